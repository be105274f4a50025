"""A sequence: one choice of one request, as every rank knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from grammar_sync.spec import GrammarSpec
from grammar_sync.thinking import ThinkingRules
from runtime.messages import AddSequence, ErrorInfo, FinishReason
from runtime.speculation import PromptLookup
from sampler.params import SamplingParams


class SequenceState(Enum):
    """Where a sequence stands; it moves downwards in this list, and back to ``WAITING`` when it is preempted."""

    WAITING_FOR_GRAMMAR = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Sequence:
    """The replicated state of a sequence: equal on all ranks after the same step.

    Args:
        sequence_id: Minted by the leader, increasing in arrival order.
        choice: Which of its request's choices it is.
        prompt_token_ids: The prompt.
        max_tokens: How many tokens it generates at most.
        params: Its sampling parameters.
        seed: Its request's seed.
        grammar: What its output must match, if anything.
        thinking: How it thinks before, if it does.
        prefill_of: The sequence whose prefill it shares, if it is still there.
        bad_words_token_ids: Token sequences that its output must not hold.
        forced_output_tokens: How many of the last prompt ids a score takes as generated.
        state: Where it stands.
        priority: The lower, the sooner; of equals the one that came first.
        cache_salt: Only requests with the same salt share KV blocks.
        output_token_ids: What was committed so far.
        num_computed: How many of its tokens have their KV entries computed or in flight.
        num_scored: How many of its prompt's tokens were run for the logprobs of those that follow them.
        block_keys: What its full KV blocks are known by, as far as they were asked for.
        last_step: The step that it last had a row in.
        preemptions: How often its KV blocks were taken from it.
        prompt_step: The step that computed the last of its prompt; None before.
        in_flight: Whether a step that holds a row of it is not committed yet.
        lookup: Guesses its next tokens; None before it was first asked.
        ended: Why the output that it came with ends it; None when it does not.
        finish_reason: Why it ended; None before.
        error: What went wrong, if something did.
    """

    sequence_id: int
    choice: int
    prompt_token_ids: list[int]
    max_tokens: int
    params: SamplingParams
    seed: int
    grammar: GrammarSpec | None
    thinking: ThinkingRules | None
    prefill_of: int | None
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    forced_output_tokens: int
    state: SequenceState
    priority: int = 0
    cache_salt: str = ""
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scored: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    last_step: int = 0
    preemptions: int = 0
    prompt_step: int | None = None
    in_flight: bool = False
    lookup: PromptLookup | None = None
    ended: FinishReason | None = None
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None

    @classmethod
    def from_action(cls, action: AddSequence) -> Sequence:
        """Returns a new sequence, behind the output it comes with; one with a grammar waits until that is ready."""
        return cls(
            sequence_id=action.sequence_id,
            choice=action.choice,
            prompt_token_ids=action.prompt_token_ids,
            max_tokens=action.max_tokens,
            params=action.params,
            seed=action.seed,
            grammar=action.grammar,
            thinking=action.thinking,
            prefill_of=action.prefill_of,
            bad_words_token_ids=action.bad_words_token_ids,
            forced_output_tokens=action.forced_output_tokens,
            state=SequenceState.WAITING if action.grammar is None else SequenceState.WAITING_FOR_GRAMMAR,
            priority=action.priority,
            cache_salt=action.cache_salt,
            output_token_ids=list(action.output_token_ids),
            num_scored=action.num_scored,
            ended=action.ended,
        )

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the order of service: by priority, then by arrival."""
        return self.priority, self.sequence_id

    @property
    def num_tokens(self) -> int:
        """How many tokens it has, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_constrained(self) -> bool:
        """Whether every token that it draws needs a mask."""
        return self.grammar is not None or self.thinking is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt's logprobs are reported; of several choices the first one's are."""
        return self.params.prompt_logprobs is not None and self.choice == 0

    @property
    def capacity_tokens(self) -> int:
        """How many KV entries it may need."""
        return len(self.prompt_token_ids) + self.max_tokens

    def token_ids(self, start: int, length: int) -> list[int]:
        """Returns the ids at positions ``start`` to ``start + length`` (excluded)."""
        prompt_length = len(self.prompt_token_ids)
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : start - prompt_length + length]
        head = self.prompt_token_ids[start : start + length]
        return head + self.output_token_ids[: length - len(head)]

    def preempt(self) -> None:
        """Makes a running sequence that is not in flight wait again; all but its KV entries is kept."""
        self.state = SequenceState.WAITING
        self.num_computed = 0
        self.prompt_step = None
        self.preemptions += 1

    def finish(self, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Ends the sequence."""
        self.state = SequenceState.FINISHED
        self.finish_reason = reason
        self.error = error

    def reason_to_finish(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Returns why the sequence ends with its last token, or None; a function of replicated state alone."""
        if self.is_stop(self.output_token_ids[-1], eos_token_ids):
            return "stop"
        return "length" if len(self.output_token_ids) >= self.max_tokens else None

    def is_stop(self, token_id: int, eos_token_ids: frozenset[int]) -> bool:
        """Returns whether a token ends the sequence.

        A grammar allows an end-of-sequence id only where its output is complete, so such an id ends a constrained
        sequence whatever ``ignore_eos`` says. ``ignore_eos`` leaves the user's own stop ids in force.
        """
        if token_id in self.params.stop_token_ids:
            return True
        return token_id in eos_token_ids and (self.grammar is not None or not self.params.ignore_eos)
