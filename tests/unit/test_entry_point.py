"""The console script that the package declares is there to be run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_console_script_prints_its_help() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert list(scripts) == ["lockstep"]
    module, function = scripts["lockstep"].split(":")
    program = f"import sys; sys.argv[1:] = ['--help']; from {module} import {function}; sys.exit({function}())"
    outcome = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    for command in ("generate", "score", "sample", "doctor"):
        assert command in outcome.stdout
