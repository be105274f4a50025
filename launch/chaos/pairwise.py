"""Few combinations of axis values in which every two values of two axes meet, unless no combination allows them to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

Combination = tuple[str, ...]
Pair = tuple[int, str, int, str]
Rule = Callable[[Mapping[str, str]], bool]
"""Whether a combination is impossible."""


def allowed_combinations(axes: Mapping[str, Sequence[str]], rules: Mapping[str, Rule]) -> list[Combination]:
    """Returns every combination of axis values that no rule excludes, in the order of the axes' values.

    Args:
        axes: The values of each axis, by its name.
        rules: Why combinations are impossible, by the reason's name. A rule is asked as soon as all axes that it looks
            at have values; what it excludes then is not gone into.
    """
    return list(_extended({}, list(axes.items()), list(rules.values())))


def _extended(
    chosen: dict[str, str], axes: list[tuple[str, Sequence[str]]], rules: list[Rule]
) -> Iterator[Combination]:
    if not axes:
        yield tuple(chosen.values())
        return
    (name, values), *others = axes
    for value in values:
        chosen[name] = value
        undecided = _undecided(chosen, rules)
        if undecided is not None:
            yield from _extended(chosen, others, undecided)
        del chosen[name]


def _undecided(chosen: Mapping[str, str], rules: Sequence[Rule]) -> list[Rule] | None:
    """Returns the rules that look at an axis without a value yet; None when another excludes what has one."""
    undecided = []
    for rule in rules:
        try:
            if rule(chosen):
                return None
        except KeyError:
            undecided.append(rule)
    return undecided


def pairs_of(combination: Combination) -> Iterable[Pair]:
    """Returns every pair of axis values of a combination."""
    for (first, one), (second, other) in combinations(enumerate(combination), 2):
        yield first, one, second, other


def shuffled(combinations: Sequence[Combination], seed: int) -> list[Combination]:
    """Returns ``combinations`` in another order, the same for the same seed."""
    order = list(combinations)
    random.Random(seed).shuffle(order)  # noqa: S311 - no secret is drawn
    return order


def pairwise(candidates: Sequence[Combination], seed: int = 0) -> list[Combination]:
    """Returns some of ``candidates`` that have every pair of values that any of them has; the same for the same seed.

    Greedy: the next one is that with most pairs not met yet; ``seed`` settles ties.
    """
    order = shuffled(candidates, seed)
    holders: dict[Pair, list[int]] = {}
    for index, combination in enumerate(order):
        for pair in pairs_of(combination):
            holders.setdefault(pair, []).append(index)
    missing = [sum(1 for _ in pairs_of(combination)) for combination in order]
    chosen: list[Combination] = []
    while holders:
        best = max(range(len(order)), key=missing.__getitem__)
        chosen.append(order[best])
        for pair in pairs_of(order[best]):
            for index in holders.pop(pair, ()):
                missing[index] -= 1
    return chosen
