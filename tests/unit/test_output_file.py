"""Where results go: what cannot be written is one line, whenever that shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli.parse import UsageError
from launch.output_file import OutputError, open_output

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path) as output:
        output.write("a😀\n")
        output.flush()
        assert path.read_text(encoding="utf-8") == "a😀\n"
        output.write("b\n")
    assert path.read_text(encoding="utf-8") == "a😀\nb\n"
    assert output.closed


def test_a_file_that_cannot_be_opened_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^--output {tmp_path}: Is a directory$"), open_output(tmp_path):
        pass


def _write(path: Path, text: str, *, flush: bool = False, error: Exception | None = None) -> None:
    with open_output(path) as output:
        output.write(text)
        if flush:
            output.flush()
        if error is not None:
            raise error


@pytest.mark.parametrize(("text", "flush"), [("x" * 100_000, False), ("x", True), ("x", False)])
def test_a_full_disk_is_said_at_once_or_at_the_end(text: str, flush: bool) -> None:
    with pytest.raises(OutputError, match=r"^--output /dev/full: No space left on device$"):
        _write(Path("/dev/full"), text, flush=flush)


def test_an_error_of_the_work_itself_is_not_hidden_by_a_full_disk() -> None:
    with pytest.raises(KeyError, match="work"):
        _write(Path("/dev/full"), "x", error=KeyError("work"))


def test_a_reader_that_left_is_one_error_and_nothing_more_at_the_end() -> None:
    code = (
        "import os, sys\n"
        "from launch.output_file import OutputError, open_output\n"
        "reading, writing = os.pipe(); os.dup2(writing, 1); os.close(writing); os.close(reading)\n"
        "try:\n"
        "    with open_output(None) as output:\n"
        "        output.write('x')\n"
        "except OutputError as error:\n"
        "    sys.exit(f'one line: {error}')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "one line: standard output: Broken pipe\n"
