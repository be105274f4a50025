"""/v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from launch.front.engine_output import ChoiceOutput, RequestOutput
from launch.serve.chat_fields import ChatFields, chat_job
from launch.serve.details import chat_logprobs, extras, usage_reply
from launch.serve.fields import as_body, read_object, take
from launch.serve.finish import finish_reason
from launch.serve.generation import stream_response, whole_response
from launch.serve.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from launch.serve.state import ReplyHead, ServerState
from launch.serve.tools import CallParser, CallPart
from runtime.messages import Finished, PromptInfo, RequestMessage, TokenDelta, TokenInfo, Usage


async def answer(state: ServerState, request: Request) -> Response:
    """Answers a request of /v1/chat/completions.

    Raises:
        HttpError: It is wrong, or failed.
    """
    chat, rest = take(await read_object(request), ChatFields)
    state.check_model(chat.model)
    job = chat_job(chat, rest)
    submission = state.submit([as_body(job.fields)], stream=chat.stream)
    assembler = ChatAssembler(state.new_reply("chatcmpl"), chat, calls=job.calls, is_all_or_none=job.is_all_or_none)
    respond = stream_response if chat.stream else whole_response
    return await respond(request, submission, assembler, job.param_names)


class ChatAssembler:
    """Makes the replies of one request.

    Args:
        head: Their head.
        chat: What the request asks for.
        calls: Whether the output may call tools.
        is_all_or_none: Whether an output that begins as calls do is one, and not an answer.
    """

    def __init__(self, head: ReplyHead, chat: ChatFields, *, calls: bool = False, is_all_or_none: bool = False) -> None:
        self._head = head
        self._chat = chat
        self._calls = calls
        self._is_all_or_none = is_all_or_none
        self._parsers: dict[int, CallParser] = {}
        self._begun: set[int] = set()
        self._usages: list[Usage] = []
        self._prompt: list[TokenInfo] | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """Returns the reply, all outputs being done."""
        (output,) = outputs
        choices = []
        for index, choice in enumerate(output.choices):
            message, is_called = self._message(choice)
            found = extras(choice.token_ids if self._chat.return_token_ids else None, choice.finished)
            if not index and output.prompt is not None:
                found["prompt_logprobs"] = output.prompt_logprobs()
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=chat_logprobs(choice.logprobs),
                    finish_reason=finish_reason(choice.finished, has_calls=is_called),
                    **found,
                )
            )
        usages = [choice.finished.usage for choice in output.choices if choice.finished is not None]
        head = self._head
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage_reply([usages]),
            system_fingerprint=head.system_fingerprint,
        )

    def chunks(self, _position: int, message: RequestMessage, /) -> Iterable[msgspec.Struct]:
        """Yields the events of a message; there is one prompt."""
        match message:
            case PromptInfo():
                self._prompt = self._prompt or []
                self._prompt += message.tokens
            case TokenDelta():
                yield from self._delta_chunks(message)
            case Finished():
                yield from self._end_chunks(message)
            case _:
                pass

    def last_chunks(self) -> Iterable[msgspec.Struct]:
        """Yields the tokens used, where the request asks for them."""
        options = self._chat.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], usage=usage_reply([self._usages]))

    def _delta_chunks(self, message: TokenDelta) -> Iterable[msgspec.Struct]:
        yield from self._first_chunk(message.index)
        deltas = [ChatDelta(reasoning_content=message.reasoning)] if message.reasoning else []
        deltas += self._text_deltas(message.index, message.text)
        found = extras(message.token_ids if self._chat.return_token_ids else None, None)
        if self._prompt is not None:
            found["prompt_logprobs"] = [None, *self._prompt]
            self._prompt = None
        logprobs = chat_logprobs(message.logprobs)
        if not deltas and (found or logprobs is not None):
            deltas = [ChatDelta()]
        for delta in deltas:
            yield self._chunk([ChatChunkChoice(index=message.index, delta=delta, logprobs=logprobs, **found)])
            found, logprobs = {}, None

    def _end_chunks(self, message: Finished) -> Iterable[msgspec.Struct]:
        yield from self._first_chunk(message.index)
        parser = self._parsers.get(message.index)
        for part in parser.finish() if parser is not None else ():
            yield self._chunk([ChatChunkChoice(index=message.index, delta=_delta(part))])
        self._usages.append(message.usage)
        reason = finish_reason(message, has_calls=parser is not None and _is_called(parser))
        end = ChatChunkChoice(index=message.index, delta=ChatDelta(), finish_reason=reason, **extras(None, message))
        yield self._chunk([end])

    def _first_chunk(self, index: int) -> Iterable[msgspec.Struct]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))])

    def _text_deltas(self, index: int, text: str) -> list[ChatDelta]:
        if not text:
            return []
        if not self._calls:
            return [ChatDelta(content=text)]
        return [_delta(part) for part in self._parsers.setdefault(index, self._parser()).feed(text)]

    def _message(self, choice: ChoiceOutput) -> tuple[ChatMessage, bool]:
        """Returns a choice's message, and whether it ended for its calls."""
        text, reasoning = "".join(choice.text), "".join(choice.reasoning) or UNSET
        if not self._calls:
            return ChatMessage(content=text, reasoning_content=reasoning), False
        parser = self._parser()
        content = ""
        names: list[str] = []
        arguments: list[str] = []
        for part in (*parser.feed(text), *parser.finish()):
            if part.call is None:
                content += part.text
            elif part.name is not None:
                names.append(part.name)
                arguments.append("")
            else:
                arguments[part.call] += part.text
        calls = [ToolCall(_call_id(), FunctionCall(name, given)) for name, given in zip(names, arguments, strict=True)]
        message = ChatMessage(
            content=content or (None if calls else ""), reasoning_content=reasoning, tool_calls=calls or UNSET
        )
        return message, _is_called(parser)

    def _parser(self) -> CallParser:
        return CallParser(is_all_or_none=self._is_all_or_none)

    def _chunk(self, choices: list[ChatChunkChoice], **fields: Any) -> ChatChunk:
        options = self._chat.stream_options
        if options is not None and options.include_usage:
            fields.setdefault("usage", None)
        head = self._head
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            system_fingerprint=head.system_fingerprint,
            **fields,
        )


def _delta(part: CallPart) -> ChatDelta:
    if part.call is None:
        return ChatDelta(content=part.text)
    if part.name is None:
        return ChatDelta(tool_calls=[ToolCallDelta(index=part.call, function=FunctionDelta(part.text))])
    begin = ToolCallDelta(index=part.call, id=_call_id(), type="function", function=FunctionDelta("", part.name))
    return ChatDelta(tool_calls=[begin])


def _is_called(parser: CallParser) -> bool:
    """Returns whether an output calls functions; one that was cut within a call asks for none to be called yet."""
    return parser.calls > 0 and not parser.is_cut


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
