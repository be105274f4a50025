"""What a rank's supervisor asks of its node's zygote, and what it is told, over a stream socket.

The supervisor sends one ``ForkRequest`` with its three standard files; the zygote answers with the rank's process id,
and with its exit code when it has ended. A side that leaves closes the connection.
"""

from __future__ import annotations

import socket
import struct

import msgspec

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
    """Returns a request and the three files that came with it; None when the other side left."""
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, len(STANDARD_FILES))
    body = b""
    if len(head) == _LENGTH.size:
        body = _receive_exactly(connection, _LENGTH.unpack(head)[0])
    if not body:
        return None
    return msgspec.msgpack.decode(body, type=ForkRequest), files


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
