"""What travels between a client and the leader, and from the leader to all ranks.

Clients and leader exchange ``ClientMessage`` and ``EngineMessage`` values as msgpack over ZMQ. The leader turns them
into ``Action`` values, the only input besides verdicts and token ids that the replicated scheduler has: every rank
applies the same actions in the same order in the same step.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from grammar_sync.spec import GrammarSpec
from grammar_sync.statistics import GrammarStatistics
from grammar_sync.thinking import ThinkingRules
from runtime.engine_statistics import EngineStatistics
from sampler.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a request or a choice failed.

    Args:
        code: ``invalid_request``, ``grammar_error``, ``grammar_violation``, ``sampling_error``, ``timeout``,
            ``quarantined`` (ranks failed each time that it ran) or ``internal_error``.
        message: One line for a person.
        param: The field at fault, if one is.
    """

    code: str
    message: str
    param: str | None = None


class CompletionDetails(msgspec.Struct, frozen=True):
    """What the tokens of an output were for.

    Args:
        reasoning_tokens: Tokens before the answer, markers among them.
    """

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of one choice; ``completion_tokens_details`` for one that thought."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | None = None


class RenderedPrompt(msgspec.Struct, frozen=True):
    """Messages as a chat template made them a prompt; made anew it may read otherwise: a template can ask for the date.

    Args:
        token_ids: The prompt.
        is_thinking: Whether it ends inside a think block.
    """

    token_ids: list[int]
    is_thinking: bool


class Settled(msgspec.Struct, frozen=True):
    """What was settled when a request was accepted, beyond what its fields say: it stays so when it is resumed.

    Args:
        seed: The client's, or minted.
        prompt_tokens: How many tokens the prompt has.
        max_tokens: How many a choice has at most.
        rendered: Its messages as a prompt; None where the prompt follows from the fields alone.
    """

    seed: int
    prompt_tokens: int
    max_tokens: int
    rendered: RenderedPrompt | None = None


class ChoiceProgress(msgspec.Struct, frozen=True):
    """How far a choice came.

    Args:
        token_ids: What the client took of it; the text that goes with these was taken too.
        is_finished: Whether the client knows its end.
    """

    token_ids: list[int]
    is_finished: bool = False


class Resume(msgspec.Struct, frozen=True):
    """How far a request came on ranks that are gone; new ones go on from there.

    Args:
        settled: As ``Accepted`` told it.
        choices: How far each choice came.
        prompt_tokens: Of how many prompt tokens, from the second on, the client was told.
    """

    settled: Settled
    choices: list[ChoiceProgress]
    prompt_tokens: int = 0


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Client → leader: a request as its user wrote it; the leader validates it.

    Args:
        request_id: The client's number for it, not used twice for the same leader.
        body: A JSON object as text, since msgpack has no integers beyond 64 bits and the leader is to name those too.
        score: Whether to generate nothing and report the logprobs of the given tokens.
        resume: How far it came with a leader before; None for a request that none accepted.
    """

    request_id: int
    body: str
    score: bool = False
    resume: Resume | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Client → leader: end every choice of a request; an unknown or finished id is ignored."""

    request_id: int


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Client → leader: tell the ids of a prompt.

    Args:
        request_id: As in ``Submit``.
        body: A JSON object as text: ``prompt`` or ``messages`` as in a request, ``add_special_tokens``.
    """

    request_id: int
    body: str


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    """Client → leader: tell the text of ids.

    Args:
        request_id: As in ``Submit``.
        body: A JSON object as text: ``token_ids``, ``skip_special_tokens``.
    """

    request_id: int
    body: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Client → leader: end all requests and all ranks."""


class InvariantFacts(msgspec.Struct, frozen=True):
    """How a run in invariant mode computes: two runs of a model with equal facts give the same bits.

    Args:
        kernel: Whose float32 products: ``onednn``, or ``torch`` as it comes.
        tile_rows: Rows of the tile that defines a product.
        attention_units: Units of the sum after attention.
        mlp_units: Units of the sum after the MLP.
        vocabulary_blocks: Blocks of the log-sum-exp.
        key_block: Keys of a block of attention.
        processor: Vector instructions of the CPU, or name of the GPU.
        torch: Version.
    """

    kernel: str
    tile_rows: int
    attention_units: int
    mlp_units: int
    vocabulary_blocks: int
    key_block: int
    processor: str
    torch: str


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Leader → client: every rank is warm.

    Args:
        tp_size: Ranks of a stage.
        pp_size: Stages.
        dtype: The model's dtype.
        device: ``cpu`` or ``cuda``.
        max_model_len: Longest prompt and output together, in tokens.
        compute: Half a line on how products are computed, and why; empty when there was no choice.
        invariant: How a run in invariant mode computes; None when the mode is off.
        epoch: How often the ranks were started anew before.
    """

    tp_size: int
    pp_size: int
    dtype: str
    device: str
    max_model_len: int
    compute: str = ""
    invariant: InvariantFacts | None = None
    epoch: int = 0


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    """Leader → client: what ``Tokenize`` asked for; ``tokens`` has the text of each id."""

    request_id: int
    token_ids: list[int]
    tokens: list[str]


class Detokenized(msgspec.Struct, frozen=True, tag="detokenized"):
    """Leader → client: what ``Detokenize`` asked for."""

    request_id: int
    text: str


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Leader → client: a request passed validation and has ``choices`` choices, each of which will finish."""

    request_id: int
    choices: int
    settled: Settled


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Leader → client: a request failed validation; no rank saw it."""

    request_id: int
    error: ErrorInfo


class TokenLogprob(msgspec.Struct, frozen=True):
    """An id, the text it stands for, and its logprob; −9999.0 stands for everything smaller."""

    token_id: int
    token: str
    logprob: float


class SupportInfo(msgspec.Struct, frozen=True):
    """What could have been drawn: every id and its logprob, renormalised; ``OVERFLOW`` when there are too many."""

    status: str
    token_ids: list[int]
    logprobs: list[float]


class TokenInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request asked to know about one of its tokens.

    Args:
        token_id: The token.
        token: The text it stands for.
        logprob: Its logprob; None when none can be told.
        top_logprobs: The most likely ids, best first; None when they were not asked for.
        named_logprobs: The ids of ``logprob_token_ids``; None when there are none.
        support: What could have been drawn; None when that was not asked for.
    """

    token_id: int
    token: str
    logprob: float | None
    top_logprobs: list[TokenLogprob] | None = None
    named_logprobs: list[TokenLogprob] | None = None
    support: SupportInfo | None = None


class PromptInfo(msgspec.Struct, frozen=True, tag="prompt"):
    """Leader → client: what was asked about prompt tokens, from the second on and in order, in one or several parts.

    A prompt of one token has one part without tokens. ``start`` is how many tokens were told before.
    """

    request_id: int
    tokens: list[TokenInfo]
    start: int = 0


class TokenDelta(msgspec.Struct, frozen=True, tag="delta"):
    """Leader → client: what a step added to a choice; the texts may lag behind ``token_ids``.

    ``reasoning`` is what was thought before the answer, ``text`` the answer. ``start`` is how many tokens came before.
    """

    request_id: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenInfo] = []
    reasoning: str = ""
    start: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Leader → client: a choice ended; ``grammar`` is what its grammar cost, if it has one."""

    request_id: int
    index: int
    finish_reason: FinishReason
    usage: Usage
    error: ErrorInfo | None = None
    grammar: GrammarStatistics | None = None


ClientMessage = Submit | Abort | Tokenize | Detokenize | Shutdown
RequestMessage = Accepted | Rejected | PromptInfo | TokenDelta | Finished | Tokenized | Detokenized
EngineMessage = EngineReady | EngineStatistics | RequestMessage


class AddSequence(msgspec.Struct, frozen=True, tag="add"):
    """Leader → ranks: a choice to generate.

    Args:
        sequence_id: Minted by the leader, never used twice.
        choice: Which of the request's ``n`` choices this is.
        prompt_token_ids: The prompt, at least one id.
        max_tokens: How many tokens to generate at most, resolved against the context; 0 = only score the prompt.
        params: The request's sampling parameters.
        seed: The request's seed, minted when the client gave none.
        grammar: What the output must match, if anything.
        thinking: How the output thinks before that, if it does.
        prefill_of: The sequence of the same request whose prefill this one shares, if it is still there.
        bad_words_token_ids: ``params.bad_words`` as token ids.
        forced_output_tokens: How many of the last prompt ids a score takes as generated.
        priority: The lower, the sooner.
        cache_salt: Only requests with the same salt share KV blocks.
        output_token_ids: What was generated on ranks that are gone: it goes on behind these.
        ended: Why these end it, so that nothing is generated; None when they do not.
        num_scored: How many of the prompt's tokens were run there for the logprobs of those that follow them.
    """

    sequence_id: int
    choice: int
    prompt_token_ids: list[int]
    max_tokens: int
    params: SamplingParams
    seed: int
    grammar: GrammarSpec | None = None
    thinking: ThinkingRules | None = None
    prefill_of: int | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    forced_output_tokens: int = 0
    priority: int = 0
    cache_salt: str = ""
    output_token_ids: list[int] = []
    ended: FinishReason | None = None
    num_scored: int = 0


class EndSequence(msgspec.Struct, frozen=True, tag="end"):
    """Leader → ranks: a sequence ends for a reason the replicas cannot see: abort, stop string, time-out, refusal."""

    sequence_id: int
    finish_reason: FinishReason
    error: ErrorInfo | None = None


class StopRanks(msgspec.Struct, frozen=True, tag="stop"):
    """Leader → ranks: leave the step loop."""


Action = AddSequence | EndSequence | StopRanks
