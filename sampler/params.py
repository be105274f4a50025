"""What a client may ask of sampling, checked once at the door; and what a row needs of it at draw time.

Importable without torch. Names are OpenAI's, else vLLM's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeGuard

import msgspec

from sampler.shown_value import shown

GREEDY_TEMPERATURE = 1e-6
MAX_SEED = 2**64 - 1
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_NAMED_LOGPROBS = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_PROCESSORS = 16
MAX_ARGS_DEPTH = 32
MAX_TOP_K = 2**31 - 1
MAX_BIAS = 100.0
NUMBER_RANGES = {
    "temperature": (0.0, 1e9),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.001, 1000.0),
}
"""The least and the largest value of each parameter that is a number; top_p has no least one."""

_TOKEN_ID = re.compile(r"-?[0-9]+")

FilterOrder = Literal["joint", "top_k_first"]
LogprobsMode = Literal["raw", "processed"]


class SamplingParamsError(ValueError):
    """A sampling parameter is not acceptable: the client's fault.

    Args:
        param: The field.
        message: Field, value and allowed range.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ProcessorCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A registered logit processor and what a request passes to it.

    Attributes:
        name: The name it is registered by.
        args: Its arguments, as decoded from JSON.
    """

    name: str
    args: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of one request.

    Attributes:
        max_tokens: Most tokens to generate, 1 to ``max_model_len``; None = up to the context.
        temperature: 0 to 1e9; below 1e-6 the row is greedy.
        top_p: In (0, 1]; 1 = off.
        top_k: 1 or more; 0 or −1 = off, and so is the whole vocabulary or more, kept as −1; 1 is greedy.
        min_p: 0 to 1; 0 = off.
        filter_order: ``joint`` takes top_p over the whole distribution, ``top_k_first`` over the one that top_k left.
        seed: 0 to 2**64 − 1; None = the leader mints one.
        n: 1 to 128 choices of one prompt, each drawing from its own stream.
        stop: At most 16 texts that end a row.
        stop_token_ids: Ids that end a row, whatever ``ignore_eos``.
        ignore_eos: Whether the model's end-of-sequence ids do not end a row.
        min_tokens: No id that ends the row is drawn before this many tokens.
        logit_bias: Added to the logits of these ids, each −100 to 100; two keys of one id must agree.
        frequency_penalty: −2 to 2, times how often an id was generated.
        presence_penalty: −2 to 2, once for an id that was generated.
        repetition_penalty: 0.001 to 1000, once for an id of the prompt or of the output; 1 = off.
        allowed_token_ids: The only ids that may be drawn, at least one; None = all.
        banned_token_ids: Ids that are never drawn.
        bad_words: At most 256 texts, or lists of 1 to 64 token ids, that the output never contains: the last id of one
            is banned wherever the ids before it were just generated.
        logit_processors: At most 16 registered processors, applied to the model's output in this order.
        logprobs: 0 to 20: report the logprob of each generated token and of this many most likely ones.
        logprob_token_ids: At most 128 ids whose logprobs are reported at every generated token.
        prompt_logprobs: 0 to 20: report the same of every prompt token but the first, of the model's output always,
            except in a score, which follows ``logprobs_mode``.
        logprobs_mode: ``raw`` is of the model's output; ``processed`` is of what is drawn from before the filters:
            after processors, penalties, bias, bans, mask and temperature (1 for a greedy row).
        return_support: Whether to report the ids that could have been drawn, with their logprobs.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    filter_order: FilterOrder = "joint"
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logit_processors: tuple[ProcessorCall, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    return_support: bool = False

    @classmethod
    def parse(cls, fields: Mapping[str, object], *, vocab_size: int, max_model_len: int) -> SamplingParams:
        """Returns the parameters in ``fields``, every one checked; a null means the default.

        Args:
            fields: Parameters as decoded from JSON, flat.
            vocab_size: How many ids the model's LM head has.
            max_model_len: How many tokens the model's context has.

        Raises:
            SamplingParamsError: A field is unknown, of the wrong type or out of range.
        """
        unknown = [name for name in fields if name not in cls.__struct_fields__]
        if unknown:
            near = difflib.get_close_matches(unknown[0][:40], cls.__struct_fields__, n=3)
            hint = f"; the nearest {'are' if len(near) > 1 else 'is'} {', '.join(near)}" if near else ""
            raise SamplingParamsError(unknown[0], f"{unknown[0][:80]} is no sampling parameter{hint}")
        given = {name: value for name, value in fields.items() if value is not None}
        checked: dict[str, object] = {}
        for name, value in given.items():
            checked[name] = _check(name, value, vocab_size, max_model_len)
        params = msgspec.convert(checked, cls)
        if params.top_k >= vocab_size:
            params = msgspec.structs.replace(params, top_k=-1)
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            _refuse("min_tokens", params.min_tokens, f"an integer from 0 to max_tokens ({params.max_tokens})")
        return params

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes its largest logit without a draw."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether the row's logits depend on the tokens before."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def has_logprobs(self) -> bool:
        """Whether logprobs of generated tokens are reported: who is told what could have been drawn is told its own."""
        return self.logprobs is not None or bool(self.logprob_token_ids) or self.return_support


class RowSampling(msgspec.Struct, frozen=True, kw_only=True):
    """What one row of a batch, which is one choice of one request, needs at draw time.

    Attributes:
        params: The request's parameters.
        seed: The client's seed or the one minted for it, 0 ≤ seed < 2**64.
        choice: Which of the request's ``n`` choices the row is, from 0.
        stop_ids: Ids banned while fewer than ``min_tokens`` tokens were generated: end-of-sequence ids and
            ``stop_token_ids``.
        bad_words_token_ids: ``params.bad_words`` as token ids: a text gives one sequence for each way it is tokenized.
        prompt_ids: The prompt; read when the row has penalties or logit processors.
        output_ids: The tokens generated so far, when a row (re)joins a batch; read when the row has penalties, bad
            words or logit processors.
    """

    params: SamplingParams
    seed: int
    choice: int = 0
    stop_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()


def integer_ranges(max_model_len: int) -> dict[str, tuple[int, int]]:
    """Returns the least and the largest value of each parameter that is an integer."""
    return {
        "max_tokens": (1, max_model_len),
        "top_k": (-1, MAX_TOP_K),
        "seed": (0, MAX_SEED),
        "n": (1, MAX_CHOICES),
        "min_tokens": (0, max_model_len),
        "logprobs": (0, MAX_LOGPROBS),
        "prompt_logprobs": (0, MAX_LOGPROBS),
    }


def _check(name: str, value: object, vocab_size: int, max_model_len: int) -> object:
    """Returns the checked value of one field."""
    integers = integer_ranges(max_model_len)
    if name in integers:
        return _integer(name, value, *integers[name])
    if name in NUMBER_RANGES:
        return _number(name, value, *NUMBER_RANGES[name])
    if name in {"ignore_eos", "return_support"}:
        return _flag(name, value)
    return _check_listed(name, value, vocab_size)


def _check_listed(name: str, value: object, vocab_size: int) -> object:
    """Returns the checked value of a field that is no plain number."""
    if name in ID_LISTS:
        return _token_ids(name, value, vocab_size, *ID_LISTS[name])
    if name == "logit_bias":
        return _logit_bias(value, vocab_size)
    if name == "bad_words":
        return _bad_words(value, vocab_size)
    if name in CHOICES:
        return _choice(name, value, CHOICES[name])
    return _OTHER_FIELDS[name](value)


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise SamplingParamsError(name, f"{name} must be {allowed}, not {shown(value)}")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        _refuse(name, value, f"an integer from {low} to {high}")
    return value


def _number(name: str, value: object, low: float, high: float) -> float:
    if not _is_number(value, low, high):
        _refuse(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _is_number(value: object, low: float, high: float) -> TypeGuard[int | float]:
    # The comparison comes before any conversion: it refuses NaN, and integers too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _top_p(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        _refuse("top_p", value, "a number above 0 and at most 1")
    return float(value)


def _stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    allowed = f"a text or a list of at most {MAX_STOP_STRINGS} texts, none empty"
    if not isinstance(texts, list | tuple) or len(texts) > MAX_STOP_STRINGS:
        _refuse("stop", value, allowed)
    for text in texts:
        if not isinstance(text, str) or not text:
            _refuse("stop", value, allowed)
    return tuple(texts)


def _token_ids(name: str, value: object, vocab_size: int, low: int, high: int | None) -> tuple[int, ...]:
    """Returns distinct ids, ``low`` to ``high`` of them."""
    size = f"at least {low} " if low else "" if high is None else f"at most {high} "
    allowed = f"a list of {size}token ids from 0 to {vocab_size - 1}"
    if not isinstance(value, list | tuple) or len(value) < low or (high is not None and len(value) > high):
        _refuse(name, value, allowed)
    for token_id in value:
        if not _is_token_id(token_id, vocab_size):
            _refuse(name, token_id, allowed)
    return tuple(dict.fromkeys(value))


def _is_token_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _bad_words(value: object, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    allowed = (
        f"a list of at most {MAX_BAD_WORDS} texts, none empty, or lists of 1 to {MAX_BAD_WORD_TOKENS} token ids "
        f"from 0 to {vocab_size - 1}"
    )
    if not isinstance(value, list | tuple) or len(value) > MAX_BAD_WORDS:
        _refuse("bad_words", value, allowed)
    words: list[str | tuple[int, ...]] = []
    for word in value:
        if isinstance(word, str) and word:
            words.append(word)
            continue
        if not isinstance(word, list | tuple) or not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            _refuse("bad_words", word, allowed)
        if not all(_is_token_id(token_id, vocab_size) for token_id in word):
            _refuse("bad_words", word, allowed)
        words.append(tuple(word))
    return tuple(words)


def _logit_processors(value: object) -> tuple[ProcessorCall, ...]:
    """Returns the calls; whether the names are registered and the arguments fit, the registry says."""
    allowed = f'a list of at most {MAX_PROCESSORS} objects {{"name": text, "args": object}}'
    if not isinstance(value, list | tuple) or len(value) > MAX_PROCESSORS:
        _refuse("logit_processors", value, allowed)
    calls = []
    for call in value:
        if _depth(call, MAX_ARGS_DEPTH + 1) > MAX_ARGS_DEPTH:
            _refuse("logit_processors", call, f"{allowed}, nested {MAX_ARGS_DEPTH} deep at most")
        try:
            checked = msgspec.convert(call, ProcessorCall)
            # What cannot travel to the ranks, such as an integer of more than 64 bits, is refused here.
            msgspec.msgpack.encode(checked)
        except (msgspec.ValidationError, OverflowError):
            _refuse("logit_processors", call, f"{allowed}, integers of 64 bits at most")
        calls.append(checked)
    return tuple(calls)


def _depth(value: object, limit: int) -> int:
    """Returns how deep lists and objects are nested, looking no deeper than ``limit``."""
    if limit == 0 or not isinstance(value, list | tuple | Mapping):
        return 0
    parts = value.values() if isinstance(value, Mapping) else value
    return 1 + max((_depth(part, limit - 1) for part in parts), default=0)


def _logit_bias(value: object, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        _refuse("logit_bias", value, f"an object from token ids to numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    checked: dict[int, float] = {}
    for key, bias in value.items():
        is_id = isinstance(key, int) and not isinstance(key, bool)
        # A key of thousands of digits is out of every range; int() would refuse to read it.
        if not is_id and not (isinstance(key, str) and len(key) <= 20 and _TOKEN_ID.fullmatch(key)):
            _refuse("logit_bias", key, f"keyed by token ids from 0 to {vocab_size - 1}")
        token_id = int(key)
        if not 0 <= token_id < vocab_size:
            _refuse("logit_bias", key, f"keyed by token ids from 0 to {vocab_size - 1}")
        if not _is_number(bias, -MAX_BIAS, MAX_BIAS):
            message = (
                f"logit_bias must be numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {shown(bias)} (id {token_id})"
            )
            raise SamplingParamsError("logit_bias", message)
        number = float(bias)
        # "1" and "01" are one id: said alike it is said once.
        if checked.setdefault(token_id, number) != number:
            _refuse("logit_bias", key, f"keyed by an id once (id {token_id} has {checked[token_id]:g} already)")
    return checked


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")
    return value


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> object:
    if value not in allowed:
        _refuse(name, value, " or ".join(f'"{word}"' for word in allowed))
    return value


ID_LISTS: dict[str, tuple[int, int | None]] = {
    "stop_token_ids": (0, None),
    "allowed_token_ids": (1, None),
    "banned_token_ids": (0, None),
    "logprob_token_ids": (0, MAX_NAMED_LOGPROBS),
}
"""Least and most ids of each parameter that is a list of ids."""

CHOICES = {"filter_order": ("joint", "top_k_first"), "logprobs_mode": ("raw", "processed")}
_OTHER_FIELDS: dict[str, Callable[[object], object]] = {
    "top_p": _top_p,
    "stop": _stop,
    "logit_processors": _logit_processors,
}
