from __future__ import annotations

import json
import re
from functools import lru_cache

import llguidance
import pytest
import xgrammar
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from regular_cases import asserting_patterns, texts

from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.language import Language, not_pattern, pattern, strings, whole_regex, words
from grammar_sync.regular.write import ebnf_rules, tree_of

BYTES = [bytes([value]) for value in range(256)]
END = len(BYTES)


class _ByteTokenizer:
    """What llguidance asks of a tokenizer."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*BYTES, b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def xgrammar_compiler() -> xgrammar.GrammarCompiler:
    tokens = xgrammar.TokenizerInfo([*BYTES, b"<end>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(tokens, max_threads=1)


@lru_cache(maxsize=1)
def llguidance_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokenizer()), slices=[])


def xgrammar_takes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


def llguidance_takes(regex: str, text: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_regex(regex)
    matcher = llguidance.LLMatcher(llguidance_tokenizer(), grammar, log_level=0)
    assert not matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


def written(language: Language, *, json_encoded: bool = False) -> str:
    """The language as a regex; a random language that is too large for one is not a case."""
    try:
        return language.to_regex(json_encoded=json_encoded)
    except RegularError:
        reject()


def json_body(text: str) -> str:
    """What stands between the quotes of the text's JSON form."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


CASES: dict[str, Language] = {
    "name": pattern("^[a-z][a-z0-9_-]*$").with_length(2, 5),
    "specials": words(['a"b', "\\", "/&~", "[x]", "^-$", "a\nb", "\x00\x1f\x7f", "é🐲", "\u2028 \u00a0", "--&&~~||"]),
    "anything": strings(),
    "short": strings(1, 3),
    "negated class": pattern(r'^[^"\\a]{2,3}$'),
    "everything but": not_pattern("^(ab|a.b)"),
    "no foo": pattern("^((?!foo).)*$"),
    "set operations": whole_regex(r"[\^&~\-\]\[|]+"),
    "optional words": whole_regex("(?:foo|bar){0,2}(?:x|)"),
    "word characters": not_pattern(r"\w"),
}
TEXTS = [
    "", "a", "ab", "a-b", "abc_9", "abcdef", 'a"b', "\\", "/&~", "[x]", "^-$", "a\nb", "\x00\x1f\x7f", "é🐲",
    "\u2028 \u00a0", "--&&~~||", "éé", "\n\n", '""', "aab", "foo", "xfooy", "fofo", "foobarx", "barfoofoo", "-&~^[]|",
    "\ud7ff\ue000", "٣", "\x1f",
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("json_encoded", [False, True])
def test_engines_take_the_language(name: str, json_encoded: bool) -> None:
    language = CASES[name]
    regex = language.to_regex(json_encoded=json_encoded)
    by_regex = xgrammar_compiler().compile_regex(regex)
    by_rules = xgrammar_compiler().compile_grammar(language.to_ebnf("root", json_encoded=json_encoded))
    right_linear = ebnf_rules(language.automaton(), "root", json_encoded=json_encoded)
    by_states = xgrammar_compiler().compile_grammar(right_linear)
    taken = 0
    for text in TEXTS:
        expected = language.fullmatch(text)
        taken += expected
        written = json_body(text) if json_encoded else text
        assert bool(re.fullmatch(regex, written)) == expected, text
        assert xgrammar_takes(by_regex, written) == expected, text
        assert xgrammar_takes(by_rules, written) == expected, text
        assert xgrammar_takes(by_states, written) == expected, text
        assert llguidance_takes(regex, written) == expected, text
    assert taken


@settings(deadline=None, max_examples=60)
@given(asserting_patterns(), texts("ab-1"))
def test_regex_means_the_automaton(expression: str, text: str) -> None:
    language = pattern(expression)
    if language.is_empty():
        with pytest.raises(RegularError, match="no string"):
            language.to_regex()
        return
    regex = written(language)
    assert Language(tree_of(language.automaton())).equals(language)
    assert whole_regex(regex).equals(language)
    assert bool(re.fullmatch(regex, text)) == language.fullmatch(text)


@settings(deadline=None, max_examples=60)
@given(asserting_patterns(), st.text(st.sampled_from('a"\\\n\x01\x0b\x1f/é🐲'), max_size=4))
@example(".", "\x7f")
def test_json_form(expression: str, text: str) -> None:
    language = pattern(expression)
    if language.is_empty():
        return
    regex = written(language, json_encoded=True)
    assert bool(re.fullmatch(regex, json_body(text))) == language.fullmatch(text)
    # Nothing of the JSON form is anything but the inside of a JSON string.
    form = whole_regex(regex)
    string = whole_regex(r'(?:[^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00[01][0-9a-f])*')
    assert form.is_subset(string)
    shortest = form.shortest()
    assert shortest is not None
    assert language.fullmatch(json.loads(f'"{shortest}"'))


def test_common_patterns_stay_short() -> None:
    assert pattern("^[a-z]+(-[a-z]+)*$").to_regex() == "[a-z]+(?:-[a-z]+)*"
    assert pattern(r"\.png$").to_regex() == r"[\u0000-\ud7ff\ue000-\U0010ffff]*\.png"
    assert pattern("^(https?://|/).+").to_regex(json_encoded=False).startswith(r"(?:https?:\/\/|\/)")
    assert strings(0, 24).to_regex(json_encoded=True) == (
        r'(?:[^\u0000-\u001f"\\]|\\["\\bfnrt]|\\u000[0-7bef]|\\u001[0-9a-f]){0,24}'
    )
    # Rules of a small automaton where groups repeat, one expression elsewhere.
    assert pattern("^[a-z]+(-[a-z]+)*$").to_ebnf("key").splitlines() == [
        "key ::= [a-z] key_2",
        'key_2 ::= "-" key | [a-z] key_2 | ""',
    ]
    assert pattern("^abbb?$").to_ebnf("key") == 'key ::= "a" "b"{2,3}'


def test_rules_where_an_expression_would_explode() -> None:
    language = pattern("^([a-z]+-?)*$").with_length(2, 64)
    with pytest.raises(RegularError, match="too large for one expression"):
        language.to_regex()
    rules = language.to_ebnf("root")
    assert len(rules) < 6_000
    grammar = xgrammar_compiler().compile_grammar(rules)
    for text in ("a", "ab", "a-b-c", "a--b", "a" * 64, "a" * 65, "-a"):
        assert xgrammar_takes(grammar, text) == language.fullmatch(text), text


def test_an_empty_language_is_not_written() -> None:
    for language in (words([]), pattern("a^b"), pattern("^a$").with_length(2)):
        with pytest.raises(RegularError, match="no string"):
            language.to_regex()
        with pytest.raises(RegularError, match="no string"):
            language.to_ebnf("root")


def test_a_json_string_without_bounds_has_no_group_that_repeats() -> None:
    """xgrammar fills a mask 300 times slower in a group with a rule or a star behind it."""
    rules = strings().to_ebnf("text", json_encoded=True)
    assert "(" not in rules
    assert rules.count(" text") == 4
