"""What is wrong with a command is found before any rank starts, and named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from launch.checks import check_command
from launch.cli.parse import UsageError, parse_command
from launch.commands import GenerateCommand


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def check(tiny: str, *argv: str) -> GenerateCommand:
    """Returns the command that passed the checks."""
    command = parse_command(["generate", "--model", tiny, "x", *argv])
    assert isinstance(command, GenerateCommand)
    check_command(command)
    return command


def test_a_grammar_cache_is_made(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    check(tiny, "--grammar-cache-dir", str(folder))
    assert list(folder.iterdir()) == []
    check(tiny, "--grammar-cache-dir", str(folder))


@pytest.mark.parametrize("name", ["file/cache", "/proc/cache", "/proc"])
def test_a_grammar_cache_that_cannot_be_used_is_named(tiny: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / name
    with pytest.raises(UsageError) as caught:
        check(tiny, "--grammar-cache-dir", str(folder))
    assert str(caught.value).startswith(f"--grammar-cache-dir {folder}: ")
    assert "\n" not in str(caught.value)


def test_defaults_of_every_kind_pass(tiny: str) -> None:
    given = {"json_object": True, "max_whitespace": 0, "max_items": 3, "thinking_budget": 4, "top_k": 2}
    argv = ("--json-object", "--max-whitespace", "0", "--max-items", "3", "--thinking-budget", "4", "--top-k", "2")
    defaults = check(tiny, *argv).defaults
    assert {name: defaults[name] for name in given} == given
