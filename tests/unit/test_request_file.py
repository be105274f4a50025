"""Requests from a file, stdin or the command line: every line is a request or an error record of its own."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cli.parse import UsageError
from launch.commands import GenerateCommand
from launch.options import EngineOptions, NodeOptions
from launch.request_file import InputRequest, read_requests
from runtime.messages import Submit


def command(**fields: Any) -> GenerateCommand:
    return GenerateCommand(engine=EngineOptions(model=Path("m")), nodes=NodeOptions(), **fields)


def read(folder: Path, content: bytes, **defaults: Any) -> list[InputRequest]:
    path = folder / "input.jsonl"
    path.write_bytes(content)
    return list(read_requests(command(input_file=str(path), defaults=defaults)))


def fields_of(request: InputRequest) -> dict[str, Any]:
    assert request.body is not None
    fields = json.loads(request.body)
    assert isinstance(fields, dict)
    return fields


def one(folder: Path, fields: Any, **defaults: Any) -> InputRequest:
    (request,) = read(folder, json.dumps(fields).encode(), **defaults)
    return request


def test_prompts_from_the_command_line() -> None:
    requests = list(read_requests(command(prompts=("a", "caf\udce9"), defaults={"max_tokens": 5})))
    assert [(request.user_id, fields_of(request)) for request in requests] == [
        ("prompt-1", {"max_tokens": 5, "prompt": "a"}),
        ("prompt-2", {"max_tokens": 5, "prompt": "caf\udce9"}),
    ]
    assert all(survives_the_wire(request) for request in requests)
    (chat,) = read_requests(command(prompts=("a",), chat=True))
    assert fields_of(chat) == {"messages": [{"role": "user", "content": "a"}]}


def test_lines_in_order_with_their_own_ids(tmp_path: Path) -> None:
    content = (
        b'{"id": "x", "prompt": "a"}\n\n  \r\n{"prompt": "b"}\r\n{"id": 7, "prompt": "c"}\n{"id": [1], "prompt": "d"}'
    )
    requests = read(tmp_path, content)
    assert [request.user_id for request in requests] == ["x", "line-4", 7, [1]]
    assert [fields_of(request)["prompt"] for request in requests] == ["a", "b", "c", "d"]
    assert all(request.error is None for request in requests)


def test_an_id_of_null_is_echoed(tmp_path: Path) -> None:
    assert one(tmp_path, {"id": None, "prompt": "a"}).user_id is None
    assert one(tmp_path, {"prompt": "a"}).user_id == "line-1"


def test_a_null_is_sent_on_where_no_default_takes_its_place(tmp_path: Path) -> None:
    line = {"prompt": "a", "top_K": None, "seed": None}
    assert fields_of(one(tmp_path, line, seed=5)) == {"prompt": "a", "top_K": None, "seed": 5}


def test_the_same_id_twice_is_two_requests(tmp_path: Path) -> None:
    requests = read(tmp_path, b'{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n')
    assert [(request.user_id, request.error) for request in requests] == [("x", None), ("x", None)]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"nonsense",
        b'{"prompt": "a"} trailing',
        b'{"prompt": "a"}{"prompt": "b"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\x00",
        b"[]",
        b'["a"]',
        b'"text"',
        b"5",
        b"null",
        b"true",
    ],
)
def test_a_bad_line_is_its_own_error_record(tmp_path: Path, line: bytes) -> None:
    good = b'{"prompt": "a"}'
    first, bad, last = read(tmp_path, b"\n".join((good, line, good)) + b"\n")
    assert (first.error, last.error) == (None, None)
    assert (first.user_id, last.user_id) == ("line-1", "line-3")
    assert bad.user_id == "line-2"
    assert bad.body is None
    assert bad.error is not None
    assert bad.error.code == "invalid_request"
    assert "line 2" in bad.error.message


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    (request,) = read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert request.error is None


def test_an_empty_file_has_no_requests(tmp_path: Path) -> None:
    assert read(tmp_path, b"") == []
    assert read(tmp_path, b"\n\n \n") == []


def test_defaults_fill_what_a_line_does_not_say(tmp_path: Path) -> None:
    request = one(
        tmp_path, {"prompt": "a", "temperature": 0, "seed": None, "n": 2}, temperature=1.0, seed=5, max_tokens=9
    )
    assert fields_of(request) == {"prompt": "a", "temperature": 0, "seed": 5, "n": 2, "max_tokens": 9}


@pytest.mark.parametrize(
    ("fields", "defaults", "expected"),
    [
        ({}, {"regex": "a"}, {"regex": "a"}),
        ({"choice": ["b"]}, {"regex": "a"}, {"choice": ["b"]}),
        ({"regex": "b"}, {"regex": "a"}, {"regex": "b"}),
        ({"json_schema": {}}, {"json_object": True}, {"json_schema": {}}),
        ({"json_schema": False}, {"regex": "a"}, {"json_schema": False}),
        ({"json_schema": False}, {"json_schema": {}}, {"json_schema": False}),
        ({"json_object": False}, {"json_object": True}, {"json_object": False}),
        ({"json_object": False}, {"regex": "a"}, {"json_object": False, "regex": "a"}),
        ({"regex": None}, {"regex": "a"}, {"regex": "a"}),
        ({"structural_tag": {}}, {"ebnf": "a"}, {"structural_tag": {}}),
    ],
)
def test_a_grammar_of_its_own_replaces_the_default_one(
    tmp_path: Path, fields: dict[str, Any], defaults: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert fields_of(one(tmp_path, {"prompt": "a", **fields}, **defaults)) == {"prompt": "a", **expected}


def test_the_defaults_are_not_changed_by_a_line(tmp_path: Path) -> None:
    defaults = {"regex": "a", "max_tokens": 5}
    path = tmp_path / "input.jsonl"
    path.write_text('{"prompt": "a", "choice": ["b"], "max_tokens": 1}\n{"prompt": "b"}\n')
    requests = list(read_requests(command(input_file=str(path), defaults=defaults)))
    assert fields_of(requests[1]) == {"regex": "a", "max_tokens": 5, "prompt": "b"}
    assert defaults == {"regex": "a", "max_tokens": 5}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            list(read_requests(command(input_file=str(path))))


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{\n')))
    first, second = read_requests(command(input_file="-"))
    assert fields_of(first) == {"prompt": "a"}
    assert second.error is not None
    assert not sys.stdin.buffer.closed


def test_a_file_is_read_as_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' * 100_000)
    requests = read_requests(command(input_file=str(path)))
    assert next(requests).user_id == "line-1"
    assert next(requests).user_id == "line-2"


def survives_the_wire(request: InputRequest) -> bool:
    """Whether the leader can read the request, and its id can stand in a line of output."""
    assert (request.body is None) != (request.error is None)
    msgspec.json.encode(request.user_id)
    sent = Submit(0, request.body or "{}")
    return bool(msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Submit) == sent)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(value=_json)
@settings(max_examples=60, deadline=None)
def test_whatever_json_a_line_holds_it_is_sent_as_it_is(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert survives_the_wire(one(folder, value))
    request = one(folder, {"prompt": value})
    assert survives_the_wire(request)
    assert fields_of(request) == {"prompt": value}


@pytest.mark.parametrize(
    "user_id",
    [
        pytest.param(b'"\\ud800"', id="lone-surrogate"),
        pytest.param(b"18446744073709551616", id="beyond-64-bits"),
        pytest.param(b'{"a": [1, "\\udfff"]}', id="nested"),
        pytest.param(b"1" * 4000, id="4000-digits"),
        pytest.param(b"NaN", id="nan"),
        pytest.param(b"[" * 900 + b"]" * 900, id="900-deep"),
    ],
)
def test_an_id_can_stand_in_the_output_or_is_refused(tmp_path: Path, user_id: bytes) -> None:
    (request,) = read(tmp_path, b'{"prompt": "a", "id": ' + user_id + b"}")
    assert survives_the_wire(request)


def test_a_line_nested_deep_is_sent_or_refused_but_ends_nothing(tmp_path: Path) -> None:
    for depth in (50, 500, *range(sys.getrecursionlimit() - 120, sys.getrecursionlimit() + 10), 2000):
        (request,) = read(tmp_path, b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}")
        assert survives_the_wire(request)
