"""/v1/score: the logprob of every token of given texts; nothing is generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from launch.front.engine_output import RequestOutput
from launch.serve.completions import prompt_fields, prompt_names
from launch.serve.details import usage_reply
from launch.serve.errors import HttpError
from launch.serve.fields import as_body, read_object, take
from launch.serve.generation import whole_response
from launch.serve.replies import ScoreEntry, ScoreReply
from launch.serve.state import ReplyHead, ServerState
from launch.serve.tools import read_calls
from runtime.messages import RequestMessage

REFUSED: Final = ("max_tokens", "stop", "seed", "top_p", "min_p", "filter_order")
"""Fields of how a token is drawn and when an output ends: where nothing is generated they say nothing."""


class ScoreFields(msgspec.Struct, frozen=True, kw_only=True):
    """What /v1/score takes beside the engine's own fields.

    Args:
        model: The model's name.
        prompt: A text, token ids, or a list of either.
        messages: A conversation, in place of a prompt.
    """

    model: str | None = None
    prompt: str | list[Any] | None = None
    messages: Any = None


async def answer(state: ServerState, request: Request) -> Response:
    """Answers a request of /v1/score.

    Raises:
        HttpError: It is wrong, or failed.
    """
    score, rest = take(await read_object(request), ScoreFields)
    state.check_model(score.model)
    for name in REFUSED:
        if rest.get(name) is not None:
            raise HttpError(400, f"{name} is given, but a score generates nothing", param=name)
    if score.messages is not None:
        rest["messages"] = read_calls(score.messages)
    bodies = [as_body(rest | prompt) for prompt in prompt_fields(score.prompt)]
    submission, names = state.submit(bodies, score=True), prompt_names(score.prompt)
    return await whole_response(request, submission, ScoreAssembler(state.new_reply("score")), names)


class ScoreAssembler:
    """Makes the reply of one request.

    Args:
        head: Its head.
    """

    def __init__(self, head: ReplyHead) -> None:
        self._head = head

    def whole(self, outputs: Sequence[RequestOutput]) -> ScoreReply:
        """Returns the reply, all outputs being done."""
        usages = [
            [choice.finished.usage for choice in output.choices if choice.finished is not None] for output in outputs
        ]
        data = [
            ScoreEntry(index=index, prompt_logprobs=output.prompt_logprobs() or [None], usage=usage_reply([usage]))
            for index, (output, usage) in enumerate(zip(outputs, usages, strict=True))
        ]
        head = self._head
        return ScoreReply(id=head.id, created=head.created, model=head.model, data=data, usage=usage_reply(usages))

    def chunks(self, _position: int, _message: RequestMessage, /) -> Iterable[msgspec.Struct]:
        """Returns nothing: a score is no stream."""
        return ()

    def last_chunks(self) -> Iterable[msgspec.Struct]:
        """Returns nothing."""
        return ()
