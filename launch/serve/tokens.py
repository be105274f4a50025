"""/tokenize and /detokenize: the leader's tokenizer, asked over the socket."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from launch.serve.errors import ENGINE_ERRORS, http_error
from launch.serve.fields import read_object, take
from launch.serve.generation import json_response
from launch.serve.replies import DetokenizeReply, TokenizeReply
from launch.serve.state import ServerState
from launch.serve.tools import read_calls


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """What /tokenize takes.

    Args:
        model: The model's name.
        prompt: A text.
        messages: A conversation, in place of it.
        tools: Tools that the chat template is told of.
        add_special_tokens: Whether a text gets BOS and EOS, as a prompt does.
        enable_thinking: As in a request.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    enable_thinking: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """What /detokenize takes.

    Args:
        model: The model's name.
        tokens: The ids.
        skip_special_tokens: Whether special tokens are left out.
    """

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


async def tokenize(state: ServerState, request: Request) -> Response:
    """Answers a request of /tokenize.

    Raises:
        HttpError: It is wrong.
    """
    given, rest = take(await read_object(request), TokenizeFields)
    state.check_model(given.model)
    fields = msgspec.structs.asdict(given) | {"messages": read_calls(given.messages)}
    del fields["model"]
    fields = {name: value for name, value in fields.items() if value is not None} | rest
    try:
        answer = await state.client.tokenize(fields)
    except ENGINE_ERRORS as error:
        raise http_error(error) from error
    return json_response(
        TokenizeReply(
            count=len(answer.token_ids),
            max_model_len=state.client.ready.max_model_len,
            tokens=answer.token_ids,
            token_strs=answer.tokens,
        )
    )


async def detokenize(state: ServerState, request: Request) -> Response:
    """Answers a request of /detokenize.

    Raises:
        HttpError: It is wrong.
    """
    given, rest = take(await read_object(request), DetokenizeFields)
    state.check_model(given.model)
    fields = {"token_ids": given.tokens, "skip_special_tokens": given.skip_special_tokens} | rest
    try:
        answer = await state.client.detokenize(fields)
    except ENGINE_ERRORS as error:
        raise http_error(error, {"token_ids": "tokens"}) from error
    return json_response(DetokenizeReply(answer.text))
