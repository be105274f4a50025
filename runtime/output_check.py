"""Whether a finished JSON output is what its schema asks for, by another library than the one that made the masks.

It runs in a process of its own (``serve``): patterns of a schema are a client's, and a search for one may take forever.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, BinaryIO, Literal

import msgspec
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from grammar_sync.schema.old_bounds import reading_old_bounds

_KEPT_SCHEMAS = 64
_MAX_MESSAGE_LENGTH = 200


class CheckJob(msgspec.Struct, frozen=True):
    """An output to be checked: the schema as its client wrote it, and the text."""

    schema: str
    text: str


class CheckResult(msgspec.Struct, frozen=True):
    """What came of a check.

    Attributes:
        state: ``unchecked`` when the library cannot tell.
        message: What is violated and where, or why it was not checked; one line.
    """

    state: Literal["valid", "violation", "unchecked"]
    message: str = ""


READY = CheckResult("valid", "ready")
"""What the process says before the first job."""


def check_output(job: CheckJob) -> CheckResult:
    """Returns whether the text is a JSON value that its schema takes, formats included."""
    try:
        value = json.loads(job.text)
    except json.JSONDecodeError as error:
        return CheckResult("violation", f"it is no JSON: {error}")
    except (ValueError, RecursionError) as error:
        return CheckResult("unchecked", _one_line(error))
    try:
        found = next(_validator(job.schema).iter_errors(value), None)
    except Exception as error:  # noqa: BLE001 - the process boundary: what a foreign schema makes the library raise
        return CheckResult("unchecked", f"{type(error).__name__}: {_one_line(error)}")
    if found is None:
        return CheckResult("valid")
    return CheckResult("violation", f"{found.json_path}: {_one_line(found.message)}")


def serve(jobs: BinaryIO, results: BinaryIO) -> None:
    """Answers jobs, one JSON line each, in order, until there are no more."""
    _say(results, READY)
    for line in jobs:
        _say(results, check_output(msgspec.json.decode(line, type=CheckJob)))


def _say(results: BinaryIO, result: CheckResult) -> None:
    results.write(msgspec.json.encode(result) + b"\n")
    results.flush()


@lru_cache(maxsize=_KEPT_SCHEMAS)
def _validator(source: str) -> Validator:
    schema: Any = json.loads(source)
    kind = reading_old_bounds(validator_for(schema, default=Draft202012Validator))
    validator: Validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    return validator


def _one_line(error: object) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]}…"
