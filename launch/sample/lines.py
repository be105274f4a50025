"""Lines of ``lockstep sample``: a sampling step each, checked like a request, and what is told of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from launch.line_error import LineError
from runtime.messages import ErrorInfo
from sampler.params import MAX_CHOICES, RowSampling, SamplingParams, SamplingParamsError
from sampler.shown_value import kind_of, shown

SHORT_NAMES = {
    "frequency": "frequency_penalty",
    "presence": "presence_penalty",
    "repetition": "repetition_penalty",
    "min_new_tokens": "min_tokens",
}
"""What the case files call parameters, and their names in requests."""

STEP_FIELDS = ("prompt", "output", "stop_ids", "allowed", "choice")
"""What is said in ``params`` of a step that a request does not say itself."""

MEANINGLESS = ("max_tokens", "n", "stop", "ignore_eos", "prompt_logprobs")
"""Parameters of requests that change nothing in one step: ``ignored`` names them."""

_LARGEST_LOGIT = torch.finfo(torch.float32).max
# From here on the nearest float32 is none that is finite.
_ROUNDED_TO_INFINITY = 2.0**128 - 2.0**103
_LINE_FIELDS = ("id", "logits", "params", "expect")
_UNLIMITED_TOKENS = 1 << 31


class SampleStep(msgspec.Struct, frozen=True):
    """One line of the input.

    Args:
        logits: The model's output over the whole vocabulary.
        row: Parameters and history.
        allowed: Ids that a grammar would allow; None = all.
        ignored: What the line says beside that, to no effect.
    """

    logits: list[float]
    row: RowSampling
    allowed: list[int] | None
    ignored: list[str]


class IdLogprob(msgspec.Struct, frozen=True):
    """An id and its logprob; −9999.0 stands for everything smaller."""

    token_id: int
    logprob: float


class StepLogprobs(msgspec.Struct, frozen=True):
    """What ``logprobs`` and ``logprob_token_ids`` ask of a step.

    Args:
        logprob: Of the token.
        top_logprobs: The most likely ids, best first.
        named_logprobs: The ids of ``logprob_token_ids``.
    """

    logprob: float | None
    top_logprobs: list[IdLogprob]
    named_logprobs: list[IdLogprob]


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output.

    Args:
        id: The line's, whatever it is; ``line-N`` where there is none.
        status: ``OK``; ``INVALID`` when no id can be drawn; ``ERROR`` when the line is no sampling step.
        token: What seed, choice and position draw; None when nothing can be drawn.
        support: The ids that may be drawn, ascending; all of them, however many.
        probs: Their probabilities.
        counts: How often each id came in ``--draws`` draws at positions 0, 1, …
        error: Why there is no token; None when there is one.
        logprobs: What the line asks to know about logprobs; None when it does not, or when there is no token.
        ignored: Fields of the line that change nothing in one step.
    """

    id: Any
    status: str
    token: int | None = None
    support: list[int] = []
    probs: list[float] = []
    counts: dict[str, int] = {}
    error: ErrorInfo | None = None
    logprobs: StepLogprobs | None = None
    ignored: list[str] = []


def parse_step(fields: Mapping[str, Any]) -> SampleStep:
    """Returns the sampling step that a line describes, with names as in the case files or as in requests.

    Raises:
        LineError: It is none.
    """
    logits = _logits(fields.get("logits"))
    for name in fields:
        if name in SHORT_NAMES or name in STEP_FIELDS or name in SamplingParams.__struct_fields__:
            raise LineError(f"{name} stands beside params: it is needed inside", name)
    given = _params(fields)
    own = {name: given.pop(name) for name in STEP_FIELDS if name in given}
    try:
        params = SamplingParams.parse(given, vocab_size=len(logits), max_model_len=_UNLIMITED_TOKENS)
    except SamplingParamsError as error:
        raise LineError(str(error), error.param) from error
    if params.logit_processors:
        message = "logit_processors cannot be replayed from logits alone: give the logits that they returned"
        raise LineError(message, "logit_processors")
    ids = {name: _ids(name, own.get(name), len(logits)) for name in STEP_FIELDS if name != "choice"}
    row = RowSampling(
        # What may be drawn is told anyway.
        params=msgspec.structs.replace(params, return_support=False),
        seed=params.seed or 0,
        choice=_choice(own.get("choice", 0)),
        stop_ids=tuple(sorted({*(ids["stop_ids"] or ()), *params.stop_token_ids})),
        bad_words_token_ids=_bad_words(params),
        prompt_ids=ids["prompt"] or (),
        output_ids=ids["output"] or (),
    )
    ignored = [name for name in fields if name not in _LINE_FIELDS] + [name for name in given if name in MEANINGLESS]
    return SampleStep(logits, row, ids["allowed"], ignored)


def _params(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the line's ``params`` say, by names as in requests."""
    given = fields.get("params")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise LineError(f"params is {kind_of(given)}: an object is needed", "params")
    params: dict[str, Any] = {}
    for short, value in given.items():
        name = SHORT_NAMES.get(str(short), str(short))
        if value is None and (name in STEP_FIELDS or name in SamplingParams.__struct_fields__):
            continue
        if name in params:
            raise LineError(f"{name} has two names here, and is given by both: one of them is needed", name)
        params[name] = value
    return params


def _logits(value: Any) -> list[float]:
    needed = "a list of numbers is needed, or of 'nan', 'inf', '-inf'"
    if value is None:
        raise LineError(f"logits is missing: {needed}", "logits")
    if not isinstance(value, list) or not value:
        raise LineError(f"logits is {shown(value)}: {needed}", "logits")
    return [_logit(index, one) for index, one in enumerate(value)]


def _logit(index: int, value: Any) -> float:
    is_number = type(value) is int or (type(value) is float and math.isfinite(value))
    if not is_number and value not in ("nan", "inf", "-inf"):
        message = f"logits[{index}] is {shown(value)}: a number, 'nan', 'inf' or '-inf' is needed"
        raise LineError(message, "logits")
    if not is_number:
        return float(value)
    if abs(value) >= _ROUNDED_TO_INFINITY:
        allowed = f"a number in ±{_LARGEST_LOGIT:.8g} (float32), or 'inf',"
        raise LineError(f"logits[{index}] is {shown(value)}: {allowed} is needed", "logits")
    # The largest float32 is written 3.4028235e38, which is a little more.
    return min(max(float(value), -_LARGEST_LOGIT), _LARGEST_LOGIT)


def _ids(name: str, value: Any, vocab_size: int) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise LineError(f"{name} is {shown(value)}: a list of ids in 0..{vocab_size - 1} is needed", name)
    for index, one in enumerate(value):
        if type(one) is not int or not 0 <= one < vocab_size:
            message = f"{name}[{index}] is {shown(one)}: an integer in 0..{vocab_size - 1} is needed"
            raise LineError(message, name)
    return value


def _choice(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_CHOICES:
        raise LineError(f"choice is {shown(value)}: an integer in 0..{MAX_CHOICES - 1} is needed", "choice")
    return value


def _bad_words(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    words = []
    for word in params.bad_words:
        if isinstance(word, str):
            message = f"bad_words has the text {shown(word)}: there is no tokenizer here, lists of ids are needed"
            raise LineError(message, "bad_words")
        words.append(word)
    return tuple(words)
