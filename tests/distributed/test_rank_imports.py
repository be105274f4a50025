"""What a rank imports before it runs: its start is as long as that takes."""

from __future__ import annotations

from ranks import modules_of_rank, run_ranks


def test_the_grammar_engines_come_without_transformers() -> None:
    (modules,) = run_ranks(modules_of_rank, 1)
    assert {"xgrammar", "llguidance"} <= modules
    assert "transformers" not in modules
