"""A request's prompt: text, ids or messages, to token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from grammar_sync.thinking import ReasoningMarkers
from runtime.chat_template import ChatTemplateError
from runtime.messages import RenderedPrompt
from runtime.request_error import RequestError
from runtime.request_limits import RequestLimits
from runtime.thinking_fields import ThinkingFields, is_open
from runtime.tokenizer import Tokenizer
from runtime.tool_prompt import messages_for_plain_template, speaks_of_tools
from sampler.shown_value import kind_of, shown

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
"""The request fields of which exactly one is given."""


_CHARS_OF_A_TOKEN = 128
"""A text with more for each token of the context is refused unread: it would not fit, and reading it takes seconds."""


class Prompt(NamedTuple):
    """A prompt's ids, the field they came from, and whether it ends inside a think block."""

    token_ids: list[int]
    name: str
    is_thinking: bool

    @property
    def rendered(self) -> RenderedPrompt | None:
        """What may read otherwise when it is made once more; None when nothing may."""
        return RenderedPrompt(self.token_ids, self.is_thinking) if self.name == "messages" else None


class PromptReader:
    """Turns the fields of a prompt into ids.

    Args:
        tokenizer: The model's.
        limits: What a request may ask for at most.
        markers: The markers around the model's thinking; None when it has none.
    """

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits, markers: ReasoningMarkers | None) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._markers = markers

    def read(self, fields: Mapping[str, Any], asked: ThinkingFields, rendered: RenderedPrompt | None = None) -> Prompt:
        """Returns the prompt of a request; other fields than those of a prompt are not looked at.

        Args:
            fields: The request's fields.
            asked: What it says of thinking.
            rendered: What its messages were made before, which they then stay.

        Raises:
            RequestError: There is none or more than one, it is malformed, or it leaves no room in the context.
        """
        if rendered is not None:
            return Prompt(rendered.token_ids, "messages", rendered.is_thinking)
        name, ids, end = self._given(fields, asked, add_special_tokens=True)
        if len(ids) >= self._limits.max_model_len:
            raise RequestError(
                f"{name} has {len(ids)} tokens: the context of {self._limits.max_model_len} tokens "
                f"leaves room for at most {self._limits.max_model_len - 1}",
                name,
            )
        return Prompt(ids, name, self._markers is not None and is_open(end, self._markers))

    def tokenize(self, fields: Mapping[str, Any]) -> list[int]:
        """Returns the ids of a prompt; ``add_special_tokens`` says whether a text gets BOS and EOS.

        They may be more than the context has room for.

        Raises:
            RequestError: A field is unknown or malformed, or the text by far too long for the context.
        """
        _check_known(fields, (*PROMPT_FIELDS, "tools", "add_special_tokens", "enable_thinking"))
        special = _flag(fields, "add_special_tokens", default=True)
        enable = None if fields.get("enable_thinking") is None else _flag(fields, "enable_thinking", default=False)
        return self._given(fields, ThinkingFields(enable), add_special_tokens=special)[1]

    def detokenize(self, fields: Mapping[str, Any]) -> str:
        """Returns the text of ``token_ids``, special tokens in it unless ``skip_special_tokens``.

        Raises:
            RequestError: A field is unknown or malformed.
        """
        _check_known(fields, ("token_ids", "skip_special_tokens"))
        ids = self._checked_ids("token_ids", fields.get("token_ids"))
        skip = _flag(fields, "skip_special_tokens", default=False)
        return self._tokenizer.decode(ids, skip_special_tokens=skip)

    def _given(
        self, fields: Mapping[str, Any], asked: ThinkingFields, *, add_special_tokens: bool
    ) -> tuple[str, list[int], str]:
        """Returns the field given, its ids, and the text at its end that says whether it is thinking."""
        given = [name for name in PROMPT_FIELDS if fields.get(name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"exactly one of {', '.join(PROMPT_FIELDS)} is needed, got {', '.join(given) or 'none'}",
                given[1] if given else "prompt",
            )
        name, value, tools = given[0], fields[given[0]], fields.get("tools")
        if tools is not None and name != "messages":
            raise RequestError(f"tools are given with {name}: they go with messages only", "tools")
        if name == "prompt_token_ids":
            ids = self._checked_ids(name, value)
            end = "" if self._markers is None else self._tokenizer.decode(ids, skip_special_tokens=False)
        elif name == "messages":
            text, end = self._rendered(value, tools, asked)
            ids = self._encode_text(name, text, add_special_tokens=False)
        elif isinstance(value, str):
            ids, end = self._encode_text(name, value, add_special_tokens=add_special_tokens), value
        else:
            raise RequestError(f"prompt is {kind_of(value)}: a string is needed", name)
        if not ids:
            raise RequestError(f"{name} has no tokens: at least one is needed", name)
        return name, ids, end

    def _rendered(self, messages: Any, tools: Any, asked: ThinkingFields) -> tuple[str, str]:
        """Returns the messages as a prompt, and what the template put behind them to have them answered.

        What a message says of markers does not count.
        """
        if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
            raise RequestError(f"tools is {shown(tools)}: a list of objects is needed", "tools")
        if speaks_of_tools(messages, tools) and not self._tokenizer.template_mentions("tools"):
            messages, tools = messages_for_plain_template(messages, tools), None
        # Templates call the switch by either name.
        switch = {} if asked.enable is None else {"enable_thinking": asked.enable, "thinking": asked.enable}
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, variables=switch)
            if self._markers is None:
                return text, ""
            bare = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=False, variables=switch
            )
        except ChatTemplateError as error:
            raise RequestError(str(error), "messages") from error
        return text, text.removeprefix(bare)

    def _encode_text(self, name: str, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{name} holds a lone surrogate at character {error.start}: not text", name) from error
        most = _CHARS_OF_A_TOKEN * self._limits.max_model_len
        if len(text) > most:
            raise RequestError(
                f"{name} has {len(text)} characters: at most {most} are read with a context of "
                f"{self._limits.max_model_len} tokens",
                name,
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _checked_ids(self, name: str, value: Any) -> list[int]:
        vocab_size = self._limits.vocab_size
        if not isinstance(value, list):
            raise RequestError(f"{name} is {kind_of(value)}: a list of ids is needed", name)
        for position, token_id in enumerate(value):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name}[{position}] is {shown(token_id)}: an integer in 0..{vocab_size - 1} is needed", name
                )
        return value


def _check_known(fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown field {name[:80]}: the fields are {', '.join(known)}", name)


def _flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}: true or false is needed", name)
    return value
