"""The command line of ``lockstep check-grammar``, and grammars given on command lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer import BadParameter

from grammar_sync.json_text import parse_json
from grammar_sync.spec import GrammarError, parse_grammar
from launch.cli import types
from launch.cli.groups import GrammarGroup, GrammarOptionGroup, given_fields, spread
from launch.commands import CheckGrammarCommand, Command, FailOn, OutputFormat
from launch.default_model import default_model


@spread
def check_grammar(
    *,
    input_file: Annotated[
        str | None,
        typer.Option("--input", help="JSONL file, one grammar a line (id, kind, spec, texts); - reads stdin."),
    ] = None,
    output: types.Output = None,
    output_format: Annotated[
        OutputFormat,
        typer.Option("--format", help="auto = text for a grammar from the command line, else jsonl."),
    ] = "auto",
    text: Annotated[
        list[str] | None,
        typer.Option(help="A text to check the grammar against; may be given again.", show_default=False),
    ] = None,
    model: types.Model = None,
    strict: Annotated[
        bool,
        typer.Option(help="Refuse what cannot be enforced, or list it and go on; for grammars that do not say."),
    ] = True,
    grammar_backend: types.GrammarBackendChoice = "auto",
    grammar_timeout: types.GrammarTimeout = 10.0,
    fail_on: Annotated[
        str,
        typer.Option(help=f"Comma-separated: {', '.join(get_args(FailOn))}; or none. What makes the exit code 6."),
    ] = "refused,text",
    grammar: GrammarGroup,
    details: GrammarOptionGroup,
) -> Command:
    """Compiles grammars for a model's vocabulary, says what is enforced, and checks texts against them."""
    given = grammar_fields(grammar)
    options = grammar_options(details)
    if len(given) > 1 or (bool(given) == (input_file is not None)):
        raise BadParameter("give one grammar, or --input FILE (- for stdin)", param_hint="the grammar")
    if text and input_file is not None:
        raise BadParameter("texts for grammars of --input stand in its lines", param_hint="--text")
    return CheckGrammarCommand(
        model=model if model is not None else default_model(),
        input_file=input_file,
        output_file=output,
        output_format=output_format,
        grammar=given,
        options=options,
        texts=tuple(text or ()),
        strict=strict,
        grammar_backend=grammar_backend,
        grammar_timeout_s=grammar_timeout,
        fail_on=_fail_on(fail_on),
    )


def grammar_fields(group: GrammarGroup) -> dict[str, Any]:
    """Returns the request fields that a command line's grammar options stand for, those given only.

    Raises:
        BadParameter: A file cannot be read, or holds no JSON where it should.
    """
    fields = {
        "json_schema": None if group.json_schema is None else _json_of("--json-schema", group.json_schema),
        "json_object": group.json_object or None,
        "regex": group.regex,
        "ebnf": None if group.ebnf is None else _text_of("--ebnf", group.ebnf),
        "choice": None if group.choice is None else group.choice.split(","),
        "structural_tag": None if group.structural_tag is None else _json_of("--structural-tag", group.structural_tag),
    }
    return {name: value for name, value in fields.items() if value is not None}


def grammar_options(group: GrammarOptionGroup) -> dict[str, Any]:
    """Returns the request fields that a command line's options of grammars stand for, those given only.

    Raises:
        BadParameter: One is out of its range.
    """
    fields = given_fields(group)
    try:
        parse_grammar(fields)
    except GrammarError as error:
        raise BadParameter(str(error), param_hint=f"--{error.param.replace('_', '-')}") from error
    return fields


def _fail_on(text: str) -> tuple[FailOn, ...]:
    names = [] if text == "none" else text.split(",")
    known: dict[str, FailOn] = {name: name for name in get_args(FailOn)}
    for name in names:
        if name not in known:
            raise BadParameter(f"{name!r}: any of {', '.join(known)}, or none", param_hint="--fail-on")
    return tuple(known[name] for name in names)


def _json_of(option: str, text: str) -> Any:
    """Returns the JSON value that ``text`` is, or that the file it names holds."""
    is_json = text.lstrip()[:1] in ("{", "") or text in ("true", "false")
    source = text if is_json else _text_of(option, Path(text))
    try:
        return parse_json(source)
    except (ValueError, RecursionError) as error:
        raise BadParameter(str(error), param_hint=option) from error


def _text_of(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadParameter(f"{path}: {error.strerror}", param_hint=option) from error
    except UnicodeDecodeError as error:
        raise BadParameter(f"{path}: {error}", param_hint=option) from error
