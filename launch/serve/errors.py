"""Errors in OpenAI's form, each with its HTTP status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from launch.front.engine_errors import EngineClosedError, RequestFailedError, RequestRefusedError, SlowReaderError
from launch.node.rank_processes import RanksFailedError
from runtime.client_socket import ClientSocketError
from runtime.messages import ErrorInfo

_STATUS_OF_CODE: Final[Mapping[str, int]] = {
    "invalid_request": 400,
    "grammar_error": 400,
    "sampling_error": 422,
    "quarantined": 422,
    "timeout": 503,
}
"""The status of each code of the engine; of any other, 500."""

_TYPE_OF_STATUS: Final[Mapping[int, str]] = {401: "authentication_error", 429: "rate_limit_error"}
_RETRY_AFTER_S: Final = "1"

ENGINE_ERRORS: Final = (
    RequestRefusedError,
    RequestFailedError,
    EngineClosedError,
    SlowReaderError,
    RanksFailedError,
    ClientSocketError,
)
"""What a request to the engine may raise."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """Why a request failed.

    Args:
        message: One line for a person.
        type: ``invalid_request_error``, ``authentication_error``, ``rate_limit_error`` or ``server_error``.
        param: The field at fault, if one is.
        code: What went wrong, for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """An error as clients of OpenAI's interface expect it."""

    error: ErrorDetail


POSITION: Final = "{position}"
"""In what a client calls a field: which of its prompts."""


class HttpError(ValueError):
    """A request is answered with an error.

    Args:
        status: The HTTP status.
        message: One line for a person.
        param: The field at fault, if one is.
        code: What went wrong, for programs.
        headers: Headers of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        kind = _TYPE_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.reply = ErrorReply(ErrorDetail(_text(message), kind, None if param is None else _text(param), code))

    def response(self) -> Response:
        """Returns the reply."""
        body = msgspec.json.encode(self.reply)
        return Response(body, self.status, headers=self.headers, media_type="application/json")


def http_error(error: Exception, param_names: Mapping[str, str] | None = None) -> HttpError:
    """Returns what a client is told of an error of the engine.

    Args:
        error: One of ``ENGINE_ERRORS``, or an HttpError.
        param_names: What the client called fields of the engine, where it differs; and places in a field, as an error's
            message begins with them (``field: /place``). ``POSITION`` in a name is that of the request at fault.
    """
    match error:
        case HttpError():
            return error
        case RequestRefusedError() | RequestFailedError():
            names = {} if param_names is None else param_names
            position = error.position if isinstance(error, RequestRefusedError) else 0
            return of_info(error.info, {one: name.replace(POSITION, str(position)) for one, name in names.items()})
        case SlowReaderError():
            return HttpError(408, str(error), code="slow_reader")
        case EngineClosedError():
            return HttpError(503, str(error), code="closing", headers={"Retry-After": _RETRY_AFTER_S})
        case RanksFailedError() | ClientSocketError():
            return HttpError(503, str(error), code="engine_failed")
        case _:
            return HttpError(500, f"{type(error).__name__}: {error}", code="internal_error")


def of_info(info: ErrorInfo, param_names: Mapping[str, str] | None = None) -> HttpError:
    """Returns what a client is told of an error that the leader reported; ``param_names`` as in ``http_error``."""
    status = _STATUS_OF_CODE.get(info.code, 500)
    headers = {"Retry-After": _RETRY_AFTER_S} if status == 503 else {}
    names = param_names or {}
    param, message = info.param, info.message
    for place, name in names.items():
        if ": /" in place and re.match(re.escape(place) + r"(?![0-9A-Za-z_])", message):
            message, param = name + message[len(place) :], name
            break
    else:
        if param is not None and param in names:
            param, own = names[param], param
            if re.match(re.escape(own) + r"(?![0-9A-Za-z_])", message):
                message = param + message[len(own) :]
    if param is not None:
        param = re.split(r"[.\[]", param)[0]
    return HttpError(status, message, param=param, code=info.code, headers=headers)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answers a request whose handler raised."""
    if isinstance(error, HTTPException):
        code = "not_found" if error.status_code == 404 else None
        message = f"{error.detail}: {request.method} {request.url.path}"
        return HttpError(error.status_code, message, code=code, headers=error.headers).response()
    return http_error(error).response()


def _text(text: str) -> str:
    """Returns text that can be sent: what a client wrote may hold lone surrogates."""
    return text.encode(errors="replace").decode()
