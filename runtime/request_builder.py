"""What a request must look like: the only door through which client data reaches the ranks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grammar_sync.spec import GRAMMAR_FIELDS, GRAMMAR_OPTION_FIELDS, GrammarError, GrammarSpec, parse_grammar
from grammar_sync.thinking import ReasoningMarkers, ThinkingRules
from runtime.messages import AddSequence, RenderedPrompt, Settled
from runtime.prompt import PROMPT_FIELDS, PromptReader
from runtime.request_error import RequestError, parse_object
from runtime.request_limits import RequestLimits
from runtime.scheduling_fields import SCHEDULING_FIELDS, SchedulingFieldError, cache_salt_of, priority_of
from runtime.thinking_fields import THINKING_FIELDS, ThinkingError, ThinkingFields, parse_thinking, rules_of
from runtime.tokenizer import Tokenizer
from sampler.params import SamplingParams, SamplingParamsError
from sampler.processors import ProcessorRegistry
from sampler.shown_value import shown

_CHECKED_ELSEWHERE = ("id", "tools", *SCHEDULING_FIELDS, *GRAMMAR_FIELDS, *GRAMMAR_OPTION_FIELDS, *THINKING_FIELDS)
_PROMPT_TOKENS = "prompt_tokens"
_FOREIGN_FIELDS = {
    "response_format": "json_schema (the schema alone) or json_object",
    "jsonschema": "json_schema",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
"""What other programs call a grammar, and its name here."""


@dataclass(frozen=True)
class Request:
    """A valid request, tokenized.

    Args:
        prompt_token_ids: At least one id.
        max_tokens: Resolved against the context.
        params: Validated sampling parameters.
        seed: The client's, or minted.
        grammar: What the output must match, if anything.
        bad_words_token_ids: The bad words as token ids.
        thinking: How the output thinks before, if it does.
        forced_output_tokens: How many of the last prompt ids a score takes as generated.
        priority: The lower, the sooner.
        cache_salt: Only requests with the same salt share KV entries.
        rendered: Its messages as a prompt; None where it has none.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    params: SamplingParams
    seed: int
    grammar: GrammarSpec | None
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    thinking: ThinkingRules | None = None
    forced_output_tokens: int = 0
    priority: int = 0
    cache_salt: str = ""
    rendered: RenderedPrompt | None = None

    @property
    def settled(self) -> Settled:
        """What its fields alone do not say."""
        return Settled(self.seed, len(self.prompt_token_ids), self.max_tokens, self.rendered)

    def sequence(self, sequence_id: int, choice: int, prefill_of: int | None) -> AddSequence:
        """Returns one of its choices as a sequence."""
        return AddSequence(
            sequence_id=sequence_id,
            choice=choice,
            prompt_token_ids=self.prompt_token_ids,
            max_tokens=self.max_tokens,
            params=self.params,
            seed=self.seed,
            grammar=self.grammar,
            thinking=self.thinking,
            prefill_of=prefill_of,
            bad_words_token_ids=self.bad_words_token_ids,
            forced_output_tokens=self.forced_output_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


class RequestBuilder:
    """Turns a client's fields into a valid, tokenized request.

    Args:
        tokenizer: The model's.
        limits: What a request may ask for at most.
        processors: The logit processors that requests may name; None = none.
        markers: The markers around the model's thinking; None when it has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        processors: ProcessorRegistry | None = None,
        markers: ReasoningMarkers | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._processors = processors or ProcessorRegistry({})
        self._markers = markers
        self.prompts = PromptReader(tokenizer, limits, markers)
        """Reads prompts alone."""

    def parse(self, body: str, *, score: bool = False, settled: Settled | None = None) -> Request:
        """Returns the request that a JSON object describes.

        Args:
            body: The object, as text.
            score: Whether to generate nothing and report the logprobs of the given tokens.
            settled: What was settled when it was accepted before; None for a new one.

        Raises:
            RequestError: It is no JSON object, or what ``build`` refuses.
        """
        return self.build(parse_object(body), score=score, settled=settled)

    def build(self, fields: Mapping[str, Any], *, score: bool = False, settled: Settled | None = None) -> Request:
        """Returns the request that ``fields`` describe (names as in JSONL input; ``id`` is the client's own).

        Args:
            fields: The request's fields.
            score: Whether to generate nothing and report the logprobs of the given tokens.
            settled: What was settled when it was accepted before; None for a new one.

        Raises:
            RequestError: A field is missing, unknown, of a wrong type or out of its range.
        """
        for name, own in _FOREIGN_FIELDS.items():
            if name in fields:
                raise RequestError(f"unknown field {name}: the field here is {own}", name)
        if not score and _PROMPT_TOKENS in fields:
            where = "only a score has it, and there it says after how many tokens those begin that count as generated"
            raise RequestError(f"{_PROMPT_TOKENS} is no field of a request that generates: {where}", _PROMPT_TOKENS)
        rest = {
            name: value
            for name, value in fields.items()
            if name not in (*PROMPT_FIELDS, *_CHECKED_ELSEWHERE, _PROMPT_TOKENS)
        }
        try:
            grammar = parse_grammar(fields)
            asked = parse_thinking(fields, self._limits.max_model_len)
            params = SamplingParams.parse(
                {"prompt_logprobs": 0} | rest if score else rest,
                vocab_size=self._limits.vocab_size,
                max_model_len=self._limits.max_model_len,
            )
            priority, cache_salt = priority_of(fields), cache_salt_of(fields)
            self._processors.check(params.logit_processors)
            if score:
                _check_score(params, grammar, asked)
            prompt = self.prompts.read(fields, asked, None if settled is None else settled.rendered)
            thinking = rules_of(asked, self._markers, inside=prompt.is_thinking, has_grammar=grammar is not None)
        except GrammarError as error:
            raise RequestError(str(error), error.param, "grammar_error") from error
        except (SamplingParamsError, SchedulingFieldError, ThinkingError) as error:
            raise RequestError(str(error), error.param) from error
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(64) if settled is None else settled.seed
        asked_tokens = params.max_tokens if settled is None else settled.max_tokens
        max_tokens = 0 if score else self._max_tokens(prompt.name, len(prompt.token_ids), asked_tokens, params)
        if len(prompt.token_ids) > self._limits.kv_cache_tokens:
            raise RequestError(
                f"{prompt.name} has {len(prompt.token_ids)} tokens: the KV cache has room for "
                f"{self._limits.kv_cache_tokens}",
                prompt.name,
            )
        forced = _forced_output_tokens(fields.get(_PROMPT_TOKENS), len(prompt.token_ids)) if score else 0
        return Request(
            prompt_token_ids=prompt.token_ids,
            max_tokens=max_tokens,
            params=params,
            seed=seed,
            grammar=grammar,
            bad_words_token_ids=self._bad_words(params),
            thinking=thinking,
            forced_output_tokens=forced,
            priority=priority,
            cache_salt=cache_salt,
            rendered=prompt.rendered,
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Returns the bad words as token ids: a text as it is spelled at a word's beginning and within a line."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            spellings = (
                [word]
                if not isinstance(word, str)
                else [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")]
            )
            sequences.update(dict.fromkeys(ids for ids in spellings if ids))
        return tuple(sequences)

    def _max_tokens(self, name: str, prompt_tokens: int, asked: int | None, params: SamplingParams) -> int:
        room = min(self._limits.max_model_len, self._limits.kv_cache_tokens) - prompt_tokens
        if room < 1:
            raise RequestError(
                f"{name} has {prompt_tokens} tokens: the KV cache of {self._limits.kv_cache_tokens} tokens "
                "has no room for it and one more",
                name,
            )
        if asked is None:
            asked = min(room, self._limits.default_max_tokens)
            if params.min_tokens > asked:
                raise RequestError(
                    f"min_tokens is {params.min_tokens}: without max_tokens the output has {asked} tokens at most, "
                    f"so 0..{asked} is possible",
                    "min_tokens",
                )
            return asked
        if asked > room:
            limits = f"context of {self._limits.max_model_len} tokens, KV cache of {self._limits.kv_cache_tokens}"
            raise RequestError(
                f"max_tokens is {asked}: after a prompt of {prompt_tokens} tokens 1..{room} are possible ({limits})",
                "max_tokens",
            )
        return asked


def _check_score(params: SamplingParams, grammar: GrammarSpec | None, asked: ThinkingFields) -> None:
    """Returns if a request asks for nothing that only generating gives.

    Its other parameters, such as a seed, may be those of the request that is scored again: they change nothing.
    """
    generating = {
        "n": params.n != 1,
        "logprobs": params.logprobs is not None,
        "return_support": params.return_support,
        "" if grammar is None else grammar.kind: grammar is not None,
        asked.wanted_by: asked.wants_thinking,
    }
    for name, is_given in generating.items():
        if is_given:
            instead = ": prompt_logprobs says how many of the likeliest ids to tell" if name == "logprobs" else ""
            raise RequestError(f"{name} is not possible in a score, which generates nothing{instead}", name)


def _forced_output_tokens(prompt_tokens: object, given_tokens: int) -> int:
    """Returns how many of the tokens to score are taken as generated, from how many are said to be the prompt."""
    if prompt_tokens is None:
        return 0
    if type(prompt_tokens) is not int or not 1 <= prompt_tokens <= given_tokens:
        raise RequestError(
            f"prompt_tokens is {shown(prompt_tokens)}: an integer in 1..{given_tokens}, the tokens to score, is needed",
            _PROMPT_TOKENS,
        )
    return given_tokens - prompt_tokens
