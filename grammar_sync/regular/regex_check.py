r"""What a regex may not have: it would be read in several ways, or it is no part of a regular expression.

Look-around, word boundaries, Unicode properties, flags and named groups mean different things, or nothing, to the
programs that check an output later.
"""

from __future__ import annotations

import re
from typing import Final

from grammar_sync.engines.prepared import CompileError

_GROUPS: Final = (
    (re.compile(r"\?<?[=!]"), "look-around"),
    (re.compile(r"\?P?<|\?'"), "a named group"),
    (re.compile(r"\?\("), "a conditional group"),
    (re.compile(r"\?>"), "an atomic group"),
    (re.compile(r"\?#"), "a comment"),
    (re.compile(r"\?(?!:)"), "flags"),
)
_ESCAPES: Final = {
    **dict.fromkeys("bB", "a word boundary"),
    **dict.fromkeys("pP", "a Unicode property"),
    **dict.fromkeys("AZzG", "an anchor"),
    **dict.fromkeys("123456789k", "a back-reference"),
}


def check_regex(source: str) -> None:
    """Checks that a regex has nothing of what is refused.

    Raises:
        CompileError: It has; says what and where.
    """
    in_class = False
    position = 0
    while position < len(source):
        character = source[position]
        following = source[position + 1 : position + 2]
        if character == "\\":
            found = _ESCAPES.get(following)
            if found is not None and not (in_class and following not in "pP"):
                raise CompileError(f"the regex has {found} at position {position}, which is not supported")
            position += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            # A bracket at the front is a character of the class.
            position += 1 if following == "]" else 2 if source[position + 1 : position + 3] == "^]" else 0
        elif character == "(":
            for pattern, name in _GROUPS:
                if pattern.match(source, position + 1):
                    raise CompileError(f"the regex has {name} at position {position}, which is not supported")
        position += 1
