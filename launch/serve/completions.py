"""/v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from launch.front.engine_output import RequestOutput
from launch.serve.details import completion_logprobs, extras, usage_reply
from launch.serve.errors import POSITION, HttpError
from launch.serve.fields import CommonFields, as_body, read_object, refuse_stored, take
from launch.serve.finish import finish_reason
from launch.serve.generation import stream_response, whole_response
from launch.serve.replies import Completion, CompletionChoice
from launch.serve.state import ReplyHead, ServerState
from runtime.messages import Finished, PromptInfo, RequestMessage, TokenDelta, TokenInfo, Usage


class CompletionFields(CommonFields, frozen=True, kw_only=True):
    """What /v1/completions takes beside the engine's own fields.

    Args:
        prompt: A text, token ids, or a list of either.
        echo: Only false is taken.
        best_of: Only what ``n`` is, is taken.
        suffix: Not taken.
    """

    prompt: str | list[Any] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


async def answer(state: ServerState, request: Request) -> Response:
    """Answers a request of /v1/completions.

    Raises:
        HttpError: It is wrong, or failed.
    """
    common, rest = take(await read_object(request), CompletionFields)
    state.check_model(common.model)
    refuse_stored(common)
    _refuse_foreign(common, rest)
    bodies = [as_body(rest | prompt) for prompt in prompt_fields(common.prompt)]
    submission = state.submit(bodies, stream=common.stream)
    n = rest.get("n")
    assembler = CompletionAssembler(state.new_reply("cmpl"), common, n if type(n) is int else 1)
    respond = stream_response if common.stream else whole_response
    return await respond(request, submission, assembler, prompt_names(common.prompt))


class CompletionAssembler:
    """Makes the replies of one request.

    Args:
        head: Their head.
        common: What the request asks for.
        n: Choices of each prompt.
    """

    def __init__(self, head: ReplyHead, common: CompletionFields, n: int) -> None:
        self._head = head
        self._common = common
        self._n = n
        self._usages: dict[int, list[Usage]] = {}
        self._lengths: dict[int, int] = {}
        self._prompts: dict[int, list[TokenInfo]] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """Returns the reply, all outputs being done."""
        choices = []
        usages: list[list[Usage]] = []
        for position, output in enumerate(outputs):
            usages.append([choice.finished.usage for choice in output.choices if choice.finished is not None])
            for index, choice in enumerate(output.choices):
                found = extras(choice.token_ids if self._common.return_token_ids else None, choice.finished)
                if not index and output.prompt is not None:
                    found["prompt_logprobs"] = output.prompt_logprobs()
                choices.append(
                    CompletionChoice(
                        index=position * self._n + index,
                        text="".join(choice.text),
                        logprobs=completion_logprobs(choice.logprobs, 0),
                        finish_reason=finish_reason(choice.finished),
                        reasoning_content="".join(choice.reasoning) or UNSET,
                        **found,
                    )
                )
        return self._reply(choices, usage=usage_reply(usages))

    def chunks(self, position: int, message: RequestMessage, /) -> Iterable[msgspec.Struct]:
        """Yields the events of a message of the prompt at ``position``."""
        match message:
            case PromptInfo():
                self._prompts.setdefault(position, []).extend(message.tokens)
            case TokenDelta():
                index = position * self._n + message.index
                length = self._lengths.get(index, 0)
                self._lengths[index] = length + sum(len(info.token) for info in message.logprobs)
                found = extras(message.token_ids if self._common.return_token_ids else None, None)
                if (prompt := self._prompts.pop(position, None)) is not None:
                    found["prompt_logprobs"] = [None, *prompt]
                choice = CompletionChoice(
                    index=index,
                    text=message.text,
                    logprobs=completion_logprobs(message.logprobs, length),
                    finish_reason=None,
                    reasoning_content=message.reasoning or UNSET,
                    **found,
                )
                if message.text or message.reasoning or message.logprobs or found:
                    yield self._reply([choice])
            case Finished():
                self._usages.setdefault(position, []).append(message.usage)
                yield self._reply(
                    [
                        CompletionChoice(
                            index=position * self._n + message.index,
                            text="",
                            logprobs=None,
                            finish_reason=finish_reason(message),
                            **extras(None, message),
                        )
                    ]
                )
            case _:
                pass

    def last_chunks(self) -> Iterable[msgspec.Struct]:
        """Yields the tokens used, where the request asks for them."""
        options = self._common.stream_options
        if options is not None and options.include_usage:
            yield self._reply([], usage=usage_reply(self._usages.values()))

    def _reply(self, choices: list[CompletionChoice], **fields: Any) -> Completion:
        options = self._common.stream_options
        if options is not None and options.include_usage:
            fields.setdefault("usage", None)
        head = self._head
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            system_fingerprint=head.system_fingerprint,
            **fields,
        )


def prompt_fields(prompt: str | list[Any] | None) -> list[dict[str, Any]]:
    """Returns the fields of each prompt, as the engine calls them; what a list holds is the leader's to judge.

    Raises:
        HttpError: The list is empty.
    """
    if prompt is None:
        return [{}]
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not prompt:
        raise HttpError(400, "prompt is an empty list: at least one prompt is needed", param="prompt")
    if all(type(item) is int for item in prompt):
        return [{"prompt_token_ids": prompt}]
    return [{"prompt_token_ids" if isinstance(item, list) else "prompt": item} for item in prompt]


def prompt_names(prompt: str | list[Any] | None) -> dict[str, str]:
    """Returns what a client calls the engine's fields of a prompt."""
    is_list = isinstance(prompt, list) and not all(type(item) is int for item in prompt)
    return dict.fromkeys(("prompt", "prompt_token_ids"), f"prompt[{POSITION}]" if is_list else "prompt")


def _refuse_foreign(common: CompletionFields, rest: dict[str, Any]) -> None:
    if common.echo:
        message = "echo is true: prompts are not repeated; prompt_logprobs and /v1/score tell of their tokens"
        raise HttpError(400, message, param="echo")
    if common.suffix:
        raise HttpError(400, "suffix is given: text is only generated at the end", param="suffix")
    n = 1 if rest.get("n") is None else rest["n"]
    if common.best_of is not None and common.best_of != n:
        raise HttpError(400, f"best_of is {common.best_of}: only n, {n}, is taken", param="best_of")
