"""The README's examples of serving and of ``Engine``, run as they are written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ROOT
from default_model import default_model_path
from http_server import Server, serving

pytestmark = [pytest.mark.long(65), pytest.mark.model]


def blocks(heading: str, language: str) -> list[str]:
    """Returns the code blocks of a section of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split(f"\n### {heading}\n")[1].split("\n### ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def run_python(program: str, folder: Path) -> str:
    (folder / "program.py").write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    default_model_path()
    command = blocks("Over HTTP", "console")[0].strip()
    assert command.startswith("$ lockstep serve ")
    with serving(*command.split()[3:], executed=True) as started:
        yield started


def test_curl(server: Server) -> None:
    text = blocks("Over HTTP", "console")[1]
    commands = [command.strip() for command in re.split(r"^\$ ", text, flags=re.MULTILINE) if command.strip()]
    assert len(commands) == 3
    replies = []
    for command in commands:
        here = command.replace("http://127.0.0.1:8000", server.url)
        assert here != command
        outcome = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=60, check=True)
        replies.append(json.loads(outcome.stdout))
    assert "Paris" in replies[0]["choices"][0]["message"]["content"]
    assert re.fullmatch(" 1[0-9]{3}", replies[1]["choices"][0]["text"])
    assert replies[2]["status"] == "ok"


def test_openai_client(server: Server, tmp_path: Path) -> None:
    (program,) = blocks("Over HTTP", "python")
    printed = run_python(program.replace("http://127.0.0.1:8000", server.url), tmp_path)
    assert re.search(r"kind='(cat|dog|bird)' legs=-?\d+", printed)
    assert re.search(r"name='get_weather'", printed)


def test_engine(tmp_path: Path) -> None:
    default_model_path()
    (program,) = blocks("In Python", "python")
    printed = run_python(program, tmp_path)
    assert printed.startswith(" Paris")
    assert re.search(r"\[('(yes|no)'(, )?){8}\]", printed)
