"""The socket between the front side and the leader: msgpack over ZMQ, nothing pickled.

The front binds, so that it can outlive the ranks; the leader connects. Each message is a list of values of one
direction. Nothing else in the project touches ZMQ.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import zmq

from runtime.messages import ClientMessage, EngineMessage

_UNDELIVERED_S = 2.0
_LOG = logging.getLogger(__name__)
Message = TypeVar("Message")


class ClientSocketError(RuntimeError):
    """The socket between front and leader failed."""


class FrontSocket:
    """The front's end.

    Args:
        endpoint: Where to bind, for example ``ipc:///run/user/1000/lockstep-x/client``.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = _dealer(self._context)
        self._decoder = msgspec.msgpack.Decoder(list[EngineMessage])
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

    def send(self, messages: Sequence[ClientMessage]) -> None:
        """Sends messages in order, without waiting.

        Raises:
            ClientSocketError: No leader is connected.
        """
        try:
            self._socket.send(msgspec.msgpack.encode(list(messages)), zmq.NOBLOCK)
        except zmq.Again as error:
            raise ClientSocketError("no leader is connected") from error

    def receive(self, timeout_s: float) -> list[EngineMessage]:
        """Returns what the leader sent, in order; empty when nothing came in ``timeout_s``.

        A frame that is no message is logged and dropped.
        """
        return _decoded(self._decoder, _frames(self._socket, timeout_s))

    def close(self, undelivered_s: float = _UNDELIVERED_S) -> None:
        """Closes the socket; messages not yet delivered are given ``undelivered_s``."""
        self._socket.close(linger=round(undelivered_s * 1000))
        self._context.term()


class LeaderSocket:
    """The leader's end.

    Args:
        endpoint: Where the front bound its end; it may bind later.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = _dealer(self._context)
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
        return _decoded(self._decoder, _frames(self._socket, 0))

    def wake(self) -> None:
        """Ends a ``receive`` that waits; any thread may call it."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Closes the socket; messages not yet delivered are given two seconds."""
        self._socket.close(linger=round(_UNDELIVERED_S * 1000))
        self._context.term()
        os.close(self._wake)


def _dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    return socket


def _decoded(decoder: msgspec.msgpack.Decoder[list[Message]], frames: list[bytes]) -> list[Message]:
    messages: list[Message] = []
    for frame in frames:
        try:
            messages += decoder.decode(frame)
        except msgspec.DecodeError as error:
            _LOG.warning("dropped %d bytes from the client socket that are no message: %s", len(frame), error)
    return messages


def _frames(socket: zmq.Socket[bytes], timeout_s: float) -> list[bytes]:
    """Returns every frame that is there, after waiting up to ``timeout_s`` for the first."""
    frames: list[bytes] = []
    if timeout_s > 0 and not socket.poll(round(timeout_s * 1000)):
        return frames
    while True:
        try:
            frames.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return frames
