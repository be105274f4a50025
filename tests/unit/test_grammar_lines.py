"""Lines of ``check-grammar``: what they mean, and which field is named when one is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grammar_sync.engines.prepared import Finding
from grammar_sync.spec import GrammarOptions, GrammarSpec
from launch.check_grammar.lines import GrammarLine, read_grammars
from launch.check_grammar.report import GrammarRecord, TextRecord, Totals
from launch.cli.parse import UsageError, parse_command
from launch.commands import CheckGrammarCommand, FailOn
from runtime.messages import ErrorInfo

MODEL = Path("m")


def lines_of(folder: Path, *lines: Any, **options: Any) -> list[GrammarLine]:
    source = folder / "in.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return list(read_grammars(CheckGrammarCommand(model=MODEL, input_file=str(source), **options)))


def test_every_kind(tmp_path: Path) -> None:
    fields: list[tuple[str, Any, str]] = [
        ("json_schema", {"type": "integer"}, '{"type":"integer"}'),
        ("json_object", None, '{"type":"object"}'),
        ("json_object", True, '{"type":"object"}'),
        ("regex", "a|b", "a|b"),
        ("ebnf", 'root ::= "a"', 'root ::= "a"'),
        ("choice", ["a", "é"], '["a","é"]'),
        ("structural_tag", {"format": {"type": "any_text"}}, '{"format":{"type":"any_text"}}'),
    ]
    lines = lines_of(tmp_path, *({"id": kind, "kind": kind, "spec": spec, "texts": ["x"]} for kind, spec, _ in fields))
    for line, (kind, _, source) in zip(lines, fields, strict=True):
        assert line.spec == GrammarSpec(kind, source)  # type: ignore[arg-type]
        assert (line.user_id, line.kind, line.texts, line.expect, line.error) == (kind, kind, ("x",), (True,), None)


def test_options_of_a_line(tmp_path: Path) -> None:
    line = {"kind": "ebnf", "spec": 'start ::= "a"', "root": "start", "strict": False, "max_items": 3}
    whitespace = {"kind": "json_object", "spec": None, "any_whitespace": False, "expect": None, "texts": None}
    first, second = lines_of(tmp_path, line, whitespace)
    assert first.spec is not None
    assert second.spec is not None
    assert first.spec.options == GrammarOptions(strict=False, root_rule="start", max_items=3)
    assert second.spec.options == GrammarOptions(any_whitespace=False)
    assert (first.user_id, second.user_id, second.texts) == ("line-1", "line-2", ())


def test_strictness_of_the_command_line_is_for_lines_that_do_not_say(tmp_path: Path) -> None:
    lines = lines_of(
        tmp_path, *({"kind": "regex", "spec": "a", "strict": strict} for strict in (None, True, False)), strict=False
    )
    assert [line.spec.options.strict for line in lines if line.spec is not None] == [False, True, False]


def test_fields_that_mean_nothing_are_said(tmp_path: Path) -> None:
    (line,) = lines_of(tmp_path, {"kind": "regex", "spec": "a", "stict": False, "source": {}})
    assert line.spec is not None
    assert line.ignored == ("stict", "source")


def test_options_that_mean_nothing_for_a_kind_are_said(tmp_path: Path) -> None:
    options = {
        "strict": True,
        "any_whitespace": True,
        "max_whitespace": 1,
        "max_string_length": 2,
        "max_items": 3,
        "ebnf_root": "root",
        "root": "root",
    }
    kinds = {"json_schema": {}, "json_object": True, "regex": "a", "ebnf": 'root ::= "a"', "choice": ["a"]}
    lines = lines_of(tmp_path, *({"kind": kind, "spec": spec, **options} for kind, spec in kinds.items()))
    of_json, of_ebnf = tuple(options)[1:5], ("ebnf_root", "root")
    assert [line.ignored for line in lines] == [of_ebnf, of_ebnf, of_json + of_ebnf, of_json, of_json + of_ebnf]


def test_options_of_the_command_line_are_for_lines_that_do_not_say(tmp_path: Path) -> None:
    lines = lines_of(
        tmp_path,
        {"kind": "json_object", "spec": True},
        {"kind": "json_object", "spec": True, "max_items": 5},
        options={"max_items": 3},
    )
    assert [line.spec.options.max_items for line in lines if line.spec is not None] == [3, 5]


def test_options_of_a_grammar_from_the_command_line() -> None:
    parsed = command("--choice", "a,b", "--max-whitespace", "0", "--ebnf-root", "top")
    assert parsed.options == {"max_whitespace": 0, "ebnf_root": "top"}
    (line,) = read_grammars(parsed)
    assert line.ignored == ("max_whitespace", "ebnf_root")


@pytest.mark.parametrize(
    ("line", "param", "named"),
    [
        ("{", None, "is no JSON"),
        ("[]", None, "is no JSON object"),
        ({"id": "x" * 3, "spec": "a"}, "kind", "kind is null"),
        ({"kind": "xml", "spec": "a"}, "kind", "'xml': any of json_schema, json_object"),
        ({"kind": ["regex"], "spec": "a"}, "kind", "['regex']"),
        ({"kind": "regex"}, "spec", "spec is null"),
        ({"kind": "json_object", "spec": False}, "spec", "spec is false"),
        ({"kind": "regex", "spec": "a", "texts": "abc"}, "texts", "'abc': a list of strings"),
        ({"kind": "regex", "spec": "a", "texts": ["a", 1]}, "texts", "['a', 1]"),
        ({"kind": "regex", "spec": "a", "texts": ["a"], "expect": [True, True]}, "expect", "one for each of 1 texts"),
        ({"kind": "regex", "spec": "a", "texts": ["a"], "expect": [1]}, "expect", "[1]"),
    ],
)
def test_a_malformed_line_names_its_field_and_the_next_goes_on(
    tmp_path: Path, line: Any, param: str | None, named: str
) -> None:
    bad, good = lines_of(tmp_path, line, {"kind": "regex", "spec": "a"})
    assert bad.error is not None
    assert (bad.spec, bad.is_malformed, bad.error.param) == (None, True, param)
    assert named in bad.error.message
    assert good.error is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kind": "regex", "spec": 3}, "regex"),
        ({"kind": "choice", "spec": []}, "choice"),
        ({"kind": "json_schema", "spec": []}, "json_schema"),
        ({"kind": "regex", "spec": "a", "strict": "yes"}, "strict"),
        ({"kind": "ebnf", "spec": "a", "root": 3}, "ebnf_root"),
    ],
)
def test_a_grammar_that_is_none_is_refused_as_a_request_would_be(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    (line,) = lines_of(tmp_path, {**fields, "texts": ["a"]})
    assert line.error is not None
    assert (line.error.code, line.error.param, line.is_malformed, line.texts) == ("grammar_error", param, False, ("a",))


def command(*argv: str) -> CheckGrammarCommand:
    parsed = parse_command(["check-grammar", "--model", "m", *argv])
    assert isinstance(parsed, CheckGrammarCommand)
    return parsed


def test_a_grammar_from_the_command_line() -> None:
    parsed = command("--regex", "a+", "--text", "aa", "--text", "", "--no-strict", "--fail-on", "text,not-enforced")
    assert parsed == CheckGrammarCommand(
        model=MODEL, grammar={"regex": "a+"}, texts=("aa", ""), strict=False, fail_on=("text", "not-enforced")
    )
    (line,) = read_grammars(parsed)
    assert line == GrammarLine(
        "command-line",
        GrammarSpec("regex", "a+", GrammarOptions(strict=False)),
        kind="regex",
        texts=("aa", ""),
        expect=(True, True),
    )


def test_defaults() -> None:
    assert command("--input", "-") == CheckGrammarCommand(model=MODEL, input_file="-")
    assert command("--json-schema", "false").grammar == {"json_schema": False}
    assert command("--structural-tag", '{"format": {}}').grammar == {"structural_tag": {"format": {}}}
    assert command("--json-object", "--fail-on", "none").fail_on == ()
    assert command("--choice", "a,b", "--grammar-backend", "llguidance").grammar_backend == "llguidance"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--input"),
        (["--regex", "a", "--input", "f"], "--input"),
        (["--regex", "a", "--choice", "b"], "one grammar"),
        (["--input", "f", "--text", "a"], "--text"),
        (["--regex", "a", "--fail-on", "refused,all"], "'all'"),
        (["--regex", "a", "--fail-on", ""], "--fail-on"),
        (["--regex", "a", "--grammar-timeout", "nan"], "--grammar-timeout"),
        (["--regex", "a", "--grammar-backend", "outlines"], "--grammar-backend"),
        (["--structural-tag", "no-such-file.json"], "no-such-file.json"),
        (["--json-schema", "{"], "--json-schema"),
        (["--json-schema", '{"type": "null", "type": "string"}'], "the key 'type' stands twice"),
        (["--json-object", "--max-items", "0"], "--max-items"),
        (["--input", "f", "--max-whitespace", "257"], "--max-whitespace"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv: list[str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command(["check-grammar", "--model", "m", *argv])
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD = GrammarLine("good", GrammarSpec("regex", "a"), kind="regex", texts=("a",), expect=(True,))
MALFORMED = GrammarLine("bad", None, ErrorInfo("invalid_request", "kind is None", "kind"))
REFUSED = GrammarLine("no", None, ErrorInfo("grammar_error", "regex: no", "regex"), kind="regex")
LOOSE = [Finding("/a", "uniqueItems", "items may repeat")]


@pytest.mark.parametrize(
    ("fail_on", "codes"),
    [
        ((), [0, 0, 0, 0, 3, 0]),
        (("refused",), [0, 0, 0, 0, 3, 6]),
        (("text",), [0, 6, 0, 6, 3, 0]),
        (("not-enforced",), [0, 0, 6, 6, 3, 0]),
        (("refused", "text", "not-enforced"), [0, 6, 6, 6, 3, 6]),
    ],
)
def test_what_counts_as_failure_is_said_by_fail_on(fail_on: tuple[FailOn, ...], codes: list[int]) -> None:
    outcomes = [
        (GOOD, record(ok=True)),
        (GOOD, record(ok=False)),
        (GOOD, record(ok=True, not_enforced=LOOSE)),
        (GOOD, record(ok=False, not_enforced=LOOSE)),
        (MALFORMED, GrammarRecord(id="bad", accepted=False)),
        (REFUSED, GrammarRecord(id="no", accepted=False)),
    ]
    given = CheckGrammarCommand(model=MODEL, input_file="-", fail_on=fail_on)
    for (line, outcome), code in zip(outcomes, codes, strict=True):
        totals = Totals()
        totals.add(GOOD, record(ok=True))
        totals.add(line, outcome)
        assert totals.exit_code(given) == code


def record(*, ok: bool, not_enforced: list[Finding] | None = None) -> GrammarRecord:
    return GrammarRecord(id="good", accepted=True, texts=[TextRecord(ok=ok)], not_enforced=not_enforced or [])
