"""What replies tell beside text: usage, logprobs, and what goes beyond OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from launch.serve.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    CompletionTokensDetails,
    ContentLogprob,
    TopLogprob,
    UsageReply,
)
from runtime.messages import Finished, TokenInfo, TokenLogprob, Usage

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def usage_reply(prompts: Iterable[Sequence[Usage]]) -> UsageReply:
    """Returns the tokens of prompts, each given as the usage of its choices."""
    given = generated = reasoning = 0
    thought = False
    for choices in prompts:
        given += choices[0].prompt_tokens if choices else 0
        for usage in choices:
            generated += usage.completion_tokens
            if usage.completion_tokens_details is not None:
                thought = True
                reasoning += usage.completion_tokens_details.reasoning_tokens
    return UsageReply(
        prompt_tokens=given,
        completion_tokens=generated,
        total_tokens=given + generated,
        completion_tokens_details=CompletionTokensDetails(reasoning) if thought else UNSET,
    )


def extras(token_ids: list[int] | None, finished: Finished | None) -> dict[str, Any]:
    """Returns the fields of ``ChoiceExtras`` that a choice, or a chunk of one, has."""
    found: dict[str, Any] = {}
    if token_ids is not None:
        found["token_ids"] = token_ids
    if finished is not None and finished.grammar is not None:
        found["grammar"] = finished.grammar
    return found


def chat_logprobs(infos: Sequence[TokenInfo]) -> ChatLogprobs | None:
    """Returns the logprobs of a message's tokens; None when nobody asked."""
    if not infos:
        return None
    return ChatLogprobs(
        [
            ContentLogprob(
                token=info.token,
                logprob=0.0 if info.logprob is None else info.logprob,
                bytes=_bytes(info.token),
                top_logprobs=[TopLogprob(one.token, one.logprob, _bytes(one.token)) for one in info.top_logprobs or ()],
                named_logprobs=_named(info),
                support=UNSET if info.support is None else info.support,
            )
            for info in infos
        ]
    )


def completion_logprobs(infos: Sequence[TokenInfo], text_length: int) -> CompletionLogprobs | None:
    """Returns the logprobs of a text's tokens; None when nobody asked.

    Args:
        infos: The tokens.
        text_length: How many characters of the text stand before them.
    """
    if not infos:
        return None
    offsets = []
    for info in infos:
        offsets.append(text_length)
        text_length += len(info.token)
    tops = []
    for info in infos:
        top: dict[str, float] = {}
        for one in info.top_logprobs or ():
            # Two ids may have the same text: the likelier stands for both.
            top.setdefault(one.token, one.logprob)
        tops.append(top)
    return CompletionLogprobs(
        tokens=[info.token for info in infos],
        token_logprobs=[0.0 if info.logprob is None else info.logprob for info in infos],
        top_logprobs=tops,
        text_offset=offsets,
        named_logprobs=[info.named_logprobs or [] for info in infos]
        if any(one.named_logprobs for one in infos)
        else UNSET,
        supports=[info.support for info in infos] if any(one.support is not None for one in infos) else UNSET,
    )


def _named(info: TokenInfo) -> list[TokenLogprob] | UnsetType:
    return info.named_logprobs or UNSET


def _bytes(token: str) -> list[int] | None:
    return None if _REPLACEMENT in token else list(token.encode())
