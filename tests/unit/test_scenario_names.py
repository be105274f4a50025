"""Scenarios that users of comparable systems met, about faults, sampling and HTTP, are tests, named by them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"^def test_((?:[ts]\d+_)+)", re.MULTILINE)


@pytest.fixture(scope="module")
def named() -> set[str]:
    found: set[str] = set()
    for path in sorted(_TESTS.rglob("test_*.py")):
        for names in _NAME.findall(path.read_text(encoding="utf-8")):
            found.update(names.strip("_").split("_"))
    return found


_FAULTS = ("t4", *(f"t{one}" for one in range(19, 23)))
_SAMPLING = (*(f"t{one}" for one in range(11, 19)), *(f"s{one}" for one in range(1, 18)))
_HTTP = ("t23", "t24", "t25")


@pytest.mark.parametrize("scenario", [*_FAULTS, *_SAMPLING, *_HTTP])
def test_the_scenario_has_a_test(scenario: str, named: set[str]) -> None:
    assert scenario in named
