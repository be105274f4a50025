"""What is wrong with a client's request, and the reading of one from text."""

from __future__ import annotations

import json
from typing import Any

from grammar_sync.json_text import DuplicateKeyError, parse_json
from runtime.messages import ErrorInfo
from sampler.shown_value import kind_of


class RequestError(ValueError):
    """A request is refused before any rank sees it.

    Args:
        message: One line naming the field, its value and what is allowed.
        param: The field at fault.
        code: The error's code.
    """

    def __init__(self, message: str, param: str | None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.info = ErrorInfo(code=code, message=message, param=param)


def parse_object(body: str) -> dict[str, Any]:
    """Returns the JSON object that a text holds, all strings in it text that a tokenizer and a socket can take.

    Raises:
        RequestError: It is no JSON, no object, has a key twice, or holds a lone surrogate.
    """
    try:
        fields = parse_json(body)
    except DuplicateKeyError as error:
        raise RequestError(f"the request is ambiguous: {error}", error.field) from error
    except RecursionError as error:
        raise RequestError("the request is nested too deeply", None) from error
    except ValueError as error:
        raise RequestError(f"the request is no JSON: {error}", None) from error
    if not isinstance(fields, dict):
        raise RequestError(f"the request is {kind_of(fields)}: an object is needed", None)
    for name, value in fields.items():
        _check_is_text(name, value)
    return fields


def _check_is_text(name: str, value: object) -> None:
    try:
        json.dumps({name: value}, ensure_ascii=False).encode()
    except RecursionError as error:
        raise RequestError(f"{name} is nested too deeply", name) from error
    except UnicodeEncodeError as error:
        field = name.encode(errors="replace").decode()
        raise RequestError(f"{field} holds a lone surrogate, which is not text", field) from error
