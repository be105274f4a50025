"""Turns syntax trees into automata, anchors and lookaround included, wherever they stand.

A tree becomes a nondeterministic automaton whose edges without a character may carry an assertion. While it is made
deterministic, a *path* is a state with *obligations*: a lookahead that was passed on the way is an automaton that runs
along from there and must accept the rest of the string (the end of the string is the lookahead for nothing). A
lookbehind is an automaton that runs from the start of the string and must accept what was read so far. Both are exact,
and both keep the automaton finite.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from grammar_sync.regular.automaton import Alphabet, Budget, Dfa, make_alphabet, minimise, of_words
from grammar_sync.regular.chars import CharSet, RegularError
from grammar_sync.regular.syntax import (
    ANY_CHAR,
    Chars,
    Choice,
    Concat,
    End,
    Look,
    Node,
    Repeat,
    Start,
    concat,
    repeat,
    walk,
)

MAX_NFA_STATES: Final = 20_000

_Obligations: TypeAlias = frozenset[tuple[int, int]]  # (lookahead, the state that its automaton is in)
_Path: TypeAlias = tuple[int, _Obligations]
_Paths: TypeAlias = frozenset[_Path]
_Behind: TypeAlias = tuple[int, ...]  # the states of the lookbehinds' automata

_NO_OBLIGATIONS: Final[_Obligations] = frozenset()
_START: Final = -1  # in an edge's condition: the start of the string


class _Edge(msgspec.Struct, frozen=True):
    target: int
    ahead: int | None = None  # index of the lookahead that must hold
    behind: int | None = None  # index of the lookbehind that must hold, or _START


class _Nfa:
    """Thompson's construction: one initial and one final state per part."""

    def __init__(self, budget: Budget, *, at_start: bool) -> None:
        self.budget = budget
        self.at_start = at_start
        self.edges: list[list[_Edge]] = []
        self.letters: dict[int, tuple[CharSet, int]] = {}  # at most one character edge leaves a state
        self.ahead: list[Dfa] = []  # for a start anchor inside: at even indices away from the start, at odd ones there
        self.behind: list[Dfa] = []
        self._looks: dict[Node, int] = {}

    def state(self) -> int:
        if len(self.edges) >= MAX_NFA_STATES:
            raise RegularError("the pattern is too complex: its repetitions multiply to too many states")
        self.edges.append([])
        return len(self.edges) - 1

    def add(self, node: Node, source: int) -> int:
        """Adds the node's part from a state on; returns its final state."""
        if isinstance(node, Concat):
            for part in node.parts:
                source = self.add(part, source)
            return source
        target = self.state()
        if isinstance(node, Chars):
            inner = self.state()
            self.edges[source].append(_Edge(inner))
            self.letters[inner] = (node.chars, target)
        elif isinstance(node, Choice):
            for option in node.options:
                self._option(option, source, target)
        elif isinstance(node, Repeat):
            self._repeat(node, source, target)
        else:
            self.edges[source].append(self._assertion(node, target))
        return target

    def _option(self, option: Node, source: int, target: int) -> None:
        inner = self.state()
        self.edges[source].append(_Edge(inner))
        self.edges[self.add(option, inner)].append(_Edge(target))

    def _repeat(self, node: Repeat, source: int, target: int) -> None:
        for _ in range(node.minimum):
            source = self.add(node.body, source)
        if node.maximum is None:
            hub = self.state()
            self.edges[source].append(_Edge(hub))
            self.edges[self.add(node.body, hub)].append(_Edge(hub))
            self.edges[hub].append(_Edge(target))
            return
        for _ in range(node.maximum - node.minimum):
            self.edges[source].append(_Edge(target))
            source = self.add(node.body, source)
        self.edges[source].append(_Edge(target))

    def _assertion(self, node: Start | End | Look, target: int) -> _Edge:
        if isinstance(node, Start):
            return _Edge(target, behind=_START)
        if node not in self._looks:
            if isinstance(node, Look) and not node.ahead:
                self._looks[node] = len(self.behind)
                self.behind.append(self._lookbehind(node))
            else:
                self._looks[node] = len(self.ahead)
                self.ahead.extend(self._lookahead(node))
        index = self._looks[node]
        return _Edge(target, behind=index) if isinstance(node, Look) and not node.ahead else _Edge(target, ahead=index)

    def _lookahead(self, node: End | Look) -> tuple[Dfa, Dfa]:
        if isinstance(node, End):
            found = of_words(["", "\n"] if node.before_newline else [""])
            return found, found
        if any(isinstance(inner, Look) and not inner.ahead for inner in walk(node.body)):
            raise RegularError("a lookbehind or word boundary inside a lookahead is not supported")
        body = concat([node.body, repeat(ANY_CHAR, 0, None)])
        both = [determinise(body, self.budget, at_start=at_start) for at_start in (False, True)]
        return (both[0].complement(), both[1].complement()) if node.negative else (both[0], both[1])

    def _lookbehind(self, node: Look) -> Dfa:
        if any(isinstance(inner, End) or (isinstance(inner, Look) and inner.ahead) for inner in walk(node.body)):
            raise RegularError("an end anchor, word boundary or lookahead inside a lookbehind is not supported")
        body = concat([repeat(ANY_CHAR, 0, None), node.body])
        found = determinise(body, self.budget)
        return found.complement() if node.negative else found

    def alphabet(self) -> Alphabet:
        sets = [chars for chars, _ in self.letters.values()]
        for found in (*self.ahead, *self.behind):
            sets.extend(found.alphabet.classes)
        return make_alphabet(sets)


def determinise(node: Node, budget: Budget, *, at_start: bool = True) -> Dfa:
    """Returns the smallest automaton of the strings that the tree matches as a whole.

    Args:
        node: A syntax tree.
        budget: Bounds the work.
        at_start: Whether the string's start counts as a start for anchors.

    Raises:
        RegularError: The budget is exceeded, or a lookaround is nested in a way that is not supported.
    """
    nfa = _Nfa(budget, at_start=at_start)
    start = nfa.state()
    final = nfa.add(node, start)
    return minimise(_Subsets(nfa, start, final).run(), budget)


class _Subsets:
    """The subset construction over paths."""

    def __init__(self, nfa: _Nfa, start: int, final: int) -> None:
        self.nfa = nfa
        self.start = start
        self.final = final
        self.alphabet = nfa.alphabet()
        self.letters: dict[int, tuple[tuple[int, ...], int]] = {
            state: (self.alphabet.within(chars), target) for state, (chars, target) in nfa.letters.items()
        }
        codes = self.alphabet.representatives()
        self.ahead_classes = [[found.alphabet.class_of(code) for code in codes] for found in nfa.ahead]
        self.behind_classes = [[found.alphabet.class_of(code) for code in codes] for found in nfa.behind]
        self.hopeless = [[not live for live in found.live()] for found in nfa.ahead]
        self.certain = [[not live for live in found.complement().live()] for found in nfa.ahead]
        self._closures: dict[tuple[int, _Behind | None, bool], tuple[_Path, ...]] = {}

    def run(self) -> Dfa:
        behind: _Behind = (0,) * len(self.nfa.behind)
        first = (frozenset(self._closure(self.start, behind, at_start=self.nfa.at_start)), behind)
        numbers: dict[tuple[_Paths, _Behind], int] = {first: 0}
        queue = [first]
        moves: list[tuple[int, ...]] = []
        for paths, behind in queue:
            row: list[int] = []
            for target in self._step(paths, behind):
                number = numbers.setdefault(target, len(numbers))
                if number == len(queue):
                    queue.append(target)
                row.append(number)
            moves.append(tuple(row))
            self.nfa.budget.spend(len(row), len(queue))
        return Dfa(self.alphabet, tuple(moves), tuple(self._accepts(paths) for paths, _ in queue))

    def _accepts(self, paths: _Paths) -> bool:
        return any(
            state == self.final and all(self.nfa.ahead[look].accepting[at] for look, at in obligations)
            for state, obligations in paths
        )

    def _step(self, paths: _Paths, behind: _Behind) -> list[tuple[_Paths, _Behind]]:
        """Returns for each class of characters what is reached."""
        following = [
            tuple(
                found.moves[at][classes[letter]]
                for found, at, classes in zip(self.nfa.behind, behind, self.behind_classes, strict=True)
            )
            for letter in range(len(self.alphabet.classes))
        ]
        reached: list[set[_Path]] = [set() for _ in following]
        work = len(following) * len(behind)
        for state, obligations in paths:
            letters, target = self.letters.get(state, ((), -1))
            for letter in letters:
                kept = self._advance(obligations, letter) if obligations else obligations
                if kept is None:
                    continue
                closure = self._closure(target, following[letter], at_start=False)
                work += len(closure) * (1 + 2 * len(kept)) + 4 * len(obligations)
                if kept:
                    reached[letter].update((inner, spawned | kept) for inner, spawned in closure)
                else:
                    reached[letter].update(closure)
        self.nfa.budget.spend(work)
        return [(frozenset(found), at) for found, at in zip(reached, following, strict=True)]

    def _advance(self, obligations: _Obligations, letter: int) -> _Obligations | None:
        """Returns the obligations after a character; None when one can no longer be met."""
        kept: list[tuple[int, int]] = []
        for look, at in obligations:
            following = self.nfa.ahead[look].moves[at][self.ahead_classes[look][letter]]
            if self.hopeless[look][following]:
                return None
            if not self.certain[look][following]:
                kept.append((look, following))
        return frozenset(kept)

    def _closure(self, state: int, behind: _Behind, *, at_start: bool) -> tuple[_Path, ...]:
        """Returns the states that matter and are reached without a character, with the obligations taken on."""
        key = (state, behind, at_start)
        if key not in self._closures:
            seen: set[_Path] = {(state, _NO_OBLIGATIONS)}
            stack = list(seen)
            while stack:
                at, obligations = stack.pop()
                for edge in self.nfa.edges[at]:
                    found = self._passed(edge, obligations, behind, at_start)
                    if found is not None and (edge.target, found) not in seen:
                        seen.add((edge.target, found))
                        stack.append((edge.target, found))
            self.nfa.budget.spend(len(seen))
            self._closures[key] = tuple(
                path for path in sorted(seen, key=_order) if path[0] == self.final or path[0] in self.letters
            )
        return self._closures[key]

    def _passed(self, edge: _Edge, obligations: _Obligations, behind: _Behind, at_start: bool) -> _Obligations | None:
        """Returns the obligations after an edge, or None where its condition does not hold."""
        if edge.behind == _START:
            return obligations if at_start else None
        if edge.behind is not None:
            return obligations if self.nfa.behind[edge.behind].accepting[behind[edge.behind]] else None
        if edge.ahead is None:
            return obligations
        look = edge.ahead + int(at_start)
        if self.hopeless[look][0]:
            return None
        return obligations if self.certain[look][0] else obligations | {(look, 0)}


def _order(path: _Path) -> tuple[int, tuple[tuple[int, int], ...]]:
    return path[0], tuple(sorted(path[1]))
