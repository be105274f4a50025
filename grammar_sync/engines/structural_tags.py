"""Structural tags: free text with tags in it whose contents are grammars, as in tool calls.

The older form, a list of structures and a list of triggers, is turned into the present one. JSON Schemas and regexes
inside become grammars of our own, as they do where they stand alone.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from grammar_sync.engines.ebnf_dialect import read_ebnf
from grammar_sync.engines.ebnf_forms import xgrammar_form
from grammar_sync.engines.prepared import CompileError, Finding, PreparedGrammar
from grammar_sync.engines.tag_formats import check_fields, checked_kind
from grammar_sync.json_text import parse_json
from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.language import whole_regex
from grammar_sync.regular.regex_check import check_regex
from grammar_sync.schema.document import pointer
from grammar_sync.schema.grammar import ROOT, schema_grammar
from grammar_sync.schema.productions import ebnf
from grammar_sync.spec import GrammarOptions, GrammarSpec

MAX_REPEATS: Final = 4096
"""Bound on the counts of repeated parts."""


class _Findings:
    def __init__(self) -> None:
        self.not_enforced: list[Finding] = []
        self.rewritten: list[Finding] = []


def prepare_tag(spec: GrammarSpec) -> PreparedGrammar:
    """Returns a structural tag as xgrammar reads it.

    Raises:
        CompileError: It is wrong, or a schema in it has something that cannot be enforced.
    """
    tag = json.loads(spec.source)
    findings = _Findings()
    known = ("type", "format") if "format" in tag else ("type", "structures", "triggers")
    check_fields(tag, "", "a structural tag", known)
    top = tag["format"] if "format" in tag else _present_form(tag)
    rewritten = {"type": "structural_tag", "format": _rewritten(top, "/format", spec.options, findings)}
    source = json.dumps(rewritten, ensure_ascii=False, separators=(",", ":"))
    return PreparedGrammar(
        "xgrammar",
        "structural_tag",
        source,
        spec.options,
        tuple(findings.not_enforced),
        tuple(findings.rewritten),
    )


def _present_form(tag: dict[str, Any]) -> dict[str, Any]:
    """Returns {structures: [{begin, schema, end}], triggers} as a format of tags that triggers open."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise CompileError("structures and triggers must be lists")
    tags = []
    for index, structure in enumerate(structures):
        if not isinstance(structure, dict) or not {"begin", "end"}.issubset(structure):
            raise CompileError(f"/structures/{index} has no begin or no end")
        name = "json_schema" if "json_schema" in structure else "schema"
        check_fields(structure, f"/structures/{index}", "a structure", ("begin", name, "end"))
        schema = structure.get(name, {})
        if isinstance(schema, str):
            try:
                schema = parse_json(schema)
            except (ValueError, RecursionError) as error:
                raise CompileError(f"/structures/{index}/{name} is no JSON: {error}") from error
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _rewritten(part: Any, path: str, options: GrammarOptions, findings: _Findings, *, in_tags: bool = False) -> Any:
    if isinstance(part, dict):
        return _format(part, path, options, findings, in_tags=in_tags)
    if isinstance(part, list):
        places = ((pointer(path, index), item) for index, item in enumerate(part))
        return [_rewritten(item, place, options, findings, in_tags=in_tags) for place, item in places]
    if isinstance(part, str) and "\0" in part:
        raise CompileError(f"{path} has a NUL character, which no grammar may have")
    return part


def _format(
    part: dict[str, Any], path: str, options: GrammarOptions, findings: _Findings, *, in_tags: bool
) -> dict[str, Any]:
    kind = checked_kind(part, path, expected="tag" if in_tags else None)
    match kind:
        case "json_schema" if part.get("style", "json") == "json":
            return _schema(part, path, options, findings)
        case "json_schema" | "qwen_xml_parameter":
            message = "parameters written as XML are checked by the engine alone"
            if options.strict:
                raise CompileError(f"{path}: {message}; give strict: false to run without a check")
            findings.not_enforced.append(Finding(path, kind, message))
            return part
        case "regex":
            return _regex(part, path)
        case "grammar" if part.get("syntax", "ebnf") == "ebnf":
            return _grammar(part, path)
    for name in ("min", "max", "count"):
        count = part.get(name)
        if isinstance(count, int) and count > MAX_REPEATS:
            raise CompileError(f"{pointer(path, name)} is {count}, at most {MAX_REPEATS} is allowed")
    return {
        name: _rewritten(item, pointer(path, name), options, findings, in_tags=name == "tags")
        for name, item in part.items()
    }


def _schema(part: dict[str, Any], path: str, options: GrammarOptions, findings: _Findings) -> dict[str, Any]:
    place = pointer(path, "json_schema")
    schema = part.get("json_schema")
    if not isinstance(schema, bool | dict):
        raise CompileError(f"{place} is no JSON Schema: an object, true or false is expected")
    try:
        grammar = schema_grammar(json.dumps(schema), options)
        text = ebnf(grammar.rules, ROOT)
    except (CompileError, RegularError) as error:
        message = str(error)
        raise CompileError(f"{place}{message}" if message.startswith("/") else f"{place}: {message}") from error
    for found, kept in (
        (grammar.not_enforced, findings.not_enforced),
        (grammar.rewritten, findings.rewritten),
    ):
        kept.extend(msgspec.structs.replace(finding, path=place + finding.path) for finding in found)
    return {"type": "grammar", "grammar": text}


def _regex(part: dict[str, Any], path: str) -> dict[str, Any]:
    pattern = part.get("pattern")
    if not isinstance(pattern, str):
        raise CompileError(f"{pointer(path, 'pattern')} must be a text")
    try:
        check_regex(pattern)
        return {**part, "pattern": whole_regex(pattern).to_regex()}
    except (RegularError, CompileError) as error:
        raise CompileError(f"{pointer(path, 'pattern')}: {error}") from error


def _grammar(part: dict[str, Any], path: str) -> dict[str, Any]:
    place, text = pointer(path, "grammar"), part.get("grammar")
    if not isinstance(text, str):
        raise CompileError(f"{place} must be a text")
    try:
        return {"type": "grammar", "grammar": xgrammar_form(read_ebnf(text, ROOT), ROOT)}
    except (RegularError, CompileError) as error:
        raise CompileError(f"{place}: {error}") from error
