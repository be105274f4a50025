"""The faults there are: what each does, the row of the fault matrix that it belongs to, and where it can strike."""

from __future__ import annotations

from typing import Literal

import msgspec

Action = Literal[
    "kill",
    "segv",
    "exit",
    "exit0",
    "raise",
    "stop",
    "sleep",
    "gil",
    "slow",
    "skip",
    "extra",
    "reorder",
    "wrong_size",
    "wrong_dtype",
    "corrupt",
    "error",
    "async_error",
    "cut",
    "store_slow",
    "store_dead",
    "sigterm",
    "sigint",
    "load",
    "none",
]
Place = Literal["before", "inside", "after"]
PLACES: tuple[Place, ...] = ("before", "inside", "after")

Reach = Literal["process", "call", "around"]
"""``process``: befalls a process, at a call or at any time; ``call``: changes one call of a collective or message;
``around``: befalls what ranks need, or who runs them."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault.

    Args:
        action: Its name.
        row: Its row of the fault matrix: K1 to K16.
        reach: What it befalls.
        what: What happens, in a few words.
        changes_data: Whether a run that goes on may compute something else.
    """

    action: Action
    row: str
    reach: Reach
    what: str
    changes_data: bool = False


FAULTS: tuple[Fault, ...] = (
    Fault(action="kill", row="K1", reach="process", what="SIGKILL"),
    Fault(action="segv", row="K1", reach="process", what="SIGSEGV"),
    Fault(action="exit", row="K1", reach="process", what="leaves at once with exit code 7"),
    Fault(action="exit0", row="K1", reach="process", what="leaves at once with exit code 0"),
    Fault(action="raise", row="K2", reach="process", what="the program raises an exception"),
    Fault(action="stop", row="K3", reach="process", what="SIGSTOP"),
    Fault(action="sleep", row="K3", reach="process", what="the program sleeps for ever"),
    Fault(action="gil", row="K3", reach="process", what="a C call sleeps for ever and holds the GIL"),
    Fault(action="slow", row="K4", reach="call", what="the call begins late"),
    Fault(action="skip", row="K5", reach="call", what="the call is left out", changes_data=True),
    Fault(action="extra", row="K5", reach="call", what="the call is made twice", changes_data=True),
    Fault(action="reorder", row="K5", reach="call", what="a broadcast is made before the call", changes_data=True),
    Fault(action="wrong_size", row="K6", reach="call", what="half of the tensor takes part", changes_data=True),
    Fault(action="wrong_dtype", row="K6", reach="call", what="the tensor is twice as wide", changes_data=True),
    Fault(action="corrupt", row="K7", reach="call", what="a bit of the tensor is flipped", changes_data=True),
    Fault(action="error", row="K11", reach="call", what="the backend refuses the call"),
    Fault(action="async_error", row="K11", reach="call", what="the backend fails when the call is waited for"),
    Fault(action="cut", row="K10", reach="process", what="the connections between two ranks are shut"),
    Fault(action="store_slow", row="K12", reach="around", what="the process with the store is stopped for a while"),
    Fault(action="store_dead", row="K12", reach="around", what="the process with the store is killed"),
    Fault(action="sigterm", row="K16", reach="around", what="SIGTERM to the front side"),
    Fault(action="sigint", row="K16", reach="around", what="SIGINT to the front side"),
    Fault(action="load", row="K16", reach="around", what="all cores are busy for a while"),
    Fault(action="none", row="K16", reach="around", what="nothing"),
)
BY_ACTION = {fault.action: fault for fault in FAULTS}


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that the faulty backend works in one rank at one of its calls.

    Args:
        action: What happens.
        rank: Global rank of the victim.
        call: Which call: ``all_reduce``, ``broadcast``, ``send`` and so on; ``*`` = any.
        group: The group it is made on: ``default``, or global ranks as ``0,2``; ``*`` = any.
        tag: The tag of a message; None = any.
        number: Which of the matching calls since the fault was armed, from 0.
        place: When, as seen from the call.
        epoch: In which epoch of the ranks; None = in any.
        seconds: How long a slow call waits.
        peer: The other end of a connection that is cut.
        byte: Which byte of a tensor is corrupted; None = the high one of its first element.
    """

    action: Action
    rank: int
    call: str = "*"
    group: str = "*"
    tag: int | None = None
    number: int = 0
    place: Place = "inside"
    epoch: int | None = None
    seconds: float = 0.5
    peer: int | None = None
    byte: int | None = None
