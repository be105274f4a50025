"""The engines without what guards them: a grammar goes to the engine as it is given, schemas to its own reading."""

from __future__ import annotations

import llguidance
import xgrammar as xgr

from grammar_sync.engines.llguidance_backend import LLGuidanceBackend
from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.spec import GrammarSpec
from grammar_sync.vocabulary import GrammarVocabulary

MAKE = "raw_engine:RawEngine"


class RawEngine(XGrammarBackend):
    def __init__(self, vocabulary: GrammarVocabulary, policy: str) -> None:
        assert policy == "xgrammar"
        super().__init__(vocabulary)

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        match spec.kind:
            case "regex" | "ebnf" | "structural_tag":
                return (PreparedGrammar("xgrammar", spec.kind, spec.source, spec.options),)
            case _:  # a language of the other engine's, so that it is told apart
                return (PreparedGrammar("xgrammar", "lark", spec.source, spec.options),)

    def _compile(self, prepared: PreparedGrammar) -> xgr.CompiledGrammar:
        if prepared.language == "lark":
            return self._compiler.compile_json_schema(prepared.source, strict_mode=True)
        return super()._compile(prepared)


class RawGuidance(LLGuidanceBackend):
    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        assert spec.kind == "json_schema"
        return (PreparedGrammar("llguidance", "lark", spec.source, spec.options),)

    def _grammar(self, prepared: PreparedGrammar) -> str:
        return str(llguidance.LLMatcher.grammar_from_json_schema(prepared.source))
