"""A process group around a real one that works faults at chosen calls, put in the place of every group of a rank.

It is registered as the backend ``faulty``. What a program asks for (``gloo``, ``nccl``, or one for each device) is made
beneath it, and is what ``get_backend`` names. Until a fault is due a call costs some microseconds.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from launch.chaos.altered import AlteredWork, DoneWork, FailedWork, flip, halved, other_dtype, tensors_in
from launch.chaos.faults import BY_ACTION, Injection
from launch.chaos.injury import injure
from launch.chaos.record import CellFolder, Fired, write_place
from tp.python_group import PythonGroup

_BACKEND = "faulty"
_HELPER = "_new_process_group_helper"
_RECEIVING = ("broadcast", "recv", "all_gather", "scatter")
Method = Callable[..., Any]


class Trigger:
    """Knows which call of this rank a fault is due at, and keeps count of calls.

    Args:
        folder: Where faults are armed and noted.
        rank: This rank.
        epoch: Of its life.

    Attributes:
        calls: How often each call was made on each group, as ``all_reduce@0,1`` and, for messages, ``send:3@0,2``.
    """

    def __init__(self, folder: CellFolder, rank: int, epoch: int) -> None:
        self.folder = folder
        self.calls: Counter[str] = Counter()
        self._injections = [
            (index, injection)
            for index, injection in enumerate(folder.injections())
            if injection.rank == rank and injection.epoch in (None, epoch)
        ]
        self._matched: Counter[int] = Counter()
        self._armed = folder.open_armed()
        self._place = folder.open_place(rank)
        self._rank = rank
        folder.write_pid(rank)

    def enter(self, call: str, group: str, tag: int | None) -> Injection | None:
        """Notes that a call begins; returns the fault that is due at it."""
        name = f"{call}@{group}" if tag is None else f"{call}:{tag}@{group}"
        self.calls[name] += 1
        write_place(self._place, f"inside {name} #{self.calls[name]}")
        for index, injection in self._injections:
            if self._armed[0] <= index or injection.call not in ("*", call) or injection.group not in ("*", group):
                continue
            if injection.tag not in (None, tag):
                continue
            self._matched[index] += 1
            if self._matched[index] == injection.number + 1 and self.folder.claim(str(index), self._fired(injection)):
                return injection
        return None

    def leave(self) -> None:
        """Notes that no call is being made."""
        write_place(self._place, "outside")

    def _fired(self, injection: Injection) -> Fired:
        place = bytes(self._place).rstrip(b"\0 ").decode().removeprefix("inside ")
        return Fired.now(injection.action, self._rank, f"{injection.place} {place}")


class FaultyGroup(PythonGroup):
    """One group of a rank.

    Args:
        real: The group that does the work.
        name: ``default``, or its global ranks as ``0,2``.
        trigger: Says when a fault is due.
    """

    def __init__(self, real: dist.ProcessGroup, name: str, trigger: Trigger) -> None:
        super().__init__(real.rank(), real.size())
        self._real = real
        self._name = name
        self._trigger = trigger

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns the backend's name."""
        return _BACKEND

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_reduce", self._real.allreduce, args, kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_reduce", self._real.allreduce_coalesced, args, kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("broadcast", self._real.broadcast, args, kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("reduce", self._real.reduce, args, kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_gather", self._real.allgather, args, kwargs)

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Any:
        return self._made("all_gather", self._real._allgather_base, args, kwargs)  # noqa: SLF001 - torch's name

    def all_gather_single(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_gather", self._real.all_gather_single, args, kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_gather", self._real.allgather_coalesced, args, kwargs)

    def allgather_into_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_gather", self._real.allgather_into_tensor_coalesced, args, kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("gather", self._real.gather, args, kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("scatter", self._real.scatter, args, kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("reduce_scatter", self._real.reduce_scatter, args, kwargs)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Any:
        return self._made("reduce_scatter", self._real._reduce_scatter_base, args, kwargs)  # noqa: SLF001 - torch's name

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("reduce_scatter", self._real.reduce_scatter_single, args, kwargs)

    def alltoall(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_to_all", self._real.alltoall, args, kwargs)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_to_all", self._real.alltoall_base, args, kwargs)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("all_to_all", self._real.all_to_all_single, args, kwargs)

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> Any:
        """As the real group's."""
        return self._made("send", self._real.send, (tensors, dst_rank, tag), {}, tag)

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> Any:
        """As the real group's."""
        return self._made("recv", self._real.recv, (tensors, src_rank, tag), {}, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """As the real group's."""
        return self._made("recv", self._real.recv_anysource, (tensors, tag), {}, tag)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """As the real group's."""
        return self._made("barrier", self._real.barrier, args, kwargs)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As the real group's."""
        real: Any = self._real
        self._made("barrier", real.monitored_barrier, (timeout, wait_all_ranks), {})

    def abort(self) -> None:
        """As the real group's."""
        self._real.abort()

    def shutdown(self) -> None:
        """As the real group's."""
        self._real.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """As the real group's."""
        self._real.set_timeout(timeout)

    def _made(self, call: str, method: Method, args: tuple[Any, ...], kwargs: Any, tag: int | None = None) -> Any:
        """Returns the work of a call, after or with the fault that is due at it."""
        injection = self._trigger.enter(call, self._name, tag)
        if injection is None:
            work = method(*args, **kwargs)
        elif BY_ACTION[injection.action].reach == "process":
            work = self._injured(injection, method, args, kwargs)
        else:
            work = self._altered(injection, call, method, args, kwargs)
        return self._watched(work)

    def _watched(self, work: Any) -> Any:
        """Returns work that says, when it was waited for, that this rank is in no call."""
        if work is None:
            self._trigger.leave()
            return None
        return AlteredWork(work, self._trigger.leave)

    def _injured(self, injection: Injection, method: Method, args: Any, kwargs: Any) -> Any:
        folder = self._trigger.folder
        if injection.place == "before":
            injure(injection, folder)
            return method(*args, **kwargs)
        work = method(*args, **kwargs)
        if injection.place == "after" and work is not None:
            return AlteredWork(work, lambda: injure(injection, folder))
        injure(injection, folder)
        return work

    def _altered(self, injection: Injection, call: str, method: Method, args: Any, kwargs: Any) -> Any:
        match injection.action:
            case "slow":
                injure(injection, self._trigger.folder)
            case "skip":
                return DoneWork()
            case "extra" | "reorder":
                self._made_before(injection.action, method, args, kwargs)
            case "wrong_size":
                return method(*halved(args), **kwargs)
            case "wrong_dtype":
                return method(*other_dtype(args), **kwargs)
            case "corrupt" if call in _RECEIVING:
                work = method(*args, **kwargs)
                tensor = tensors_in(args[0])[-1]
                return AlteredWork(work, lambda: flip(tensor, injection.byte))
            case "corrupt":
                for tensor in tensors_in(args[0])[:1]:
                    flip(tensor, injection.byte)
            case "error":
                raise RuntimeError(f"injected: {call} is refused by the backend")
            case "async_error":
                return FailedWork(method(*args, **kwargs), f"injected: {call} failed in the backend")
        return method(*args, **kwargs)

    def _made_before(self, action: str, method: Method, args: Any, kwargs: Any) -> None:
        """Makes the same call once more, or a broadcast that no other rank makes, and waits for it."""
        if action == "extra":
            work = method(*args, **kwargs)
        else:
            work = self._real.broadcast([torch.zeros(1)], dist.BroadcastOptions())
        if work is not None:
            work.wait()


class _Wanted:
    """What the faulty backend is made around."""

    def __init__(self, real: dist.ProcessGroup) -> None:
        self.real = real


def install(trigger: Trigger, group_timeout_s: float | None = None) -> None:
    """Puts a faulty group in the place of every group that this process makes from now on.

    Args:
        trigger: Says when a fault is due.
        group_timeout_s: The time-out of every group; None = what the program asks for.
    """
    helper = vars(distributed_c10d)[_HELPER]
    signature = inspect.signature(helper)

    def create(options: Any, wanted: _Wanted) -> FaultyGroup:
        members = ",".join(map(str, options.global_ranks_in_group)) or "default"
        return FaultyGroup(wanted.real, members, trigger)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments
        backend, name = asked["backend"], asked["group_name"]
        if group_timeout_s is not None:
            asked["timeout"] = timedelta(seconds=group_timeout_s)
        real, store = helper(**asked | {"group_name": f"{name}/real"})
        if not isinstance(real, dist.ProcessGroup):
            return real, store
        group, store = helper(**asked | {"backend": _BACKEND, "backend_options": _Wanted(real)})
        distributed_c10d._world.pg_map[group] = (backend, store)  # noqa: SLF001 - torch has no other way to say it
        return group, store

    dist.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    vars(distributed_c10d)[_HELPER] = new_group
