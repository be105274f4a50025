"""Deterministic automata over Unicode characters, and the operations on the languages they recognise."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from grammar_sync.regular.chars import ALL, CharSet, RegularError, char_set

MAX_STATES: Final = 20_000
MAX_WORK: Final = 800_000  # set elements or transitions handled; less than a second of CPU time


class Budget:
    """Bounds the work of one construction, so that a hostile pattern ends in an error and not in a long wait.

    Args:
        work: How many elementary steps may be spent.
        states: How many states one automaton may have.
    """

    def __init__(self, work: int = MAX_WORK, states: int = MAX_STATES) -> None:
        self.work = work
        self.states = states

    def spend(self, work: int, states: int = 0) -> None:
        """Takes note of work done and of the number of states made so far.

        Raises:
            RegularError: A limit is exceeded.
        """
        self.work -= work
        if self.work < 0 or states > self.states:
            raise RegularError("the pattern is too complex: its automaton exceeds the limit on states or work")


class Alphabet(msgspec.Struct, frozen=True):
    """A partition of all characters into classes that an automaton need not tell apart.

    Args:
        classes: The classes' characters; disjoint, not empty, together all characters.
        starts: Where the classes' intervals start, ascending.
        owners: Which class each of these intervals belongs to.
    """

    classes: tuple[CharSet, ...]
    starts: tuple[int, ...]
    owners: tuple[int, ...]

    def class_of(self, code_point: int) -> int:
        """Returns the class of a character; of a surrogate, -1."""
        if 0xD800 <= code_point <= 0xDFFF:
            return -1
        return self.owners[bisect_right(self.starts, code_point) - 1]

    def within(self, chars: CharSet) -> tuple[int, ...]:
        """Returns the classes that lie in a set, which is a union of classes."""
        return tuple(index for index, found in enumerate(self.classes) if found.ranges[0][0] in chars)

    def representatives(self) -> tuple[int, ...]:
        """Returns one character of each class."""
        return tuple(found.ranges[0][0] for found in self.classes)


def make_alphabet(sets: Iterable[CharSet]) -> Alphabet:
    """Returns the coarsest alphabet of which every given set is a union of classes."""
    distinct = [found for found in dict.fromkeys(sets) if found]
    edges: dict[int, int] = {0: 0, 0xD800: 0, 0xE000: 0}
    for index, found in enumerate(distinct):
        for low, high in found.ranges:
            edges[low] = edges.get(low, 0) ^ (1 << index)
            edges[high + 1] = edges.get(high + 1, 0) ^ (1 << index)
    points = sorted(point for point in edges if point <= ALL.ranges[-1][1])
    members: dict[int, list[tuple[int, int]]] = {}
    signature = 0
    for point, following in itertools.zip_longest(points, points[1:], fillvalue=ALL.ranges[-1][1] + 1):
        signature ^= edges[point]
        if point == 0xD800:
            continue
        ranges = members.setdefault(signature, [])
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1] = (ranges[-1][0], following - 1)
        else:
            ranges.append((point, following - 1))
    classes = tuple(CharSet(tuple(ranges)) for ranges in members.values())
    intervals = sorted((low, index) for index, found in enumerate(classes) for low, _ in found.ranges)
    return Alphabet(classes, tuple(low for low, _ in intervals), tuple(index for _, index in intervals))


class Dfa(msgspec.Struct, frozen=True):
    """A complete deterministic automaton; state 0 is the start.

    Args:
        alphabet: Classes of characters.
        moves: For each state, the next state by class.
        accepting: For each state, whether a string may end there.
    """

    alphabet: Alphabet
    moves: tuple[tuple[int, ...], ...]
    accepting: tuple[bool, ...]

    def accepts(self, text: str) -> bool:
        """Returns whether the string is in the language."""
        state = 0
        for char in text:
            found = self.alphabet.class_of(ord(char))
            if found < 0:
                return False
            state = self.moves[state][found]
        return self.accepting[state]

    def complement(self) -> Dfa:
        """Returns the automaton of all other strings."""
        return Dfa(self.alphabet, self.moves, tuple(not accepting for accepting in self.accepting))

    def live(self) -> tuple[bool, ...]:
        """Returns for each state whether an accepting one can be reached from it."""
        sources: list[list[int]] = [[] for _ in self.moves]
        for state, row in enumerate(self.moves):
            for target in set(row):
                sources[target].append(state)
        found = list(self.accepting)
        queue = [state for state, accepting in enumerate(self.accepting) if accepting]
        while queue:
            for source in sources[queue.pop()]:
                if not found[source]:
                    found[source] = True
                    queue.append(source)
        return tuple(found)

    def is_empty(self) -> bool:
        """Returns whether no string is in the language."""
        return not self.live()[0]

    def shortest(self) -> str | None:
        """Returns a shortest string of the language, or None where there is none."""
        queue = deque([(0, "")])
        seen = {0}
        letters = [chr(code) for code in self.alphabet.representatives()]
        while queue:
            state, text = queue.popleft()
            if self.accepting[state]:
                return text
            for target, letter in zip(self.moves[state], letters, strict=True):
                if target not in seen:
                    seen.add(target)
                    queue.append((target, text + letter))
        return None

    def is_finite(self) -> bool:
        """Returns whether the language has finitely many strings."""
        return _topological(self) is not None

    def longest_length(self) -> int | None:
        """Returns the length of a longest string in characters; None where there is no bound or no string."""
        order = _topological(self)
        if not order:
            return None
        live = self.live()
        longest = [0] * len(self.moves)
        for state in reversed(order):
            longest[state] = max((longest[target] + 1 for target in set(self.moves[state]) if live[target]), default=0)
        return longest[0]

    def words(self, limit: int) -> tuple[str, ...] | None:
        """Returns all strings, shorter ones first and else by code point; None where there are more than ``limit``."""
        live = self.live()
        if not live[0]:
            return ()
        if _topological(self) is None:
            return None
        found: list[str] = []
        stack = [(0, "")]
        while stack:
            state, text = stack.pop()
            if self.accepting[state]:
                found.append(text)
            if len(found) + len(stack) > limit:
                # Every entry of the stack leads to at least one more string.
                return None
            for target, chars in zip(self.moves[state], self.alphabet.classes, strict=True):
                if live[target]:
                    if chars.size() > limit:
                        return None
                    stack.extend(
                        (target, text + chr(code)) for low, high in chars.ranges for code in range(low, high + 1)
                    )
        return tuple(sorted(found, key=lambda text: (len(text), text)))


def _topological(dfa: Dfa) -> list[int] | None:
    """Returns the live states that the start reaches, in topological order, or None when they have a cycle."""
    live = dfa.live()
    if not live[0]:
        return []
    targets = [sorted({target for target in row if live[target]}) for row in dfa.moves]
    order: list[int] = []
    open_states = {0}
    done: set[int] = set()
    stack = [(0, iter(targets[0]))]
    while stack:
        state, rest = stack[-1]
        for target in rest:
            if target in open_states:
                return None
            if target not in done:
                open_states.add(target)
                stack.append((target, iter(targets[target])))
                break
        else:
            stack.pop()
            open_states.discard(state)
            done.add(state)
            order.append(state)
    return order[::-1]


def combine(left: Dfa, right: Dfa, accept: Callable[[bool, bool], bool], budget: Budget) -> Dfa:
    """Returns the automaton of the strings that ``accept`` takes, told which of the two languages they are in.

    Raises:
        RegularError: The budget is exceeded.
    """
    alphabet = left.alphabet
    if alphabet != right.alphabet:
        alphabet = make_alphabet((*left.alphabet.classes, *right.alphabet.classes))
    pairs_of_classes = [
        (left.alphabet.class_of(code), right.alphabet.class_of(code)) for code in alphabet.representatives()
    ]
    numbers = {(0, 0): 0}
    queue = [(0, 0)]
    moves: list[tuple[int, ...]] = []
    for pair in queue:
        row: list[int] = []
        left_row, right_row = left.moves[pair[0]], right.moves[pair[1]]
        for left_class, right_class in pairs_of_classes:
            target = (left_row[left_class], right_row[right_class])
            number = numbers.setdefault(target, len(numbers))
            if number == len(queue):
                queue.append(target)
            row.append(number)
        moves.append(tuple(row))
        budget.spend(len(row), len(queue))
    accepting = tuple(accept(left.accepting[a], right.accepting[b]) for a, b in queue)
    return minimise(Dfa(alphabet, tuple(moves), accepting), budget)


def minimise(dfa: Dfa, budget: Budget) -> Dfa:
    """Returns the smallest automaton of the same language (Hopcroft), with states numbered from the start.

    Raises:
        RegularError: The budget is exceeded.
    """
    blocks = _hopcroft(dfa, budget)
    rows: list[tuple[int, ...]] = []
    accepting: list[bool] = []
    numbers = {blocks[0]: 0}
    queue = [0]
    for state in queue:
        row: list[int] = []
        for target in dfa.moves[state]:
            number = numbers.setdefault(blocks[target], len(numbers))
            if number == len(queue):
                queue.append(target)
            row.append(number)
        rows.append(tuple(row))
        accepting.append(dfa.accepting[state])
    return _merge_classes(Dfa(dfa.alphabet, tuple(rows), tuple(accepting)))


def _hopcroft(dfa: Dfa, budget: Budget) -> list[int]:
    """Returns for each state the block of equivalent states that it is in."""
    sources = _sources(dfa)
    blocks: list[set[int]] = [set(), set()]
    block_of = [0] * len(dfa.moves)
    for state, accepting in enumerate(dfa.accepting):
        blocks[int(accepting)].add(state)
        block_of[state] = int(accepting)
    waiting = {(int(len(blocks[1]) < len(blocks[0])), letter) for letter in range(len(sources))}
    while waiting:
        splitter, letter = waiting.pop()
        by_target = sources[letter]
        hit: dict[int, list[int]] = {}
        for target in blocks[splitter]:
            for state in by_target.get(target, ()):
                hit.setdefault(block_of[state], []).append(state)
        budget.spend(1 + sum(map(len, hit.values())))
        for index, members in hit.items():
            block = blocks[index]
            if len(members) == len(block):
                continue
            fresh = len(blocks)
            blocks.append(set(members))
            block.difference_update(members)
            for state in members:
                block_of[state] = fresh
            for other in range(len(sources)):
                smaller = fresh if len(members) <= len(block) else index
                waiting.add((fresh if (index, other) in waiting else smaller, other))
    return block_of


def _sources(dfa: Dfa) -> list[dict[int, list[int]]]:
    """Returns for each class of characters the states that move to a state, by that state."""
    found: list[dict[int, list[int]]] = []
    for column in zip(*dfa.moves, strict=True):
        by_target: dict[int, list[int]] = {}
        for state, target in enumerate(column):
            by_target.setdefault(target, []).append(state)
        found.append(by_target)
    return found


def _merge_classes(dfa: Dfa) -> Dfa:
    """Returns the automaton with classes of characters that it never tells apart made one."""
    columns: dict[tuple[int, ...], list[int]] = {}
    for index, column in enumerate(zip(*dfa.moves, strict=True)):
        columns.setdefault(column, []).append(index)
    merged = [
        char_set(itertools.chain.from_iterable(dfa.alphabet.classes[index].ranges for index in indices))
        for indices in columns.values()
    ]
    alphabet = make_alphabet(merged)
    order = [next(i for i, found in enumerate(merged) if code in found) for code in alphabet.representatives()]
    by_class = list(columns)
    moves = tuple(zip(*(by_class[index] for index in order), strict=True))
    return Dfa(alphabet, moves, dfa.accepting)


def counting(minimum: int, maximum: int | None) -> Dfa:
    """Returns the automaton of all strings of that many characters (None: no upper bound)."""
    last = minimum if maximum is None else maximum + 1
    moves = tuple((min(state + 1, last),) for state in range(last + 1))
    accepting = tuple(state >= minimum and (maximum is None or state <= maximum) for state in range(last + 1))
    return Dfa(make_alphabet([ALL]), moves, accepting)


def of_words(texts: Sequence[str]) -> Dfa:
    """Returns the automaton of a finite set of strings."""
    alphabet = make_alphabet(
        [char_set([(code, code)]) for code in sorted({ord(char) for text in texts for char in text})]
    )
    rows: list[dict[int, int]] = [{}, {}]  # state 1 takes nothing
    accepting = [False, False]
    for text in texts:
        state = 0
        for char in text:
            letter = alphabet.class_of(ord(char))
            if letter < 0:
                raise RegularError("a lone surrogate in a string")
            following = rows[state].setdefault(letter, len(rows))
            if following == len(rows):
                rows.append({})
                accepting.append(False)
            state = following
        accepting[state] = True
    letters = range(len(alphabet.classes))
    return Dfa(alphabet, tuple(tuple(row.get(letter, 1) for letter in letters) for row in rows), tuple(accepting))
