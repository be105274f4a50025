"""What a rank's supervisor asks of its node's zygote, and what it is told, over a stream socket.

The supervisor sends one ``ForkRequest`` with its three standard files; the zygote answers with the rank's process id,
and with its exit code when it has ended. A side that leaves closes the connection.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from typing import Final

import msgspec

_LOG = logging.getLogger(__name__)
_REQUEST_S: Final = 5.0
_MAX_REQUEST_BYTES: Final = 16 << 20
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!i")
STANDARD_FILES = (0, 1, 2)


class ForkRequest(msgspec.Struct, frozen=True):
    """A rank to be forked.

    Args:
        argv: The rank's command line, without the program's name.
        environ: Its whole environment.
        folder: Its working folder.
    """

    argv: list[str]
    environ: dict[str, str]
    folder: str


def send_request(connection: socket.socket, request: ForkRequest) -> None:
    """Sends ``request`` with this process's standard files."""
    payload = msgspec.msgpack.encode(request)
    socket.send_fds(connection, [_LENGTH.pack(len(payload))], STANDARD_FILES)
    connection.sendall(payload)


def receive_request(connection: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Returns a request and the three files that came with it; None when the other side left, or is no supervisor.

    Nothing but a whole request that comes at once is taken: whatever else is sent costs its sender the connection, and
    nobody else anything.
    """
    files: list[int] = []
    connection.settimeout(_REQUEST_S)
    try:
        head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, len(STANDARD_FILES))
        size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        body = _receive_exactly(connection, size) if size <= _MAX_REQUEST_BYTES else b""
        if body and len(files) == len(STANDARD_FILES):
            request = msgspec.msgpack.decode(body, type=ForkRequest)
            connection.settimeout(None)
            return request, files
    except (OSError, msgspec.DecodeError) as error:
        _LOG.warning("dropped a connection to the zygote that sent no request: %s", error)
    for file in files:
        os.close(file)
    return None


def send_number(connection: socket.socket, number: int) -> None:
    """Sends a process id or an exit code; when the other side is gone, nobody is left to be told."""
    try:
        connection.sendall(_NUMBER.pack(number))
    except (BrokenPipeError, ConnectionResetError):
        return


def receive_number(connection: socket.socket) -> int | None:
    """Returns a process id or an exit code; None when the other side left."""
    try:
        data = _receive_exactly(connection, _NUMBER.size)
    except ConnectionResetError:
        return None
    return int(_NUMBER.unpack(data)[0]) if data else None


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Returns ``size`` bytes, or none when the other side left before they came."""
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)
