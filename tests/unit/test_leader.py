"""The leader between a client and the scheduler: a fake socket on one side, scripted tokens on the other."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leader_bench import EOS, Bench, ScriptedGrammars, script_of

from grammar_sync.engines.prepared import Finding
from grammar_sync.statistics import GrammarStatistics
from runtime.intake import Patience
from runtime.messages import (
    Abort,
    Accepted,
    AddSequence,
    ChoiceProgress,
    EndSequence,
    ErrorInfo,
    Finished,
    Resume,
    Settled,
    Shutdown,
    StopRanks,
    Submit,
    Usage,
)
from runtime.output_check import CheckJob, CheckResult


def test_a_request_from_submit_to_finish() -> None:
    bench = Bench()
    bench.submit(5, prompt="abc", max_tokens=10)
    bench.scripts[0] = script_of("hi 😀")
    bench.run()
    accepted = bench.socket.sent[0]
    assert isinstance(accepted, Accepted)
    assert (accepted.request_id, accepted.choices) == (5, 1)
    assert accepted.settled == Settled(bench.added[0].seed, 3, 10)
    assert bench.text(5) == "hi 😀"
    assert bench.token_ids(5) == script_of("hi 😀")
    finished = bench.finished(5)
    assert (finished.finish_reason, finished.error) == ("stop", None)
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (3, 8)
    bench.assert_nothing_left()


def test_requests_are_noted_while_they_are_read_and_while_they_run() -> None:
    noted: list[tuple[int, ...]] = []
    bench = Bench(note_work=noted.append)
    bench.submit(5, prompt="abc", max_tokens=2)
    bench.leader.collect(Patience.LONG)
    assert noted == [(5,), ()], "it was read, and nobody began with it"
    bench.leader.working_at([0])
    bench.submit(6, prompt="long" * 70_000)
    bench.leader.collect(Patience.LONG)
    assert noted[2:4] == [(5,), (6, 5)], "it is read beside the steps"
    assert bench.socket.woken.wait(20)
    bench.leader.collect(Patience.LONG)
    bench.leader.working_at([0])
    assert noted[4:] == [(5,)], "it was read"


def test_a_token_is_told_as_soon_as_it_came() -> None:
    bench = Bench()
    bench.submit(0)
    bench.scripts[0] = script_of("abc")
    bench.step()
    assert [delta.text for delta in bench.deltas(0)] == ["a"]
    bench.step()
    assert [delta.text for delta in bench.deltas(0)] == ["a", "b"]


def test_max_tokens_ends_with_length_and_keeps_the_last_text() -> None:
    bench = Bench()
    bench.submit(0, max_tokens=3)
    bench.scripts[0] = script_of("abcdef")
    bench.run()
    assert bench.text(0) == "abc"
    assert bench.finished(0).finish_reason == "length"


def test_a_character_cut_by_max_tokens_shows_as_replacement_only_at_the_end() -> None:
    bench = Bench()
    bench.submit(0, max_tokens=3)
    bench.scripts[0] = script_of("a😀")
    bench.run()
    assert [delta.text for delta in bench.deltas(0)] == ["a", "", "\ufffd"]


@pytest.mark.parametrize(
    ("output", "stop", "text", "tokens", "reason"),
    [
        ("abcDEFGHIJxyz", ["DEFGHIJ"], "abc", 10, "stop"),
        ("ab,cd", ["b,c"], "a", 4, "stop"),
        ("abcDEFGxHIJ", ["DEFGHIJ"], "abcDEFGxHIJ", 12, "stop"),
        ("abcDEF", ["DEFGHIJ"], "abcDEF", 7, "stop"),
        ("a😀b", ["😀"], "a", 5, "stop"),
        ("stop", ["stop"], "", 4, "stop"),
        ("xaab", ["aab", "b"], "x", 4, "stop"),
        ("abc", "b", "a", 2, "stop"),
    ],
)
def test_stop_strings(output: str, stop: Any, text: str, tokens: int, reason: str) -> None:
    bench = Bench()
    bench.submit(0, stop=stop)
    bench.scripts[0] = script_of(output)
    bench.run()
    assert bench.text(0) == text
    assert bench.finished(0).finish_reason == reason
    assert bench.token_ids(0) == script_of(output)[:tokens]
    bench.assert_nothing_left()


def test_a_stop_string_at_the_very_last_token_is_a_stop_not_a_length() -> None:
    bench = Bench()
    bench.submit(0, stop=["cd"], max_tokens=4)
    bench.submit(1, stop=["cx"], max_tokens=3)
    bench.scripts = {0: script_of("abcdef"), 1: script_of("abcx")}
    bench.run()
    assert (bench.text(0), bench.finished(0).finish_reason) == ("ab", "stop")
    assert (bench.text(1), bench.finished(1).finish_reason) == ("abc", "length"), "what was held back is released"


def test_a_stop_string_ends_its_own_choice_in_the_next_step() -> None:
    bench = Bench()
    bench.submit(0, stop=["b"], n=2, max_tokens=8)
    bench.scripts = {0: script_of("abzzz"), 1: script_of("xyzxyzxyz")}
    bench.step()
    bench.step()
    assert bench.finished(0, 0).finish_reason == "stop"
    assert bench.step() == [EndSequence(0, "stop")]
    assert 0 not in bench.scheduler
    bench.run()
    assert (bench.text(0, 1), bench.finished(0, 1).finish_reason) == ("xyzxyzxy", "length")
    bench.assert_nothing_left()


def test_choices_share_prompt_and_seed_and_are_numbered() -> None:
    bench = Bench()
    bench.submit(3, n=3, prompt="ab", seed=11)
    bench.submit(4, n=1)
    bench.scripts = {index: script_of("xyz"[:index]) for index in range(4)}
    bench.run()
    accepted = [one for one in bench.socket.sent if isinstance(one, Accepted)]
    assert [(one.request_id, one.choices) for one in accepted] == [(3, 3), (4, 1)]
    assert accepted[0].settled.seed == 11
    assert [(one.sequence_id, one.choice) for one in bench.added] == [(0, 0), (1, 1), (2, 2), (3, 0)]
    assert {one.seed for one in bench.added[:3]} == {11}
    assert [bench.text(3, index) for index in range(3)] == ["", "x", "xy"]
    assert [bench.finished(3, index).index for index in range(3)] == [0, 1, 2]
    bench.assert_nothing_left()


def test_choices_without_a_seed_share_one_that_was_minted() -> None:
    bench = Bench()
    bench.submit(0, n=4)
    bench.submit(1)
    actions = bench.leader.collect(Patience.NONE)
    seeds = [action.seed for action in actions if isinstance(action, AddSequence)]
    assert len(set(seeds[:4])) == 1
    assert seeds[4] != seeds[0]


def test_a_rejection_leaves_the_others_untouched() -> None:
    bench = Bench()
    bench.submit(0)
    bench.submit(1, temperature=-0.1)
    bench.submit(2, prompt=None, prompt_token_ids=[257])
    bench.submit(3)
    bench.scripts = {0: script_of("good"), 1: script_of("fine")}
    bench.run()
    assert [(message.request_id, message.error.param) for message in bench.rejected()] == [
        (1, "temperature"),
        (2, "prompt_token_ids"),
    ]
    assert (bench.text(0), bench.text(3)) == ("good", "fine")
    assert [one.sequence_id for one in bench.added] == [0, 1], "no rank saw the bad ones"
    bench.assert_nothing_left()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "[" * 100_000,
        '{"prompt": "caf\\udce9"}',
        '{"prompt": "a", "seed": 18446744073709551616}',
        '{"prompt": "a", "seed": ' + "9" * 4000 + "}",
        '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
        '{"prompt": "a", "temperature": NaN}',
        '{"prompt": "a", "temperature": 1e999}',
        '{"prompt": "a", "json_schema": ' + '{"not":' * 400 + "{}" + "}" * 400 + "}",
    ],
    ids=lambda body: body[:40],
)
def test_no_body_ends_the_leader(body: str) -> None:
    bench = Bench()
    bench.submit(0)
    bench.socket.inbox.append(Submit(1, body))
    bench.scripts[0] = script_of("fine")
    bench.run()
    # A long one is not read within a step.
    if not bench.rejected():
        assert bench.socket.woken.wait(20)
        bench.step()
    (rejected,) = bench.rejected()
    assert rejected.request_id == 1
    assert bench.text(0) == "fine"
    bench.assert_nothing_left()


def test_t4_an_abort_is_of_exactly_one_request() -> None:
    bench = Bench()
    for request_id in (1, 10, 11):
        bench.submit(request_id, max_tokens=6)
    bench.scripts = {index: script_of("abcdef", eos=False) for index in range(3)}
    bench.step()
    bench.socket.inbox.append(Abort(1))
    assert bench.step() == [EndSequence(0, "abort")]
    bench.run()
    assert (bench.finished(1).finish_reason, bench.text(1)) == ("abort", "a")
    for request_id in (10, 11):
        assert (bench.finished(request_id).finish_reason, bench.text(request_id)) == ("length", "abcdef")
    bench.assert_nothing_left()


def test_an_abort_ends_every_choice_and_releases_what_was_held_back() -> None:
    bench = Bench()
    bench.submit(0, n=2, stop=["bcd"])
    bench.scripts = {0: script_of("abc"), 1: script_of("xyz")}
    bench.step()
    bench.step()
    bench.socket.inbox.append(Abort(0))
    bench.run()
    assert [bench.finished(0, index).finish_reason for index in range(2)] == ["abort", "abort"]
    assert [bench.text(0, index) for index in range(2)] == [
        "ab",
        "x",
    ]  # the second shares the first's prefill, a step later
    bench.assert_nothing_left()


def test_aborts_that_find_nothing_are_ignored() -> None:
    bench = Bench()
    bench.socket.inbox.append(Abort(99))
    assert bench.step() == []
    bench.submit(0)
    bench.scripts[0] = script_of("a")
    bench.run()
    bench.socket.inbox += [Abort(0), Abort(0)]
    assert bench.step() == []
    assert bench.finished(0).finish_reason == "stop"


def test_two_aborts_of_one_request_end_it_once() -> None:
    bench = Bench()
    bench.submit(0)
    bench.scripts[0] = script_of("abc")
    bench.step()
    bench.socket.inbox += [Abort(0), Abort(0)]
    bench.run()
    assert bench.finished(0).finish_reason == "abort"
    bench.assert_nothing_left()


def test_an_abort_before_the_first_step() -> None:
    bench = Bench()
    bench.submit(0)
    bench.socket.inbox.append(Abort(0))
    bench.run()
    assert bench.finished(0).finish_reason == "abort"
    assert bench.finished(0).usage.completion_tokens == 0
    bench.assert_nothing_left()


def test_a_grammar_that_is_never_ready_times_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(grammar_wait_limit_s=10.0)
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    bench.submit(0, regex="a+", n=2)
    bench.submit(1, regex="b+", max_tokens=4)
    bench.submit(2, max_tokens=4)
    bench.scripts = {0: [], 1: [], 2: script_of("bbbbb"), 3: script_of("ccccc")}
    bench.step()
    bench.step(ready=[2])
    now_s[0] = 109.9
    assert bench.step() == []
    now_s[0] = 110.1
    bench.step()
    bench.run()
    for index in range(2):
        finished = bench.finished(0, index)
        assert finished.finish_reason == "error"
        assert finished.error is not None
        assert finished.error.code == "timeout"
        assert "10 s" in finished.error.message
    assert (bench.text(1), bench.text(2)) == ("bbbb", "cccc")
    bench.assert_nothing_left()


def test_grammars_that_wait_while_others_are_compiled_never_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(grammar_wait_limit_s=10.0)
    grammars = ScriptedGrammars()
    bench.leader.watch_grammars(grammars)
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    waiting = list(range(151))
    for sequence_id in waiting:
        bench.submit(sequence_id, regex=f"a{{{sequence_id}}}", max_tokens=4)
        bench.scripts[sequence_id] = script_of("a")
    bench.step()
    while waiting:
        now_s += 9.0
        grammars.moved = dict.fromkeys(waiting, now_s - 5.0)
        bench.step(ready=[waiting.pop(0)])
    assert now_s > 1000.0
    bench.run()
    assert {bench.finished(sequence_id).finish_reason for sequence_id in range(151)} == {"stop"}


def test_a_stuck_grammar_times_out_although_others_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(grammar_wait_limit_s=10.0)
    grammars = ScriptedGrammars()
    bench.leader.watch_grammars(grammars)
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    bench.submit(0, regex="a")
    bench.submit(1, regex="b")
    bench.scripts = {1: script_of("b")}
    bench.step()
    grammars.moved = {0: 105.0, 1: 110.0}
    now_s = 114.9
    assert bench.step() == []
    now_s = 115.1
    grammars.moved[1] = 115.0
    bench.step()
    assert bench.finished(0).error == ErrorInfo("timeout", "the grammar compiler gave no sign of life for 10 s")
    bench.step(ready=[1])
    bench.run()
    assert bench.text(1) == "b"
    bench.assert_nothing_left()


def test_nobody_asks_for_a_grammar_before_its_ranks_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a crowd's requests may take longer than the limit, in the very step that brings them."""
    bench = Bench(grammar_wait_limit_s=0.0)
    grammars = ScriptedGrammars()
    bench.leader.watch_grammars(grammars)
    clock_s = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock_s)))
    bench.submit(0, regex="a")
    bench.scripts = {0: script_of("a")}
    bench.step()
    grammars.moved = {0: 1e9}
    bench.step(ready=[0])
    bench.run()
    assert bench.finished(0).finish_reason == "stop"


def test_a_grammar_that_was_ready_never_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(grammar_wait_limit_s=1.0)
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    bench.submit(0, regex="a+", max_tokens=5)
    bench.scripts[0] = script_of("aaaaa")
    bench.step()
    bench.step(ready=[0])
    now_s[0] = 1000.0
    bench.run()
    assert (bench.text(0), bench.finished(0).finish_reason) == ("aaaaa", "length")


def test_a_grammar_that_does_not_compile_ends_its_request() -> None:
    bench = Bench()
    bench.submit(0, regex="(")
    bench.submit(1)
    bench.scripts = {1: script_of("ok")}
    bench.step(failed=None)
    bench.step(failed={0: "unclosed group at position 0"})
    bench.run()
    finished = bench.finished(0)
    assert finished.error == ErrorInfo("grammar_error", "regex: unclosed group at position 0", "regex")
    assert bench.text(1) == "ok"
    bench.assert_nothing_left()


def test_an_abort_while_the_grammar_compiles() -> None:
    bench = Bench()
    bench.submit(0, regex="a+")
    bench.step()
    bench.socket.inbox.append(Abort(0))
    bench.step()
    assert bench.finished(0).finish_reason == "abort"
    bench.assert_nothing_left()


def test_a_token_that_its_grammar_refused_ends_the_request_loudly() -> None:
    bench = Bench()
    bench.submit(0, regex="a+")
    bench.submit(1)
    bench.scripts = {0: script_of("aab"), 1: script_of("other")}
    bench.step()
    bench.step(ready=[0])
    bench.refusing[0] = "token 97 refused in state 3"
    bench.step()
    bench.run()
    finished = bench.finished(0)
    assert (finished.finish_reason, finished.error) == (
        "error",
        ErrorInfo("grammar_error", "token 97 refused in state 3"),
    )
    assert bench.text(0) == "a", "the refused token is not part of the output"
    assert bench.text(1) == "other"
    bench.assert_nothing_left()


def test_a_row_that_cannot_be_sampled_ends_its_request() -> None:
    bench = Bench()
    bench.submit(0)
    bench.submit(1)
    bench.scripts = {0: script_of("abc"), 1: script_of("other")}
    bench.step()
    error = ErrorInfo("sampling_error", "step 2, stage 0: a logit is NaN")
    bench.failing[0] = error
    bench.run()
    finished = bench.finished(0)
    assert (finished.finish_reason, finished.error, bench.text(0)) == ("error", error, "a")
    assert bench.text(1) == "other"
    bench.assert_nothing_left()


def test_shutdown_ends_all_requests_and_the_ranks() -> None:
    bench = Bench()
    bench.submit(0, n=2)
    bench.submit(1, regex="a+")
    bench.scripts = {0: script_of("abcdef"), 1: script_of("ghijkl")}
    bench.step()
    bench.submit(2)
    bench.socket.inbox.append(Shutdown())
    actions = bench.step()
    assert actions[-1] == StopRanks()
    assert bench.stopped
    for request_id, choices in ((0, 2), (1, 1), (2, 1)):
        for index in range(choices):
            assert bench.finished(request_id, index).finish_reason == "abort"
    bench.assert_nothing_left()


def test_the_death_of_the_client_stops_the_ranks() -> None:
    bench = Bench()
    bench.submit(0)
    bench.scripts[0] = script_of("abc")
    bench.step()
    assert not bench.stopped
    bench.client_lives = False
    bench.step()
    assert bench.stopped


def test_how_long_the_leader_waits() -> None:
    bench = Bench()
    for patience in (Patience.LONG, Patience.BRIEF, Patience.NONE):
        assert bench.leader.collect(patience) == []
    assert bench.socket.timeouts_s == [9.0, 2.0, 0.0]
    bench.submit(0, stop=["a"])
    bench.scripts[0] = script_of("a")
    bench.step()
    bench.leader.collect(Patience.LONG)
    assert bench.socket.timeouts_s[-1] == 0.0, "an action that waits must not wait for the client"


def test_the_leader_looks_again_soon_only_when_its_own_rank_has_a_grammar() -> None:
    bench = Bench()
    grammars = ScriptedGrammars()
    bench.leader.watch_grammars(grammars)
    for number in range(2):
        bench.submit(number, regex="a")
    bench.leader.collect(Patience.BRIEF)
    bench.leader.collect(Patience.BRIEF)
    assert bench.socket.timeouts_s[-1] == 2.0
    grammars.compiled = {1}
    bench.leader.collect(Patience.BRIEF)
    assert bench.socket.timeouts_s[-1] == 0.5, "the other ranks may have it any moment"
    bench.leader.grammars_ready((1,))
    bench.leader.collect(Patience.BRIEF)
    assert bench.socket.timeouts_s[-1] == 2.0


_output = st.text(alphabet="ab,😀é", max_size=12)
_request = st.fixed_dictionaries(
    {
        "stop": st.lists(st.text(alphabet="ab,😀", min_size=1, max_size=3), max_size=2),
        "max_tokens": st.integers(1, 30),
        "n": st.integers(1, 2),
        "ignore_eos": st.booleans(),
    }
)


@given(requests=st.lists(st.tuples(_request, _output, st.integers(0, 6)), min_size=1, max_size=4), data=st.data())
@settings(max_examples=80, deadline=None)
def test_every_choice_ends_once_and_its_deltas_are_its_text(
    requests: list[tuple[dict[str, Any], str, int]], data: st.DataObject
) -> None:
    bench = Bench()
    sequence_id = 0
    for number, (fields, output, _) in enumerate(requests):
        bench.submit(number, **fields)
        for _ in range(fields["n"]):
            bench.scripts[sequence_id] = script_of(output)
            sequence_id += 1
    aborted = {number for number, (_, _, at) in enumerate(requests) if at > 3}
    for step in range(3):
        bench.step()
        bench.socket.inbox += [Abort(number) for number in sorted(aborted) if requests[number][2] - 4 == step]
    bench.run()
    for number, (fields, _, _) in enumerate(requests):
        for index in range(fields["n"]):
            finished = bench.finished(number, index)
            ids = bench.token_ids(number, index)
            text = bench.text(number, index)
            kept = bytes(one for one in ids if one != EOS).decode(errors="replace")
            assert finished.finish_reason in {"stop", "length", *({"abort"} if number in aborted else ())}
            assert kept.startswith(text)
            assert all(stop not in text for stop in fields["stop"])
            if finished.finish_reason == "length" or not fields["stop"]:
                assert text == kept
            if finished.finish_reason == "length":
                assert len(ids) == fields["max_tokens"]
    bench.assert_nothing_left()


class LateChecks:
    """Checks that come out when they are told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[int, CheckJob]] = []
        self.outcomes: list[tuple[int, CheckResult]] = []

    def submit(self, number: int, job: CheckJob) -> None:
        self.jobs.append((number, job))

    def results(self) -> list[tuple[int, CheckResult]]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes


def test_a_whole_json_output_is_held_until_it_was_checked() -> None:
    checks = LateChecks()
    bench = Bench(checks=checks)
    bench.submit(0, json_schema={"type": "integer"})
    bench.scripts[0] = script_of("12x")
    bench.step()
    bench.step(ready=[0])
    bench.run()
    assert checks.jobs == [(0, CheckJob('{"type":"integer"}', "12x"))]
    assert bench.text(0) == "12x", "its text is not held back"
    assert not any(isinstance(message, Finished) for message in bench.socket.sent)
    checks.outcomes = [(0, CheckResult("violation", "$: no"))]
    bench.step()
    finished = bench.finished(0)
    assert finished.finish_reason == "error"
    assert finished.error is not None
    assert finished.error.code == "grammar_violation"
    bench.assert_nothing_left()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop": "2"}, "stop"),
        ({"stop_token_ids": [ord("2")]}, "stop"),
        ({"max_tokens": 2}, "length"),
    ],
)
def test_an_output_that_its_grammar_did_not_end_is_not_checked(fields: dict[str, Any], reason: str) -> None:
    checks = LateChecks()
    bench = Bench(checks=checks)
    bench.submit(0, json_schema={"type": "integer"}, **fields)
    bench.scripts[0] = script_of("123")
    bench.step()
    bench.step(ready=[0])
    bench.run()
    assert bench.finished(0).finish_reason == reason
    assert checks.jobs == []


def test_an_output_of_which_not_all_is_promised_is_not_checked_and_says_so() -> None:
    checks = LateChecks()
    bench = Bench(checks=checks)
    finding = Finding("/not", "not", "is not enforced")
    grammars = ScriptedGrammars()
    grammars.cost = GrammarStatistics(False, 0.1, 0.2, 0.0, 3, engine="xgrammar", not_enforced=(finding,))
    bench.leader.watch_grammars(grammars)
    bench.submit(0, json_schema={"not": {"type": "integer"}}, strict=False)
    bench.scripts[0] = script_of("123")
    bench.step()
    bench.step(ready=[0])
    bench.run()
    finished = bench.finished(0)
    assert finished.finish_reason == "stop"
    assert finished.grammar is not None
    assert finished.grammar.not_enforced == (finding,)
    assert checks.jobs == []


def resumed(bench: Bench, request_id: int, *outputs: str | None, **fields: Any) -> None:
    """Submits a request of which the client has these outputs of its choices; None = it knows the choice's end."""
    body = json.dumps({"prompt": "p", "seed": 3} | fields)
    settled = Settled(seed=3, prompt_tokens=1, max_tokens=fields.get("max_tokens", 4095))
    choices = [ChoiceProgress(script_of(one or "", eos=False), is_finished=one is None) for one in outputs]
    bench.socket.inbox.append(Submit(request_id, body, resume=Resume(settled, choices)))


def test_a_resumed_choice_goes_on_behind_its_text() -> None:
    bench = Bench()
    resumed(bench, 0, "a😀", max_tokens=9)
    bench.scripts[0] = script_of("a😀bc")
    bench.run()
    assert bench.text(0) == "bc"
    assert [delta.start for delta in bench.deltas(0)] == [5, 6, 7]
    finished = bench.socket.sent[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.usage) == ("stop", Usage(1, 8, 9))
    bench.assert_nothing_left()


def test_a_character_and_a_stop_string_go_on_across_the_cut() -> None:
    bench = Bench()
    smile = "😀".encode()
    body, settled = json.dumps({"prompt": "p", "stop": ["xyz"]}), Settled(seed=0, prompt_tokens=1, max_tokens=99)
    for number, ids in enumerate(([97, *smile[:2]], [97, 120, 121])):
        bench.socket.inbox.append(Submit(number, body, resume=Resume(settled, [ChoiceProgress(ids)])))
    bench.scripts = {0: [97, *smile, 98, EOS], 1: [*b"axyz!", EOS]}
    bench.run()
    assert bench.text(0) == "😀b"
    assert bench.text(1) == ""
    assert [one.finish_reason for one in bench.socket.sent if isinstance(one, Finished)] == ["stop", "stop"]
    assert bench.token_ids(1) == [ord("z")]


@pytest.mark.parametrize(
    ("ids", "fields", "reason"),
    [
        ([*b"abc", EOS], {}, "stop"),
        ([*b"abc"], {"max_tokens": 3}, "length"),
        ([*b"abc"], {"stop": "bc"}, "stop"),
        ([*b"abc"], {"stop": ["bc", "bcd"], "max_tokens": 3}, "stop"),
        ([*b"abc"], {"stop_token_ids": [99]}, "stop"),
        ([*b"abc", EOS], {"ignore_eos": True, "max_tokens": 4}, "length"),
    ],
)
def test_a_choice_that_had_come_to_its_end_is_told_of_and_not_generated(
    ids: list[int], fields: dict[str, Any], reason: str
) -> None:
    bench = Bench()
    body = json.dumps({"prompt": "p"} | fields)
    settled = Settled(seed=0, prompt_tokens=1, max_tokens=fields.get("max_tokens", 99))
    bench.socket.inbox.append(Submit(4, body, resume=Resume(settled, [ChoiceProgress(ids)])))
    bench.run()
    assert [type(message) for message in bench.socket.sent] == [Accepted, Finished]
    finished = bench.socket.sent[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.usage) == (reason, Usage(1, len(ids), 1 + len(ids)))
    bench.assert_nothing_left()


def test_a_whole_output_is_checked_once_its_grammar_is_there() -> None:
    checks = LateChecks()
    bench = Bench(checks=checks)
    body, settled = json.dumps({"prompt": "p", "json_schema": {"type": "integer"}}), Settled(0, 1, 99)
    bench.socket.inbox.append(Submit(0, body, resume=Resume(settled, [ChoiceProgress(script_of("12"))])))
    bench.step()
    assert checks.jobs == [], "what of the grammar is enforced is not known yet"
    bench.step(ready=[0])
    assert checks.jobs == [(0, CheckJob('{"type":"integer"}', "12"))]
    checks.outcomes = [(0, CheckResult("valid", ""))]
    bench.step()
    assert [type(message) for message in bench.socket.sent] == [Accepted, Finished]
    bench.assert_nothing_left()


def test_choices_whose_end_is_known_are_left_out_and_the_others_share_a_prefill() -> None:
    bench = Bench()
    resumed(bench, 0, None, "", "xy", n=3, max_tokens=4)
    bench.scripts = {0: script_of("abc"), 1: script_of("xyz")}
    bench.run()
    assert [(one.choice, one.prefill_of, one.output_token_ids, one.num_scored) for one in bench.added] == [
        (1, None, [], 0),
        (2, 0, [*b"xy"], 1),
    ]
    assert [bench.text(0, index) for index in range(3)] == ["", "abc", "z"]
    assert sorted(one.index for one in bench.socket.sent if isinstance(one, Finished)) == [1, 2]
    bench.assert_nothing_left()


@pytest.mark.parametrize(
    ("resume", "why"),
    [
        (Resume(Settled(3, 2, 9), [ChoiceProgress([])]), "its prompt had 2 tokens and has 1 now"),
        (Resume(Settled(3, 1, 9), [ChoiceProgress([])] * 2), "2 choices are told of, the request has 1"),
        (Resume(Settled(3, 1, 2), [ChoiceProgress([1, 2, 3])]), "choice 0 has 3 tokens of at most 2"),
        (Resume(Settled(3, 1, 9), [ChoiceProgress([])], 1), "1 tokens behind the first are told of"),
    ],
)
def test_what_does_not_fit_its_request_is_not_resumed(resume: Resume, why: str) -> None:
    bench = Bench()
    bench.socket.inbox.append(Submit(0, '{"prompt": "p"}', resume=resume))
    bench.run()
    (rejected,) = bench.rejected()
    assert rejected.error.code == "internal_error"
    assert why in rejected.error.message
    bench.assert_nothing_left()
