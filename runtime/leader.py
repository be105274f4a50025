"""The leader: the one rank that talks to the client.

It turns client messages into actions for all ranks, and committed tokens into text for the client. What the replicas
cannot see for themselves (an abort, a stop string, a time-out, a grammar that refused a token) becomes an action of the
next step, so that every rank learns it at the same point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from grammar_sync.reasoning import ReasoningVocabulary, ThinkingState
from grammar_sync.thinking import ThinkingRules
from runtime.engine_statistics import EngineStatistics
from runtime.held_outputs import HeldOutputs, checked_schema
from runtime.intake import Patience
from runtime.leader_needs import GrammarWatch, LeaderLimits, MessageSocket
from runtime.messages import (
    Abort,
    Accepted,
    Action,
    ClientMessage,
    CompletionDetails,
    Detokenize,
    EndSequence,
    EngineMessage,
    ErrorInfo,
    Finished,
    FinishReason,
    PromptInfo,
    Rejected,
    Shutdown,
    StopRanks,
    Submit,
    Tokenize,
    Usage,
)
from runtime.output_check import CheckJob
from runtime.output_stream import OutputStream
from runtime.output_text import OutputText
from runtime.release import LateMessages
from runtime.reports import TokenReport
from runtime.request_builder import Request, RequestBuilder
from runtime.request_reader import RequestReader
from runtime.sequence import Sequence
from runtime.token_info import token_info
from runtime.tokenizer import Tokenizer


class Leader:
    """The source of actions and the sink of tokens.

    Args:
        socket: The client's other end.
        builder: Validates and tokenizes requests.
        tokenizer: For the output.
        limits: Its clock.
        client_is_alive: Whether the client's process still exists; when not, the ranks stop.
        reasoning: How the model thinks; None when it does not.
        eos_token_ids: What ends an output.
        held: Holds finished JSON outputs while they are checked; None when nobody checks.
        statistics: Returns new statistics for the client now and then, else None; None when nobody counts.
        note_work: Told of the requests that the ranks work at, whenever they change; None when nobody wants to know.
    """

    def __init__(
        self,
        socket: MessageSocket,
        builder: RequestBuilder,
        tokenizer: Tokenizer,
        limits: LeaderLimits,
        client_is_alive: Callable[[], bool],
        *,
        eos_token_ids: Iterable[int],
        reasoning: ReasoningVocabulary | None = None,
        held: HeldOutputs | None = None,
        statistics: Callable[[], EngineStatistics | None] | None = None,
        note_work: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        self._socket = socket
        self._reader = RequestReader(builder, tokenizer, socket.wake)
        self._aborted_unread: set[int] = set()
        self._tokenizer = tokenizer
        self._limits = limits
        self._client_is_alive = client_is_alive
        self._eos_token_ids = frozenset(eos_token_ids)
        self._reasoning = reasoning
        self._held = held
        self._statistics = statistics
        self._note_work = note_work
        self._work: tuple[int, ...] = ()
        self._planned: tuple[int, ...] = ()
        self._grammars: GrammarWatch | None = None
        self._streams: dict[int, OutputStream] = {}
        self._sequences_of: dict[int, list[int]] = {}
        self._actions: list[Action] = []
        self._outbox: list[EngineMessage] = []
        self._late = LateMessages(held)
        self._next_sequence_id = 0

    def collect(self, patience: Patience) -> list[Action]:
        """Returns the next step's actions, after waiting for them as ``patience`` allows."""
        # First, since of a sequence that comes now nobody can tell anything yet.
        self._expire_grammars()
        self._reader.begin(is_busy=patience is Patience.NONE)
        for message in self._socket.receive(self._timeout_s(patience)):
            self._handle(message)
        self._take_read()
        if not self._client_is_alive():
            self._stop()
        if self._held is not None:
            self._outbox += self._held.released()
        counted = None if self._statistics is None else self._statistics()
        if counted is not None:
            self._outbox.append(counted)
        self.flush()
        actions, self._actions = self._actions, []
        return actions

    def begin_step(self, step: int) -> None:
        """Takes the step that what it hears from now on belongs to."""
        self._late.begin_step(step)

    def agreed(self, before_step: int) -> None:
        """Tells the client what was heard in the steps before ``before_step``: all ranks had the same in them."""
        self._outbox += self._late.agreed(before_step)

    def working_at(self, sequence_ids: Iterable[int]) -> None:
        """Notes which requests the ranks work at, and those that are being read."""
        if self._note_work is None:
            return
        streams = (self._streams.get(sequence_id) for sequence_id in sequence_ids)
        self._planned = tuple(stream.request_id for stream in streams if stream is not None)
        self._tell_work()

    def _tell_work(self, *reading: int) -> None:
        work = tuple(dict.fromkeys((*reading, *self._reader.unread, *self._planned)))
        if self._note_work is not None and work != self._work:
            self._work = work
            self._note_work(work)

    def watch_grammars(self, grammars: GrammarWatch) -> None:
        """Takes what tells of the sequences' grammars."""
        self._grammars = grammars

    def grammars_ready(self, sequence_ids: tuple[int, ...]) -> None:
        """Notes that the grammars of these sequences were agreed ready."""
        for sequence_id in sequence_ids:
            if sequence_id in self._streams:
                self._streams[sequence_id].grammar_moved_s = None

    def prompt(self, sequence: Sequence, reports: list[TokenReport]) -> None:
        """Emits what is reported of the next tokens of a sequence's prompt."""
        stream = self._streams.get(sequence.sequence_id)
        # Of a prompt of one token there is nothing to tell, and that is told.
        if stream is None or not (reports or len(sequence.prompt_token_ids) == 1):
            return
        params, is_score = sequence.params, sequence.max_tokens == 0
        has_top, has_named = bool(params.prompt_logprobs), is_score and bool(params.logprob_token_ids)
        infos = [token_info(report, self._text, has_top=has_top, has_named=has_named) for report in reports]
        self._late.add(PromptInfo(stream.request_id, infos, stream.prompt_tokens))
        stream.prompt_tokens += len(infos)

    def token(self, sequence: Sequence, report: TokenReport | None) -> None:
        """Emits what a sequence's newest token adds, and its end if it has come to it."""
        stream = self._streams.get(sequence.sequence_id)
        if stream is None:
            return
        if sequence.finish_reason == "error":
            self._finish(stream, sequence, "error", sequence.error)
            return
        token_id = sequence.output_token_ids[-1]
        stream.token_ids.append(token_id)
        stream.completion_tokens += 1
        if report is not None:
            has_top, has_named = bool(sequence.params.logprobs), bool(sequence.params.logprob_token_ids)
            stream.logprobs.append(token_info(report, self._text, has_top=has_top, has_named=has_named))
        if sequence.finish_reason != "stop":
            stream.add(stream.output.push(token_id))
        if stream.output.stopped is not None:
            self._actions.append(EndSequence(sequence.sequence_id, "stop"))
            self._finish(stream, sequence, "stop", None)
        elif sequence.finish_reason is not None:
            self._finish(stream, sequence, sequence.finish_reason, None)
        else:
            self._late.add(stream.taken())

    def refused(self, sequence: Sequence, message: str) -> None:
        """Ends a sequence whose grammar refused the token that its own mask allowed."""
        stream = self._streams.get(sequence.sequence_id)
        if stream is None:
            return
        error = ErrorInfo("grammar_error", message)
        self._actions.append(EndSequence(sequence.sequence_id, "error", error))
        self._finish(stream, sequence, "error", error)

    def ended(self, sequence: Sequence) -> None:
        """Tells the client of a sequence that an action or a verdict ended."""
        stream = self._streams.get(sequence.sequence_id)
        if stream is not None and sequence.finish_reason is not None:
            self._finish(stream, sequence, sequence.finish_reason, sequence.error)

    def flush(self) -> None:
        """Sends what has gathered for the client."""
        if self._outbox:
            self._socket.send(self._outbox)
            self._outbox = []

    def _timeout_s(self, patience: Patience) -> float:
        if self._actions or patience is Patience.NONE:
            return 0.0
        if patience is Patience.LONG:
            return self._limits.beat_s
        return self._limits.grammar_wait_s if self._has_compiled_one() else self._limits.grammar_beat_s

    def _has_compiled_one(self) -> bool:
        """Whether this rank is ready for a sequence that waits for its grammar: then others may be, any moment."""
        return self._grammars is not None and any(
            stream.grammar_moved_s is not None and self._grammars.is_compiled(sequence_id)
            for sequence_id, stream in self._streams.items()
        )

    def _handle(self, message: ClientMessage) -> None:
        match message:
            case Submit() | Tokenize() | Detokenize():
                self._ask(message)
            case Abort():
                self._abort(message.request_id)
            case Shutdown():
                self._actions += [EndSequence(sequence_id, "abort") for sequence_id in self._streams]
                self._stop()

    def _stop(self) -> None:
        self._reader.close()
        self._actions.append(StopRanks())

    def _ask(self, question: Submit | Tokenize | Detokenize) -> None:
        request_id = question.request_id
        if request_id in self._sequences_of or self._reader.holds(request_id):
            error = ErrorInfo("invalid_request", f"request {request_id} is under way already", "request_id")
            self._outbox.append(Rejected(request_id, error))
            return
        # Reading a text may be what ends this rank.
        self._tell_work(request_id)
        self._reader.put(question)
        self._take_read()
        self._tell_work()

    def _abort(self, request_id: int) -> None:
        if self._reader.holds(request_id):
            self._aborted_unread.add(request_id)
        for sequence_id in self._sequences_of.get(request_id, ()):
            self._actions.append(EndSequence(sequence_id, "abort"))

    def _take_read(self) -> None:
        """Takes what was read: requests become sequences, all else is an answer."""
        for question, answer in self._reader.read():
            if isinstance(question, Submit) and isinstance(answer, Request):
                self._admit(question, answer)
            elif not isinstance(answer, Request):
                self._outbox.append(answer)
            if question.request_id in self._aborted_unread:
                self._aborted_unread.remove(question.request_id)
                self._abort(question.request_id)

    def _admit(self, message: Submit, request: Request) -> None:
        resume = message.resume
        self._outbox.append(Accepted(message.request_id, request.params.n, request.settled))
        first_id = self._next_sequence_id
        for choice in range(request.params.n):
            if resume is None or not resume.choices[choice].is_finished:
                self._add(message, request, choice, first_id)

    def _add(self, message: Submit, request: Request, choice: int, first_id: int) -> None:
        """Adds a choice, behind what the client has of it; it shares the prefill of sequence ``first_id``."""
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        self._sequences_of.setdefault(message.request_id, []).append(sequence_id)
        action = request.sequence(sequence_id, choice, first_id if sequence_id != first_id else None)
        stream = self._stream(message.request_id, request, choice)
        if message.resume is not None:
            token_ids, stream.prompt_tokens = message.resume.choices[choice].token_ids, message.resume.prompt_tokens
            action = msgspec.structs.replace(action, output_token_ids=token_ids, num_scored=stream.prompt_tokens)
            if token_ids:
                # A choice with tokens has had its prompt told of.
                action = msgspec.structs.replace(
                    action,
                    ended=stream.replay(token_ids, Sequence.from_action(action).reason_to_finish(self._eos_token_ids)),
                    num_scored=len(request.prompt_token_ids),
                )
        self._streams[sequence_id] = stream
        self._actions.append(action)

    def _stream(self, request_id: int, request: Request, choice: int) -> OutputStream:
        return OutputStream(
            request_id,
            choice,
            OutputText(
                self._tokenizer, request.prompt_token_ids, request.params.stop, self._thinking(request.thinking)
            ),
            grammar_moved_s=None if request.grammar is None else time.monotonic(),
            is_constrained=request.grammar is not None or request.thinking is not None,
            schema=checked_schema(request.grammar),
        )

    def _expire_grammars(self) -> None:
        """Ends the sequences whose grammars are stuck; one that waits while others are compiled is not."""
        before_s = time.monotonic() - self._limits.grammar_wait_limit_s
        for sequence_id, stream in self._streams.items():
            if stream.grammar_moved_s is None or stream.grammar_moved_s >= before_s:
                continue
            if self._grammars is not None:
                stream.grammar_moved_s = max(stream.grammar_moved_s, self._grammars.moved_s(sequence_id))
            if stream.grammar_moved_s < before_s:
                stream.grammar_moved_s = None
                message = f"the grammar compiler gave no sign of life for {self._limits.grammar_wait_limit_s:g} s"
                self._actions.append(EndSequence(sequence_id, "error", ErrorInfo("timeout", message)))

    def _thinking(self, rules: ThinkingRules | None) -> ThinkingState | None:
        return None if rules is None or self._reasoning is None else ThinkingState(self._reasoning, rules)

    def _text(self, token_id: int) -> str:
        """Returns a token's text by itself; half a character shows as U+FFFD."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _finish(self, stream: OutputStream, sequence: Sequence, reason: FinishReason, error: ErrorInfo | None) -> None:
        stream.add(stream.output.finish())
        if stream.output.stopped is not None and reason == "length":
            reason = "stop"
        if stream.has_news:
            self._late.add(stream.taken())
        prompt, output, thought = (
            len(sequence.prompt_token_ids),
            stream.completion_tokens,
            stream.output.reasoning_tokens,
        )
        details = None if thought is None else CompletionDetails(thought)
        usage = Usage(prompt, output, prompt + output, details)
        statistics = None
        if stream.is_constrained and self._grammars is not None:
            statistics = self._grammars.statistics(sequence.sequence_id)
        finished = Finished(stream.request_id, stream.index, reason, usage, error, statistics)
        is_promised = statistics is None or not statistics.not_enforced
        job = None
        if self._held is not None and stream.schema is not None and is_promised and _is_whole(stream, sequence, reason):
            job = CheckJob(stream.schema, "".join(stream.answer))
        self._late.finish(sequence.sequence_id, finished, job)
        del self._streams[sequence.sequence_id]
        siblings = self._sequences_of[stream.request_id]
        siblings.remove(sequence.sequence_id)
        if not siblings:
            del self._sequences_of[stream.request_id]


def _is_whole(stream: OutputStream, sequence: Sequence, reason: FinishReason) -> bool:
    """Returns whether the grammar ended the output, not a stop string or a stop id of the client's."""
    if reason != "stop" or stream.output.stopped is not None:
        return False
    return sequence.output_token_ids[-1] not in sequence.params.stop_token_ids
