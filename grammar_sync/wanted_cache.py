"""A cache bounded in bytes that never drops what a request still wants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass
class _Slot(Generic[Value]):
    value: Value | None = None
    size_bytes: int = 0
    wanted_by: int = 0


class WantedCache(Generic[Key, Value]):
    """Keeps values until they exceed a limit; then the least recently wanted go, never one that is wanted.

    A key that is wanted may have no value yet. Not safe for several threads: the owner has a lock.

    Args:
        limit_bytes: Bound on the sizes of all values.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._slots: OrderedDict[Key, _Slot[Value]] = OrderedDict()
        self.size_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def __getitem__(self, key: Key) -> Value | None:
        """Returns the value of a key, or None when it has none yet.

        Raises:
            KeyError: The key is not there.
        """
        return self._slots[key].value

    def want(self, key: Key) -> bool:
        """Counts one more who wants ``key``; returns whether it was not there."""
        is_new = key not in self._slots
        slot = self._slots.setdefault(key, _Slot())
        slot.wanted_by += 1
        self._slots.move_to_end(key)
        return is_new

    def is_wanted(self, key: Key) -> bool:
        """Returns whether anybody wants ``key``."""
        slot = self._slots.get(key)
        return slot is not None and slot.wanted_by > 0

    def unwant(self, key: Key) -> bool:
        """Counts one less who wants ``key``, which is wanted; returns whether nobody does any more."""
        slot = self._slots[key]
        slot.wanted_by -= 1
        self._evict()
        return slot.wanted_by == 0

    def put(self, key: Key, value: Value, size_bytes: int) -> None:
        """Gives a key its value, or another one."""
        slot = self._slots.setdefault(key, _Slot())
        self.size_bytes += size_bytes - slot.size_bytes
        slot.value, slot.size_bytes = value, size_bytes
        self._evict()

    def forget(self, key: Key) -> None:
        """Drops a key, wanted or not, if it is there."""
        slot = self._slots.pop(key, None)
        self.size_bytes -= 0 if slot is None else slot.size_bytes

    def _evict(self) -> None:
        if self.size_bytes <= self._limit_bytes:
            return
        for key in list(self._slots):
            slot = self._slots[key]
            if slot.wanted_by == 0 and slot.value is not None:
                self.forget(key)
            if self.size_bytes <= self._limit_bytes:
                return
