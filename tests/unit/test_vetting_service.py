"""The compile process: whatever an engine does in it, one grammar is refused for it and the others go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from faulty_engine import MAKE
from grammars import small_vocabulary

from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import Refused, Setup, Vetted, VettingLimits
from grammar_sync.vetting.protocol import VettingReport
from grammar_sync.vetting.service import VettingError, VettingService
from launch.rank.grammar_compiler import GrammarProcessStarter, RunningProcess

pytestmark = pytest.mark.long(40)

TESTS = str(Path(__file__).resolve().parents[1])
PATIENCE_S = 60.0
LIMITS = VettingLimits(deadline_s=0.3, memory_bytes=64 << 20, fill_limit_s=0.1, probe_limit_s=0.6)


def spec(source: str) -> GrammarSpec:
    return GrammarSpec("regex", source)


class Bench:
    """A service whose compile process runs the faulty engine."""

    def __init__(self, limits: VettingLimits = LIMITS, **options: Any) -> None:
        self.starter = GrammarProcessStarter({**os.environ, "PYTHONPATH": TESTS})
        self.started: list[RunningProcess] = []
        self.service = VettingService(
            Setup(small_vocabulary(), MAKE, "auto", limits), self.start(), self.start, **options
        )

    def start(self) -> RunningProcess:
        self.started.append(self.starter())
        return self.started[-1]

    def ask(self, *sources: str) -> None:
        for source in sources:
            self.service.submit(spec(source))

    def answer(self, source: str) -> VettingReport:
        until(lambda: self.service.poll(spec(source)) is not None, f"an answer to {source}")
        report = self.service.poll(spec(source))
        assert report is not None
        return report

    def outcome(self, source: str) -> Vetted | Refused:
        """Asks, waits for the answer, and wants it no more."""
        self.ask(source)
        report = self.answer(source)
        self.service.discard(spec(source))
        return report.outcome

    def process(self) -> psutil.Process:
        return psutil.Process(self.started[-1].pid)


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.service.close()


def marks(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_good_grammar_passes_with_its_figures(bench: Bench) -> None:
    outcome = bench.outcome("burn 0.05")
    assert isinstance(outcome, Vetted)
    assert (outcome.prepared.engine, outcome.prepared.source) == ("xgrammar", "burn 0.05")
    assert outcome.size_bytes == 1000
    assert 0.04 < outcome.compile_s < 0.4
    assert 0 < outcome.slowest_fill_s < 0.1


REFUSALS = [
    ("unprepared", "grammar", "cannot be prepared", True),
    ("bad", "grammar", "no such grammar", True),
    ("segv", "crash", "the grammar compiler crashed on it (SIGSEGV)", True),
    ("abort", "crash", "the grammar compiler crashed on it (SIGABRT)", True),
    ("exit", "crash", "the grammar compiler crashed on it (exit code 3)", True),
    ("kill", "crash", "the grammar compiler was killed while it worked on it", False),
    ("broken", "crash", "internal error of the grammar compiler", False),
    ("burn 3600", "time", "it was not compiled in 0.3 s", False),
    ("endless preparation", "time", "it was not compiled in 0.3 s", False),
    ("sleep", "time", "it was not compiled in 0.3 s", False),
    ("allocate", "memory", "it needs more than 64 MiB to compile", True),
    ("nonsense", "crash", "the grammar compiler sent what is no message", True),
    ("bad_alloc", "memory", "it needs more than 64 MiB to compile", True),
    ("slow mask", "masks", "one of its masks takes 0.1", True),
    ("endless mask", "masks", "one of its masks takes more than 0.1 s to fill", True),
    ("dead end", "masks", "it leads to a state in which no token is allowed", True),
    ("bad | bad too", "grammar", "no such grammar", True),
    (
        "segv | bad",
        "crash",
        "xgrammar: the grammar compiler crashed on it (SIGSEGV); llguidance: no such grammar",
        True,
    ),
    ("bad | kill", "grammar", "xgrammar: no such grammar; llguidance: the grammar compiler was killed while it", False),
]


@pytest.mark.parametrize(("source", "reason", "message", "is_final"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_what_goes_wrong_is_told_and_the_next_grammar_is_vetted(
    bench: Bench, capfd: pytest.CaptureFixture[str], source: str, reason: str, message: str, is_final: bool
) -> None:
    pid = bench.started[-1].pid
    bench.ask("innocent")
    outcome = bench.outcome(source)
    assert isinstance(outcome, Refused)
    assert outcome.message.startswith(message)
    assert (outcome.reason, outcome.is_final) == (reason, is_final)
    assert "\n" not in outcome.message
    assert isinstance(bench.answer("innocent").outcome, Vetted)
    assert isinstance(bench.outcome(f"mark /dev/null after {source}"), Vetted)
    bench.service.discard(spec("innocent"))
    assert is_alive(pid), "the worker is gone, its parent is not"
    until(lambda: bench.process().children() == [], "workers to end")
    assert capfd.readouterr().out == ""


def test_a_contradiction_is_found(bench: Bench) -> None:
    outcome = bench.outcome("refuses what it allows")
    assert isinstance(outcome, Refused)
    assert outcome.message.startswith("the grammar engine contradicts itself")


@pytest.mark.parametrize("first", ["bad", "segv", "exit", "burn 3600", "allocate", "slow mask", "endless mask"])
def test_the_next_form_is_taken_when_the_first_will_not_do(bench: Bench, first: str) -> None:
    outcome = bench.outcome(f"{first} | fine")
    assert isinstance(outcome, Vetted)
    assert (outcome.prepared.engine, outcome.prepared.source) == ("llguidance", "fine")


def test_nothing_but_own_errors_reaches_the_terminal(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    assert isinstance(bench.outcome("noise"), Vetted)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_one_vetting_for_all_who_want_it(bench: Bench, tmp_path: Path) -> None:
    source = f"mark {tmp_path}/runs burn 0.1"
    bench.ask(*[source] * 5)
    assert isinstance(bench.answer(source).outcome, Vetted)
    bench.ask(source)
    assert isinstance(bench.answer(source).outcome, Vetted)
    assert len(marks(tmp_path / "runs")) == 1
    for _ in range(6):
        bench.service.discard(spec(source))
    assert isinstance(bench.outcome(source), Vetted), "kept though nobody wanted it"
    assert len(marks(tmp_path / "runs")) == 1


@pytest.mark.parametrize(("end", "runs"), [("bad", 1), ("segv", 1), ("burn 3600", 2), ("kill", 2)])
def test_failures_are_kept_and_time_outs_are_not(bench: Bench, tmp_path: Path, end: str, runs: int) -> None:
    source = f"mark {tmp_path}/runs {end}"
    first, second = bench.outcome(source), bench.outcome(source)
    assert isinstance(first, Refused)
    assert first == second
    assert len(marks(tmp_path / "runs")) == runs


def test_what_nobody_wants_any_more_is_ended(bench: Bench, tmp_path: Path) -> None:
    source = f"mark {tmp_path}/pid sleep"
    bench.ask(source, source)
    until(lambda: bool(marks(tmp_path / "pid")), "the compile to run")
    (pid,) = marks(tmp_path / "pid")
    bench.service.discard(spec(source))
    assert isinstance(bench.outcome("another"), Vetted)
    assert is_alive(pid), "one still wants it"
    bench.service.discard(spec(source))
    until(lambda: not is_alive(pid), "the worker to end")
    with pytest.raises(VettingError, match="poll"):
        bench.service.poll(spec(source))


def test_misuse_is_an_error(bench: Bench) -> None:
    with pytest.raises(VettingError, match="poll of a regex grammar that no request wants"):
        bench.service.poll(spec("never asked"))
    with pytest.raises(VettingError, match="discard"):
        bench.service.discard(spec("never asked"))


def test_hard_grammars_keep_no_other_waiting_and_end_with_the_service(tmp_path: Path) -> None:
    """More hang than there are places for; one that comes later is vetted long before these are given up."""
    bench = Bench(VettingLimits(deadline_s=20))
    hard = [f"mark {tmp_path}/{number} sleep" for number in range(7)]
    bench.ask(*hard)
    began_s = time.monotonic()
    assert isinstance(bench.outcome("ordinary"), Vetted)
    assert time.monotonic() - began_s < 40, "a single hard one would have a minute"
    assert all(bench.service.poll(spec(source)) is None for source in hard)
    until(lambda: all((tmp_path / str(number)).exists() for number in range(7)), "all hard ones to be tried")
    workers = bench.process().children()
    assert 0 < len(workers) <= 4
    bench.service.close()
    assert not is_alive(bench.started[0].pid)
    until(lambda: not any(is_alive(worker.pid) for worker in workers), "the workers to end with their parent")
    report = bench.service.poll(spec(hard[0]))
    assert report is not None
    assert report.outcome == Refused("crash", "the grammar compiler was closed", is_final=False)
    with pytest.raises(VettingError, match="after close"):
        bench.ask("more")


def test_computing_is_heard_of_and_yields_to_the_ranks_after_a_while() -> None:
    bench = Bench(VettingLimits(deadline_s=30))
    bench.ask("burn 3600", "sleep")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    until(lambda: len(bench.process().children()) == 2, "both to begin")
    assert {child.nice() for child in bench.process().children()} == {own + 5}
    both = {own + 5, own + 10}
    until(lambda: {child.nice() for child in bench.process().children()} == both, "the long one to yield")
    heard_s = bench.service.heard_s
    until(lambda: bench.service.heard_s > heard_s, "a sign of life")
    bench.service.discard(spec("burn 3600"))
    until(lambda: len(bench.process().children()) == 1, "the long one to end")
    heard_s = bench.service.heard_s
    time.sleep(2.5)
    assert bench.service.heard_s == heard_s, "one that only sleeps gives no sign of life"
    assert bench.service.poll(spec("sleep")) is None
    bench.ask("burn 3601")
    until(lambda: bench.service.heard_s > heard_s, "a sign of life again")
    bench.process().suspend()
    time.sleep(0.5)
    heard_s = bench.service.heard_s
    time.sleep(1.5)
    assert bench.service.heard_s == heard_s, "one that is stopped gives no sign of life"
    bench.service.close()


def test_a_lost_process_is_replaced_and_its_work_done_again(tmp_path: Path) -> None:
    bench = Bench()
    source = f"mark {tmp_path}/runs burn 0.1"
    bench.ask(source, "a", "b")
    until(lambda: bool(marks(tmp_path / "runs")), "the compile to run")
    os.kill(bench.started[0].pid, signal.SIGKILL)
    assert isinstance(bench.answer(source).outcome, Vetted)
    assert all(isinstance(bench.answer(other).outcome, Vetted) for other in ("a", "b"))
    assert bench.service.counters().restarts == 1
    assert len(bench.started) == 2
    bench.service.close()
