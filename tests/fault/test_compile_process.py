"""The compile process with a real engine in it: grammars that crash, hang or swell it, and processes that are killed.

What guards the engine from such grammars is left out here, so that it is the process that has to.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import LOCKSTEP, Running, running, wait_until
from grammars import small_vocabulary
from raw_engine import MAKE
from tiny_checkpoints import write_tiny_checkpoint

from grammar_sync.spec import GrammarKind, GrammarSpec
from grammar_sync.vetting.messages import Refused, Setup, Vetted, VettingLimits
from grammar_sync.vetting.service import VettingService
from launch.exit_codes import ExitCode
from launch.rank.grammar_compiler import GrammarProcessStarter

pytestmark = pytest.mark.long(15)

TESTS = str(Path(__file__).resolve().parents[1])
LIMITS = VettingLimits(deadline_s=1.0, memory_bytes=256 << 20)
PATIENCE_S = 120.0
START_S = 90.0


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + '{"type":"integer"}' + closing * depth


def chain(length: int) -> str:
    rules: dict[str, object] = {
        f"d{number}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(length)
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**rules, f"d{length}": {"type": "integer"}}})


def optional(count: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(count)}}


REPEATED = {"type": "repeat", "min": 1, "max": 10**9, "content": {"type": "regex", "pattern": "[a-z]+"}}

# What may be said of each; where two limits are close, either may come first.
HOSTILE: list[tuple[str, GrammarKind, str, set[str]]] = [
    ("chain of references", "json_schema", chain(5000), {"crash"}),
    ("objects nested", "json_schema", nested('{"type":"object","properties":{"a":', "}}", 1000), {"memory", "time"}),
    ("long const", "json_schema", json.dumps({"const": "x" * 1_000_000}), {"time", "memory"}),
    ("repetition twice", "regex", "([a-z]{1,1000}){1,1000}", {"masks"}),
    ("repetition thrice", "regex", "(([a-z]{1,100}){1,100}){1,100}", {"masks", "time"}),
    ("repeated tag", "structural_tag", json.dumps({"type": "structural_tag", "format": REPEATED}), {"masks"}),
    ("itself", "ebnf", "root ::= root", {"grammar"}),
    ("dead end", "ebnf", 'root ::= "x" a\na ::= b\nb ::= a', {"masks"}),
    ("schema of itself", "json_schema", '{"allOf":[{"$ref":"#"}]}', {"grammar"}),
    ("a NUL", "regex", "a\0b", {"grammar"}),
    ("a line end in a class", "regex", "^[^\n\r]{1,129}$", {"grammar"}),
]
MORE_HOSTILE: list[tuple[str, GrammarKind, str, set[str]]] = [
    ("anyOf nested", "json_schema", nested('{"anyOf":[', "]}", 1000), {"crash", "time", "memory"}),
    ("arrays nested", "json_schema", nested('{"type":"array","items":', "}", 800), {"time", "memory"}),
    ("long enum", "json_schema", json.dumps({"enum": [f"value {i}" for i in range(100_000)]}), {"time", "memory"}),
    ("optional properties", "json_schema", json.dumps(optional(1000)), {"time", "memory"}),
    ("some of many", "json_schema", json.dumps({**optional(300), "minProperties": 150}), {"time", "memory"}),
    ("long alternation", "regex", "|".join(f"w{number}" for number in range(100_000)), {"time", "memory"}),
    ("long literal", "ebnf", f'root ::= "{"x" * 1_000_000}"', {"time", "memory"}),
]


def outcome_of(service: VettingService, spec: GrammarSpec) -> Vetted | Refused:
    service.submit(spec)
    end_s = time.monotonic() + PATIENCE_S
    while (report := service.poll(spec)) is None:
        assert time.monotonic() < end_s, "no answer"
        time.sleep(0.005)
    service.discard(spec)
    return report.outcome


@pytest.fixture(scope="module")
def service() -> Iterator[VettingService]:
    starter = GrammarProcessStarter({**os.environ, "PYTHONPATH": TESTS})
    made = VettingService(Setup(small_vocabulary(), MAKE, "xgrammar", LIMITS), starter(), starter)
    yield made
    made.close()


def check_refused(service: VettingService, kind: GrammarKind, source: str, reasons: set[str]) -> None:
    outcome = outcome_of(service, GrammarSpec(kind, source))
    assert isinstance(outcome, Refused)
    assert outcome.reason in reasons, outcome.message
    assert "\n" not in outcome.message
    assert len(outcome.message) < 400


@pytest.mark.parametrize(
    ("kind", "source", "reasons"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
def test_a_hostile_grammar_is_refused_and_the_next_one_compiles(
    service: VettingService, kind: GrammarKind, source: str, reasons: set[str]
) -> None:
    check_refused(service, kind, source, reasons)
    assert isinstance(outcome_of(service, GrammarSpec("regex", f"[a-z]{{{len(source) % 7 + 1}}}")), Vetted)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "source", "reasons"), [case[1:] for case in MORE_HOSTILE], ids=[case[0] for case in MORE_HOSTILE]
)
def test_more_hostile_grammars_are_refused(
    service: VettingService, kind: GrammarKind, source: str, reasons: set[str]
) -> None:
    check_refused(service, kind, source, reasons)


def test_nothing_was_lost_but_workers(service: VettingService) -> None:
    counters = service.counters()
    assert counters.restarts == 0
    assert sum(counters.refused.values()) + counters.vetted <= counters.asked


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3"))


def compile_process(started: Running) -> psutil.Process | None:
    """Returns the compile process of a run: the child of rank 0."""
    rank = started.ranks().get(0)
    children = [] if rank is None else rank.children()
    return children[0] if children else None


def working(started: Running) -> psutil.Process | None:
    """Returns a worker that has computed for a while, so that it is in the middle of a compile."""
    parent = compile_process(started)
    workers = [] if parent is None else parent.children()
    return next((worker for worker in workers if worker.cpu_times().user > 0.3), None)


MANY_BOUNDS = "|".join(f'[a-z]{{1,{number + 20}}} "{number}"' for number in range(200))
HARD = f"root ::= ({MANY_BOUNDS}){{1,40}}"


def test_t21_sigterm_in_the_middle_of_a_compile(tiny: str, tmp_path: Path) -> None:
    """SCENARIOS T21: the run ends in five seconds, and the compile with it."""
    path = tmp_path / "hard.ebnf"
    path.write_text(HARD)
    limits = ("--grammar-timeout", "100", "--grammar-backend", "xgrammar")
    with running(*LOCKSTEP, "generate", *limits, "--model", tiny, "--ebnf", str(path), "hi") as started:
        wait_until(lambda: working(started) is not None, START_S, "a compile to be under way")
        outcome, seconds = started.interrupt(signal.SIGTERM, 30)
        assert (outcome.returncode, outcome.message) == (ExitCode.TERMINATED, "lockstep: terminated")
        assert seconds < 5.0
        started.check_nothing_left()


@pytest.mark.parametrize("victim", ["worker", "compile process"])
def test_kill_in_the_middle_of_a_compile(tiny: str, tmp_path: Path, victim: str) -> None:
    """Only the request whose grammar was being compiled may be touched."""
    requests: list[dict[str, Any]] = [
        {"id": "hard", "prompt": "a", "max_tokens": 4, "ebnf": HARD},
        {"id": "easy", "prompt": "a", "max_tokens": 30, "temperature": 1, "seed": 1, "regex": "[a-z]{3}"},
        {"id": "plain", "prompt": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, requests)))
    limits = ("--grammar-timeout", "3", "--grammar-backend", "xgrammar")
    command = (*LOCKSTEP, "generate", *limits, "--model", tiny, "--tp", "2", "--input", str(path))
    with running(*command) as started:
        wait_until(lambda: working(started) is not None, START_S, "a compile to be under way")
        target = working(started) if victim == "worker" else compile_process(started)
        assert target is not None
        target.send_signal(signal.SIGKILL)
        outcome = started.wait(PATIENCE_S)
        started.check_nothing_left()
    assert outcome.returncode == ExitCode.REQUESTS_FAILED
    records = {record["id"]: record for record in map(json.loads, outcome.stdout.splitlines())}
    error = records["hard"]["error"]
    if victim == "worker":
        assert error["code"] == "grammar_error"
        assert "was killed while it worked on it" in error["message"]
    else:  # it was tried again, by a new process, and is still too hard
        assert "it was not compiled in 3 s" in error["message"]
    assert [records[name]["error"] for name in ("easy", "plain")] == [None, None]
    assert len(records["easy"]["text"]) == 3
    assert records["plain"]["usage"]["completion_tokens"] == 4
