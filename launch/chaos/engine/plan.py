"""What a cell's front side is told, and the requests that every run of the engine is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from launch.chaos.engine.scenario import Scenario

_LONG = "the quick brown fox jumps over the lazy dog " * 6
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 48, "ignore_eos": True},
    "long prompt": {"prompt": _LONG, "temperature": 0, "max_tokens": 40, "ignore_eos": True},
    "seeded": {"prompt": "Once", "temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 48, "ignore_eos": True},
    "penalties": {
        "prompt": "again again again",
        "seed": 3,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "max_tokens": 48,
        "ignore_eos": True,
    },
    "schema": {"prompt": "As JSON:", "json_schema": _SCHEMA, "seed": 5, "max_tokens": 64},
    "regex": {"prompt": "Letters:", "regex": "[a-f]{40}", "seed": 11, "max_tokens": 64},
}
AFTERWARDS: dict[str, Any] = {"prompt": "And then", "temperature": 0, "max_tokens": 4, "ignore_eos": True}


class FrontPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the front side of a cell does.

    Args:
        scenario: The fault; None = an undisturbed run.
        model: Folder or file.
        tp: Ranks of a stage.
        pp: Stages.
        options: More fields of ``EngineOptions``.
    """

    scenario: Scenario | None
    model: Path
    tp: int
    pp: int
    options: dict[str, Any]


def write_plan(folder: Path, plan: FrontPlan) -> None:
    """Leaves a plan for the front side."""
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan, enc_hook=str))


def read_plan(folder: Path) -> FrontPlan:
    """Returns the plan of a cell's folder."""

    def path(_: type, text: Any) -> Path:
        return Path(text)

    return msgspec.json.decode((folder / "plan.json").read_bytes(), type=FrontPlan, dec_hook=path)
