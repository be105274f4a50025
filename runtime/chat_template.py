"""Chat templates: messages to one prompt text, in the environment that model authors write their templates for.

Templates come with a model and see nothing but plain data, in a sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sampler.shown_value import shown

# What the expressions of a template may raise when a message has not the shape that the template expects.
_RENDER_ERRORS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplateError(ValueError):
    """The messages cannot be turned into a prompt; the message says which one and why."""


class ChatTemplate:
    """The compiled templates of one model.

    Args:
        sources: Template texts by name: ``default``, and ``tool_use`` where the model has one for requests with tools.
        variables: What every template sees besides the messages: ``bos_token``, ``eos_token``, ...

    Raises:
        ChatTemplateError: A text is not a template.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        environment = _environment()
        self._default_source = sources.get("default", "")
        self._variables = dict(variables)
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateError as error:
                raise ChatTemplateError(f"chat template {name!r} cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt text for ``messages``; the template sees ``variables`` beside the model's own.

        Keys whose value is None are left out of a message. Content given as a list of text parts becomes one string,
        the parts joined by newlines: most templates take nothing else.

        Raises:
            ChatTemplateError: There is no template, the messages have a wrong shape, or the template refused them.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            have = f"only {', '.join(sorted(self._templates))}" if self._templates else "none"
            raise ChatTemplateError(f"messages: the model has no default chat template ({have}); send a prompt instead")
        plain_messages = _checked_messages(messages)
        plain_tools = _checked_tools(tools)
        try:
            return self._templates[name].render(
                self._variables,
                **(variables or {}),
                messages=plain_messages,
                tools=plain_tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except _RENDER_ERRORS as error:
            raise ChatTemplateError(f"messages: the chat template refused them: {error}") from error

    def mentions(self, text: str) -> bool:
        """Returns whether ``text`` stands in the default template."""
        return text in self._default_source


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise ChatTemplateError("messages must be a list of at least one message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object with role and content, got {type(message).__name__}")
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where}.role must be a non-empty string, got {shown(role)}")
    if "content" in plain:
        plain["content"] = _checked_content(plain["content"], f"{where}.content")
    elif not plain.get("tool_calls"):
        raise ChatTemplateError(f"{where}.content is missing: only a message with tool_calls may leave it out")
    return plain


def _checked_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(f"{where} must be a string or a list of text parts, got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ChatTemplateError(f"{where}[{index}] must be a part of type 'text', got {shown(kind)}")
        if not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{where}[{index}].text must be a string, got {shown(part.get('text'))}")
        texts.append(part["text"])
    return "\n".join(texts)


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise ChatTemplateError(f"tools must be a list of objects, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ChatTemplateError(f"tools[{index}] must be an object, got {type(tool).__name__}")
    return [dict(tool) for tool in tools]


class _GenerationBlock(Extension):
    """Lets a template mark the assistant's own words with ``generation`` blocks; only training needs the marks."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the block's content as if the marks were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without the HTML escapes of the template engine's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    # Templates print the date where the server stands, as their authors' own runtime does.
    return datetime.datetime.now().astimezone().strftime(layout)
