"""The leader between a client and the scheduler: a fake socket on one side, scripted tokens on the other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar_sync.agreement import GrammarFailure, Verdict
from grammar_sync.statistics import GrammarStatistics
from runtime.held_outputs import HeldOutputs, OutputChecks
from runtime.intake import Patience
from runtime.leader import Leader
from runtime.leader_needs import LeaderLimits
from runtime.messages import (
    Action,
    AddSequence,
    ClientMessage,
    EndSequence,
    EngineMessage,
    ErrorInfo,
    Finished,
    Rejected,
    StopRanks,
    Submit,
    TokenDelta,
)
from runtime.request_builder import RequestBuilder
from runtime.request_limits import RequestLimits
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence as EngineSequence
from runtime.step_planner import SchedulerLimits
from runtime.tokenizer import Tokenizer

EOS = 256


class ByteTokenizer(Tokenizer):
    """One id a byte, and the end of a text."""

    def __init__(self) -> None:
        self.size = 257
        self.special_token_ids = frozenset({EOS})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert isinstance(add_special_tokens, bool)
        return list(text.encode())

    def piece(self, token_id: int, previous_id: int | None) -> bytes:
        assert previous_id is None or previous_id in range(self.size)
        return bytes([token_id])


class FakeSocket:
    """The client's end; notes how long the leader was willing to wait."""

    def __init__(self) -> None:
        self.inbox: list[ClientMessage] = []
        self.sent: list[EngineMessage] = []
        self.timeouts_s: list[float] = []
        self.woken = threading.Event()

    def send(self, messages: list[EngineMessage]) -> None:
        assert messages, "an empty list needs no message"
        self.sent += messages

    def receive(self, timeout_s: float) -> list[ClientMessage]:
        self.timeouts_s.append(timeout_s)
        inbox, self.inbox = self.inbox, []
        return inbox

    def wake(self) -> None:
        self.woken.set()


class ScriptedGrammars:
    """What the leader is told of grammars: when each got on, by sequence, and what all of them cost."""

    def __init__(self) -> None:
        self.cost = GrammarStatistics(False, 0.1, 0.2, 0.0, 3)
        self.moved: dict[int, float] = {}
        self.compiled: set[int] = set()

    def is_compiled(self, sequence_id: int) -> bool:
        return sequence_id in self.compiled

    def statistics(self, sequence_id: int) -> GrammarStatistics:
        assert sequence_id >= 0
        return self.cost

    def moved_s(self, sequence_id: int) -> float:
        return self.moved[sequence_id]


class Bench:
    """Leader and scheduler as the step loop joins them; the tokens come from ``scripts``, by request and choice."""

    def __init__(
        self,
        *,
        grammar_wait_limit_s: float = 60.0,
        checks: OutputChecks | None = None,
        note_work: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        self.socket = FakeSocket()
        self.client_lives = True
        tokenizer = ByteTokenizer()
        builder = RequestBuilder(tokenizer, RequestLimits(257, 4096, 100_000, 4096))
        limits = LeaderLimits(
            beat_s=9.0, grammar_wait_s=0.5, grammar_beat_s=2.0, grammar_wait_limit_s=grammar_wait_limit_s
        )
        held = None if checks is None else HeldOutputs(checks)
        self.leader = Leader(
            self.socket,
            builder,
            tokenizer,
            limits,
            lambda: self.client_lives,
            eos_token_ids=[EOS],
            held=held,
            note_work=note_work,
        )
        self.scheduler = Scheduler(SchedulerLimits(64, 100_000, 1_000_000, 1), [EOS])
        self.scripts: dict[int, list[int]] = {}
        self.added: list[AddSequence] = []
        self.stopped = False
        self.step_number = 0
        self.lag = 0
        self.refusing: dict[int, str] = {}
        self.failing: dict[int, ErrorInfo] = {}

    def submit(self, request_id: int, **fields: Any) -> None:
        self.socket.inbox.append(Submit(request_id, json.dumps({"prompt": "p"} | fields)))

    def step(self, *, ready: Sequence[int] = (), failed: Mapping[int, str] | None = None) -> list[Action]:
        """Runs one step; returns its actions."""
        self.step_number += 1
        self.leader.begin_step(self.step_number)
        actions = self.leader.collect(Patience.NONE)
        for action in actions:
            self._apply(action)
        verdict = Verdict(self.step_number, tuple(ready), tuple(GrammarFailure(*one) for one in (failed or {}).items()))
        for sequence in self.scheduler.apply(verdict):
            self.leader.ended(sequence)
        self.leader.grammars_ready(verdict.ready)
        self.scheduler.release_finished(self.step_number)
        plan = self.scheduler.plan(self.step_number)
        tokens = [self._token(row.sequence_id) for row in plan.sampling_rows]
        errors = [self.failing.get(row.sequence_id) for row in plan.sampling_rows]
        for index in self.scheduler.commit(plan, tokens, errors):
            sequence = self.scheduler[plan.sampling_rows[index].sequence_id]
            refusal = None if sequence.error is not None else self.refusing.get(sequence.sequence_id)
            if refusal is None:
                self.leader.token(sequence, None)
            else:
                self.leader.refused(sequence, refusal)
        self.scheduler.release_finished(self.step_number)
        # As with one rank: nobody else has to agree.
        self.leader.agreed(self.step_number + 1 - self.lag)
        self.leader.flush()
        return actions

    def run(self, limit: int = 300) -> None:
        """Steps until nothing runs and nothing is left to say."""
        for _ in range(limit):
            actions = self.step()
            if not actions and not self.scheduler.has_work:
                return
        raise AssertionError("did not come to an end")

    def _apply(self, action: Action) -> None:
        match action:
            case AddSequence():
                self.added.append(action)
                sequence = EngineSequence.from_action(action)
                self.scheduler.add(sequence)
                if sequence.finish_reason is not None:
                    self.leader.ended(sequence)
            case EndSequence():
                ended = self.scheduler.end(action.sequence_id, action.finish_reason, action.error)
                if ended is not None:
                    self.leader.ended(ended)
            case StopRanks():
                self.stopped = True

    def _token(self, sequence_id: int) -> int:
        script = self.scripts[sequence_id]
        position = len(self.scheduler[sequence_id].output_token_ids)
        return script[position] if position < len(script) else EOS

    def text(self, request_id: int, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(request_id, index))

    def token_ids(self, request_id: int, index: int = 0) -> list[int]:
        return [token_id for delta in self.deltas(request_id, index) for token_id in delta.token_ids]

    def deltas(self, request_id: int, index: int = 0) -> list[TokenDelta]:
        return [
            message
            for message in self.socket.sent
            if isinstance(message, TokenDelta) and (message.request_id, message.index) == (request_id, index)
        ]

    def finished(self, request_id: int, index: int = 0) -> Finished:
        """Returns the one end of a choice, after which nothing may come."""
        of_choice = [
            message
            for message in self.socket.sent
            if isinstance(message, TokenDelta | Finished) and (message.request_id, message.index) == (request_id, index)
        ]
        ends = [message for message in of_choice if isinstance(message, Finished)]
        assert len(ends) == 1
        assert of_choice[-1] is ends[0], "something came after the end"
        assert ends[0].usage.completion_tokens == len(self.token_ids(request_id, index))
        assert ends[0].usage.total_tokens == ends[0].usage.prompt_tokens + ends[0].usage.completion_tokens
        return ends[0]

    def rejected(self) -> list[Rejected]:
        return [message for message in self.socket.sent if isinstance(message, Rejected)]

    def assert_nothing_left(self) -> None:
        assert self.leader._streams == {}
        assert self.leader._sequences_of == {}
        assert self.scheduler._sequences == {}


def script_of(text: str, *, eos: bool = True) -> list[int]:
    return [*text.encode(), *([EOS] if eos else [])]
