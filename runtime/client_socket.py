"""The socket between the front side and the leader: msgpack over ZMQ, nothing pickled.

The front binds, so that it can outlive the ranks; each leader connects, by a name that says its epoch: what one that is
gone had under way is known by that. Each message is a list of values of one direction. Nothing else in the project
touches ZMQ.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from runtime.messages import ClientMessage, EngineMessage

_UNDELIVERED_S = 2.0
_LEADER_ID = re.compile(rb"leader-\d{10}")
_LOG = logging.getLogger(__name__)
Message = TypeVar("Message")


class ClientSocketError(RuntimeError):
    """The socket between front and leader failed."""


class FrontSocket:
    """The front's end; it outlives the leaders, of which each has an epoch of its own.

    What it sends goes to the newest leader it heard of. What an older one still had under way is dropped.

    Args:
        endpoint: Where to bind, for example ``ipc:///run/user/1000/lockstep-x/client``.
    """

    def __init__(self, endpoint: str) -> None:
        self.dropped_frames = 0
        """How many frames of older leaders came after the first of a newer one."""
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(list[EngineMessage])
        self._leader = b""
        self._connections = 0
        self._is_lost = False
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ClientSocketError(f"cannot bind {endpoint}: {error}") from error

    @property
    def descriptor(self) -> int:
        """What turns readable when something may have come.

        It tells once: whoever waits on it then receives all there is, and looks again after every ``send``.
        """
        return self._socket.fileno()

    @property
    def is_lost(self) -> bool:
        """Whether the newest leader's end is gone, as far as ``receive`` and ``send`` have seen."""
        return self._is_lost

    def send(self, messages: Sequence[ClientMessage]) -> None:
        """Sends messages to the newest leader, in order, without waiting.

        Raises:
            ClientSocketError: No leader is connected, or the newest one is lost.
        """
        if not self._leader or self._is_lost:
            raise ClientSocketError("no leader is connected")
        try:
            self._socket.send_multipart([self._leader, msgspec.msgpack.encode(list(messages))], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError) as error:
            self._is_lost = True
            raise ClientSocketError("no leader is connected") from error

    def receive(self, timeout_s: float) -> list[EngineMessage]:
        """Returns what the newest leader sent, in order; empty when nothing came in ``timeout_s``, or a leader left.

        In one answer, what an older leader sent may come before what a newer one did. A frame that is no message is
        logged and dropped.
        """
        if timeout_s > 0:
            self._poller.poll(round(timeout_s * 1000))
        self._watch_connections()
        received = _received(self._socket)
        return _decoded(self._decoder, [parts[-1] for parts in received if self._is_current(*parts)])

    def close(self, undelivered_s: float = _UNDELIVERED_S) -> None:
        """Closes the socket; messages not yet delivered are given ``undelivered_s``."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=round(undelivered_s * 1000))
        self._context.term()

    def _is_current(self, leader: bytes, *parts: bytes) -> bool:
        if not _LEADER_ID.fullmatch(leader) or len(parts) != 1:
            _LOG.warning("dropped %d bytes from the client socket that no leader sent", sum(map(len, parts)))
            return False
        if leader < self._leader:
            self.dropped_frames += 1
            return False
        if leader > self._leader:
            self._leader, self._is_lost = leader, False
        return True

    def _watch_connections(self) -> None:
        """Notes that the leader is lost when nobody is connected any more; a new one connects before it is heard."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            self._connections += 1 if event == zmq.EVENT_ACCEPTED else -1
            self._is_lost |= self._connections == 0 and bool(self._leader)


class LeaderSocket:
    """The leader's end.

    Args:
        endpoint: Where the front bound its end; it may bind later.
        epoch: How often the ranks were started anew before; larger than that of every leader before.
    """

    def __init__(self, endpoint: str, epoch: int = 0) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTING_ID, b"leader-%010d" % epoch)
        self._decoder = msgspec.msgpack.Decoder(list[ClientMessage])
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._socket.connect(endpoint)

    def send(self, messages: Sequence[EngineMessage]) -> None:
        """Sends messages in order, without waiting."""
        self._socket.send(msgspec.msgpack.encode(list(messages)))

    def receive(self, timeout_s: float) -> list[ClientMessage]:
        """Returns what the front sent, in order; empty when nothing came in ``timeout_s`` or ``wake`` was called.

        A frame that is no message is logged and dropped.
        """
        if timeout_s > 0:
            ready = dict(self._poller.poll(round(timeout_s * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
        return _decoded(self._decoder, [parts[-1] for parts in _received(self._socket)])

    def wake(self) -> None:
        """Ends a ``receive`` that waits; any thread may call it."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Closes the socket; messages not yet delivered are given two seconds."""
        self._socket.close(linger=round(_UNDELIVERED_S * 1000))
        self._context.term()
        os.close(self._wake)


def _decoded(decoder: msgspec.msgpack.Decoder[list[Message]], frames: list[bytes]) -> list[Message]:
    messages: list[Message] = []
    for frame in frames:
        try:
            messages += decoder.decode(frame)
        except msgspec.DecodeError as error:
            _LOG.warning("dropped %d bytes from the client socket that are no message: %s", len(frame), error)
    return messages


def _received(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Returns all that is there, in parts."""
    received: list[list[bytes]] = []
    while True:
        try:
            received.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return received
