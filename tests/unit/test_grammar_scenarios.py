"""Grammars that broke comparable systems (SCENARIOS T5 to T9): each is refused in one line, or does what it says."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from grammars import small_tokenizer, small_vocabulary
from hostile_grammars import HOSTILE, Hostile

from grammar_sync.engines.backend import GrammarBackend, compile_spec
from grammar_sync.engines.factory import MAKE_BACKEND, make_backend
from grammar_sync.engines.prepared import CompileError
from grammar_sync.spec import GrammarError, GrammarSpec, parse_grammar
from grammar_sync.text_check import TextChecker
from grammar_sync.vetting.messages import Refused, Setup, Vetted, VettingLimits
from grammar_sync.vetting.service import VettingService
from launch.rank.grammar_compiler import GrammarProcessStarter

pytestmark = pytest.mark.long(16)

_TEXT_KINDS = {"regex", "ebnf"}
PATIENCE_S = 200.0


def of(*scenarios: str) -> dict[str, Hostile]:
    return {name: one for name, one in HOSTILE.items() if one.scenario in scenarios}


@cache
def backend() -> GrammarBackend:
    torch.set_num_threads(1)
    return make_backend(small_vocabulary(), "auto")


def check_one_line(message: str) -> None:
    assert message
    assert "\n" not in message
    assert len(message) <= 900
    assert "internal error" not in message


@pytest.mark.parametrize("name", [name for name, one in HOSTILE.items() if one.at_the_door])
def test_t5_t6_t7_refused_at_the_door(name: str) -> None:
    """What is beyond a bound is refused before any engine sees it, naming the field."""
    with pytest.raises(GrammarError) as caught:
        parse_grammar(HOSTILE[name].fields)
    assert caught.value.param in HOSTILE[name].fields
    check_one_line(str(caught.value))


def test_every_other_passes_the_door() -> None:
    for name, one in HOSTILE.items():
        assert one.at_the_door or parse_grammar(one.fields) is not None, name


@pytest.mark.parametrize("name", [name for name, one in of("T5").items() if not one.at_the_door])
def test_t5_a_wrong_grammar_is_refused_with_its_position(name: str) -> None:
    fields = HOSTILE[name].fields
    spec = parse_grammar(fields)
    assert spec is not None
    with pytest.raises(CompileError) as caught:
        compile_spec(backend(), spec)
    check_one_line(str(caught.value))
    if fields.keys() & _TEXT_KINDS:
        assert re.search(r"(position|column) \d+", str(caught.value))


@pytest.mark.parametrize("value", [None, False])
def test_t5_no_grammar_is_no_error(value: object) -> None:
    assert parse_grammar({"json_object": value, "regex": None}) is None


LIMITS = VettingLimits(deadline_s=0.5, memory_bytes=256 << 20)
HEAVY = [name for name, one in of("T6", "T7", "T7b", "T11").items() if not one.at_the_door]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Vetted | Refused]]:
    """Has all heavy grammars vetted at once by the real engines, and after them one that is innocent."""
    start = GrammarProcessStarter(os.environ)
    service = VettingService(Setup(small_vocabulary(), MAKE_BACKEND, "auto", LIMITS), start(), start)
    specs = {name: spec_of(HOSTILE[name]) for name in HEAVY} | {"innocent": spec_of(Hostile("", {"regex": "a+"}))}
    for spec in specs.values():
        service.submit(spec)
    found: dict[str, Vetted | Refused] = {}
    end_s = time.monotonic() + PATIENCE_S
    while len(found) < len(specs):
        assert time.monotonic() < end_s, f"no outcome of {sorted(set(specs) - set(found))}"
        for name, spec in specs.items():
            report = service.poll(spec)
            if report is not None:
                found[name] = report.outcome
        time.sleep(0.02)
    assert service.counters().restarts == 0
    yield found
    service.close()


def spec_of(one: Hostile) -> GrammarSpec:
    spec = parse_grammar(one.fields)
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", HEAVY)
def test_t6_t7_t7b_refused_or_bounded(name: str, outcomes: dict[str, Vetted | Refused]) -> None:
    """A compile or a mask without end is refused under limits; what passes has quick masks."""
    match outcomes[name]:
        case Refused(reason=reason, message=message):
            assert reason != "crash"
            check_one_line(message)
        case Vetted(compile_s=compile_s, slowest_fill_s=slowest_s):
            assert not HOSTILE[name].must_fail
            assert compile_s <= LIMITS.deadline_s
            assert slowest_s <= LIMITS.fill_limit_s


def test_t7_the_innocent_behind_them_passes(outcomes: dict[str, Vetted | Refused]) -> None:
    assert isinstance(outcomes["innocent"], Vetted)


def encode(text: str) -> list[int]:
    ids: list[int] = small_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@cache
def checker() -> TextChecker:
    return TextChecker(small_vocabulary(), encode)


@pytest.mark.parametrize("name", of("T9"))
def test_t9_enforced_or_refused_by_path(name: str) -> None:
    """What an engine would leave out without a word is enforced, or refused with its place in the schema."""
    one = HOSTILE[name]
    compiled, refusal = None, ""
    try:
        compiled = compile_spec(backend(), spec_of(one))[1]
    except CompileError as error:
        refusal = str(error)
    if compiled is None:
        check_one_line(refusal)
        assert one.path in refusal
        return
    assert [text for text in one.takes if not checker().check(compiled, text).ok] == []
    assert [text for text in one.refuses if checker().check(compiled, text).ok] == []


@pytest.mark.parametrize("name", [name for name in of("T9") if name not in ("remote reference", "anchor inside")])
def test_t9_without_strict_it_runs_and_says_what_is_not_enforced(name: str) -> None:
    one = HOSTILE[name]
    spec = parse_grammar({**one.fields, "strict": False})
    assert spec is not None
    prepared, compiled = compile_spec(backend(), spec)
    assert [text for text in one.takes if not checker().check(compiled, text).ok] == []
    loose = [text for text in one.refuses if checker().check(compiled, text).ok]
    assert not loose or any(one.path in finding.path for finding in prepared.not_enforced)
