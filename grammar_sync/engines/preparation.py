"""From a request's grammar to what engines compile: everything that can be decided without an engine is decided here.

JSON Schemas, and what can be said in the same way, become grammars of our own and are written for each engine; their
reading of schemas is not used. Regular expressions and EBNF are parsed and written again in a dialect that both
engines read alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from grammar_sync.engines.ebnf_dialect import read_ebnf
from grammar_sync.engines.ebnf_forms import llguidance_form, xgrammar_form
from grammar_sync.engines.prepared import CompileError, Engine, Finding, Language, PreparedGrammar
from grammar_sync.engines.structural_tags import prepare_tag
from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.language import whole_regex
from grammar_sync.regular.regex_check import check_regex
from grammar_sync.schema.grammar import ROOT, schema_grammar
from grammar_sync.schema.productions import Expression, Literal, Terminal, ebnf, lark, options
from grammar_sync.spec import GrammarSpec

ENGINES: Final[tuple[Engine, ...]] = ("xgrammar", "llguidance")
"""All engines, the preferred one first."""

_SLOW_IN_XGRAMMAR: Final = re.compile(r"^t[0-9]+_text ::= .*\)\{[0-9]", re.MULTILINE)
"""Strings of a bounded length: a mask of theirs takes xgrammar 30 ms or more with 49,152 tokens, llguidance 0.2 ms."""

_Rules: TypeAlias = dict[str, Expression | Terminal]


def prepare(spec: GrammarSpec, engines: Sequence[Engine]) -> tuple[PreparedGrammar, ...]:
    """Returns a form for each of the engines that can take the grammar, at least one, in the order given.

    Raises:
        CompileError: The grammar is wrong, has something that cannot be enforced, or none of the engines takes it.
    """
    match spec.kind:
        case "json_schema" | "json_object":
            grammar = schema_grammar(spec.source, spec.options)
            return _written(spec, engines, grammar.rules, grammar.not_enforced, grammar.rewritten)
        case "choice":
            texts: list[str] = json.loads(spec.source)
            return _written(spec, engines, {ROOT: options(*(Literal(text) for text in texts))})
        case "regex":
            return tuple(PreparedGrammar(engine, "regex", _regex(spec.source), spec.options) for engine in engines)
        case "ebnf":
            return _ebnf(spec, engines)
        case "structural_tag":
            if "xgrammar" not in engines:
                raise CompileError("llguidance has no structural tags: the xgrammar engine is needed")
            return (prepare_tag(spec),)


def _written(
    spec: GrammarSpec,
    engines: Sequence[Engine],
    rules: _Rules,
    not_enforced: tuple[Finding, ...] = (),
    rewritten: tuple[Finding, ...] = (),
) -> tuple[PreparedGrammar, ...]:
    found: list[PreparedGrammar] = []
    refusal: Exception | None = None
    for engine in engines:
        try:
            source = ebnf(rules, ROOT) if engine == "xgrammar" else lark(rules, ROOT)
        except (RegularError, CompileError) as error:
            refusal = error
            continue
        language: Language = "ebnf" if engine == "xgrammar" else "lark"
        found.append(PreparedGrammar(engine, language, source, spec.options, not_enforced, rewritten))
    if len(found) > 1 and _SLOW_IN_XGRAMMAR.search(found[0].source):
        found.reverse()
    if not found:
        raise CompileError(f"the {spec.kind} cannot be written for an engine: {refusal}") from refusal
    return tuple(found)


def _regex(source: str) -> str:
    check_regex(source)
    try:
        language = whole_regex(source)
        if language.is_empty():
            raise CompileError("the regex matches no text at all")
        return language.to_regex()
    except RegularError as error:
        raise CompileError(str(error)) from error


def _ebnf(spec: GrammarSpec, engines: Sequence[Engine]) -> tuple[PreparedGrammar, ...]:
    start = spec.options.root_rule
    rules = read_ebnf(spec.source, start)
    # What is written starts at a rule of the same name in every case.
    enforced = msgspec.structs.replace(spec.options, root_rule="root")
    try:
        return tuple(
            PreparedGrammar(engine, "ebnf", xgrammar_form(rules, start), enforced)
            if engine == "xgrammar"
            else PreparedGrammar(engine, "lark", llguidance_form(rules, start), enforced)
            for engine in engines
        )
    except RegularError as error:
        raise CompileError(f"the ebnf cannot be written for an engine: {error}") from error
