"""The door: whatever a client sends is either a valid request or an error that names the field and what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_sync.spec import GrammarSpec
from runtime.chat_template import ChatTemplate
from runtime.request_builder import Request, RequestBuilder
from runtime.request_error import RequestError
from runtime.request_limits import RequestLimits
from runtime.tokenizer import Tokenizer

VOCAB = 257
MAX_LEN = 64
TEMPLATE = ChatTemplate(
    {
        "default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    },
    {},
)


class ByteTokenizer(Tokenizer):
    """One id a byte; 256 begins a text that is encoded with special tokens, if asked for."""

    def __init__(self, *, begins: bool = False) -> None:
        self.size = VOCAB
        self.begins = begins
        self.special_token_ids = frozenset({256})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [256] * (self.begins and add_special_tokens) + list(text.encode())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        return TEMPLATE.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)


def builder(*, kv_cache_tokens: int = 1000, begins: bool = False) -> RequestBuilder:
    return RequestBuilder(ByteTokenizer(begins=begins), RequestLimits(VOCAB, MAX_LEN, kv_cache_tokens, 10_000))


def build(**fields: Any) -> Request:
    return builder().build({"prompt": "ab"} | fields)


def error_of(fields: Mapping[str, Any], **limits: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        builder(**limits).build(fields)
    info = caught.value.info
    assert info.message == str(caught.value)
    assert "\n" not in info.message
    assert len(info.message) < 400, "an error is one line for a person, however long the value"
    return caught.value


def cases(name: str, *values: Any) -> list[tuple[str, Any]]:
    return [(name, value) for value in values]


def test_a_plain_prompt() -> None:
    request = build(max_tokens=5, temperature=0.5, seed=3, id="mine")
    assert (request.prompt_token_ids, request.max_tokens, request.seed) == ([97, 98], 5, 3)
    assert request.params.temperature == 0.5
    assert request.grammar is None


def test_prompt_forms() -> None:
    with_begin = builder(begins=True)
    assert with_begin.build({"prompt": "a"}).prompt_token_ids == [256, 97]
    assert with_begin.build({"prompt": ""}).prompt_token_ids == [256]
    assert with_begin.build({"prompt_token_ids": [0, 256, 5]}).prompt_token_ids == [0, 256, 5]
    chat = with_begin.build({"messages": [{"role": "user", "content": "x"}]})
    assert bytes(chat.prompt_token_ids) == b"<user>x:", "the template has its special tokens already"
    assert builder().build({"prompt": "a", "messages": None, "prompt_token_ids": None}).prompt_token_ids == [97]


def test_max_tokens_is_what_the_context_leaves() -> None:
    assert build().max_tokens == MAX_LEN - 2
    assert build(max_tokens=MAX_LEN - 2).max_tokens == MAX_LEN - 2
    assert builder(kv_cache_tokens=10).build({"prompt": "ab"}).max_tokens == 8
    assert builder().build({"prompt": "a" * (MAX_LEN - 1)}).max_tokens == 1


def test_s12_a_missing_seed_is_minted_and_differs() -> None:
    seeds = {build().seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert build(seed=None).seed != build(seed=None).seed
    assert [build(seed=seed).seed for seed in (0, 42, 2**64 - 1)] == [0, 42, 2**64 - 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": True}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": "a" * MAX_LEN}, "prompt"),
        ({"prompt": "a" * 100_000}, "prompt"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [[]]}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids"),
        ({"prompt_token_ids": {"0": 1}}, "prompt_token_ids"),
        ({"prompt_token_ids": [257]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.0]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [None]}, "prompt_token_ids"),
        ({"prompt_token_ids": ["1"]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**63]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * MAX_LEN}, "prompt_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * MAX_LEN}]}, "messages"),
    ],
)
def test_bad_prompts_name_their_field(fields: dict[str, Any], param: str) -> None:
    error = error_of(fields)
    assert error.info.code == "invalid_request"
    assert error.info.param == param
    assert param in error.info.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *cases("temperature", -0.1, -1, float("nan"), float("inf"), 1e10, "0.5", True, [1]),
        *cases("top_p", 0, 1.0001, -0.5, float("nan"), "1", True),
        *cases("top_k", -2, 1.5, "5", True, 2**31),
        *cases("min_p", -0.01, 1.01, float("nan"), "0"),
        *cases("seed", 2**64, -1, 1.5, True, "7"),
        *cases("n", 0, -1, 129, 1.0, True),
        *cases("max_tokens", 0, -1, MAX_LEN + 1, MAX_LEN - 1, 1.5, "5", True),
        *cases("min_tokens", -1, MAX_LEN + 1, 1.5, True),
        *cases("stop", "", [""], ["a", ""], [1], 5, {"a": 1}, ["x"] * 17),
        *cases("stop_token_ids", [151645], [-1], [257], [1.0], [True], 5, "5"),
        *cases("ignore_eos", 1, "true", 0),
        *cases("filter_order", "top_p_first", 1, ""),
        *cases("logit_bias", {"191222": -100}, {"-1": 1}, {"1.5": 1}, {"abc": 1}, {"": 1}, {"1": float("inf")}),
        *cases("logit_bias", {"1": float("nan")}, {"1": 101}, {"1": "5"}, {"9" * 5000: 1}, [1], 5),
        *cases("frequency_penalty", 2.1, -2.1, float("nan"), "1"),
        *cases("presence_penalty", 2.1, -2.1, float("inf")),
        *cases("repetition_penalty", 0, -1, float("nan"), float("inf")),
        *cases("logprobs", 21, -1, True, "5"),
        *cases("prompt_logprobs", 21, -1),
    ],
)
def test_bad_sampling_parameters_name_their_field(name: str, value: Any) -> None:
    error = error_of({"prompt": "ab", name: value})
    assert error.info.code == "invalid_request"
    assert error.info.param == name
    assert name in error.info.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *cases("json_schema", "", [], 3, "{", False, {"a": float("nan")}, {"a": "\ud800"}),
        *cases("json_object", 1, "true", {}),
        *cases("regex", "", 5, ["a"], "a\0b", "\ud800"),
        *cases("ebnf", "", 5, "root ::= \0"),
        *cases("choice", [], "a,b", [""], [1], ["a", "a"], {"a": 1}),
        ("structural_tag", {"structures": []}),
        ("strict", "yes"),
    ],
)
def test_bad_grammars_name_their_field(name: str, value: Any) -> None:
    error = error_of({"prompt": "ab", name: value})
    assert error.info.code == "grammar_error"
    assert error.info.param == name
    assert name in error.info.message


def test_two_grammars_are_refused() -> None:
    assert error_of({"prompt": "a", "regex": "a", "choice": ["a"]}).info.code == "grammar_error"


def test_grammars_that_ask_for_nothing() -> None:
    assert build(json_object=False).grammar is None
    assert build(regex=None, json_schema=None, strict=None).grammar is None
    grammar = build(json_object=True).grammar
    assert isinstance(grammar, GrammarSpec)
    assert grammar.kind == "json_object"


@pytest.mark.parametrize("name", ["promt", "max_new_tokens", "best_of", "", "Temperature", "__class__"])
def test_unknown_fields_are_named(name: str) -> None:
    error = error_of({"prompt": "a", name: 1})
    assert error.info.param == name
    assert name in error.info.message


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("response_format", "json_schema"),
        ("jsonschema", "json_schema"),
        ("guided_json", "json_schema"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "ebnf"),
    ],
)
def test_what_others_call_a_grammar_is_told_its_name_here(name: str, own: str) -> None:
    error = error_of({"prompt": "a", name: {}})
    assert error.info.param == name
    assert own in error.info.message.partition(": ")[2]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a" * 12},
        {"prompt_token_ids": [1] * 12},
        {"messages": [{"role": "user", "content": "abcdef"}]},
    ],
)
def test_a_prompt_beyond_the_kv_cache_names_the_field_that_was_sent(fields: dict[str, Any]) -> None:
    error = error_of(fields, kv_cache_tokens=12)
    assert "12" in error.info.message
    assert error.info.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"prompt_token_ids": ["x" * 100_000]}, id="prompt_token_ids"),
        pytest.param({"prompt": "a", "x" * 100_000: 1}, id="unknown"),
        pytest.param({"prompt": "a", "stop": ["x" * 10] * 10_000}, id="stop"),
        pytest.param({"prompt": "a", "regex": ["x" * 100_000]}, id="regex"),
        pytest.param({"messages": [{"role": {"x": "y" * 100_000}}]}, id="role"),
        pytest.param({"messages": [{"role": "user", "content": [{"type": "z" * 100_000}]}]}, id="content"),
    ],
)
def test_long_values_give_short_messages(fields: dict[str, Any]) -> None:
    assert 0 < len(error_of(fields).info.message) < 400


@pytest.mark.parametrize("digits", [100, 5000])
@pytest.mark.parametrize(
    "name", ["seed", "max_tokens", "n", "top_k", "temperature", "prompt_token_ids", "stop_token_ids"]
)
def test_integers_of_any_length_are_refused(name: str, digits: int) -> None:
    value: Any = 10**digits
    if name.endswith("_ids"):
        value = [value]
    fields = {name: value} if name == "prompt_token_ids" else {"prompt": "a", name: value}
    assert error_of(fields).info.param == name


@pytest.mark.parametrize(
    "name",
    [
        "prompt",
        "prompt_token_ids",
        "messages",
        "temperature",
        "stop",
        "logit_bias",
        "stop_token_ids",
        "json_schema",
        "json_object",
        "regex",
        "ebnf",
        "choice",
        "strict",
        "filter_order",
        "seed",
        "nonsense",
    ],
)
def test_values_nested_as_deep_as_json_can_be_read_are_refused(name: str) -> None:
    prompt = "" if name in {"prompt", "prompt_token_ids", "messages"} else '"prompt": "a", '
    limit = sys.getrecursionlimit()
    for depth in (100, *range(limit - 120, limit + 2)):
        body = "{" + prompt + f'"{name}": ' + "[" * depth + "]" * depth + "}"
        with pytest.raises(RequestError):
            builder().parse(body)


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "null", '"a"', "5", "[" * 100_000, '{"prompt": "a"} x', '{"seed": 1' + "0" * 5000],
    ids=lambda body: body[:12],
)
def test_a_body_that_is_no_object_is_refused(body: str) -> None:
    with pytest.raises(RequestError) as caught:
        builder().parse(body)
    assert caught.value.info.code == "invalid_request"
    assert "\n" not in str(caught.value)


def test_a_body_is_read_as_json() -> None:
    request = builder().parse('{"prompt": "\\u00e9", "seed": 18446744073709551615, "id": null}')
    assert (request.prompt_token_ids, request.seed) == (list("é".encode()), 2**64 - 1)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(
    [
        "prompt",
        "prompt_token_ids",
        "messages",
        "id",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "n",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "logit_bias",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "json_schema",
        "json_object",
        "regex",
        "ebnf",
        "choice",
        "structural_tag",
        "strict",
        "filter_order",
    ]
)


def outcome_of(fields: dict[str, Any]) -> Request | RequestError:
    try:
        return builder().build(fields)
    except RequestError as error:
        return error


@given(fields=st.dictionaries(_names | st.text(max_size=4), _json, max_size=4), with_prompt=st.booleans())
@settings(max_examples=150, deadline=None)
def test_anything_is_a_request_or_a_request_error(fields: dict[str, Any], with_prompt: bool) -> None:
    if with_prompt:
        fields = {**fields, "prompt": "ab"}
    request = outcome_of(fields)
    if isinstance(request, RequestError):
        assert request.info.message
        assert request.info.param is not None
        return
    assert 1 <= len(request.prompt_token_ids) < MAX_LEN
    assert all(0 <= token_id < VOCAB for token_id in request.prompt_token_ids)
    assert 1 <= request.max_tokens <= MAX_LEN - len(request.prompt_token_ids)
    assert 0 <= request.seed < 2**64
    assert request.params.n >= 1
    msgspec.msgpack.encode((request.params, request.grammar))


def test_priority_and_cache_salt_go_with_the_request() -> None:
    assert (build().priority, build().cache_salt) == (0, "")
    request = build(priority=-3, cache_salt="tenant-1")
    assert (request.priority, request.cache_salt) == (-3, "tenant-1")
    assert (build(priority=None, cache_salt=None).priority, build(cache_salt=None).cache_salt) == (0, "")


@pytest.mark.parametrize("value", [1.0, "1", True, 2**31, -(2**31), 10**50, [1]])
def test_a_priority_is_an_integer_of_32_bits(value: Any) -> None:
    assert error_of({"prompt": "a", "priority": value}).info.param == "priority"


@pytest.mark.parametrize("value", ["", "x" * 1025, 7, ["a"]])
def test_a_cache_salt_is_a_short_text(value: Any) -> None:
    assert error_of({"prompt": "a", "cache_salt": value}).info.param == "cache_salt"


def test_a_prompt_to_score_must_fit_into_the_kv_cache() -> None:
    assert builder(kv_cache_tokens=3).build({"prompt": "abc"}, score=True).max_tokens == 0
    with pytest.raises(RequestError, match="prompt has 4 tokens: the KV cache has room for 3"):
        builder(kv_cache_tokens=3).build({"prompt": "abcd"}, score=True)


@pytest.mark.parametrize("value", [1, None])
def test_what_only_a_score_has_is_told_so(value: object) -> None:
    with pytest.raises(
        RequestError, match=r"^prompt_tokens is no field of a request that generates: only a score"
    ) as e:
        builder().build({"prompt": "ab", "prompt_tokens": value})
    assert e.value.info.param == "prompt_tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("logprobs", 0),
        ("return_support", True),
        ("regex", "a"),
        ("json_schema", {"type": "object"}),
        ("json_object", True),
        ("choice", ["a"]),
    ],
)
def test_a_score_refuses_by_name_what_only_generating_gives(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is not possible in a score") as caught:
        builder().build({"prompt": "ab", name: value}, score=True)
    assert caught.value.info.param == name


def test_a_score_takes_the_parameters_of_the_request_that_is_scored_again() -> None:
    fields = {
        "prompt": "ab",
        "seed": 3,
        "top_p": 0.5,
        "max_tokens": 5,
        "stop": ["x"],
        "return_support": False,
        "logprob_token_ids": [4],
        "logprobs": None,
        "n": 1,
    }
    request = builder().build(fields, score=True)
    assert (request.max_tokens, request.params.logprob_token_ids, request.params.prompt_logprobs) == (0, (4,), 0)


def test_min_tokens_beyond_what_the_default_allows_is_refused() -> None:
    door = RequestBuilder(ByteTokenizer(), RequestLimits(VOCAB, MAX_LEN, 1000, 20))
    assert door.build({"prompt": "ab", "min_tokens": 20}).max_tokens == 20
    assert door.build({"prompt": "ab", "min_tokens": 30, "max_tokens": 40}).params.min_tokens == 30
    for prompt, most in (("ab", 20), ("a" * (MAX_LEN - 5), 5)):
        with pytest.raises(RequestError, match=f"without max_tokens the output has {most} tokens at most") as caught:
            door.build({"prompt": prompt, "min_tokens": 21})
        assert caught.value.info.param == "min_tokens"
    # Nothing is generated, so nothing is too short.
    assert door.build({"prompt": "ab", "min_tokens": 30}, score=True).params.min_tokens == 30


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^the request is ambiguous: the key 'seed' stands twice in one object$"):
        builder().parse('{"prompt": "ab", "seed": 1, "seed": 2}')


def test_the_key_that_stands_twice_is_the_param() -> None:
    with pytest.raises(RequestError) as caught:
        builder().parse('{"prompt": "ab", "seed": 1, "seed": 2}')
    assert caught.value.info.param == "seed"
