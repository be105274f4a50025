"""The keeper of a node's ranks: sees that one failed, says which and why, and has all of them forked anew.

It lives in the zygote, beside its sockets. Ranks of an epoch begin and end together: whatever was in their memory or in
flight between them is gone with their processes, and nothing of it can reach the next epoch.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launch.exit_codes import ExitCode
from launch.node.digests import first_disagreement, kept_digests
from launch.node.progress_record import Phase, ProgressRecord
from launch.node.rank_fault import FaultBudget, FaultKind, FaultReport, RankFault, culprits
from launch.node.recovery_settings import RecoverySettings
from launch.node.run_folder import RankReport, RunFolder
from launch.node.stack_dump import StackDump
from launch.node.stall import SeenRank, describe_stall, described, process_state, stalled_ranks

POLL_S = 0.05
"""How often records are looked at."""

_OWN_WINDOW_S = 0.03
"""How long after a rank failed by itself others are heard."""

_CONSEQUENCE_WINDOW_S = 0.25
"""How long after a rank lost contact with another that one is waited for."""

_STARVED_S = 0.5
"""When the keeper itself was not run for this long, the machine may not have run the ranks either."""

_STARTING = (Phase.START.name.lower(), Phase.LOAD.name.lower())
_STACKS_S = 0.1
_END_S = 5.0


class KeptRank:
    """A rank of this node, over all epochs.

    Args:
        rank: Its global rank.
        record: Where its processes write how far they are.
        stacks: Where they write what they are doing.

    Attributes:
        pid: Its process; 0 when there is none.
        ended: Turns readable when that ends; -1 when there is none.
        exit_code: What it ended with; None while it lives.
    """

    def __init__(self, rank: int, record: ProgressRecord, stacks: StackDump) -> None:
        self.rank = rank
        self.record = record
        self.stacks = stacks
        self.pid = 0
        self.ended = -1
        self.exit_code: int | None = None
        self._written_ns = 0
        self._cpu_before_s = 0.0

    def started(self, pid: int) -> None:
        """Takes a process that was just forked for it."""
        self.pid, self.ended = pid, os.pidfd_open(pid)
        self.exit_code = None

    def seen(self) -> SeenRank:
        """Returns what can be seen of it now."""
        state, cpu_s = process_state(self.pid)
        progress = self.record.read()
        if progress.t_ns != self._written_ns:
            self._written_ns, self._cpu_before_s = progress.t_ns, cpu_s
        age_s = progress.age_s()
        return SeenRank(progress, age_s, state, (cpu_s - self._cpu_before_s) / max(age_s, POLL_S))

    def forget(self) -> None:
        """Closes what stands for its process, which is gone."""
        if self.ended >= 0:
            os.close(self.ended)
        self.pid, self.ended = 0, -1

    def close(self) -> None:
        """Closes all of it in this process."""
        self.stacks.close()
        self.record.close()


@dataclass
class _Trouble:
    """Faults that were seen and not judged yet."""

    seen_s: float
    seen_at: float
    faults: list[RankFault] = field(default_factory=list)

    @property
    def due_s(self) -> float:
        """When they are judged."""
        is_own = any(not fault.is_consequence for fault in self.faults)
        return self.seen_s + (_OWN_WINDOW_S if is_own else _CONSEQUENCE_WINDOW_S)


class RankKeeper:
    """Judges what becomes of the ranks of one run, all of which are this node's.

    Args:
        settings: How they are watched.
        folder: The run's.
        clock: The monotonic clock, in seconds.
    """

    def __init__(
        self, settings: RecoverySettings, folder: RunFolder, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.epoch = 0
        self._settings = settings
        self._folder = folder
        self._clock = clock
        self._ranks: dict[int, KeptRank] = {}
        self._budget = FaultBudget(settings.max_recoveries, settings.window_s)
        self._trouble: _Trouble | None = None
        self._polled_s = clock()
        self._is_closing = False
        self._reports = 0

    @property
    def ranks(self) -> Sequence[KeptRank]:
        """The ranks that were forked so far, in order."""
        return [kept for _, kept in sorted(self._ranks.items())]

    @property
    def is_closing(self) -> bool:
        """Whether the run ends: then ranks that end are no fault."""
        return self._is_closing

    def close(self) -> None:
        """Takes note that the run ends."""
        self._is_closing = True

    def keep(self, kept: KeptRank) -> None:
        """Takes a rank's process of this epoch into care."""
        self._ranks[kept.rank] = kept

    def wait_s(self) -> float:
        """Returns after how many seconds ``judge`` wants to be called again."""
        due_s = self._polled_s + POLL_S
        if self._trouble is not None:
            due_s = min(due_s, self._trouble.due_s)
        return max(0.0, due_s - self._clock())

    def has_ended(self, kept: KeptRank, exit_code: int) -> bool:
        """Takes note that a rank ended; returns whether that is to be told at once, since nothing is to be judged."""
        kept.exit_code = exit_code
        phase = kept.record.read().phase
        if self._is_closing or phase is Phase.LEAVING:
            self._is_closing = True
            return True
        self._note(self._fault_of(kept, exit_code))
        return False

    def judge(self) -> FaultReport | None:
        """Looks at the ranks; returns a report when the epoch is over, else None.

        When the report says that the ranks recover, all of them are ended and the next epoch may be forked.
        """
        self._look()
        trouble = self._trouble
        if trouble is None or self._clock() < trouble.due_s:
            return None
        self._trouble, epoch = None, self.epoch
        own, lost = self._diverged(trouble.faults) or culprits(trouble.faults)
        requests = tuple(one for kept in self.ranks for one in kept.record.requests())
        why_not = self._why_not(own)
        if not why_not and not self._end_epoch():
            why_not = f"a process could not be ended in {_END_S:g} s"
        if why_not:
            self._is_closing = True
        report = FaultReport(
            epoch=epoch,
            culprits=own,
            consequences=lost,
            recovers=not why_not,
            why_not=why_not,
            seen_at=trouble.seen_at,
            judged_after_s=self._clock() - trouble.seen_s,
            requests=requests,
        )
        self._reports += 1
        self._folder.write_fault(self._reports, report)
        if why_not:
            self._leave_last_words(report)
            # Whoever stands still would keep the run from its end: the others leave when they lose contact with it.
            for kept in [self._ranks[fault.rank] for fault in own if fault.rank in self._ranks]:
                if kept.exit_code is None:
                    signal.pidfd_send_signal(kept.ended, signal.SIGKILL)
        return report

    def _end_epoch(self) -> bool:
        """Ends every rank; returns whether all are gone, so that the next epoch may begin.

        A process that cannot be ended, since it waits in the kernel for a device, may still hold what a next one needs.
        """
        alive = [kept for kept in self.ranks if kept.exit_code is None]
        for kept in alive:
            signal.pidfd_send_signal(kept.ended, signal.SIGKILL)
        deadline_s = self._clock() + _END_S
        for kept in alive:
            left_s = max(0.0, deadline_s - self._clock())
            if not select.select([kept.ended], [], [], left_s)[0]:
                return False
            _, status = os.waitpid(kept.pid, 0)
            kept.exit_code = os.waitstatus_to_exitcode(status)
        self._folder.forget_reports()
        self._ranks.clear()
        self.epoch += 1
        self._polled_s = self._clock()
        return True

    def _diverged(self, faults: Sequence[RankFault]) -> tuple[tuple[RankFault, ...], tuple[RankFault, ...]] | None:
        """Returns who is out of step and who only noticed, when digests differ: who raised that may be in the right."""
        found = first_disagreement({kept.rank: kept_digests(kept.record) for kept in self.ranks})
        if found is None:
            return None
        message = found.sentence()
        own = [self._fault(self._ranks[rank], "diverged", message) for rank in found.suspects]
        return tuple(own), tuple(fault for fault in faults if fault.rank not in found.suspects)

    def _look(self) -> None:
        """Looks for ranks that stalled."""
        now_s = self._clock()
        since_s, self._polled_s = now_s - self._polled_s, now_s
        alive = {kept.rank: kept for kept in self.ranks if kept.exit_code is None}
        seen = {rank: kept.seen() for rank, kept in alive.items()}
        if self._is_closing or since_s > _STARVED_S or len(self._ranks) < self._settings.world_size:
            return
        if self._trouble is not None:
            # Those that live wait for one that does not: nothing new.
            return
        stalled = stalled_ranks(seen, self._settings.tp, self._settings.stall_timeout_s, self._settings.start_timeout_s)
        if not stalled:
            return
        for rank in stalled:
            alive[rank].stacks.ask(alive[rank].pid)
        time.sleep(_STACKS_S)
        for rank in stalled:
            message = describe_stall(seen[rank], stalled)
            self._note(self._fault(alive[rank], "stalled", message, stacks=alive[rank].stacks.read()))

    def _note(self, fault: RankFault) -> None:
        if self._trouble is None:
            self._trouble = _Trouble(self._clock(), time.time())
        self._trouble.faults.append(fault)

    def _fault_of(self, kept: KeptRank, exit_code: int) -> RankFault:
        report = self._folder.report_of(kept.rank)
        if report is not None:
            return self._fault(kept, "raised", report.message, is_consequence=report.is_consequence)
        if exit_code < 0:
            return self._fault(
                kept, "killed", f"killed by {signal.Signals(-exit_code).name}", stacks=kept.stacks.read()
            )
        return self._fault(kept, "left", f"left with exit code {exit_code} without a word")

    def _fault(
        self,
        kept: KeptRank,
        kind: FaultKind,
        message: str,
        *,
        is_consequence: bool = False,
        stacks: str = "",
    ) -> RankFault:
        stage, tp_rank = divmod(kept.rank, self._settings.tp)
        progress = kept.record.read()
        return RankFault(
            rank=kept.rank,
            stage=stage,
            tp_rank=tp_rank,
            kind=kind,
            message=message,
            phase=progress.phase.name.lower(),
            step=progress.step,
            operation=described(progress),
            age_s=progress.age_s(),
            tokens=progress.tokens,
            is_consequence=is_consequence,
            exit_code=kept.exit_code,
            stacks=stacks,
        )

    def _why_not(self, own: Sequence[RankFault]) -> str:
        """Returns why no next epoch can begin; empty when one can."""
        usage = [fault for fault in own if fault.exit_code == ExitCode.USAGE]
        if usage:
            return "it would fail again"
        is_up = all(kept.record.read().phase not in (Phase.START, Phase.LOAD) for kept in self.ranks)
        if self.epoch == 0 and not is_up:
            return "the ranks had not come up"
        if not self._budget.spend(self._clock()):
            limit, window_s = self._settings.max_recoveries, self._settings.window_s
            plural = "" if limit == 1 else "s"
            return f"more than {limit} fault{plural} in {window_s:g} s" if limit else "--max-recoveries is 0"
        return ""

    def _leave_last_words(self, report: FaultReport) -> None:
        """Leaves the cause where the front side looks for it when the ranks are gone."""
        for fault in report.culprits:
            phase = "start" if fault.phase in _STARTING else "run"
            code = int(ExitCode.START_FAILED if phase == "start" else ExitCode.RANK_FAILED)
            if fault.kind == "raised" and fault.exit_code:
                # It said itself what its error is; what it left with otherwise means nothing to others.
                code = fault.exit_code
            message = fault.message
            if self._settings.max_recoveries and report.why_not.startswith("more than"):
                code = int(ExitCode.RECOVERIES_EXHAUSTED)
                message += f"; {report.why_not}: --max-recoveries and --recovery-window allow no more"
            self._folder.write_report(
                RankReport(fault.rank, fault.stage, fault.tp_rank, phase, fault.kind, message, False, code),
                replaces=True,
            )
