"""What requests may ask of thinking, which markers a model has, and where a prompt leaves its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from grammars import END, small_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from grammar_sync.thinking import ReasoningMarkers, ThinkingRules
from launch.request_file import _with_defaults
from runtime.messages import Settled
from runtime.request_builder import Request, RequestBuilder
from runtime.request_error import RequestError
from runtime.request_limits import RequestLimits
from runtime.thinking import find_markers
from runtime.thinking_fields import ThinkingError, marker_pair
from runtime.tokenizer import Tokenizer
from runtime.tokenizer_parts import TokenizerParts

# Qwen3's way: the model writes the start marker itself, unless it is told not to think.
OPTIONAL = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}a:"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# DeepSeek-R1's way: the template opens the think block.
ALWAYS = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:<think>\n{% endif %}"
)
MAX_LEN = 500


def tokenizer(template: str = OPTIONAL, *, tokens: bool = True) -> Tokenizer:
    backend = Backend.from_str(small_tokenizer().to_str())
    if tokens:
        backend.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return Tokenizer(TokenizerParts(backend, [END], {}, {"default": template}))


def builder(
    template: str = OPTIONAL, *, tokens: bool = True, markers: ReasoningMarkers | None = None
) -> RequestBuilder:
    model = tokenizer(template, tokens=tokens)
    limits = RequestLimits(model.size, MAX_LEN, 10_000, 100)
    return RequestBuilder(model, limits, markers=markers or find_markers(model))


def built(template: str = OPTIONAL, **fields: Any) -> Request:
    if not {"prompt", "prompt_token_ids", "messages"} & set(fields):
        fields["messages"] = [{"role": "u", "content": "<think> is what I say"}]
    return builder(template).build(fields)


def thinking(template: str = OPTIONAL, **fields: Any) -> ThinkingRules | None:
    return built(template, **fields).thinking


def test_markers_that_are_tokens_are_found() -> None:
    model = tokenizer()
    markers = find_markers(model)
    assert markers == ReasoningMarkers("<think>", "</think>", (2,), (model.size - 1,), end_is_token=True)


def test_markers_in_the_template_are_found() -> None:
    model = tokenizer(tokens=False)
    markers = find_markers(model)
    assert markers is not None
    assert not markers.end_is_token
    assert model.decode(markers.end_ids) == "</think>"


def test_no_markers_are_found_where_none_are_obvious() -> None:
    assert find_markers(tokenizer("{{ messages[0].content }}", tokens=False)) is None


def test_named_markers_go_before_what_is_found() -> None:
    markers = find_markers(tokenizer(), ("<a>", "</a>"))
    assert markers is not None
    assert (markers.start, markers.end, markers.end_is_token) == ("<a>", "</a>", False)


@pytest.mark.parametrize(
    ("start", "end", "pair"),
    [
        (None, None, None),
        (None, "</think>", ("<think>", "</think>")),
        (None, "[/REASON]", ("[REASON]", "[/REASON]")),
        (None, "<|end_of_thought|>", ("<|begin_of_thought|>", "<|end_of_thought|>")),
        ("START", "</x>", ("START", "</x>")),
    ],
)
def test_start_markers_are_derived(start: str | None, end: str | None, pair: tuple[str, str] | None) -> None:
    assert marker_pair(start, end) == pair


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (None, "done thinking", "'done thinking' needs --reasoning-start-marker too"),
        (None, "", "must not be empty"),
        ("", "</think>", "must not be empty"),
        ("<think>", None, "needs --reasoning-marker too"),
    ],
)
def test_markers_that_cannot_be_are_refused(start: str | None, end: str | None, message: str) -> None:
    with pytest.raises(ThinkingError, match=message):
        marker_pair(start, end)


def test_a_prompt_that_ends_in_a_think_block_starts_in_it() -> None:
    assert thinking(ALWAYS, regex="a") == ThinkingRules(before_grammar=True)
    for fields in ({"prompt": "x <think>\nI was"}, {"prompt_token_ids": [5, 2, 6]}):
        assert thinking(**fields, regex="a") == ThinkingRules(before_grammar=True)


def test_a_prompt_without_an_open_think_block_starts_in_the_grammar() -> None:
    assert thinking(regex="a") is None, "what a message says does not open a block"
    assert thinking(prompt="<think>x</think>", regex="a") is None


def test_who_says_nothing_of_thinking_and_has_no_grammar_is_left_alone() -> None:
    assert thinking(ALWAYS) is None


def test_the_switch_reaches_the_template_and_the_output() -> None:
    on, off = built(enable_thinking=True, regex="a"), built(enable_thinking=False, regex="a")
    assert on.thinking == ThinkingRules(writes_start=True, before_grammar=True)
    assert off.thinking is None
    assert len(off.prompt_token_ids) > len(on.prompt_token_ids)
    assert thinking(enable_thinking=True) == ThinkingRules(writes_start=True)


def test_a_template_that_always_opens_a_block_has_it_closed_at_once() -> None:
    assert thinking(ALWAYS, enable_thinking=False, regex="a") == ThinkingRules(budget=0, before_grammar=True)


def test_budget_and_strict_ask_for_thinking() -> None:
    assert thinking(thinking_budget=7) == ThinkingRules(writes_start=True, budget=7)
    assert thinking(ALWAYS, thinking_budget=0, strict_thinking=True, regex="a") == ThinkingRules(
        budget=0, strict=True, before_grammar=True
    )


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"enable_thinking": "yes"}, "enable_thinking", "must be true or false, not 'yes'"),
        ({"strict_thinking": 1}, "strict_thinking", "must be true or false, not 1"),
        ({"thinking_budget": -1}, "thinking_budget", f"an integer from 0 to {MAX_LEN}, not -1"),
        ({"thinking_budget": True}, "thinking_budget", "not true"),
        ({"thinking_budget": 501}, "thinking_budget", "not 501"),
        ({"thinking_budget": 1.5}, "thinking_budget", "not 1.5"),
        ({"thinking_budget": 5, "enable_thinking": False}, "thinking_budget", "enable_thinking is false"),
        ({"strict_thinking": True, "enable_thinking": False}, "strict_thinking", "enable_thinking is false"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: Mapping[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        built(**fields)
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_request", param)


@pytest.mark.parametrize("fields", [{"enable_thinking": True}, {"thinking_budget": 3}, {"strict_thinking": True}])
def test_a_model_without_markers_cannot_be_asked_to_think(fields: Mapping[str, Any]) -> None:
    plain = builder("{{ messages[0].content }}", tokens=False)
    with pytest.raises(RequestError, match="give --reasoning-marker") as caught:
        plain.build({"prompt": "a", **fields})
    assert caught.value.info.param == next(iter(fields))
    assert plain.build({"prompt": "a", "enable_thinking": False}).thinking is None


def test_a_score_does_not_think() -> None:
    for name, value in (("thinking_budget", 3), ("enable_thinking", True), ("strict_thinking", True)):
        with pytest.raises(RequestError, match=f"^{name} is not possible in a score") as caught:
            builder().build({"prompt": "a b", name: value}, score=True)
        assert caught.value.info.param == name
    assert builder().build({"prompt": "a b", "enable_thinking": False}, score=True).max_tokens == 0


def test_a_request_that_will_not_think_drops_the_command_line_s_budget() -> None:
    defaults = {"thinking_budget": 9, "temperature": 0.5}
    assert _with_defaults({"enable_thinking": False}, defaults) == {"enable_thinking": False, "temperature": 0.5}
    assert _with_defaults({"thinking_budget": 2}, defaults)["thinking_budget"] == 2


def test_a_prompt_made_of_messages_stays_what_it_was_when_its_request_is_resumed() -> None:
    template = "{{ strftime_now('%f') }}" + ALWAYS
    messages = [{"role": "u", "content": "hi"}]
    first = built(template, messages=messages, enable_thinking=True)
    assert first.rendered is not None
    assert first.rendered.is_thinking
    others = [built(template, messages=messages, enable_thinking=True) for _ in range(20)]
    assert any(one.prompt_token_ids != first.prompt_token_ids for one in others), "the template tells the microsecond"
    fields = {"messages": messages, "enable_thinking": True}
    again = builder(template).build(fields, settled=first.settled)
    assert again.prompt_token_ids == first.prompt_token_ids
    assert (again.seed, again.max_tokens, again.thinking) == (first.seed, first.max_tokens, first.thinking)
    assert again.settled == first.settled


def test_a_prompt_that_follows_from_its_fields_is_not_kept() -> None:
    request = built(prompt="hi", max_tokens=7, seed=5)
    assert request.settled == Settled(seed=5, prompt_tokens=len(request.prompt_token_ids), max_tokens=7)
