"""Ranges of numbers as regular languages of their JSON texts.

Integers are written without a point. Numbers with a bound, a divisor or an excluded value are written without an
exponent; others may have one, of at most two digits.

Readers of JSON round to doubles, and a number that is decided by its text must still be valid then. Two decimals of at
most 15 digits that differ are different doubles, and the doubles keep their order. So numbers with a point that are
constrained in any way have at most 15 digits, zeros in front not counted. Integers are taken as exact, as most readers
take them, but keep their distance from an open bound that doubles cannot tell them from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Final

from grammar_sync.regular.automaton import Dfa, make_alphabet
from grammar_sync.regular.chars import RegularError, characters
from grammar_sync.regular.language import Language, whole_regex
from grammar_sync.schema.state import Bound, Numbers, integer_range

MAX_DIVISOR: Final = 1024
"""The greatest divisor of integers: an automaton counts the remainders."""

SURE_DIVISOR: Final = 128
"""The greatest divisor of integers for which that automaton is always small enough."""

_MAX_STATES: Final = 150

MAX_DIGITS: Final = 40
"""The greatest number of digits of a bound."""

SURE_DIGITS: Final = 15
"""The greatest number of digits with which decimals that differ are different doubles."""

MAX_BINARY_DIGITS: Final = 4
"""The greatest power of 2 that may divide a divisor of numbers with a point."""

_EXACT_INTEGERS: Final = 2**53
_INTEGER: Final = "-?(?:0|[1-9][0-9]*)"
_EXPONENT: Final = r"(?:[eE][+\-]?[0-9]{1,2})?"
_FRACTION: Final = r"\.[0-9]+"


def number_language(numbers: Numbers) -> Language | None:
    """Returns the texts of the numbers, or None when there are none.

    Raises:
        RegularError: They are no regular language, or one that is too large.
    """
    if numbers == Numbers():
        return whole_regex(f"{_INTEGER}(?:{_FRACTION})?{_EXPONENT}")
    if numbers == Numbers(low=Bound(Fraction(0))):
        return whole_regex(f"(?:0|[1-9][0-9]*)(?:{_FRACTION})?{_EXPONENT}")
    for bound in (numbers.low, numbers.high):
        if bound is not None and len(_decimal(bound.value)) > MAX_DIGITS:
            raise RegularError(f"a bound on a number has more than {MAX_DIGITS} digits")
    parts = [_integers(numbers), _fractions(numbers)]
    found = [part for part in parts if part is not None and not part.is_empty()]
    if not found and numbers.integral is not True:
        exact = _fractions(numbers, few_digits=False)
        if exact is not None and not exact.is_empty():
            raise RegularError(f"no number of at most {SURE_DIGITS} digits lies within the bounds")
    return found[0].union(*found[1:]) if found else None


def _integers(numbers: Numbers) -> Language | None:
    if numbers.integral is False:
        return None
    divisors = {part.numerator for part in numbers.multiples if part.denominator != 1 or part.numerator != 1}
    texts = list(
        _integer_range(*integer_range(_told_apart(numbers.low, math.inf), _told_apart(numbers.high, -math.inf)))
    )
    if not texts:
        return None
    language = whole_regex("|".join(texts))
    if any(part.denominator != 1 and part.numerator != 1 for part in numbers.multiples):
        language = language.intersect(whole_regex(f"-?[0-9]{{1,{SURE_DIGITS}}}"))
    # An integer is a multiple of p/q, in lowest terms, when p divides it.
    languages = [_multiples(divisor) for divisor in sorted(divisors) if divisor != 1]
    language = language.intersect(*languages)
    for part in numbers.not_multiples:
        language = language.minus(whole_regex(_INTEGER) if part.numerator == 1 else _multiples(part.numerator))
    spelled = [_whole_spellings(value) for value in sorted(numbers.excluded) if value.denominator == 1]
    language = language.minus(*spelled)
    dividing = [
        part.numerator for part in (*numbers.multiples, *numbers.not_multiples) if part.numerator > SURE_DIVISOR
    ]
    open_ended = numbers.low is None or numbers.high is None
    if dividing and open_ended and len(language.automaton().moves) > _MAX_STATES:
        raise RegularError(
            f"multiples of {max(dividing)} take too large an automaton: up to {SURE_DIVISOR} works, and more within "
            "bounds or where the last digits decide, as of 500"
        )
    return language


def _told_apart(bound: Bound | None, direction: float) -> Bound | None:
    """Returns a bound whose integers are no less valid as doubles: an open one is moved where these are sparse."""
    if bound is None or not bound.is_open or abs(bound.value) < _EXACT_INTEGERS:
        return bound
    return Bound(Fraction(math.nextafter(float(bound.value), direction)))


def _whole_spellings(value: Fraction) -> Language:
    """Returns the texts of the integers that are read as a whole number where doubles are all that a reader has."""
    if abs(value) < _EXACT_INTEGERS or abs(value) >= 10**MAX_DIGITS:
        return _spellings(value)
    below, above = (int(math.nextafter(float(value), end)) for end in (-math.inf, math.inf))
    return whole_regex("|".join(_integer_range(below + 1, above - 1)))


def _fractions(numbers: Numbers, *, few_digits: bool = True) -> Language | None:
    if numbers.integral is True or any(part.denominator == 1 for part in numbers.multiples):
        return None
    if any(part.denominator != 1 for part in numbers.not_multiples):
        raise RegularError("what is no multiple of a fraction cannot be written as a pattern")
    language: Language | None = None
    texts = [*_signed_fractions(numbers.low, numbers.high)]
    if texts:
        language = texts[0].union(*texts[1:])
    if language is None:
        return None
    if few_digits:
        # The bounds themselves are doubles, however many digits they have.
        ends = [_spellings(end.value) for end in (numbers.low, numbers.high) if end is not None and not end.is_open]
        language = language.intersect(_few_digits(numbers.low, numbers.high).union(*ends))
    if numbers.integral is False or numbers.not_multiples:
        # A whole number, however it is spelled, is no multiple either where 1 is none: leave all of them out.
        language = language.intersect(whole_regex(r"-?[0-9]+\.[0-9]*[1-9][0-9]*"))
    language = language.intersect(*(_binary_multiples(part) for part in sorted(set(numbers.multiples))))
    return language.minus(*(_spellings(value) for value in sorted(numbers.excluded)))


def _few_digits(low: Bound | None, high: Bound | None) -> Language:
    """Returns numbers with a point of few enough digits: those that suit the range."""
    if low is None or high is None:
        wholes = {"0": SURE_DIGITS, "[1-9][0-9]{0,4}": 10, "[1-9][0-9]{5,9}": 5, "[1-9][0-9]{10,13}": 1}
        return whole_regex("-?(?:" + "|".join(rf"{text}\.[0-9]{{1,{most}}}" for text, most in wholes.items()) + ")")
    whole, _, decimals = _decimal(max(abs(low.value), abs(high.value))).partition(".")
    if whole == "0":
        zeros = len(decimals) - len(decimals.lstrip("0"))
        return whole_regex(rf"-?0\.[0-9]{{1,{zeros + SURE_DIGITS}}}")
    most = max(SURE_DIGITS - len(whole), 1)
    return whole_regex(rf"-?[0-9]{{1,{SURE_DIGITS - most}}}\.[0-9]{{1,{most}}}")


def _spellings(value: Fraction) -> Language:
    text = _decimal(value)
    if "." in text:
        return whole_regex(text.replace(".", r"\.") + "0*")
    return whole_regex(r"-?0(?:\.0+)?" if value == 0 else rf"{text}(?:\.0+)?")


def _decimal(value: Fraction) -> str:
    """Returns a number's shortest decimal text.

    Raises:
        RegularError: It has none, or a long one.
    """
    scale = 1
    digits = 0
    while (value * scale).denominator != 1:
        digits += 1
        scale *= 10
        if digits > MAX_DIGITS:
            raise RegularError(f"a number has more than {MAX_DIGITS} decimals")
    whole, rest = divmod(abs(value.numerator) * scale // value.denominator, scale)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole}" + (f".{rest:0{digits}d}" if digits else "")


def _integer_range(first: int | None, last: int | None) -> Iterator[str]:
    if first is None and last is None:
        yield _INTEGER
        return
    if last is None or last >= 0:
        yield from _naturals(max(first or 0, 0) if first is not None else 0, last)
    if first is None or first < 0:
        least = 1 if last is None or last >= -1 else -last
        for text in _naturals(least, None if first is None else -first):
            yield f"-{text}" if "|" not in text else f"-(?:{text})"


def _naturals(first: int, last: int | None) -> Iterator[str]:
    """Yields patterns that together match the texts of the integers from ``first``, 0 or more, to ``last``."""
    if last is not None and first > last:
        return
    if first == 0:
        yield "0"
        first = 1
    low = str(first)
    if last is None:
        yield from _same_length(low, "9" * len(low))
        yield f"[1-9][0-9]{{{len(low)},}}"
        return
    high = str(last)
    if first > last:
        return
    if len(low) == len(high):
        yield from _same_length(low, high)
        return
    yield from _same_length(low, "9" * len(low))
    if len(high) - len(low) > 1:
        yield f"[1-9][0-9]{{{len(low)},{len(high) - 2}}}"
    yield from _same_length("1" + "0" * (len(high) - 1), high)


def _same_length(low: str, high: str) -> Iterator[str]:
    """Yields patterns that together match the digits from ``low`` to ``high``, which have one length."""
    shared = next((index for index, pair in enumerate(zip(low, high, strict=True)) if pair[0] != pair[1]), None)
    if shared is None:
        yield low
        return
    head, left, right = low[:shared], low[shared:], high[shared:]
    rest = len(left) - 1
    first, last = int(left[0]), int(right[0])
    if set(left[1:]) > {"0"} or (left[1:] and set(left[1:]) != {"0"}):
        yield from (head + left[0] + text for text in _same_length(left[1:], "9" * rest))
        first += 1
    upper: list[str] = []
    if right[1:] and set(right[1:]) != {"9"}:
        upper = [head + right[0] + text for text in _same_length("0" * rest, right[1:])]
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        yield head + digit + (f"[0-9]{{{rest}}}" if rest else "")
    yield from upper


def _signed_fractions(low: Bound | None, high: Bound | None) -> Iterator[Language]:
    """Yields the numbers of a range that are written with a point, those of each sign."""
    zero = Fraction(0)
    if high is None or high.value >= 0:
        above = low if low is not None and low.value >= 0 else Bound(zero)
        part = _fraction_range(above, high)
        if part is not None:
            yield part
    if low is None or low.value < 0:
        above = Bound(zero) if high is None or high.value > 0 else Bound(-high.value, high.is_open)
        below = None if low is None else Bound(-low.value, low.is_open)
        part = _fraction_range(above, below, sign="-")
        if part is not None:
            yield part


def _fraction_range(low: Bound, high: Bound | None, sign: str = "") -> Language | None:
    if high is not None and (low.value > high.value):
        return None
    language = whole_regex(f"{sign}(?:{'|'.join(_at_least(low))})")
    if high is None:
        return language
    upper = list(_at_most(high))
    return language.intersect(whole_regex(f"{sign}(?:{'|'.join(upper)})")) if upper else None


def _split(value: Fraction) -> tuple[int, str]:
    whole, _, digits = _decimal(value).partition(".")
    return int(whole), digits.rstrip("0")


def _at_least(low: Bound) -> Iterator[str]:
    """Yields patterns of the numbers with a point from ``low``, 0 or more, on."""
    whole, digits = _split(low.value)
    yield from (rf"(?:{text})\.[0-9]+" for text in _naturals(whole + 1, None))
    for index, digit in enumerate(digits):
        if digit != "9":
            yield rf"{whole}\.{digits[:index]}[{int(digit) + 1}-9][0-9]*"
    if low.is_open:
        yield rf"{whole}\.{digits}[0-9]*[1-9][0-9]*"
    else:
        yield rf"{whole}\.{digits}[0-9]{'*' if digits else '+'}"


def _at_most(high: Bound) -> Iterator[str]:
    """Yields patterns of the numbers with a point from 0 up to ``high``."""
    whole, digits = _split(high.value)
    if whole:
        yield from (rf"(?:{text})\.[0-9]+" for text in _naturals(0, whole - 1))
    for index, digit in enumerate(digits):
        if digit != "0":
            yield rf"{whole}\.{digits[:index]}[0-{int(digit) - 1}][0-9]*"
        if index:
            yield rf"{whole}\.{digits[:index]}"
    if not high.is_open:
        yield rf"{whole}\.{digits}0{'*' if digits else '+'}"


@lru_cache(maxsize=128)
def _multiples(divisor: int) -> Language:
    """Returns the integers that a divisor divides.

    Raises:
        RegularError: The divisor is too great.
    """
    if divisor > MAX_DIVISOR:
        raise RegularError(f"integers are divided by {divisor}, at most {MAX_DIVISOR} is possible")
    return _leaving(divisor, 0, decimals="")


@lru_cache(maxsize=128)
def _leaving(divisor: int, remainder: int, *, decimals: str) -> Language:
    """Returns the numbers whose digits before the point leave a remainder, with ``decimals``: a pattern, or nothing."""
    alphabet = make_alphabet([characters(digit) for digit in "0123456789-."])
    digit_of = {alphabet.class_of(ord(digit)): int(digit) for digit in "0123456789"}
    minus, point = alphabet.class_of(ord("-")), alphabet.class_of(ord("."))
    # The states: the start, after the sign, a dead end, after the point, then one for each remainder.
    start, signed, dead, after, first = 0, 1, 2, 3, 4
    accepted = first + remainder

    def target(state: int, index: int) -> int:
        if index in digit_of and state != dead:
            return after if state == after else first + (10 * max(state - first, 0) + digit_of[index]) % divisor
        if index == point and state == accepted and decimals:
            return after
        return signed if index == minus and state == start else dead

    moves = tuple(
        tuple(target(state, index) for index in range(len(alphabet.classes))) for state in range(first + divisor)
    )
    found = Language(
        Dfa(alphabet, moves, tuple(state == (after if decimals else accepted) for state in range(len(moves))))
    )
    return found.intersect(whole_regex(rf"-?[0-9]+\.{decimals}")) if decimals else found


def _binary_multiples(part: Fraction) -> Language:
    """Returns the numbers with a point that are multiples of a fraction with a power of 2 below its line.

    Raises:
        RegularError: Of another fraction: in binary floating point, as validators calculate, these are not exact. Or of
            one whose automaton would be too large.
    """
    divisor, parts = part.numerator, part.denominator
    if parts & (parts - 1):
        raise RegularError(f"multiples of {float(part):g} are not exact in binary floating point")
    if parts > 2**MAX_BINARY_DIGITS or divisor > SURE_DIVISOR:
        raise RegularError(
            f"multiples of {float(part):g} take too large an automaton: sixteenths work, of at most {SURE_DIVISOR}"
        )
    # Of a/parts, the whole part leaves the remainder that makes it up to a multiple of the divisor.
    found = []
    for step in range(parts):
        digits = _decimal(Fraction(step, parts)).partition(".")[2]
        remainder = -step * pow(parts, -1, divisor) % divisor
        found.append(_leaving(divisor, remainder, decimals=f"{digits}0{'*' if digits else '+'}"))
    return found[0].union(*found[1:])
