"""Random regular expressions and texts for the tests of regular languages."""

from __future__ import annotations

from hypothesis import strategies as st

from grammar_sync.regular.automaton import Dfa
from grammar_sync.regular.language import Language

LETTERS = "ab-1"

_atoms = st.sampled_from(
    ["a", "b", "-", "1", ".", r"\d", r"\w", r"\W", r"\s", r"\D", "[ab]", "[^a]", "[^b-]", r"[\w-]", r"\x61"]
)  # fmt: skip
_counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}?"])
_assertions = st.sampled_from(["^", "$", r"\b", r"\B", "(?<=a)", "(?<![b1])", "(?<=ab)"])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.tuples(inner, _counts).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        inner.map(lambda body: f"({body})"),
    )


def plain_patterns() -> st.SearchStrategy[str]:
    """Returns patterns without assertions."""
    return st.recursive(_atoms, _grown, max_leaves=6)


def asserting_patterns() -> st.SearchStrategy[str]:
    """Returns patterns with anchors, word boundaries and lookaround in any place."""
    looks = st.tuples(st.sampled_from(["(?=", "(?!"]), plain_patterns(), st.sampled_from(["", "$"])).map(
        lambda parts: f"{parts[0]}{parts[1]}{parts[2]})"
    )
    return st.recursive(st.one_of(_atoms, _atoms, _assertions, looks), _grown, max_leaves=6)


def texts(letters: str = LETTERS) -> st.SearchStrategy[str]:
    """Returns short texts."""
    return st.text(st.sampled_from(letters), max_size=7)


@st.composite
def members(draw: st.DrawFn, language: Language) -> str:
    """Draws a string of a language, by a random walk on its automaton that ends soon after it may."""
    automaton = language.automaton()
    live = automaton.live()
    state, text = 0, ""
    chance = draw(st.randoms(use_true_random=False))
    while not automaton.accepting[state] or chance.random() < 0.8:
        exits = [
            (target, chars)
            for target, chars in zip(automaton.moves[state], automaton.alphabet.classes, strict=True)
            if live[target]
        ]
        if not exits or len(text) > 300:
            break
        state, chars = chance.choice(exits)
        text += chr(chance.randint(*chance.choice(chars.ranges)))
    return text if automaton.accepting[state] else text + _completion(language, state)


def _completion(language: Language, state: int) -> str:
    """Returns a shortest way from a state to the end."""
    automaton = language.automaton()
    order = [state, *(found for found in range(len(automaton.moves)) if found != state)]
    numbers = {found: number for number, found in enumerate(order)}
    moves = tuple(tuple(numbers[target] for target in automaton.moves[found]) for found in order)
    rest = Dfa(automaton.alphabet, moves, tuple(automaton.accepting[found] for found in order)).shortest()
    if rest is None:
        raise ValueError("the walk left the live states")
    return rest
