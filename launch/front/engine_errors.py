"""What can become of a request beside its output, and its fields as text, which may be the first of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from runtime.messages import ErrorInfo


class RequestRefusedError(ValueError):
    """A request was refused: no rank saw it.

    Args:
        info: Why.
        position: Which of the requests submitted together it was.
    """

    def __init__(self, info: ErrorInfo, position: int = 0) -> None:
        super().__init__(info.message)
        self.info = info
        self.position = position


def json_fields(fields: Mapping[str, Any]) -> str:
    """Returns the fields of a request as JSON.

    Raises:
        RequestRefusedError: One of them is nothing that JSON has, or is nested too deeply.
    """
    try:
        return json.dumps(dict(fields))
    except (TypeError, ValueError, RecursionError):
        for name, value in fields.items():
            _check_is_json(name, value)
        raise


def _check_is_json(name: str, value: object) -> None:
    try:
        json.dumps({name: value})
    except (TypeError, ValueError, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else f"cannot be sent as JSON: {error}"
        raise RequestRefusedError(ErrorInfo("invalid_request", f"{name} {why}", name)) from error


class RequestFailedError(RuntimeError):
    """A request ended with an error.

    Args:
        info: Why.
    """

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class EngineClosedError(RuntimeError):
    """The engine is being closed: it takes no request, and those under way ended."""


class SlowReaderError(RuntimeError):
    """A request was ended because its messages were not taken as fast as they came."""
