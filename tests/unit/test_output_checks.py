"""The check of finished outputs: what it finds, what it cannot tell, and that it cannot be made to hang."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from grammar_sync.spec import parse_grammar
from launch.rank.output_check_process import start_output_check
from runtime.held_outputs import HeldOutputs, checked_schema
from runtime.messages import Finished, Usage
from runtime.output_check import CheckJob, CheckResult, check_output
from runtime.output_checker import OutputChecker

PERSON = json.dumps({"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]})
SLOW = json.dumps({"type": "string", "pattern": "^(a+)+$"})
SLOW_TEXT = json.dumps("a" * 60 + "b")


@pytest.mark.parametrize(
    ("schema", "text", "state", "message"),
    [
        (PERSON, '{"age": 3}', "valid", ""),
        (PERSON, '{"age": -3}', "violation", "$.age: -3 is less than the minimum of 0"),
        (PERSON, '{"age": ', "violation", "it is no JSON: Expecting value"),
        (PERSON, "", "violation", "it is no JSON"),
        (PERSON, '{"age": 1} junk', "violation", "Extra data"),
        ('{"format": "ipv4"}', '"1.2.3"', "violation", "is not a 'ipv4'"),
        ('{"$ref": "https://example.com/nowhere"}', "1", "unchecked", "Unresolvable"),
        (r'{"pattern": "\\p{L}"}', '"a"', "unchecked", "bad escape"),
        ('{"minimum": 1}', "9" * 5000, "unchecked", "limit"),
        ("true", "[" * 50_000 + "]" * 50_000, "unchecked", "recursion"),
        ('{"maximum": 100, "exclusiveMaximum": true}', "50", "valid", ""),
        ('{"maximum": 100, "exclusiveMaximum": true}', "100", "violation", "the maximum of 100"),
        ('{"minimum": 0, "exclusiveMinimum": true}', "1", "valid", ""),
        ('{"minimum": 0, "exclusiveMinimum": true}', "0", "violation", "the minimum of 0"),
        ('{"exclusiveMinimum": 0}', "0", "violation", "the minimum of 0"),
        ('{"type":"object"}', "[]", "violation", "is not of type 'object'"),
    ],
)
def test_what_it_finds(schema: str, text: str, state: str, message: str) -> None:
    result = check_output(CheckJob(schema, text))
    assert result.state == state
    assert message in result.message
    assert "\n" not in result.message


def test_a_message_is_short_whatever_the_output() -> None:
    assert len(check_output(CheckJob('{"type": "integer"}', json.dumps("x" * 10_000))).message) < 300


@pytest.fixture
def checker() -> Iterator[OutputChecker]:
    made = OutputChecker(lambda: start_output_check(os.environ), run_limit_s=1.0, hold_limit_s=60.0)
    yield made
    made.close()


def results(checker: OutputChecker, count: int) -> list[tuple[int, CheckResult]]:
    found: list[tuple[int, CheckResult]] = []
    end = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < end
        found += checker.results()
        time.sleep(0.01)
    return found


def test_a_check_that_hangs_costs_its_schema_alone_and_once(checker: OutputChecker) -> None:
    checker.submit(1, CheckJob(PERSON, '{"age": 3}'))
    checker.submit(2, CheckJob(SLOW, SLOW_TEXT))
    checker.submit(3, CheckJob(PERSON, '{"age": -3}'))
    checker.submit(4, CheckJob(SLOW, '"aaa"'))
    found = results(checker, 4)
    assert [(number, result.state) for number, result in found] == [
        (1, "valid"),
        (2, "unchecked"),
        (3, "violation"),
        (4, "unchecked"),
    ]
    assert "took more than 1 s" in found[1][1].message
    assert "an earlier check of this schema" in found[3][1].message
    counters = checker.counters()
    assert (counters.valid, counters.violation, counters.unchecked) == (1, 1, 2)


def test_a_process_that_cannot_be_had_leaves_outputs_unchecked() -> None:
    def start() -> None:
        raise FileNotFoundError("no python here")

    checker = OutputChecker(start)  # type: ignore[arg-type]  # it never returns
    checker.submit(1, CheckJob(PERSON, '{"age": 3}'))
    assert [result.state for _, result in results(checker, 1)] == ["unchecked"]
    checker.close()


class Scripted:
    """Checks that come out as told."""

    def __init__(self) -> None:
        self.jobs: dict[int, CheckJob] = {}
        self.outcomes: list[tuple[int, CheckResult]] = []

    def submit(self, number: int, job: CheckJob) -> None:
        self.jobs[number] = job

    def results(self) -> list[tuple[int, CheckResult]]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes


def finished(request_id: int) -> Finished:
    return Finished(request_id, 0, "stop", Usage(1, 2, 3))


def test_outputs_are_held_until_their_check_is_over(caplog: pytest.LogCaptureFixture) -> None:
    checks = Scripted()
    held = HeldOutputs(checks)
    for number in (1, 2, 3):
        held.hold(number, finished(10 + number), CheckJob(PERSON, str(number)))
    assert held.released() == []
    checks.outcomes = [(2, CheckResult("violation", "$.age: no")), (1, CheckResult("valid"))]
    bad, good = held.released()
    assert good == finished(11)
    assert (bad.request_id, bad.finish_reason) == (12, "error")
    assert bad.error is not None
    assert (bad.error.code, bad.error.message) == (
        "grammar_violation",
        "the output is not what its schema asks for: $.age: no",
    )
    assert "request 12, choice 0: the output is not what its schema asks for" in caplog.text
    checks.outcomes = [(3, CheckResult("unchecked", "too slow"))]
    assert held.released() == [finished(13)]
    assert "request 13, choice 0: the output is unchecked: too slow" in caplog.text


def test_which_outputs_are_checked() -> None:
    assert checked_schema(None) is None
    assert checked_schema(parse_grammar({"regex": "a"})) is None
    assert checked_schema(parse_grammar({"json_object": True})) == '{"type":"object"}'
    assert checked_schema(parse_grammar({"json_schema": {"type": "integer"}})) == '{"type":"integer"}'
