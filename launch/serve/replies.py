"""What the server answers, as types: they are encoded as they stand, and are the schemas of the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from grammar_sync.statistics import GrammarStatistics
from launch.node.rank_fault import FaultReport
from runtime.messages import SupportInfo, TokenInfo, TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What output tokens were for."""

    reasoning_tokens: int


class UsageReply(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request: each prompt once, all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ChoiceExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice tells beyond OpenAI's form, where it was asked for or there is something to tell.

    Args:
        token_ids: Its tokens.
        prompt_logprobs: What was asked about the prompt's tokens, None for the first.
        grammar: What its grammar cost, and what of it was not enforced.
    """

    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[TokenInfo | None] | UnsetType = UNSET
    grammar: GrammarStatistics | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have come, and its logprob; ``bytes`` is None where they are no whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a message, its logprob, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]
    named_logprobs: list[TokenLogprob] | UnsetType = UNSET
    support: SupportInfo | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The logprobs of a message's tokens."""

    content: list[ContentLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A function and the JSON text of its arguments."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(ChoiceExtras, frozen=True, kw_only=True):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a chat request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    system_fingerprint: str


class FunctionDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a call."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A call's beginning, with id and name, or more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(ChoiceExtras, frozen=True, kw_only=True):
    """What a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | UnsetType | None = UNSET
    system_fingerprint: str


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The logprobs of a text's tokens, column by column."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    named_logprobs: list[list[TokenLogprob]] | UnsetType = UNSET
    supports: list[SupportInfo | None] | UnsetType = UNSET


class CompletionChoice(ChoiceExtras, frozen=True, kw_only=True):
    """One choice of a completion, whole or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    reasoning_content: str | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a completion request, or one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | UnsetType | None = UNSET
    system_fingerprint: str


class ScoreEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The logprobs of one scored text; the first is None, since nothing comes before it."""

    index: int
    prompt_logprobs: list[TokenInfo | None]
    usage: UsageReply


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a score request."""

    id: str
    object: Literal["score"] = "score"
    created: int
    model: str
    data: list[ScoreEntry]
    usage: UsageReply


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's ids, and the text of each."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str]


class DetokenizeReply(msgspec.Struct, frozen=True):
    """The text of ids."""

    prompt: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model, and what this server can do with it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lockstep"
    max_model_len: int
    capabilities: dict[str, Any]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The models there are: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class RankReply(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is.

    Args:
        rank: Global rank.
        stage: Its pipeline stage.
        tp_rank: Its rank within the stage.
        step: The step it said it was in.
        digest: Of all that it had planned and committed before that step; equal on ranks that are in the same step.
        step_age_s: How long ago it began that step.
        heartbeat_age_s: How long ago it said so.
        busy_steps: Its steps that ran something.
        last_step_s: The seconds of the last one that had rows.
        mean_step_s: The mean seconds of all of them.
        wait_share: The share of these spent waiting for other ranks.
        skew_s: How much later to a step's collectives it comes than the first rank of its stage.
        resident_bytes: Memory that the process has.
    """

    rank: int
    stage: int
    tp_rank: int
    step: int
    digest: str
    step_age_s: float
    heartbeat_age_s: float
    busy_steps: int
    last_step_s: float
    mean_step_s: float
    wait_share: float
    skew_s: float
    resident_bytes: int


class RanksReply(msgspec.Struct, frozen=True, kw_only=True):
    """Every rank that was heard of, in order; none in the first second.

    Args:
        epoch: How often all ranks were started anew.
        faults: Why: the latest reports, the newest last.
    """

    object: Literal["list"] = "list"
    tp_size: int
    pp_size: int
    epoch: int
    data: list[RankReply]
    faults: list[FaultReport]


class HealthReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether every rank answers; ``silent_s`` is how long ago the last of them did, or began the step it is in.

    ``recovering``: ranks were lost and others are starting; requests are taken, and wait.
    """

    status: Literal["ok", "silent", "recovering", "failed"]
    silent_s: float
    open_requests: int
    message: str | UnsetType = UNSET
