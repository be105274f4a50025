"""``lockstep check-grammar`` as a user runs it: files in and out, a report to read, exit codes for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, Outcome, run
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
LINES: list[Any] = [
    {"id": 1, "kind": "json_schema", "spec": OBJECT, "texts": ['{"a": 1}', '{"a": "1"}'], "expect": [True, False]},
    {
        "id": "date",
        "kind": "regex",
        "spec": "[0-9]{4}-[0-9]{2}",
        "texts": ["2024-05", "2024-5"],
        "expect": [True, False],
    },
    {"id": ["open"], "kind": "json_object", "spec": None, "texts": ["{}", "[]"], "expect": [True, False]},
    {"id": "broken", "kind": "regex", "spec": "(a", "texts": ["a"]},
    {"id": "unknown", "kind": "xml", "spec": "a", "texts": ["a"]},
    "{",
    {"id": "last", "kind": "choice", "spec": ["yes", "no"], "texts": ["yes"], "note": "for people"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def check(model: Path, *arguments: str) -> Outcome:
    return run(*LOCKSTEP, "check-grammar", "--model", str(model), *arguments)


def test_lines_in_and_out(model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in LINES))
    outcome = check(model, "--input", str(source), "--output", str(target))
    assert outcome.returncode == ExitCode.GRAMMARS_FAILED
    assert outcome.stdout == ""
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["id"] for record in records] == [1, "date", ["open"], "broken", "unknown", "line-6", "last"]
    assert [record["accepted"] for record in records] == [True, True, True, False, False, False, True]
    assert outcome.stderr.startswith("lockstep: 7 grammars, 2 malformed, 1 refused, 0 of 7 texts not as wanted")
    assert len(outcome.stderr.splitlines()) == 1
    for record, line in zip(records, LINES, strict=True):
        assert set(record) >= {"id", "accepted", "error", "not_enforced", "rewritten", "compile_s", "texts"}
        assert (record["error"] is None) == record["accepted"]
        if record["accepted"]:
            assert [text["ok"] for text in record["texts"]] == line.get("expect", [True])
            assert record["compile_s"] >= 0
            assert record["size_bytes"] > 0
            assert record["start"]["count"] > 0
    assert records[0]["texts"][1] == {
        "ok": False,
        "at": 6,
        "expected": "'-', 0-9, a blank, a line end, a tab or a carriage return",
        "error": None,
    }
    assert records[1]["texts"][1]["at"] == 6
    assert records[3]["error"]["code"] == "grammar_error"
    assert records[3]["error"]["param"] == "regex"
    assert [text["ok"] for text in records[3]["texts"]] == [False]
    assert [record["error"]["code"] for record in records[4:6]] == ["invalid_request"] * 2
    assert records[6]["ignored"] == ["note"]


def test_a_report_to_read(model: Path) -> None:
    outcome = check(model, "--choice", "red,green", "--text", "red", "--text", "[b]blue", "--fail-on", "refused")
    assert outcome.returncode == ExitCode.OK
    head, start, taken, refused, mark = outcome.stdout.splitlines()
    assert head.startswith("accepted  by xgrammar, compiled in ")
    assert start.startswith("starts with one of ")
    assert taken == "takes    red"
    assert refused == "refuses  [b]blue"
    assert mark == "         ^ at 0: expected 'green' or 'red'"


def test_what_is_wrong_before_it_begins_is_one_line(model: Path, tmp_path: Path) -> None:
    outcomes = [
        check(tmp_path / "no-model", "--regex", "a"),
        check(model, "--input", "no-such-file"),
        check(model, "--regex", "a", "--choice", "b"),
    ]
    for outcome, named in zip(outcomes, ("no-model", "no-such-file", "one grammar"), strict=True):
        assert outcome.returncode == ExitCode.USAGE
        assert named in outcome.message
        assert len(outcome.stderr.splitlines()) == 1
