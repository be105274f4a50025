r"""EBNF means one language, whichever engine reads it: escapes, classes, counts, empty options, and what is refused."""

from __future__ import annotations

import re
from functools import cache

import pytest
from grammars import END, Speller, small_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_sync.engines.backend import CompiledGrammar, GrammarBackend, compile_spec
from grammar_sync.engines.llguidance_backend import LLGuidanceBackend
from grammar_sync.engines.prepared import CompileError
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.spec import parse_grammar

VOCABULARY = small_vocabulary()
SPELLER = Speller(VOCABULARY)
BACKENDS: dict[str, GrammarBackend] = {
    "xgrammar": XGrammarBackend(VOCABULARY),
    "llguidance": LLGuidanceBackend(VOCABULARY),
}


@cache
def compiled(engine: str, source: str, root: str | None = None) -> CompiledGrammar:
    spec = parse_grammar({"ebnf": source, "ebnf_root": root})
    assert spec is not None
    return compile_spec(BACKENDS[engine], spec)[1]


def takes(engine: str, source: str, text: str, root: str | None = None) -> bool:
    matcher = compiled(engine, source, root).new_matcher()
    return all(matcher.accept(token_id) for token_id in SPELLER.ids(text)) and matcher.accept(END)


CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "two digits in a literal": (r'root ::= "\x41b"', ["Ab"], ["\u041b", "A"]),
    "two digits in a class": (r"root ::= [\x41b]", ["A", "b"], ["\u041b"]),
    "two digits in a range": (r"root ::= [\x41-\x43b]", ["B", "b"], ["\u043b", "D"]),
    "four digits": (r'root ::= "\u00411"', ["A1"], ["\u0411"]),
    "eight digits": (r'root ::= "\U000000411\U0001f600"', ["A1\U0001f600"], ["A"]),
    "not printable": (r'root ::= "\u2028\U000e0001" [\U000e0001] "\x7f"', ["\u2028\U000e0001\U000e0001\x7f"], []),
    "NUL in a range": (r'root ::= [^"\\\x7F\x00-\x1F] "x"', ["ax", "яx"], ["\x01x", "\0x", '"x']),
    "named": (r'root ::= "\n\r\t\\\"\]\[\-\^\/"', ['\n\r\t\\"][-^/'], []),
    "escapes in a class": (r"root ::= [\-a\]\[\^/]", ["-", "a", "]", "[", "^", "/"], ["\\", "b"]),
    "dashes at the ends": (r"root ::= [a-] [-a] [+--]", ["---", "aa,"], ["b--"]),
    "set signs": ("root ::= [&&] [~~a] [+a-]", ["&~-", "&aa"], ["a~-", "&~,"]),
    "any character": ("root ::= [^]", ["\n", "я"], ["", "ab"]),
    "line ends": ("root ::= [^\\n]", ["\r", "\u2028"], ["\n"]),
    "option on the next line": ('root ::= "a" |\n  "b"\n  | "c"', ["a", "b", "c"], ["ab"]),
    "goes on below": ('root ::= "a" # "x"\r\n  "b"', ["ab"], ["a", "ax"]),
    "none": ('root ::= "a"{0} ("b"){0,0} "c"', ["c"], ["ac", "bc"]),
    "counts": ('root ::= "a" { 2 , 3 } [bc]{1,} "d"{2}', ["aabdd", "aaacbdd"], ["abdd", "aaaabdd", "aabd"]),
    "empty options": ('root ::= ("a" | )* () "q" | ', ["", "q", "aaq"], ["a"]),
    "empty rule": ('root ::= a "x"\na ::=\n', ["x"], [""]),
    "a text begins another": ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab", "abbc"]),
    "a class begins a text": ('root ::= [a-z] "1" | "ab" "2"', ["a1", "ab2"], ["ab1"]),
    "names": (
        'root ::= true f-x 1a r_x x\ntrue ::= "t"\nf-x ::= "f"\n1a ::= "1"\nr_x ::= "r"\nx ::= "x"',
        ["tf1rx"],
        [],
    ),
    "a rule that never ends": ('root ::= "b" | "a" x\nx ::= "c" x', ["b"], ["a", "ac", "acc"]),
    "rules that never end": (
        'root ::= ("a" (x | "b" y?) | x)+ z* z{0,2} ("q" | z "r"){2}\nx ::= "c" y\ny ::= x "d"\nz ::= [0-9] z',
        ["abqq", "ababqq"],
        ["a1qq", "abcqq", "ab1qq", "abq1r"],
    ),
    "rules of themselves": ('root ::= "(" root ")" | root "+" root | "1"', ["((1))+1"], ["(1", "1+"]),
}


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_one_language(name: str, engine: str) -> None:
    source, taken, refused = CASES[name]
    assert [text for text in taken if not takes(engine, source, text)] == []
    assert [text for text in refused if takes(engine, source, text)] == []


@pytest.mark.parametrize("engine", BACKENDS)
def test_it_starts_at_the_rule_asked_for(engine: str) -> None:
    source = 'root ::= "x" r_x\nr_x ::= "a" root | "b"'
    assert takes(engine, source, "axb", "r_x")
    assert not takes(engine, source, "xb", "r_x")


@pytest.mark.parametrize("engine", BACKENDS)
def test_a_choice_of_characters_that_cannot_be_printed(engine: str) -> None:
    spec = parse_grammar({"choice": ["\U000e0001", "\u2028"]})
    assert spec is not None
    for text in ("\U000e0001", "\u2028"):
        matcher = compile_spec(BACKENDS[engine], spec)[1].new_matcher()
        assert all(matcher.accept(token_id) for token_id in SPELLER.ids(text))
        assert matcher.accept(END)


REFUSED = {
    r'root ::= "\x00a"': "a NUL character in a literal at line 1, column 11",
    r"root ::= [\x00]": "the class holds no character but NUL at line 1, column 10",
    r'root ::= "\x4"': r"the escape \x takes 2 hexadecimal digits at line 1, column 11",
    r'root ::= "\x4g"': r"the escape \x takes 2 hexadecimal digits at line 1, column 11",
    r"root ::= [a\u41]": r"the escape \u takes 4 hexadecimal digits at line 1, column 12",
    r'root ::= "\U0001f60"': r"the escape \U takes 8 hexadecimal digits at line 1, column 11",
    r'root ::= "\U00110000"': r"the escape \U00110000 is no character at line 1, column 11",
    r"root ::= [\ud800]": r"the escape \ud800 is no character at line 1, column 11",
    r'root ::= "\d"': r"unknown escape \d at line 1, column 11",
    'root ::= "a"\n#\nroot ::= ""': "rule root, defined at line 1, column 1, is defined again at line 3, column 1",
    "root ::= .": r"'.' is no part of the dialect, write [^\n] for it: found at line 1, column 10",
    'rout ::= "a"': "the start rule root is not defined in the grammar that begins at line 1, column 1",
    'root ::= "a"\n  | foo': "rule foo is not defined at line 2, column 5",
    'root ::= ("a"': "a parenthesis is never closed, opened at line 1, column 10",
    'root ::= "a")': "a parenthesis is closed that was never opened at line 1, column 13",
    'root ::= "a': "the literal is not closed on its line, opened at line 1, column 10",
    "root ::= [a\n]": "the class is not closed on its line, opened at line 1, column 10",
    "root ::= []": "the class holds no character at line 1, column 10",
    "root ::= [z-a]": "the range z-a ends before it begins at line 1, column 11",
    'root ::= "a"*?': "a count of a count: put the first in parentheses: found at line 1, column 14",
    'root ::= "a"{,2}': "expected {n}, {n,} or {n,m} at line 1, column 13",
    'root ::= "a"{3,2}': "the count {3,2} has its bounds the wrong way round at line 1, column 13",
    'root ::= "a" b ::= "c"': "rule b must begin on a line of its own at line 1, column 14",
    "root ::= 'a'": 'unexpected "\'" at line 1, column 10',
    'root ::= "a" *\r\n\r\n  (= "b")': "unexpected '=' at line 3, column 4",
    'root ::= "a" root': "allows no output at all: rule root never comes to an end, defined at line 1, column 1",
    "\n root ::= root": "allows no output at all: rule root never comes to an end, defined at line 2, column 2",
    'root ::= "a" x | x{2}\nx ::= y "b"\ny ::= x+': "rule root never comes to an end, defined at line 1, column 1",
    "a": "expected a rule (name ::= ...) at line 1, column 1",
}


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize("source", REFUSED)
def test_refused_alike_with_its_place(source: str, engine: str) -> None:
    with pytest.raises(CompileError, match=re.escape(REFUSED[source]) + "$"):
        compiled(engine, source)


_ATOMS = st.sampled_from(['"a"', '"ab"', '"ba"', "[ab]", "[^a]", '""', r'"\x61b"', r"[\u0061-b]", "x"])
_BODIES = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.builds("{} {}".format, inner, inner),
        st.builds("({} | {})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["?", "*", "+", "{0}", "{2}", "{1,2}"])),
    ),
    max_leaves=5,
)


@given(body=_BODIES, text=st.text("ab", max_size=4))
@settings(deadline=None, max_examples=80)
def test_engines_agree(body: str, text: str) -> None:
    source = f'root ::= {body} "."\nx ::= "b" | "a" x'
    assert takes("xgrammar", source, text + ".") == takes("llguidance", source, text + ".")
