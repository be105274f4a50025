"""The connections of processes on this machine, as the kernel shows them, and shutting those between two of them."""

from __future__ import annotations

import os
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LISTENING = "0A"
_CREDENTIALS = struct.Struct("3i")


class Connection(NamedTuple):
    """One end of a connection: the file in its process, and both addresses as the kernel writes them."""

    file: int
    local: str
    remote: str


def connections(pid: int) -> list[Connection]:
    """Returns the TCP connections of a process; none when it is gone."""
    known = {}
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for line in lines:
            _, local, remote, state, *_, inode = line.split()[:10]
            if state != _LISTENING:
                known[inode] = (_comparable(local), _comparable(remote))
    found = []
    folder = Path(f"/proc/{pid}/fd")
    for entry in folder.iterdir() if folder.exists() else ():
        try:
            target = _SOCKET.fullmatch(str(entry.readlink()))
        except OSError:
            continue  # closed meanwhile
        if target is not None and target[1] in known:
            found.append(Connection(int(entry.name), *known[target[1]]))
    return found


def cut_connections(peer_pid: int) -> int:
    """Shuts every connection between this process and another, both ways; returns how many there were."""
    ends = {(other.remote, other.local) for other in connections(peer_pid)}
    files = [own.file for own in connections(os.getpid()) if (own.local, own.remote) in ends]
    files += _local_connections(peer_pid)
    for file in files:
        with socket.socket(fileno=os.dup(file)) as end:
            end.shutdown(socket.SHUT_RDWR)
    return len(files)


def _local_connections(peer_pid: int) -> list[int]:
    """Returns the files of this process that are connections within the host to another one."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        # What is closed meanwhile, or is no socket.
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as end:
            if end.family == socket.AF_UNIX and end.getpeername() is not None:
                credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[0] == peer_pid:
                    found.append(int(entry.name))
    return found


def _comparable(address: str) -> str:
    """Returns an address in one form, whether its table is that of IPv4 or of IPv6 (which may carry IPv4)."""
    host, port = address.split(":")
    return f"{host[-8:]}:{port}" if host[:-8] in ("", "0000000000000000FFFF0000") else address
