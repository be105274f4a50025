"""The keeper: a rank that fails or stalls is named, and all ranks are forked anew, unseen by their supervisors."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from command_line import wait_until
from zygote_node import SOON_S, ZygoteNode, has_ended

from launch.environment import CORE_FILES, RUN_FOLDER
from launch.exit_codes import ExitCode
from launch.node.rank_fault import FaultReport
from launch.node.recovery_settings import RecoverySettings
from launch.node.run_folder import RunFolder

STALL_S = 0.6
HANDLER_S = 11.0
"""How long the handler takes that a library set for crashes: see zygote_rank.py."""


class Run:
    """Three ranks that step, under a keeper; ``told`` are files that tell them what to do."""

    def __init__(
        self, node: ZygoteNode, folder: Path, recoveries: int, told: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        ranks = self.size = 3
        self.told = folder / "told"
        self.told.mkdir()
        for name in told:
            self.tell(name)
        self.folder = RunFolder.create()
        settings = RecoverySettings(
            tp=2,
            world_size=ranks,
            max_recoveries=recoveries,
            window_s=100.0,
            stall_timeout_s=STALL_S,
            start_timeout_s=20.0,
        )
        self.supervisors = [
            node.supervisor(
                *("step", str(self.told)),
                RANK=str(rank),
                WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks),
                **{RUN_FOLDER: str(self.folder.path)},
                **settings.variable(),
                **environ,
            )
            for rank in range(ranks)
        ]

    def process(self, rank: int, epoch: int) -> psutil.Process:
        path = self.told / f"{rank}.{epoch}"
        wait_until(lambda: path.exists() and path.read_text(), SOON_S, f"rank {rank} of epoch {epoch}")
        return psutil.Process(int(path.read_text()))

    def epoch(self, epoch: int) -> list[psutil.Process]:
        return [self.process(rank, epoch) for rank in range(self.size)]

    def tell(self, name: str) -> None:
        (self.told / name).touch()

    def report(self, number: int = 1) -> FaultReport:
        wait_until(lambda: self.folder.fault(number) is not None, SOON_S, f"report {number}")
        report = self.folder.fault(number)
        assert report is not None
        return report

    def codes(self) -> list[int]:
        """Returns the supervisors' exit codes once all have left."""
        return [supervisor.wait(SOON_S) for supervisor in self.supervisors]

    def end(self) -> list[int]:
        self.tell("end")
        return self.codes()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ZygoteNode]:
    with ZygoteNode.started(tmp_path / "zygote") as started:
        yield started


@contextmanager
def run(
    node: ZygoteNode, folder: Path, *told: str, recoveries: int = 5, environ: Mapping[str, str] | None = None
) -> Iterator[Run]:
    started = Run(node, folder, recoveries, told, environ or {})
    with ExitStack() as stack:
        stack.callback(started.folder.remove)
        for supervisor in started.supervisors:
            stack.callback(close, supervisor)
        yield started


def close(supervisor: subprocess.Popen[str]) -> None:
    supervisor.kill()
    supervisor.communicate()


@pytest.mark.parametrize(
    ("sig", "message"),
    [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSEGV, "killed by SIGSEGV")],
)
def test_a_killed_rank_begins_a_new_epoch(node: ZygoteNode, tmp_path: Path, sig: signal.Signals, message: str) -> None:
    with run(node, tmp_path) as started:
        before = started.epoch(0)
        before[1].send_signal(sig)
        after = started.epoch(1)
        assert all(has_ended(process) for process in before)
        assert {process.pid for process in before}.isdisjoint({process.pid for process in after})
        assert {process.ppid() for process in after} == {node.zygote.pid}
        report = started.report()
        assert (report.epoch, report.recovers, report.why_not, report.consequences) == (0, True, "", ())
        (culprit,) = report.culprits
        assert (culprit.rank, culprit.stage, culprit.tp_rank) == (1, 0, 1)
        assert (culprit.kind, culprit.message, culprit.exit_code) == ("killed", message, -sig)
        assert culprit.step > 0
        assert report.judged_after_s < 1.0
        assert [supervisor.poll() for supervisor in started.supervisors] == [None] * 3
        assert started.end() == [0, 0, 0]


@pytest.mark.parametrize(("asked", "limit"), [("", 1), ("1", resource.RLIM_INFINITY)])
def test_a_crash_leaves_stacks_and_a_core_file_only_when_asked(
    node: ZygoteNode, tmp_path: Path, asked: str, limit: int
) -> None:
    """Writing a core file would take longer than the recovery."""
    hard = resource.prlimit(node.zygote.pid, resource.RLIMIT_CORE)[1]
    if hard != resource.RLIM_INFINITY:
        pytest.skip("this machine allows no core files")
    resource.prlimit(node.zygote.pid, resource.RLIMIT_CORE, (hard, hard))
    with run(node, tmp_path, environ={CORE_FILES: asked}) as started:
        victim = started.epoch(0)[1]
        assert resource.prlimit(victim.pid, resource.RLIMIT_CORE) == (limit, hard)
        sent_s = time.time()
        victim.send_signal(signal.SIGSEGV)
        started.epoch(1)
        report = started.report()
        assert report.seen_at - sent_s < HANDLER_S / 2
        (culprit,) = report.culprits
        assert (culprit.rank, culprit.message) == (1, "killed by SIGSEGV")
        assert "Fatal Python error: Segmentation fault" in culprit.stacks
        assert "in _step" in culprit.stacks
        assert started.end() == [0, 0, 0]
    assert asked or not list(tmp_path.glob("core*"))


def test_a_rank_leaves_its_weights_to_the_next_one(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path) as started:
        for epoch in range(2):
            started.epoch(epoch)[epoch].kill()
        started.epoch(2)
        for rank in range(started.size):
            left = [(started.told / f"weights-{rank}.{epoch}").read_text() for epoch in range(3)]
            assert left == ["", f"{rank}.0 ", f"{rank}.0 {rank}.1 "], "its own, and nobody else's"
        assert started.end() == [0, 0, 0]


def test_without_recoveries_no_weights_are_left(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path, recoveries=0) as started:
        started.epoch(0)
        assert (started.told / "weights-1.0").read_text() == "None"
        assert started.end() == [0, 0, 0]


def test_a_rank_that_leaves_early_is_a_fault(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path) as started:
        started.epoch(0)
        started.tell("leave-0-2.0")
        started.epoch(1)
        (culprit,) = started.report().culprits
        assert (culprit.rank, culprit.kind, culprit.exit_code) == (2, "left", 0)
        assert culprit.message == "left with exit code 0 without a word"
        assert started.end() == [0, 0, 0]


def test_a_stopped_rank_is_found_and_ended(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path) as started:
        victim = started.epoch(0)[0]
        began_s = time.monotonic()
        victim.suspend()
        started.epoch(1)
        assert time.monotonic() - began_s >= STALL_S
        (culprit,) = started.report().culprits
        assert (culprit.rank, culprit.kind, culprit.stacks) == (0, "stalled", "")
        assert culprit.age_s > STALL_S
        assert "the process is stopped" in culprit.message
        assert has_ended(victim)
        assert started.end() == [0, 0, 0]


def test_t20_a_rank_that_is_absent_is_named_and_says_where(node: ZygoteNode, tmp_path: Path) -> None:
    """SCENARIOS T20: not the ranks that wait for it."""
    with run(node, tmp_path) as started:
        started.epoch(0)
        started.tell("sleep-1.0")
        started.epoch(1)
        (culprit,) = started.report().culprits
        assert (culprit.rank, culprit.kind) == (1, "stalled")
        assert "zygote_rank.py" in culprit.stacks
        assert "in _step" in culprit.stacks
        assert started.end() == [0, 0, 0]


def test_who_differs_from_the_majority_is_to_blame_not_who_notices(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path) as started:
        started.epoch(0)
        started.tell("diverge-1.0")
        wait_until((started.told / "diverged-1.0").exists, SOON_S, "rank 1 to diverge")
        started.tell("leave-0-2.0")
        started.epoch(1)
        report = started.report()
        (culprit,) = report.culprits
        assert (culprit.rank, culprit.kind) == (1, "diverged")
        assert "rank 1 out of step: of all that was planned and committed before step" in culprit.message
        assert [(one.rank, one.kind) for one in report.consequences] == [(2, "left")]
        assert started.end() == [0, 0, 0]


def test_epoch_after_epoch(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path) as started:
        for epoch in range(5):
            started.epoch(epoch)[epoch % 3].kill()
        started.epoch(5)
        assert [started.report(number).epoch for number in range(1, 6)] == list(range(5))
        assert started.end() == [0, 0, 0]
        wait_until(lambda: node.zygote.num_fds() <= 5, SOON_S, "the zygote to close what it held")


def test_too_many_faults_end_the_run(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path, recoveries=1) as started:
        started.epoch(0)[0].kill()
        started.process(2, 1).kill()
        report = started.report(2)
        assert (report.epoch, report.recovers, report.why_not) == (1, False, "more than 1 fault in 100 s")
        # As torchrun would end the others.
        assert started.supervisors[2].wait(SOON_S) == -signal.SIGKILL
        cause = started.folder.cause()
        assert cause is not None
        why = "more than 1 fault in 100 s: --max-recoveries and --recovery-window allow no more"
        assert (cause.rank, cause.message) == (2, f"killed by SIGKILL; {why}")
        assert cause.exit_code == ExitCode.RECOVERIES_EXHAUSTED
        started.end()


def test_without_recoveries_the_first_fault_ends_the_run(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path, recoveries=0) as started:
        started.epoch(0)[0].kill()
        assert started.supervisors[0].wait(SOON_S) == -signal.SIGKILL
        assert started.report().why_not == "--max-recoveries is 0"
        cause = started.folder.cause()
        assert cause is not None
        assert cause.exit_code == ExitCode.RANK_FAILED
        started.end()


def test_what_a_rank_left_with_is_not_what_the_run_ends_with(node: ZygoteNode, tmp_path: Path) -> None:
    """A library that calls exit(7) does not say that recoveries are used up."""
    with run(node, tmp_path, recoveries=0) as started:
        started.epoch(0)
        started.tell("leave-7-1.0")
        assert started.supervisors[1].wait(SOON_S) == 7
        cause = started.folder.cause()
        assert cause is not None
        assert (cause.phase, cause.exit_code) == ("run", ExitCode.RANK_FAILED)
        started.end()


def test_ranks_that_stand_still_do_not_keep_a_run_from_its_end(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path, recoveries=0) as started:
        for victim in started.epoch(0):
            victim.suspend()
        for supervisor in started.supervisors:
            assert supervisor.wait(SOON_S) == -signal.SIGKILL
        report = started.report()
        assert (report.recovers, report.why_not) == (False, "--max-recoveries is 0")
        assert {culprit.kind for culprit in report.culprits} == {"stalled"}
        assert started.folder.cause() is not None
        started.end()


def test_ranks_that_do_not_come_up_are_not_recovered(node: ZygoteNode, tmp_path: Path) -> None:
    with run(node, tmp_path, "fail-1.0") as started:
        report = started.report()
        assert (report.recovers, report.why_not) == (False, "the ranks had not come up")
        assert started.supervisors[1].wait(SOON_S) == 7
        cause = started.folder.cause()
        assert cause is not None
        assert (cause.phase, cause.exit_code) == ("start", ExitCode.START_FAILED)
        started.end()


def test_a_supervisor_that_leaves_ends_the_run(node: ZygoteNode, tmp_path: Path) -> None:
    """As at Ctrl-C: torchrun ends one supervisor after the other, and no rank comes back."""
    with run(node, tmp_path) as started:
        before = started.epoch(0)
        started.supervisors[0].terminate()
        wait_until(lambda: has_ended(before[0]), SOON_S, "the first rank to end")
        before[1].kill()
        assert started.supervisors[1].wait(SOON_S) == -signal.SIGKILL
        assert started.folder.fault(1) is None
        assert not (started.told / "1.1").exists()
        started.end()


def test_ranks_of_several_nodes_are_not_kept_here() -> None:
    settings = RecoverySettings(
        tp=2, world_size=4, max_recoveries=5, window_s=1.0, stall_timeout_s=1.0, start_timeout_s=1.0
    )
    environ = {**os.environ, **settings.variable(), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert RecoverySettings.read(environ) == settings
    assert RecoverySettings.read(environ | {"LOCAL_WORLD_SIZE": "2"}) is None
    assert RecoverySettings.read({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}) is None
