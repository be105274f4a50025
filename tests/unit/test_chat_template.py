from __future__ import annotations

import datetime
import re
from typing import Any

import pytest

from runtime.chat_template import ChatTemplate, ChatTemplateError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert render(CHATML, messages) == start + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == start


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "hi\n"


def test_loop_controls_special_tokens_and_namespaces() -> None:
    source = (
        "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}"
        "{% if ns.n == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ ns.n }}{{ eos_token }}"
    )
    assert render(source, [{"role": "system", "content": "s"}, USER, USER]) == "<s>hi2</s>"


def test_json_is_not_escaped_for_html_and_keeps_its_order() -> None:
    tools = [{"type": "function", "b": "<é>", "a": [1]}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"type": "function", "b": "<é>", "a": [1]}]'
    assert render("{{ tools[0].a | tojson(indent=2) }}", tools=tools) == "[\n  1\n]"


def test_the_date_is_today() -> None:
    before = datetime.datetime.now().astimezone().date()
    text = render("{{ strftime_now('%Y-%m-%d') }}")
    assert str(before) <= text <= str(datetime.datetime.now().astimezone().date())


def test_marks_of_the_assistants_words_leave_its_words() -> None:
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "hi"


def test_documents_and_tools_are_none_unless_given() -> None:
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_keys_without_a_value_are_left_out() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None}
    source = "{{ messages[0] | list | sort | join(',') }}"
    assert render(source, [calls]) == "role,tool_calls"


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_the_messages_are_not_changed() -> None:
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}
    render("{{ messages[0].content }}", [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of at least one message"),
        ("hi", "messages must be a list of at least one message"),
        (None, "messages must be a list of at least one message"),
        ({"role": "user", "content": "x"}, "messages must be a list of at least one message"),
        ([USER, "hi"], "messages[1] must be an object with role and content, got str"),
        ([USER, {"content": "x"}], "messages[1].role must be a non-empty string, got null"),
        ([{"role": 3, "content": "x"}], "messages[0].role must be a non-empty string, got 3"),
        ([{"role": "", "content": "x"}], "messages[0].role must be a non-empty string, got ''"),
        ([USER, USER, {"role": "user"}], "messages[2].content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content must be a string or a list of text parts, got int"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] must be a part of type 'text', got 'str'"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
            "messages[0].content[1] must be a part of type 'text', got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a string, got null"),
    ],
)
def test_a_wrong_message_is_named(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=re.escape(message)):
        render(CHATML, messages)


@pytest.mark.parametrize("tools", ["x", {"type": "function"}, ["x"]])
def test_wrong_tools_are_named(tools: Any) -> None:
    with pytest.raises(ChatTemplateError, match="tools"):
        render(CHATML, tools=tools)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 3 }}", "the chat template refused them"),
        ("{{ messages[0].tool_calls[0].name }}", "the chat template refused them"),
        ("{{ messages[7]['content'] + 'x' }}", "the chat template refused them"),
        ("{{ 1 / 0 }}", "the chat template refused them"),
        ("{{ messages.append(1) }}", "the chat template refused them"),
        ("{{ ''.__class__.__mro__ }}", "the chat template refused them"),
        ("{% for i in range(10**9) %}{% endfor %}", "the chat template refused them"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template refused them"),
    ],
)
def test_what_a_template_raises_is_a_refusal(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ChatTemplateError, match=r"no default chat template \(none\)"):
        ChatTemplate({}, {}).render([USER])
    with pytest.raises(ChatTemplateError, match=r"no default chat template \(only rag\)"):
        ChatTemplate({"rag": "x"}, {}).render([USER])


def test_a_text_that_is_no_template_is_refused_at_once() -> None:
    with pytest.raises(ChatTemplateError, match="'default' cannot be compiled"):
        ChatTemplate({"default": "{% for %}"}, {})


def test_requests_with_tools_take_the_template_for_tools() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t"}, {})
    assert (template.render([USER]), template.render([USER], tools=[{}])) == ("d", "t")
