"""Canaries: what torch does that we work around or rely on. One that fails says what a newer torch makes different.

Then the workaround that its message names can go, or the text in docs/chaos.md has to be brought up to date.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import LeaveAtOnceError, RankFailure, run_ranks
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

WAIT_S = 0.5
SOON_S = 20.0
AGENT_ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "canary",
}


def error_of(wait: dist.Work | None) -> str:
    """Returns the error with which an operation fails; empty when it does not."""
    try:
        if wait is not None:
            wait.wait()
    except RuntimeError as error:
        return str(error)
    return ""


def absent_peer(rank: int, _: int, folder: Path) -> str:
    """Rank 1 is alive, and makes no call."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=WAIT_S))
    assert group is not None
    found = ""
    if rank == 0:
        found = error_of(dist.all_reduce(torch.ones(1), group=group, async_op=True))
    meet(folder, rank)
    raise LeaveAtOnceError(found)


def lost_peer(rank: int, _: int) -> str:
    dist.barrier()
    if rank == 1:
        raise LeaveAtOnceError("")
    raise LeaveAtOnceError(error_of(dist.all_reduce(torch.ones(1), async_op=True)))


def too_large_message(rank: int, _: int) -> str:
    if rank == 0:
        dist.send(torch.ones(1000), 1)
        time.sleep(WAIT_S)
    else:
        error_of(dist.irecv(torch.empty(10), 0))
    raise LeaveAtOnceError("")


def skipped_call(rank: int, _: int, folder: Path) -> float:
    """Rank 1 leaves its first call out: rank 0 gets the sum of two different ones."""
    value = torch.tensor([1.0 if rank == 0 else 20.0])
    dist.all_reduce(value)
    meet(folder, rank)
    raise LeaveAtOnceError(value.item())


def aborted(rank: int, _: int, folder: Path) -> bool:
    """Rank 0 waits in vain, and another of its threads tries whatever torch has to end that."""
    waits = False
    if rank == 0:
        blocked = threading.Thread(target=lambda: error_of(dist.all_reduce(torch.ones(1), async_op=True)), daemon=True)
        blocked.start()
        time.sleep(WAIT_S / 2)
        backend = dist.group.WORLD
        assert backend is not None
        backend.abort()
        backend.shutdown()
        blocked.join(WAIT_S)
        waits = blocked.is_alive()
    meet(folder, rank)
    raise LeaveAtOnceError(waits)


def meet(folder: Path, rank: int) -> None:
    """Returns when both ranks are here, without any operation of a group."""
    (folder / str(rank)).touch()
    deadline_s = time.monotonic() + SOON_S
    while not (folder / str(1 - rank)).exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def test_gloo_tells_a_time_out_in_the_known_words(tmp_path: Path) -> None:
    text = run_ranks(absent_peer, 2, tmp_path)[0]
    assert "Timed out waiting 500ms for recv operation to complete" in text, "docs/chaos.md quotes it"
    assert "rank" not in text.lower(), "gloo names the rank now: CollectiveError and LinkError could pass it on"


def test_gloo_tells_a_lost_peer_in_the_known_words() -> None:
    text = run_ranks(lost_peer, 2)[0]
    assert "Connection closed by peer" in text or "Connection reset by peer" in text, "docs/chaos.md quotes both"


def test_a_message_that_is_too_large_still_ends_its_receiver() -> None:
    """Else pp/link.py need not have headers checked before it posts receives for what they announce."""
    with pytest.raises(RankFailure, match="rank 1 died without a word"):
        run_ranks(too_large_message, 2)


def test_a_call_that_is_left_out_is_still_not_noticed(tmp_path: Path) -> None:
    """Else payloads need not carry step numbers."""
    assert run_ranks(skipped_call, 2, tmp_path) == [21.0, 21.0]


def test_nothing_ends_an_operation_of_gloo_that_waits(tmp_path: Path) -> None:
    """Else a rank could leave and keep its process: launch/rank/main.py leaves at once, recoveries fork anew."""
    assert run_ranks(aborted, 2, tmp_path)[0] is True


def test_the_agents_store_still_outlives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ``connect_store`` need not give each attempt a prefix of its own.

    The agent's side gives every attempt the store of the first, and the workers' side reads it without a prefix: they
    dial the addresses that the ranks before them left there.
    """
    endpoint = "localhost:0"
    parameters = RendezvousParameters("c10d", endpoint, "canary", min_nodes=1, max_nodes=1, is_host="true")
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    assert first.bootstrap_store_info is not None
    assert second.bootstrap_store_info is not None
    assert first.bootstrap_store_info.master_port == second.bootstrap_store_info.master_port
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(first.bootstrap_store_info.master_port))
    for name, value in AGENT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    seen = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        workers, _, _ = next(dist.rendezvous("env://"))
        seen.append(workers.check(["address of rank 0"]))
        workers.set("address of rank 0", "a dead port")
    assert seen == [False, True]
    handler.shutdown()
