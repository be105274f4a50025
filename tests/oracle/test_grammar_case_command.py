"""The case file through ``lockstep check-grammar``: never loose, hardly ever tight, refused by path or position."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, run
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

CASES_PATH = Path(__file__).resolve().parents[2] / ".." / "shared" / "cases" / "grammars.jsonl"
LEAST_TAKEN = 0.97
LEAST_EXACT = 0.80
pytestmark = pytest.mark.skipif(not CASES_PATH.is_file(), reason=f"{CASES_PATH.name} is not beside this checkout")


def check(folder: Path, step: int, timeout_s: float) -> tuple[Counter[str], Counter[str]]:
    """Runs each ``step``-th case; returns how many cases of a kind there are, and how many are taken exactly."""
    cases = [json.loads(line) for line in CASES_PATH.read_text(encoding="utf-8").splitlines()][::step]
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(json.dumps(_line(case)) for case in cases), encoding="utf-8")
    model = write_tiny_checkpoint(folder / "tiny", "qwen3")
    files = ("--input", str(source), "--output", str(target))
    arguments = ("--model", str(model), *files, "--fail-on", "none")
    outcome = run(*LOCKSTEP, "check-grammar", *arguments, timeout_s=timeout_s)
    assert outcome.returncode == ExitCode.OK, outcome.stderr
    records = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [record["id"] for record in records] == [case["id"] for case in cases]
    kinds, exact = Counter[str](), Counter[str]()
    valid = taken = 0
    for case, record in zip(cases, records, strict=True):
        kinds[case["kind"]] += 1
        if not record["accepted"]:
            assert record["error"]["param"] == case["kind"]
            assert re.search(r"(: /|the schema)", record["error"]["message"]), record["error"]
            continue
        ok = [text["ok"] for text in record["texts"]]
        count = len(case["accept"])
        assert not any(ok[count:]), f"loose: {case['id']}"
        assert all(text["ok"] or text["expected"] for text in record["texts"])
        valid, taken = valid + count, taken + sum(ok[:count])
        exact[case["kind"]] += all(ok[:count])
    assert taken >= LEAST_TAKEN * valid
    return kinds, exact


def _line(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("id", "kind", "spec")} | {"texts": case["accept"] + case["reject"]}


def test_some_cases(tmp_path: Path) -> None:
    kinds, exact = check(tmp_path, step=8, timeout_s=200)
    assert exact.total() >= LEAST_EXACT * kinds.total()


@pytest.mark.sweep
@pytest.mark.timeout(1000)
def test_all_cases(tmp_path: Path) -> None:
    kinds, exact = check(tmp_path, step=1, timeout_s=900)
    print("\nkind             cases  exact")
    for kind, count in sorted(kinds.items()):
        print(f"{kind:16} {count:5}  {exact[kind]:5}")
    assert exact["json_schema"] >= LEAST_EXACT * kinds["json_schema"]
