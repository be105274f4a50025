"""``lockstep bench decode``: figures, ratios and document, the schema and bytes it takes, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console
from tiny_checkpoints import write_tiny_checkpoint

from grammar_sync.spec import parse_grammar
from launch.bench import decode_peer
from launch.bench.bandwidth import copy_bytes_per_s
from launch.bench.decode import schema_of, weight_bytes
from launch.bench.decode_peer import require_transformers
from launch.bench.decode_report import DecodeCase, DecodeFigures, DecodeReport
from launch.bench.spread import Spread
from launch.cli.parse import UsageError, parse_command
from launch.commands import BenchDecodeCommand
from runtime.checkpoint import open_checkpoint


def test_a_spread_is_of_sorted_milliseconds() -> None:
    spread = Spread.of([index / 1000 for index in range(100, -1, -1)])
    assert spread == Spread(median_ms=50.0, p90_ms=90.0, p99_ms=99.0, min_ms=0.0)
    assert Spread.of([0.002]) == Spread(2.0, 2.0, 2.0, 2.0)


def test_figures_of_runs() -> None:
    runs = [[[1.0, 1.5, 2.0], [1.2, 1.6, 2.2]], [[2.0, 3.0], [2.0, 4.0]]]
    figures = DecodeFigures.of(runs)
    # 4 tokens in a second after the last first one, then 2 in two.
    assert figures.tokens_per_s == pytest.approx((4 / 1.0 + 2 / 2.0) / 2)
    assert figures.first_token.median_ms == pytest.approx(1600.0)
    assert figures.inter_token.min_ms == pytest.approx(400.0)
    assert figures.inter_token.median_ms == pytest.approx(550.0)


def test_tokens_that_come_at_once_have_a_rate() -> None:
    figures = DecodeFigures.of([[[1.0, 1.0, 1.0]]])
    assert figures.inter_token.median_ms == pytest.approx(1e-3)
    assert figures.tokens_per_s == pytest.approx(2e6)


def _figures(tokens_per_s: float, first_ms: float, between_ms: float) -> DecodeFigures:
    first, between = (Spread(one, one, one, one) for one in (first_ms, between_ms))
    return DecodeFigures(tokens_per_s, first, between)


def test_the_document_holds_every_figure_and_ratio() -> None:
    case = DecodeCase(
        batch=8,
        prompt_tokens=64,
        new_tokens=32,
        ours=_figures(200.0, 40.0, 40.0),
        constrained=_figures(190.0, 44.0, 42.0),
        peer=_figures(100.0, 50.0, 80.0),
    )
    alone = DecodeCase(
        batch=1, prompt_tokens=512, new_tokens=2, ours=_figures(50.0, 90.0, 20.0), constrained=None, peer=None
    )
    report = DecodeReport(
        model="m",
        tp=2,
        pp=1,
        threads=1,
        dtype="float32",
        device="cpu",
        compute="",
        peer="transformers 5",
        repeats=3,
        weight_bytes=500_000_000,
        copy_bytes_per_s=25e9,
        cases=[case, alone],
    )
    document = json.loads(report.document())
    assert (document["bench"], document["floor_ms"]) == ("decode", 20.0)
    assert document["cases"][0]["ratios"] == pytest.approx(
        {"of_floor": 2.0, "constrained": 1.05, "times_peer": 2.0, "first_token_of_peer": 0.8}
    )
    assert document["cases"][1]["ratios"] == {"of_floor": 1.0}
    assert document["cases"][0]["constrained"]["inter_token"]["p99_ms"] == 42.0
    console = Console(width=140, record=True, file=io.StringIO())
    report.print(console)
    text = console.export_text()
    assert "2.00 floors" in text
    assert "0.50x tokens/s, 1.25 first token" in text
    assert "500 MB of weights a step, copied at 25.0 GB/s (read and written): 20.0 ms" in text


@pytest.mark.parametrize("new_tokens", [3, 64, 500])
def test_the_schema_outlasts_the_tokens_and_is_enforced(new_tokens: int) -> None:
    schema = schema_of(new_tokens)
    Draft202012Validator.check_schema(schema)
    assert parse_grammar({"json_schema": schema}) is not None
    # A field's name alone, with its quotes, takes more than four tokens.
    assert len(schema["required"]) * 4 > new_tokens


def test_weight_bytes_are_those_a_step_reads(tmp_path: Path) -> None:
    tied = open_checkpoint(write_tiny_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)).config
    untied = open_checkpoint(write_tiny_checkpoint(tmp_path / "untied", "llama", tie_word_embeddings=False)).config
    assert weight_bytes(tied, 4) == weight_bytes(untied, 4) == 2 * weight_bytes(tied, 2)
    assert weight_bytes(tied, 1) > tied.vocab_size * tied.hidden_size


def test_memory_has_a_speed() -> None:
    assert 1e8 < copy_bytes_per_s(1) < 1e13


def test_the_command_line(tmp_path: Path) -> None:
    command = parse_command(["bench", "decode", "--model", "m", "--tp", "2", "--batches", "1, 4", "--peer", "none"])
    assert isinstance(command, BenchDecodeCommand)
    assert (command.batches, command.peer, command.engine.tp, command.constrained) == ((1, 4), "none", 2, True)
    assert (command.prompt_tokens, command.new_tokens, command.prefill_tokens, command.repeats) == (64, 64, 512, 3)
    for text in ("0", "1,x", "", "1,,2", "-1"):
        with pytest.raises(UsageError, match=r"--batches is '.*': numbers of sequences such as 1,8,32 are needed"):
            parse_command(["bench", "decode", "--model", "m", "--batches", text])


def test_a_missing_peer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_transformers()
    monkeypatch.setattr(decode_peer, "find_spec", lambda name: None if name == "transformers" else object())
    with pytest.raises(UsageError, match="pip install transformers, or --peer none"):
        require_transformers()
