"""JSON of clients: a key that stands twice would lose a value, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from grammar_sync.json_text import DuplicateKeyError, parse_json
from launch.request_file import read_lines


def test_json_is_read_as_it_is() -> None:
    assert parse_json('{"a": [{"b": 1}, {"b": 2}], "c": null, "": 0.5}') == {
        "a": [{"b": 1}, {"b": 2}],
        "c": None,
        "": 0.5,
    }
    assert parse_json(b"[1]") == [1]


@pytest.mark.parametrize(
    ("text", "message", "field"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "the key 'a' stands twice in one object", "a"),
        ('[{"logit_bias": {"1": 2, "1": 3}}]', "the key '1' stands twice in [0].logit_bias", "logit_bias"),
        ('{"x": [0, {"y": {"1": 2, "1": 3}}]}', "the key '1' stands twice in x[1].y", "x"),
        ('{"\\u0061": 1, "a": {"b": 1, "b": 2}}', "the key 'a' stands twice in one object", "a"),
        ('{"\\ud800": {"b": 1, "b": 2}}', "the key 'b' stands twice in ?", "?"),
    ],
)
def test_a_key_that_stands_twice_is_named(text: str, message: str, field: str) -> None:
    with pytest.raises(DuplicateKeyError) as raised:
        parse_json(text)
    assert (str(raised.value), raised.value.field) == (message, field)


@pytest.mark.parametrize("text", ["", "{", "nul"])
def test_what_is_no_json_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"char \d"):
        parse_json(text)


def test_an_integer_too_long_to_read_is_said_to_be() -> None:
    with pytest.raises(ValueError, match=r"^an integer has more than \d+ digits$"):
        parse_json('{"seed": ' + "1" * 5000 + "}")


def test_a_line_with_a_key_twice_is_wrong_alone(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"id": "x", "prompt": "a", "seed": 1, "seed": 2}\n{"id": 2, "prompt": "a"}\n{"a": {"b": 1, "b": 1}, \n'
    )
    wrong, right, cut = read_lines(str(path))
    assert wrong.error is not None
    assert (wrong.user_id, wrong.error.message) == ("x", "line 1: the key 'seed' stands twice in one object")
    assert wrong.error.param == "seed"
    assert right.error is None
    assert cut.error is not None
    assert cut.error.message.startswith("line 3 is no JSON")
