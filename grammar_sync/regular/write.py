r"""Writes regular languages as text that xgrammar, llguidance and Python's re all read alike.

The dialect is small: literals, classes, groups ``(?:...)``, ``|`` and counts; no ``.``, no ``\d``, no anchors, since
engines differ on these. ``/`` is written ``\/``, so that the text can stand between slashes, as in Lark.

The JSON form of a language is what stands between the quotes of a JSON string. Only the spelling of
``json.dumps(..., ensure_ascii=False)`` is written: short escapes where there are any, ``\u00xx`` in lower case for the
other control characters, everything else as it is. Other spellings of a string (``\u0041``, ``\/``) are left out.
"""

from __future__ import annotations

from typing import Final

from grammar_sync.regular.automaton import Dfa
from grammar_sync.regular.chars import CharSet, RegularError, char_set, characters
from grammar_sync.regular.syntax import (
    EMPTY_STRING,
    NOTHING,
    Chars,
    Choice,
    Concat,
    Node,
    Repeat,
    children,
    choice,
    concat,
    literal,
    repeat,
)

MAX_TEXT_CHARS: Final = 32_768  # of a written regex or rule set
MAX_TREE_NODES: Final = 3_000  # of a tree read off an automaton
MAX_TREE_DEPTH: Final = 80
_MAX_TREE_WORK: Final = 200_000  # nodes looked at while a tree is read off; less than a second of CPU time
_MAX_ELIMINATED_STATES: Final = 1_000

_SHORT_ESCAPES: Final = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_MUST_ESCAPE: Final = char_set([(0, 0x1F)]) | characters('"\\')
_REGEX_SPECIAL: Final = frozenset("\\.*+?()[]{}|^$/")
_CLASS_SPECIAL: Final = frozenset("\\[]^-/")
_UNSAFE_IN_CLASS: Final = frozenset("&~")  # doubled, they are set operations in some dialects
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPELLED_OUT: Final = 3  # repetitions of a single character up to this count are written out


def json_form(node: Node) -> Node:
    """Returns the tree of the language's strings as they stand between the quotes of JSON text."""
    if isinstance(node, Chars):
        return _json_chars(node.chars)
    if isinstance(node, Concat):
        return concat(json_form(part) for part in node.parts)
    if isinstance(node, Choice):
        return choice(json_form(option) for option in node.options)
    if isinstance(node, Repeat):
        return repeat(json_form(node.body), node.minimum, node.maximum)
    raise TypeError(f"an assertion has no JSON form: {node!r}")


def _json_chars(chars: CharSet) -> Node:
    options: list[Node] = [Chars(chars - _MUST_ESCAPE)]
    escaped = chars & _MUST_ESCAPE
    short = "".join(letter for char, letter in _SHORT_ESCAPES.items() if ord(char) in escaped)
    if short:
        options.append(concat([literal("\\"), Chars(characters(short))]))
    by_digit: dict[str, str] = {}
    for code in range(0x20):
        if code in escaped and chr(code) not in _SHORT_ESCAPES:
            by_digit[f"{code:02x}"[0]] = by_digit.get(f"{code:02x}"[0], "") + f"{code:02x}"[1]
    options += [concat([literal(f"\\u00{high}"), Chars(characters(low))]) for high, low in by_digit.items()]
    return choice(options)


def _char(code: int, special: frozenset[str]) -> str:
    """Returns a character as it is written in a regex, a class or a quoted literal."""
    char = chr(code)
    if char in special:
        return "\\" + char
    if char in _NAMED:
        return _NAMED[char]
    if char.isprintable() and char not in _UNSAFE_IN_CLASS:
        return char
    # Not \xhh: xgrammar reads as many digits as follow it.
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _class_body(chars: CharSet) -> str:
    written: list[str] = []
    for low, high in chars.ranges:
        written.append(_char(low, _CLASS_SPECIAL))
        if high > low:
            written.append(("-" if high > low + 1 else "") + _char(high, _CLASS_SPECIAL))
    return "".join(written)


def _class(chars: CharSet) -> str:
    inside, outside = _class_body(chars), _class_body(~chars)
    return f"[^{outside}]" if outside and len(outside) < len(inside) else f"[{inside}]"


def _counted(minimum: int, maximum: int | None) -> str:
    plain = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((minimum, maximum))
    if plain is not None:
        return plain
    if minimum == maximum:
        return f"{{{minimum}}}"
    return f"{{{minimum},{'' if maximum is None else maximum}}}"


def _spelled_out(node: Repeat) -> bool:
    """Returns whether a repetition is shorter when its one character is written again and again."""
    single = isinstance(node.body, Chars) and node.body.chars.size() == 1
    return single and node.minimum == node.maximum and node.minimum <= _SPELLED_OUT


def _checked(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise RegularError(f"the pattern becomes longer than {MAX_TEXT_CHARS} characters when rewritten")
    return text


def regex_text(node: Node) -> str:
    """Returns an assertion-free tree as a whole-string regular expression.

    Raises:
        RegularError: The language is empty (no expression says that in every dialect), or the text becomes too long.
    """
    if node == NOTHING:
        raise RegularError("no string matches")
    return _checked(_regex(node))


def _regex(node: Node) -> str:
    if isinstance(node, Chars):
        single = node.chars.size() == 1
        return _regex_char(node.chars.ranges[0][0]) if single else _class(node.chars)
    if isinstance(node, Concat):
        return _checked(
            "".join(f"(?:{_regex(part)})" if isinstance(part, Choice) else _regex(part) for part in node.parts)
        )
    if isinstance(node, Choice):
        return _checked("|".join(map(_regex, node.options)))
    if not isinstance(node, Repeat):
        raise TypeError(f"an assertion cannot be written: {node!r}")
    body = _regex(node.body)
    if isinstance(node.body, Chars):
        if _spelled_out(node):
            return body * node.minimum
    else:
        body = f"(?:{body})"
    return body + _counted(node.minimum, node.maximum)


def _regex_char(code: int) -> str:
    char = chr(code)
    return char if char in _UNSAFE_IN_CLASS else _char(code, _REGEX_SPECIAL)


_QUOTED_SPECIAL: Final = frozenset('"\\')


def ebnf_expression(node: Node) -> str:
    """Returns an assertion-free tree as the right side of a rule in xgrammar's EBNF.

    Raises:
        RegularError: The language is empty, or the text becomes too long.
    """
    if node == NOTHING:
        raise RegularError("no string matches")
    return _checked(_ebnf(node))


def _ebnf(node: Node) -> str:
    if isinstance(node, Chars):
        single = node.chars.size() == 1
        return f'"{_char(node.chars.ranges[0][0], _QUOTED_SPECIAL)}"' if single else _class(node.chars)
    if isinstance(node, Concat):
        return _checked(_ebnf_sequence(node)) if node.parts else '""'
    if isinstance(node, Choice):
        return _checked(" | ".join(map(_ebnf, node.options)))
    if not isinstance(node, Repeat):
        raise TypeError(f"an assertion cannot be written: {node!r}")
    if (node.minimum, node.maximum) == (0, None) and isinstance(node.body, Choice):
        return _ebnf_runs(node.body)
    body = _ebnf(node.body)
    if _spelled_out(node):
        return f'"{body[1:-1] * node.minimum}"'
    return (body if isinstance(node.body, Chars) else f"({body})") + _counted(node.minimum, node.maximum)


def _ebnf_runs(body: Choice) -> str:
    """Returns any number of a choice, a run of single characters at a time.

    That is how xgrammar keeps the masks of such states ready; written as one group it computes each mask anew, which
    takes 30 ms with 49,152 tokens.
    """
    single = next((option for option in body.options if isinstance(option, Chars)), None)
    if single is None or single.chars.size() == 1:
        return f"({_ebnf(body)})*"
    run = _ebnf(single) + "*"
    return f"{run} (({_ebnf(choice(option for option in body.options if option != single))}) {run})*"


def _ebnf_sequence(node: Concat) -> str:
    """Returns a sequence, with neighbouring single characters in one quoted literal."""
    written: list[str] = []
    for part in node.parts:
        text = f"({_ebnf(part)})" if isinstance(part, Choice) else _ebnf(part)
        if written and text[0] == text[-1] == written[-1][0] == written[-1][-1] == '"':
            written[-1] = written[-1][:-1] + text[1:]
        else:
            written.append(text)
    return " ".join(written)


def ebnf_rules(dfa: Dfa, name: str, *, json_encoded: bool) -> str:
    """Returns an automaton as rules of xgrammar's EBNF, one a line: rule ``name``, and ``name_N`` for further states.

    Args:
        dfa: An automaton.
        name: The name of the first rule.
        json_encoded: Write the JSON form.

    Raises:
        RegularError: The language is empty, or the text becomes too long.
    """
    live = dfa.live()
    if not live[0]:
        raise RegularError("no string matches")
    exits = [_exits(dfa, state, live) for state in range(len(dfa.moves))]
    ends = [dfa.accepting[state] and not exits[state] for state in range(len(dfa.moves))]
    lines: list[str] = []
    length = 0
    for state, targets in enumerate(exits):
        if not live[state] or (ends[state] and state):
            continue
        options: list[str] = []
        for target, chars in targets.items():
            # One option for each way to write a character: a group before a rule would have a mask of its own.
            tree: Node = json_form(Chars(chars)) if json_encoded else Chars(chars)
            for option in tree.options if isinstance(tree, Choice) else (tree,):
                written = _ebnf(option)
                grouped = f"({written})" if " | " in written else written
                options.append(grouped if ends[target] else f"{grouped} {_rule(name, target)}")
        if dfa.accepting[state]:
            options.append('""')
        lines.append(f"{_rule(name, state)} ::= {' | '.join(options)}")
        length += len(lines[-1]) + 1
        if length > MAX_TEXT_CHARS:
            raise RegularError(f"the pattern becomes longer than {MAX_TEXT_CHARS} characters when rewritten")
    return "\n".join(lines)


def _rule(name: str, state: int) -> str:
    return f"{name}_{state}" if state else name


def _exits(dfa: Dfa, state: int, live: tuple[bool, ...]) -> dict[int, CharSet]:
    """Returns the live states that a state moves to, each with the characters that lead there."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for target, chars in zip(dfa.moves[state], dfa.alphabet.classes, strict=True):
        if live[target]:
            ranges.setdefault(target, []).extend(chars.ranges)
    return {target: char_set(found) for target, found in ranges.items()}


def tree_of(dfa: Dfa) -> Node:
    """Returns a syntax tree of the automaton's language, by eliminating its states one after another.

    Raises:
        RegularError: The tree becomes too large; rules (:func:`ebnf_rules`) are never larger than the automaton.
    """
    live = dfa.live()
    states = [state for state, found in enumerate(live) if found]
    if len(states) > _MAX_ELIMINATED_STATES:
        raise RegularError(f"an automaton of {len(states)} states is too large for one expression")
    first, last = -1, -2
    outgoing: dict[int, dict[int, Node]] = {first: {0: EMPTY_STRING}} if live[0] else {first: {}}
    incoming: dict[int, set[int]] = {last: set(), **{state: set() for state in states}}
    for state in states:
        outgoing[state] = {target: Chars(chars) for target, chars in _exits(dfa, state, live).items()}
        if dfa.accepting[state]:
            outgoing[state][last] = EMPTY_STRING
    for state, targets in outgoing.items():
        for target in targets:
            incoming[target].add(state)
    waiting = set(states)
    work = 0
    while waiting:
        state = min(waiting, key=lambda found: (len(incoming[found]) * len(outgoing[found]), -found))
        waiting.discard(state)
        work += _eliminate(state, outgoing, incoming)
        if work > _MAX_TREE_WORK:
            raise RegularError("the automaton is too large for one expression")
    return outgoing[first].get(last, NOTHING)


def _eliminate(state: int, outgoing: dict[int, dict[int, Node]], incoming: dict[int, set[int]]) -> int:
    """Takes a state out, and returns how many nodes were looked at."""
    work = 0
    targets = outgoing.pop(state)
    sources = incoming.pop(state)
    loop = targets.pop(state, NOTHING)
    sources.discard(state)
    middle = repeat(loop, 0, None)
    for source in sorted(sources):
        before = outgoing[source].pop(state)
        for target, after in targets.items():
            through = concat([before, middle, after])
            merged = choice([outgoing[source].get(target, NOTHING), through])
            work += _check_tree(merged)
            outgoing[source][target] = merged
            incoming[target].add(source)
    for target in targets:
        incoming[target].discard(state)
    return work


def _check_tree(node: Node) -> int:
    stack = [(node, 1)]
    count = 0
    while stack:
        found, depth = stack.pop()
        count += 1
        if count > MAX_TREE_NODES or depth > MAX_TREE_DEPTH:
            raise RegularError("the automaton is too large for one expression")
        stack.extend((child, depth + 1) for child in children(found))
    return count
