"""What chaos sees of processes: those of a cell, their ends, their connections, what they leave; and its own files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.chaos.connections import connections, cut_connections
from launch.chaos.faults import Injection
from launch.chaos.load import load_factor
from launch.chaos.outside import NoVictimError, find_process, strike
from launch.chaos.processes import Deaths, end_processes, leftovers, marked_processes, shared_memory
from launch.chaos.record import CellFolder, Fired, write_place
from launch.environment import CHAOS_FOLDER

SLEEP = (sys.executable, "-c", "import time; print(flush=True); time.sleep(600)")


def sleeper(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        SLEEP, env={**os.environ, CHAOS_FOLDER: str(folder)}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_processes_are_found_by_their_mark_and_ended(tmp_path: Path) -> None:
    ours, others = sleeper(tmp_path), sleeper(tmp_path / "other")
    assert list(marked_processes(tmp_path)) == [ours.pid]
    deaths = Deaths()
    deaths.watch(ours.pid)
    deaths.watch(ours.pid)
    deaths.wait(0)
    assert deaths.at_s == {}
    began_s = time.monotonic()
    assert end_processes(tmp_path) == ["python"]
    deaths.wait(10)
    assert began_s <= deaths.at_s[ours.pid] <= time.monotonic()
    deaths.close()
    assert ours.wait(10) == -9
    assert marked_processes(tmp_path) == {}
    assert others.poll() is None
    end_processes(tmp_path / "other")
    for process in (ours, others):
        process.communicate()


def test_a_process_that_is_gone_already_ended(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    process.kill()
    process.communicate()
    deaths = Deaths()
    deaths.watch(process.pid)
    assert process.pid in deaths.at_s


def test_leftovers(tmp_path: Path) -> None:
    folder = CellFolder.create(tmp_path / "cell", (), armed=False)
    memory = shared_memory()
    assert not leftovers(folder.path, folder.temporary, memory, 0.0).any
    process = sleeper(folder.path)
    (folder.temporary / "lockstep-x").mkdir()
    (folder.temporary / "lockstep-x" / "client").touch()
    left = leftovers(folder.path, folder.temporary, memory, 0.1)
    assert (left.processes, left.files) == (["python"], ["lockstep-x", "lockstep-x/client"])
    assert left.any
    process.communicate()


def test_connections_between_two_processes_are_cut() -> None:
    """The other process reads the end of the connection; that with a third one stays."""
    listener = socket.create_server(("127.0.0.1", 0))
    third = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    program = f"import socket; end = socket.create_connection(('127.0.0.1', {port})); print(end.recv(1) == b'')"
    with listener, third, subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as peer:
        ours, _ = listener.accept()
        elsewhere = socket.create_connection(third.getsockname())
        other_end, _ = third.accept()
        with ours, elsewhere, other_end:
            assert len(connections(os.getpid())) >= 3
            assert cut_connections(peer.pid) == 1
            out, _ = peer.communicate(timeout=20)
            assert out == "True\n"
            elsewhere.sendall(b"x")
            assert other_end.recv(1) == b"x"
    assert connections(peer.pid) == []


def test_a_fault_is_claimed_once(tmp_path: Path) -> None:
    injection = Injection(action="kill", rank=1, call="all_reduce", peer=0)
    folder = CellFolder.create(tmp_path / "cell", (injection,), armed=False)
    assert folder.injections() == (injection,)
    assert folder.fired() == []
    later = Fired(action="kill", rank=1, where="inside x", t_s=5.0)
    assert folder.claim("0", later)
    assert not folder.claim("0", later)
    folder.note("stop", "process 7", rank=2)
    assert [(it.action, it.rank) for it in folder.fired()] == [("kill", 1), ("stop", 2)]


def test_arming_is_seen_at_once_and_a_rank_tells_where_it_is(tmp_path: Path) -> None:
    folder = CellFolder.create(tmp_path / "cell", (), armed=False)
    armed, place = folder.open_armed(), folder.open_place(3)
    assert armed[0] == 0
    folder.arm(2)
    assert armed[0] == 2
    assert folder.place_of(3) == ""
    write_place(place, "inside all_reduce@0,1 #7 " + "x" * 200)
    assert folder.place_of(3).startswith("inside all_reduce@0,1 #7")
    write_place(place, "outside")
    assert (folder.place_of(3), folder.place_of(4)) == ("outside", "")
    assert folder.pid_of(3) is None
    folder.write_pid(3)
    assert folder.pid_of(3) == os.getpid()


def test_a_signal_from_outside_is_noted(tmp_path: Path) -> None:
    folder = CellFolder.create(tmp_path / "cell", (), armed=False)
    process = sleeper(folder.path)
    strike(folder, "kill", process.pid, rank=3)
    assert process.wait(10) == -9
    process.communicate()
    (fired,) = folder.fired()
    assert (fired.action, fired.rank, fired.where) == ("kill", 3, f"process {process.pid}")
    strike(folder, "none", process.pid)
    assert len(folder.fired()) == 1


def test_a_victim_that_is_not_there(tmp_path: Path) -> None:
    folder = CellFolder.create(tmp_path / "cell", (), armed=False)
    assert find_process(folder, "front", None) == os.getpid()
    with pytest.raises(NoVictimError, match=r"there is no process of the zygote in 0\.1 s"):
        find_process(folder, "zygote", None, within_s=0.1)


def test_the_load_factor_is_at_least_one() -> None:
    assert load_factor(1) >= 1.0
