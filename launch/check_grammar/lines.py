"""Grammars to check: from the command line or from JSONL, each valid or with the reason why it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grammar_sync.spec import GRAMMAR_FIELDS, GRAMMAR_OPTION_FIELDS, GrammarError, GrammarSpec, parse_grammar
from launch.commands import CheckGrammarCommand
from launch.line_error import LineError
from launch.request_file import InputLine, read_lines
from runtime.messages import ErrorInfo
from sampler.shown_value import shown

COMMAND_LINE_ID = "command-line"

_OWN_FIELDS = ("id", "kind", "spec", "texts", "expect", "strict")
_JSON_OPTIONS = tuple(name for name in GRAMMAR_OPTION_FIELDS if name not in ("strict", "ebnf_root"))
_OPTIONS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("json_schema", "json_object", "structural_tag"), _JSON_OPTIONS),
    "ebnf": ("ebnf_root", "root"),
}


@dataclass(frozen=True)
class GrammarLine:
    """One grammar to check.

    Args:
        user_id: The line's ``id``, else ``line-N``.
        spec: The grammar; None when there is none.
        error: Why there is none.
        kind: The field it stands in, in a request.
        texts: What to check it against.
        expect: Whether each text is wanted to be taken.
        ignored: Fields of the line that mean nothing here, or nothing for this kind of grammar.
    """

    user_id: Any
    spec: GrammarSpec | None
    error: ErrorInfo | None = None
    kind: str | None = None
    texts: tuple[str, ...] = ()
    expect: tuple[bool, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def is_malformed(self) -> bool:
        """Whether the line itself is wrong, not its grammar."""
        return self.error is not None and self.error.code == "invalid_request"


def read_grammars(command: CheckGrammarCommand) -> Iterator[GrammarLine]:
    """Yields the grammars of a command in order.

    Raises:
        UsageError: The input file cannot be read.
    """
    if command.input_file is None:
        (kind,) = command.grammar
        fields = {"kind": kind, "spec": command.grammar[kind], "texts": list(command.texts)}
        yield _parse(InputLine(COMMAND_LINE_ID, fields | command.options), {"strict": command.strict})
        return
    for line in read_lines(command.input_file):
        yield _parse(line, {"strict": command.strict} | command.options)


def _parse(line: InputLine, defaults: dict[str, Any]) -> GrammarLine:
    fields = line.fields
    if fields is None:
        return GrammarLine(line.user_id, None, line.error)
    try:
        kind = _kind(fields)
        texts = _texts(fields)
        expect = _expect(fields, len(texts))
    except LineError as error:
        return GrammarLine(line.user_id, None, error.info)
    ignored = tuple(name for name in fields if name not in (*_OWN_FIELDS, *_OPTIONS_OF_KIND.get(kind, ())))
    options = {name: fields[name] for name in GRAMMAR_OPTION_FIELDS if fields.get(name) is not None}
    if fields.get("root") is not None:
        options["ebnf_root"] = fields["root"]
    value = fields.get("spec")
    is_bare = kind == "json_object" and value is None
    spec, problem = None, None
    try:
        spec = parse_grammar(defaults | options | {kind: True if is_bare else value})
    except GrammarError as error:
        problem = ErrorInfo("grammar_error", str(error), error.param)
    if spec is None and problem is None:
        problem = ErrorInfo("invalid_request", f"spec is {shown(value)}: a grammar is needed", "spec")
    return GrammarLine(line.user_id, spec, problem, kind, texts, expect, ignored)


def _kind(fields: dict[str, Any]) -> str:
    kind = fields.get("kind")
    if kind not in GRAMMAR_FIELDS:
        raise LineError(f"kind is {shown(kind)}: any of {', '.join(GRAMMAR_FIELDS)} is needed", "kind")
    return str(kind)


def _texts(fields: dict[str, Any]) -> tuple[str, ...]:
    texts = fields.get("texts")
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise LineError(f"texts is {shown(texts)}: a list of strings is needed", "texts")
    return tuple(texts)


def _expect(fields: dict[str, Any], count: int) -> tuple[bool, ...]:
    expect = fields.get("expect")
    if expect is None:
        return (True,) * count
    if not isinstance(expect, list) or len(expect) != count or not all(isinstance(one, bool) for one in expect):
        raise LineError(
            f"expect is {shown(expect)}: a list of true and false is needed, one for each of {count} texts", "expect"
        )
    return tuple(expect)
