"""Says whether constrained outputs are what their grammars ask for: by jsonschema and re where they can tell."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator

from grammar_sync.engines.backend import CompiledGrammar, compile_spec
from grammar_sync.engines.factory import make_backend
from grammar_sync.engines.prepared import CompileError
from grammar_sync.spec import GRAMMAR_FIELDS, GRAMMAR_OPTION_FIELDS, parse_grammar
from runtime.assembly import grammar_vocabulary
from runtime.checkpoint import open_checkpoint
from runtime.tokenizer import Tokenizer


def grammar_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that make its grammar."""
    return {name: value for name, value in request.items() if name in (*GRAMMAR_FIELDS, *GRAMMAR_OPTION_FIELDS)}


class Judge:
    """Says whether an output is what its grammar asks for: jsonschema and re where they can, else the engine."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)
        tokenizer, config = Tokenizer.load(model), open_checkpoint(model).config
        eos = tuple(sorted({*tokenizer.eos_token_ids, *config.eos_token_ids}))
        self._eos = frozenset(eos)
        self._backend = make_backend(grammar_vocabulary(tokenizer, config, eos), "auto")

    @cache  # noqa: B019 - a judge lives as long as its test
    def compiled(self, key: str) -> CompiledGrammar:
        spec = parse_grammar(json.loads(key))
        assert spec is not None
        return compile_spec(self._backend, spec)[1]

    def takes(self, fields: Mapping[str, Any]) -> bool:
        """Returns whether the engine takes a grammar at all."""
        try:
            self.compiled(json.dumps(fields))
        except CompileError:
            return False
        return True

    def follows(self, fields: Mapping[str, Any], token_ids: list[int], *, to_the_end: bool) -> bool:
        """Returns whether the grammar takes the ids, and after them the end when ``to_the_end``."""
        matcher = self.compiled(json.dumps(fields)).new_matcher()
        return all(matcher.accept(token_id) for token_id in token_ids) and matcher.is_terminated() == to_the_end

    def is_right(self, fields: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
        """Returns whether a choice's record is what its request's grammar asks for."""
        token_ids: list[int] = record["token_ids"]
        if record["finish_reason"] == "length":
            return not self._eos.intersection(token_ids) and self.follows(fields, token_ids, to_the_end=False)
        is_finished = record["finish_reason"] == "stop" and self.follows(fields, token_ids, to_the_end=True)
        return is_finished and is_valid(fields, record["text"])


def is_valid(fields: Mapping[str, Any], text: str) -> bool:
    """Returns whether a text is what a grammar asks for, as far as anybody but an engine can tell."""
    match fields:
        case {"json_schema": schema}:
            validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            return validator.is_valid(json.loads(text))
        case {"json_object": True}:
            return isinstance(json.loads(text), dict)
        case {"regex": pattern}:
            return re.fullmatch(pattern, text, re.ASCII) is not None
        case {"choice": texts}:
            return text in texts
    return True
