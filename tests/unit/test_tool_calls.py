"""Calls of tools: what an output may be, and the calls found in one that comes in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from launch.front.engine_errors import RequestRefusedError
from launch.front.engine_output import RequestOutput
from launch.serve.chat import ChatAssembler
from launch.serve.chat_fields import ChatFields, chat_job
from launch.serve.errors import HttpError, http_error
from launch.serve.fields import take
from launch.serve.replies import ChatChunk
from launch.serve.state import ReplyHead
from launch.serve.tools import CallParser, CallPart, FunctionFields, ToolFields, read_calls, tool_use
from runtime.messages import Accepted, ErrorInfo, Finished, FinishReason, Settled, TokenDelta, Usage
from runtime.tool_prompt import CALL_END, call_begin, messages_for_plain_template

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), st.dictionaries(st.text(), JSON, max_size=3)))


def parsed(text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the plain text and the calls of a text fed in pieces."""
    parser = CallParser()
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parts: list[CallPart] = []
    start = 0
    for end in ends:
        parts += parser.feed(text[start:end])
        start = end
    parts += parser.finish()
    plain = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.call is None:
            plain += part.text
        elif part.name is not None:
            assert part.call == len(calls)
            calls.append((part.name, ""))
        else:
            name, arguments = calls[part.call]
            calls[part.call] = (name, arguments + part.text)
    assert parser.calls == len(calls)
    return plain, calls


@settings(deadline=None, max_examples=60)
@given(before=st.text(alphabet="ab<tool_c \n", max_size=12), calls=CALLS, cuts=st.lists(st.integers(0, 200)))
def test_calls_are_found_wherever_the_text_is_cut(
    before: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    text = before + "\n".join(f"{call_begin(name)}{json.dumps(given)}{CALL_END}" for name, given in calls)
    plain, found = parsed(text, cuts)
    assert plain == before
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_an_output_that_was_cut() -> None:
    text = f"Well. {call_begin('f')}" + '{"a": "<tool_call>'
    assert parsed(text, [3, 9]) == ("Well. ", [("f", '{"a": "<tool_call>')])
    assert parsed("<tool_cal", [3]) == ("<tool_cal", [])
    assert parsed('Well. <tool_call>\n{"na', [2, 9, 19]) == ("Well. ", []), "it is no answer"
    assert parsed('<tool_call>\n{"name": "f', []) == ("", []), "nor is half a name a name"
    assert parsed('<tool_call>\n{"name": "f", "argu', [20]) == ("", [("f", "")])


@settings(deadline=None, max_examples=60)
@given(
    calls=CALLS.filter(bool), space=st.sampled_from(["", "\n", " "]), data=st.data(), cuts=st.lists(st.integers(0, 200))
)
def test_a_call_that_was_cut_is_never_content_and_its_arguments_are_a_beginning(
    calls: list[tuple[str, dict[str, Any]]], space: str, data: st.DataObject, cuts: list[int]
) -> None:
    whole = [(name, json.dumps(given)[:-1] + space + "}") for name, given in calls]
    text = "\n".join(f"{call_begin(name)}{given}{CALL_END}" for name, given in whole)
    end = data.draw(st.integers(len("<tool_call>"), len(text)))
    plain, found = parsed(text[:end], cuts)
    if not text[:end].rsplit("\n", 1)[-1] or not "<tool_call>".startswith(text[:end].rsplit("\n", 1)[-1]):
        assert plain == ""
    assert len(found) <= len(whole)
    for (name, arguments), (wanted, whole_arguments) in zip(found, whole, strict=False):
        assert (name, whole_arguments[: len(arguments)]) == (wanted, arguments)


@pytest.mark.parametrize(
    ("fields", "is_all_or_none"),
    [
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"function": {"name": "f"}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": None, "tool_choice": None}, False),
    ],
)
def test_whether_what_begins_as_a_call_may_be_an_answer(fields: dict[str, Any], is_all_or_none: bool) -> None:
    body: dict[str, Any] = {"messages": [], "tools": [{"function": {"name": "f"}}]} | fields
    assert chat_job(*take(body, ChatFields)).is_all_or_none is is_all_or_none
    parser = CallParser(is_all_or_none=True)
    assert [part.text for part in (*parser.feed('{"a": "x <'), *parser.finish())] == ['{"a": "x ', "<"]


def test_blanks_behind_a_brace_within_arguments_that_were_cut() -> None:
    assert parsed(call_begin("f") + '{"a": {"b": 1}\n', []) == ("", [("f", '{"a": {"b": 1}\n')])
    assert parsed(call_begin("f") + '{"a": 1}}\n</tool', []) == ("", [("f", '{"a": 1}')])
    assert parsed(call_begin("f") + '{"a": 1}', []) == ("", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("text", "reason", "told"),
    [
        (call_begin("f") + "{}" + CALL_END, "stop", "tool_calls"),
        (call_begin("f") + '{"a', "length", "length"),
        (call_begin("f") + '{"a', "stop", "stop"),
        ("<tool_call>\n{", "length", "length"),
        ("<tool_c", "length", "length"),
        ("Well.", "stop", "stop"),
    ],
)
def test_a_stream_tells_of_a_cut_call_what_a_whole_reply_tells(text: str, reason: FinishReason, told: str) -> None:
    chat = ChatFields(messages=[], tools=(tool("f"),), tool_choice="required")
    head = ReplyHead("id", 0, "m", "f")
    finished = Finished(1, 0, reason, Usage(1, 1, 2))
    output = RequestOutput()
    for message in (Accepted(1, 1, Settled(1, 1, 9)), TokenDelta(1, 0, text, [1]), finished):
        output.take(message)
    (choice,) = ChatAssembler(head, chat, calls=True, is_all_or_none=True).whole([output]).choices
    assembler = ChatAssembler(head, chat, calls=True, is_all_or_none=True)
    chunks = [*assembler.chunks(0, TokenDelta(1, 0, text, [1])), *assembler.chunks(0, finished)]
    deltas = [one for chunk in chunks if isinstance(chunk, ChatChunk) for one in chunk.choices]
    assert [one.finish_reason for one in deltas][-1] == choice.finish_reason == told
    streamed = "".join(one.delta.content for one in deltas if isinstance(one.delta.content, str))
    assert streamed == (choice.message.content or "") == ("Well." if text == "Well." else "")
    parts = [call.function for one in deltas if one.delta.tool_calls is not UNSET for call in one.delta.tool_calls]
    whole = [] if choice.message.tool_calls is UNSET else choice.message.tool_calls
    assert "".join(part.arguments for part in parts) == "".join(call.function.arguments for call in whole)


def tool(name: str, strict: bool | None = None) -> ToolFields:
    return ToolFields(function=FunctionFields(name=name, strict=strict))


def test_what_an_output_may_be() -> None:
    auto = tool_use([tool("f"), tool("g")], None, parallel=True)
    assert auto is not None
    assert (auto.output["type"], auto.output["at_least_one"], auto.may_answer) == ("triggered_tags", False, True)
    must = tool_use([tool("f"), tool("g", strict=False)], "required", parallel=False)
    assert must is not None
    assert (must.output["at_least_one"], must.output["stop_after_first"]) == (True, True)
    assert (must.is_strict, must.may_answer) == (False, False)
    assert tool_use([tool("f")], "none", parallel=True) is None
    assert tool_use([], None, parallel=True) is None
    with pytest.raises(HttpError, match="1 to 64"):
        tool_use([tool("a b")], None, parallel=True)


@pytest.mark.parametrize("kind", ["string", "bogus", ["object", "null"], None])
def test_parameters_of_no_object(kind: object) -> None:
    bad = ToolFields(function=FunctionFields(name="g", parameters={"type": kind}))
    with pytest.raises(HttpError, match=r"^tools\[1\]\.function\.parameters/type is .*'object' is needed"):
        tool_use([tool("f"), bad], None, parallel=True)


def test_arguments_are_an_object_where_the_schema_says_nothing() -> None:
    schemas: list[dict[str, Any] | None] = [None, {}, {"properties": {"a": {}}}]
    for schema in schemas:
        given = ToolFields(function=FunctionFields(name="f", parameters=schema))
        use = tool_use([given], "required", parallel=True)
        assert use is not None
        assert use.output["tags"][0]["content"]["json_schema"] == {"type": "object"} | (schema or {})


@pytest.mark.parametrize(
    ("choice", "form", "place", "name", "param"),
    [
        ("auto", None, "/format/tags/1/content/json_schema", "tools[1].function.parameters", "tools"),
        (
            {"function": {"name": "g"}},
            None,
            "/format/tags/0/content/json_schema",
            "tools[1].function.parameters",
            "tools",
        ),
        ("auto", {}, "/format/elements/0/tags/0/content/json_schema", "tools[0].function.parameters", "tools"),
        ("auto", {}, "/format/elements/1/json_schema", "response_format.json_schema.schema", "response_format"),
    ],
)
def test_errors_of_schemas_name_what_the_client_sent(
    choice: Any, form: dict[str, Any] | None, place: str, name: str, param: str
) -> None:
    body: dict[str, Any] = {"messages": [], "tool_choice": choice}
    body["tools"] = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
    if form is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "r", "schema": form}}
    job = chat_job(*take(body, ChatFields))
    info = ErrorInfo("grammar_error", f"structural_tag: {place}/properties/a is 5", "structural_tag")
    error = http_error(RequestRefusedError(info), job.param_names).reply.error
    assert (error.message, error.param) == (f"{name}/properties/a is 5", param)
    other = ErrorInfo("grammar_error", "structural_tag: too large", "structural_tag")
    assert http_error(RequestRefusedError(other), job.param_names).reply.error.message == "tools: too large"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "foo"}, "tool_choice: 'foo' is none of none, auto, required"),
        ({"response_format": {"type": "x"}}, "response_format.type: 'x' is none of text, json_object, json_schema"),
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type: 'x' is none of function"),
        ({"logprobs": 5}, "logprobs: Expected `bool`, got 5"),
        ({"tools": [{"function": {"name": 7}}]}, "tools[0].function.name: Expected `str`, got 7"),
        ({"response_format": {"type": None}}, "response_format.type: Expected `str`, got null"),
        ({"metadata": {"a": 1}, "model": []}, "model: Expected `str | null`, got []"),
    ],
)
def test_wrong_values_are_told_with_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HttpError) as caught:
        take(fields, ChatFields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "x"}, "messages[0].role is 'x': one of system, developer, user, assistant, tool, function is needed"),
        ({"role": ["x"]}, "messages[0].role is ['x']: one of system"),
        ({"contents": "x"}, "messages[0]: unknown field contents: role, content, name, tool_call_id, tool_calls"),
        ({"name": 5}, "messages[0].name is 5: a string is needed"),
        ({"tool_call_id": {}}, "messages[0].tool_call_id is {}: a string is needed"),
        ({"tool_calls": "x"}, "messages[0].tool_calls is 'x': a list of calls is needed"),
    ],
)
def test_messages_of_a_wrong_form(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HttpError) as caught:
        read_calls([{"role": "user", "content": "a"} | fields])
    assert str(caught.value).startswith(message)
    assert caught.value.reply.error.param == "messages"


def test_a_message_that_a_client_dumps_and_sends_back() -> None:
    dumped: dict[str, Any] = {"role": "assistant", "content": "a", "refusal": None, "annotations": None, "audio": None}
    dumped |= {"function_call": None, "tool_calls": None, "reasoning_content": "b", "parsed": {"a": 1}}
    assert read_calls([dumped]) == [dumped]


def test_arguments_are_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (message,) = read_calls([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert read_calls([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]
    assert read_calls("no list") == "no list"
    for wrong in ("[]", "{", None, {"a": 1}):
        call["function"] = {"name": "f", "arguments": wrong}
        with pytest.raises(HttpError, match=r"messages\[0\]\.tool_calls\[0\]"):
            read_calls([{"role": "assistant", "tool_calls": [call]}])


def test_a_template_that_knows_no_tools() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": "é"}}}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "Ah.", "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    system, said = messages_for_plain_template(messages, tools)
    assert system["content"].startswith("Be kind.\n\nYou may call")
    assert json.dumps(tools[0]) in system["content"]
    assert said == {"role": "assistant", "content": f'Ah.\n{call_begin("f")}{{"a": "é"}}{CALL_END}'}
    (first, _) = messages_for_plain_template([{"role": "user", "content": "x"}], tools)
    assert first["role"] == "system"
    assert messages_for_plain_template([5], tools) == [5]
