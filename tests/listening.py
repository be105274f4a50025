"""Where processes listen, and what a stranger may send there."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_ACCEPTS = 0x10000
_AT_ONCE_S = 0.03


class _Marker:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


def pickle_that_makes(path: Path) -> bytes:
    """Returns bytes that make an empty file when they are unpickled."""
    return pickle.dumps(_Marker(path))


def listening_addresses(processes: Iterable[psutil.Process], folder: Path) -> list[tuple[str, int] | str]:
    """Returns where processes listen: TCP addresses, and paths of Unix sockets below ``folder``."""
    found: set[tuple[str, int] | str] = set()
    for process in processes:
        with suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    loopback = "::1" if connection.family == socket.AF_INET6 else "127.0.0.1"
                    host = connection.laddr.ip
                    found.add((loopback if host in ("::", "0.0.0.0") else host, connection.laddr.port))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS and fields[7].startswith(str(folder)):
            found.add(fields[7])
    return sorted(found, key=str)


def send_to(address: tuple[str, int] | str, payload: bytes) -> bytes:
    """Sends bytes to where somebody listens; returns what came back at once."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    answer = b""
    with socket.socket(family) as connection, suppress(OSError):
        connection.connect(address)
        connection.sendall(payload)
        connection.settimeout(_AT_ONCE_S)
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def framed(payload: bytes) -> list[bytes]:
    """Returns a payload as several protocols would carry it."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    return [
        payload,
        struct.pack("!i", len(payload)) + payload,
        struct.pack("<q", len(payload)) + payload,
        head + payload,
    ]
