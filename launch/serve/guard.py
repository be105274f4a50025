"""What stands before every endpoint: the keys, and the bound on a request's size."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.serve.errors import HttpError
from launch.serve.keys import ApiKeys

_OPEN_PATHS: Final = frozenset({"/", "/health"})
"""What needs no key: whether the server lives, and the page, which holds nothing of anybody."""


class Guard:
    """Lets a request pass if it has a key and is not too large.

    Args:
        app: What stands behind.
        keys: The keys.
        max_body_bytes: Bytes of a request at most.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["path"] not in _OPEN_PATHS and not self._keys.admits(headers.get(b"authorization", b"")):
            refusal = HttpError(
                401,
                "a key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal.response()(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # As GET; the server leaves out the body.
            scope = {**scope, "method": "GET"}
        await self._app(scope, _Bounded(receive, self._max_body_bytes, self._too_large()), send)

    def _too_large(self) -> HttpError:
        message = f"the body is too large: at most {self._max_body_bytes} bytes are taken"
        return HttpError(413, message, code="body_too_large", headers={"Connection": "close"})


class _Bounded:
    """A request's messages; raises when its body, sent in chunks, grows beyond the bound."""

    def __init__(self, receive: Receive, max_bytes: int, error: HttpError) -> None:
        self._receive = receive
        self._left = max_bytes
        self._error = error

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self._error
        return message
