"""The tables of docs/sampling.md, made from the code; ``python tests/sampling_tables.py`` writes them there."""

from __future__ import annotations

from pathlib import Path

from document_tables import table, with_sections

from sampler import params
from sampler.logprobs import LOGPROB_FLOOR
from sampler.params import SamplingParams
from sampler.sampler import MAX_SUPPORT
from sampler.slices import VOCABULARY_BLOCKS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "sampling.md"
_CONTEXT = 1 << 62
_OTHERS = {
    "top_p": "a number above 0 and at most 1",
    "stop": f"a text, or at most {params.MAX_STOP_STRINGS} of them, none empty",
    "ignore_eos": "true or false",
    "logit_bias": f"an object from ids to numbers from {-params.MAX_BIAS:g} to {params.MAX_BIAS:g}; keys that are one "
    'id, such as `"1"` and `"01"`, must agree',
    "bad_words": f"at most {params.MAX_BAD_WORDS} texts, or lists of 1 to {params.MAX_BAD_WORD_TOKENS} ids",
    "logit_processors": f"at most {params.MAX_PROCESSORS} objects {{`name`, `args`}}; `args` nested at most "
    f"{params.MAX_ARGS_DEPTH} deep, with integers of at most 64 bits",
    "return_support": "true or false",
}
_DEFAULTS = {"max_tokens": "256, or what the context leaves", "seed": "a random one", "top_k": "off"}


def generated(text: str) -> str:
    """Returns the document with all its generated sections as the code has them."""
    return with_sections(text, {"parameters": _parameters(), "limits": _limits()})


def _parameters() -> str:
    rows = [(f"`{name}`", _range(name), _default(name)) for name in SamplingParams.__struct_fields__]
    return table(("Parameter", "Values", "Default"), rows)


def _range(name: str) -> str:
    integers = params.integer_ranges(_CONTEXT)
    if name in integers:
        low, high = integers[name]
        most = {_CONTEXT: "the context", params.MAX_SEED: "2⁶⁴ − 1", params.MAX_TOP_K: "2³¹ − 1"}.get(high, str(high))
        off = "; −1, 0, and the vocabulary's size or more: off" if name == "top_k" else ""
        return f"an integer from {low} to {most}{off}"
    if name in params.NUMBER_RANGES:
        low_number, high_number = params.NUMBER_RANGES[name]
        return f"a number from {low_number:g} to {high_number:g}"
    if name in params.ID_LISTS:
        least, largest = params.ID_LISTS[name]
        return "a list of ids" + f", at least {least}" * bool(least) + (f", at most {largest}" if largest else "")
    if name in params.CHOICES:
        return " or ".join(f"`{word}`" for word in params.CHOICES[name])
    return _OTHERS[name]


def _default(name: str) -> str:
    value = getattr(SamplingParams(), name)
    if name in _DEFAULTS:
        return _DEFAULTS[name]
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


def _limits() -> str:
    rows = [
        ("Ids of a support that is reported", f"{MAX_SUPPORT:,}; beyond that its `status` is `OVERFLOW`"),
        ("Smallest logprob that is reported", f"{LOGPROB_FLOOR}; it stands for everything below"),
        ("Ranks that share a vocabulary", f"{VOCABULARY_BLOCKS}"),
        ("`choice` in `lockstep sample`", f"{params.MAX_CHOICES - 1}"),
    ]
    return table(("What", "Limit"), rows)


if __name__ == "__main__":
    DOCUMENT.write_text(generated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
