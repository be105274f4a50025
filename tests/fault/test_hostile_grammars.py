"""Hostile grammars among plain streams, over real ranks: each ends by itself, and nobody else notices."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import LOCKSTEP, Outcome, running
from hostile_grammars import HOSTILE, Hostile
from output_judge import Judge
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(30)

PLAIN = [
    {"id": f"plain {index}", "prompt": f"One two {index}", "max_tokens": 160, "temperature": index % 2, "seed": index}
    for index in range(8)
]
# One of each way to do harm, cheap enough for every run of the tests.
SOME = (
    *("schema empty text", "open parenthesis", "no root rule", "missing definition", "everything refers to itself"),
    *("NUL in a regex", "lone surrogate", "chain of 5,000 definitions", "anyOf 1,000 deep", "arrays 800 deep"),
    *("enum of 100,000", "regex of 1 MB", "1,000 optional properties", "bounds times bounds", "tag a billion times"),
    *("bounds in ebnf", "chain of 400 definitions", "enum of 2,000", "rules in a circle"),
    *("uniqueItems", "not", "anchor inside", "uniqueItems in a tag"),
)
# What a rank may hold more at the end than when it began: caches of tiny grammars, the allocator's leftovers.
_GROWTH_BYTES = 128 << 20


@dataclass
class Watched:
    """What was seen of a run from outside.

    Args:
        outcome: How it ended.
        pids: All process ids that each rank ever had.
        rss_bytes: Each rank's resident memory over time.
    """

    outcome: Outcome
    pids: dict[int, set[int]] = field(default_factory=dict)
    rss_bytes: dict[int, list[int]] = field(default_factory=dict)

    def records(self) -> dict[str, dict[str, Any]]:
        return {record["id"]: record for record in self.outcome.records()}


def generate(model: Path, lines: Sequence[dict[str, Any]], timeout_s: float) -> Watched:
    pids: dict[int, set[int]] = {}
    rss_bytes: dict[int, list[int]] = {}
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--grammar-timeout", "3", "--input", "-")
    stdin = "\n".join(map(json.dumps, lines)).encode()
    with running(*LOCKSTEP, "generate", *options, stdin=stdin) as command:
        end_s = time.monotonic() + timeout_s
        while command.process.poll() is None and time.monotonic() < end_s:
            for rank, process in command.ranks().items():
                try:
                    rss_bytes.setdefault(rank, []).append(process.memory_info().rss)
                    pids.setdefault(rank, set()).add(process.pid)
                except psutil.Error:
                    continue
            time.sleep(0.3)
        outcome = command.wait(10)
        command.check_nothing_left()
    return Watched(outcome, pids, rss_bytes)


def run_among_plain_streams(model: Path, names: Sequence[str], timeout_s: float) -> tuple[Watched, list[str]]:
    """Returns a run of hostile requests among plain ones, and whose records are wrong in it.

    Plain ones must be as they are alone; a hostile one must be refused, or right where it may pass.
    """
    alone = generate(model, PLAIN, timeout_s).records()
    hostile = [{"id": name, "prompt": "a", "max_tokens": 24, **HOSTILE[name].fields} for name in names]
    mixed = [*PLAIN[:4], *hostile[::2], *PLAIN[4:], *hostile[1::2]]
    watched = generate(model, mixed, timeout_s)
    assert watched.outcome.returncode == ExitCode.REQUESTS_FAILED, watched.outcome.stderr
    records = watched.records()
    assert set(records) == {line["id"] for line in mixed}
    wrong = []
    for line in PLAIN:
        name = str(line["id"])
        got, wanted = ((one["token_ids"], one["finish_reason"]) for one in (records[name], alone[name]))
        if got != wanted or got[1] == "error":
            wrong.append(f"{name}: {records[name]}")
    judge = Judge(model)
    wrong += [f"{name}: {records[name]}" for name in names if not is_right(judge, HOSTILE[name], records[name])]
    return watched, wrong


def is_right(judge: Judge, one: Hostile, record: dict[str, Any]) -> bool:
    """Whether a hostile request's record is one that it may have."""
    error = record["error"]
    if error is None:
        return not one.must_fail and judge.is_right(one.fields, record)
    return (
        record["finish_reason"] == "error"
        and error["code"] in (["grammar_error"] + ["invalid_request"] * one.at_the_door)
        and error["param"] in one.fields
        and len(error["message"].splitlines()) == 1
    )


def kept_bytes(watched: Watched) -> list[int]:
    """Returns what each rank holds at the end beyond its most in the first half of the run."""
    sizes = [watched.rss_bytes[rank] for rank in range(4)]
    return [one[-1] - max(one[: len(one) // 2]) for one in sizes]


@pytest.mark.parametrize(
    ("names", "timeout_s"),
    [
        pytest.param(SOME, 200.0, id="some", marks=pytest.mark.slow),
        # The hard ones wait for each other, and none is lost by that: together they take minutes.
        pytest.param(tuple(HOSTILE), 800.0, id="all", marks=[pytest.mark.sweep, pytest.mark.timeout(1800)]),
    ],
)
def test_hostile_requests_among_plain_streams(tmp_path: Path, names: tuple[str, ...], timeout_s: float) -> None:
    watched, wrong = run_among_plain_streams(write_tiny_checkpoint(tmp_path / "tiny", "qwen3"), names, timeout_s)
    assert wrong == []
    assert [len(watched.pids[rank]) for rank in range(4)] == [1, 1, 1, 1], "a rank was replaced"
    assert watched.outcome.stderr.count("lockstep: ") == 1, watched.outcome.stderr
    assert max(kept_bytes(watched)) < _GROWTH_BYTES
