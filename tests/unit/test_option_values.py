"""What values options take, at every command: ranges, empty paths, options that would say nothing, and the help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from launch.cli.parse import UsageError, app, parse_command
from launch.commands import ChaosCommand, GenerateCommand
from launch.engine import Engine
from launch.options import EngineOptions
from runtime.checkpoint_layout import CheckpointError
from sampler.params import SamplingParams, SamplingParamsError

SCRIPT = ("--script", "m:f")


def usage_error(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_command(list(argv))
    return str(caught.value)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every command with its path."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))
NEEDED = {
    ("generate",): ("hi",),
    ("score",): ("--input", "x"),
    ("sample",): ("--input", "x"),
    ("check-grammar",): ("--regex", "a"),
    ("bench", "serve"): ("http://127.0.0.1:1/v1",),
}


def options_of(kind: str) -> list[tuple[tuple[str, ...], str]]:
    """Returns the options that take such values, each with its command."""
    return [
        (path, option.opts[0])
        for path, command in COMMANDS.items()
        for option in command.params
        if option.opts[0].startswith("--") and option.get_runtime_param().annotation.__name__ == kind
    ]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e300"])
def test_no_command_takes_a_number_that_is_none(value: str) -> None:
    found = options_of("float")
    assert len(found) > 25
    for path, option in found:
        arguments = [*path, *NEEDED.get(path, ()), f"{option}={value}"]
        if option in ("--temperature", "--top-p", "--min-p"):
            # Defaults of requests: they are checked as requests are, once the model is known.
            command = parse_command(arguments)
            assert isinstance(command, GenerateCommand)
            with pytest.raises(
                SamplingParamsError, match=rf"^{option[2:].replace('-', '_')} must be a number .*, not "
            ):
                SamplingParams.parse(command.defaults, vocab_size=100, max_model_len=100)
            continue
        message = usage_error(*arguments)
        assert re.fullmatch(rf"{option} must be a number from [\d.]+ to [\d.]+, not {value}", message), message


def test_no_command_takes_an_empty_path() -> None:
    found = options_of("Path")
    assert len(found) > 30
    for path, option in [*found, (("generate",), "--input"), (("score",), "--input"), (("check-grammar",), "--input")]:
        message = usage_error(*path, *NEEDED.get(path, ()), option, "")
        assert message == f"{option} is empty: leave it out, or give a value"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((*SCRIPT, "--model", "m"), "--model"),
        ((*SCRIPT, "--tp", "2"), "--tp"),
        ((*SCRIPT, "--pp", "1"), "--pp"),
        ((*SCRIPT, "--jobs", "2"), "--jobs"),
        ((*SCRIPT, "--plot", "p.svg"), "--plot"),
        (("--ranks", "2"), "--ranks"),
        (("--nccl-shim",), "--nccl-shim"),
        (("--list", "--json", "f"), "--json"),
        (("--list", "--plot", "f"), "--plot"),
    ],
)
def test_chaos_refuses_what_would_say_nothing(arguments: tuple[str, ...], named: str) -> None:
    assert f"{named} is given: " in usage_error("chaos", *arguments)


def test_chaos_defaults() -> None:
    command = parse_command(["chaos"])
    assert isinstance(command, ChaosCommand)
    assert (command.script, command.ranks, command.tp, command.pp) == (None, 2, 2, 2)
    command = parse_command(["chaos", *SCRIPT, "--ranks", "3"])
    assert isinstance(command, ChaosCommand)
    assert (command.script, command.ranks) == ("m:f", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sample", "--input", "x", "--tp", "65"), "--tp must be an integer from 1 to 64, not 65"),
        (("sample", "--input", "x", "--tp", "two"), "--tp must be an integer from 1 to 64, not 'two'"),
        (("sample", "--input", "x", "--draws", "-1"), f"--draws must be an integer from 0 to {10**12}, not -1"),
        (
            ("sample", "--input", "x", "--draws", "9" * 20),
            f"--draws must be an integer from 0 to {10**12}, not {'9' * 20}",
        ),
        (("sample", "--input", "x", "--nan-policy", "no"), "--nan-policy must be 'error' or 'sanitize', not 'no'"),
        (("sample", "--input", "x", "--device", "tpu"), "--device must be 'auto', 'cpu' or 'cuda', not 'tpu'"),
        (
            ("generate", "--grammar-timeout", "0", "hi"),
            "--grammar-timeout must be a number from 0.1 to 1000000, not 0",
        ),
        (("generate", "--max-model-len", "1", "hi"), "--max-model-len must be an integer of at least 2, not 1"),
        (("generate", "--temperature", "hot", "hi"), "--temperature must be a number, not 'hot'"),
    ],
)
def test_a_value_out_of_range_is_told_with_the_range(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command(list(arguments))
    assert str(caught.value) == message


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["doctor", "--help"]])
def test_help_is_no_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_command(argv) == 0
    assert "Usage" in capsys.readouterr().out


def test_help_names_every_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    parse_command(["generate", "--help"])
    shown = capsys.readouterr().out
    for option in ("--model", "--tp", "--pp", "--input", "--output", "--json-schema", "--regex", "--ebnf", "--choice"):
        assert option in shown


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("stall_timeout_s", float("inf"), "Expected `float` <= 1000000.0"),
        ("start_timeout_s", float("nan"), "Expected `float` >= 1.0"),
        ("max_recoveries", -1, "Expected `int` >= 0"),
        ("max_num_seqs", 0, "Expected `int` >= 1"),
        ("audit_every", -1, "Expected `int` >= 0"),
        ("threads_per_rank", 0, "Expected `int` >= 1"),
        ("fault_report", 5, "Expected `Path`, got `int`"),
    ],
)
def test_an_engine_in_python_has_the_ranges_of_the_command_line(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(UsageError, match=rf"^Engine: {option} is \S+: {re.escape(allowed)}"):
        Engine("no-model", **{option: value})


def test_an_engine_in_python_takes_paths_as_texts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no-model does not exist"):
        Engine("no-model", fault_report=str(tmp_path / "faults.jsonl"), trace=tmp_path / "t.json")


def test_ranges_are_the_same_on_the_command_line_and_in_python() -> None:
    options = {option.name: option for option in COMMANDS["generate",].params}
    schema = msgspec.json.schema(EngineOptions, schema_hook=lambda _: {"type": "string"})
    found = 0
    for name, told in schema["$defs"]["EngineOptions"]["properties"].items():
        low = min((one["minimum"] for one in told.get("anyOf", [told]) if "minimum" in one), default=None)
        option = options.get(name.removesuffix("_s"))
        if low is None or option is None or name == "group_timeout_s":
            # ``lockstep chaos`` tries shorter time-outs of groups than are good for an engine.
            continue
        found += 1
        own = option.get_runtime_param().adapter.json_schema()
        own = own if "minimum" in own else next(one for one in own["anyOf"] if "minimum" in one)
        assert own["minimum"] == low, name
    assert found >= 12


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_every_name_in_full_where_the_terminal_is_narrow(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert parse_command([*path, "--help"]) == 0
        shown = capsys.readouterr().out
        assert columns > 40 or max(map(len, shown.splitlines())) < 80
        for option in COMMANDS[path].params:
            for name in (*option.opts, *option.secondary_opts):
                assert not name.startswith("-") or re.search(rf"(?<!\S){re.escape(name)}(?![\w-])", shown), name


def test_help_of_the_whole_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    parse_command(["--help"])
    parse_command(["bench", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "..." not in shown.replace("[ARGS]...", "")
    for path, command in COMMANDS.items():
        assert command.hidden or f" {path[-1]} {command.help.split('.')[0].splitlines()[0]}" in shown, path
