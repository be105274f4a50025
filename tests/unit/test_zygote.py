"""A node's zygote and its supervisors: a forked rank is what the supervisor would have been, and both end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import wait_until
from zygote_node import AGENT, PATH, SOON_S, ZygoteNode, has_ended

from launch.environment import ZYGOTE_SOCKET
from launch.exit_codes import ExitCode
from launch.node import fork_request
from launch.node.fork_request import ForkRequest, receive_number, receive_request, send_number, send_request


@pytest.fixture
def node() -> Iterator[ZygoteNode]:
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-test-") as folder,
        ZygoteNode.started(Path(folder) / "zygote") as started,
    ):
        yield started


def test_a_rank_is_what_its_supervisor_would_have_been(node: ZygoteNode) -> None:
    supervisor = node.supervisor("say", "a b", "ü", ZYGOTE_TEST="x\ny")
    out, err = supervisor.communicate("given", timeout=SOON_S)
    said = json.loads(out)
    assert said["argv"] == ["say", "a b", "ü"]
    assert said["environ"]["ZYGOTE_TEST"] == "x\ny"
    assert said["environ"]["RANK"] == "3"
    assert ZYGOTE_SOCKET not in said["environ"]
    assert said["folder"] == str(node.socket.parent)
    assert said["stdin"] == "given"
    # The three standard ones, the one for its stacks, and the one that lists them.
    assert said["files"] == 5
    assert said["parent"] == node.zygote.pid
    assert said["weights_file"] is None
    assert err == "to stderr\n"
    assert supervisor.returncode == 0


def test_what_ranks_share_is_made_in_the_zygote_before_them(node: ZygoteNode) -> None:
    def said(*argv: str) -> list[str] | None:
        out, _ = node.supervisor("say", *argv).communicate("", timeout=SOON_S)
        prepared: list[str] | None = json.loads(out)["prepared"]
        return prepared

    made = [str(node.zygote.pid), "1", "say"]
    assert [said(), said()] == [made, made], "once for ranks of one command line"
    assert said("else") == [str(node.zygote.pid), "2", "say", "else"]


def test_nothing_is_prepared_for_ranks_of_another_folder(node: ZygoteNode, tmp_path: Path) -> None:
    node.folder = tmp_path
    out, _ = node.supervisor("say").communicate("", timeout=SOON_S)
    said = json.loads(out)
    assert (said["folder"], said["prepared"]) == (str(tmp_path), None)


@pytest.mark.parametrize(
    ("argv", "code"),
    [(("exit", "0"), 0), (("exit", "5"), 5), (("signal", "9"), -9), (("signal", "11"), -11), (("signal", "15"), -15)],
)
def test_a_supervisor_ends_as_its_rank_does(node: ZygoteNode, argv: tuple[str, ...], code: int) -> None:
    supervisor = node.supervisor(*argv)
    _, err = supervisor.communicate(timeout=SOON_S)
    assert (supervisor.returncode, err) == (code, "")


def test_an_error_in_a_rank_is_printed(node: ZygoteNode) -> None:
    supervisor = node.supervisor("raise")
    _, err = supervisor.communicate(timeout=SOON_S)
    assert supervisor.returncode == ExitCode.INTERNAL
    assert err.endswith("LookupError: nothing here\n")


def test_many_ranks_are_independent(node: ZygoteNode) -> None:
    supervisors = [node.supervisor("exit", str(code)) for code in range(10)]
    assert [supervisor.wait(SOON_S) for supervisor in supervisors] == list(range(10))
    for supervisor in supervisors:
        supervisor.communicate()
    assert node.zygote.children() == []
    # Told first, closed then.
    wait_until(lambda: node.zygote.num_fds() <= 5, SOON_S, "the zygote to close the files of its ranks")


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_rank_ends_with_its_supervisor_and_no_other_does(node: ZygoteNode, sig: signal.Signals) -> None:
    victim, rank = node.sleeper()
    other, other_rank = node.sleeper()
    victim.send_signal(sig)
    assert victim.wait(SOON_S) == -sig
    wait_until(lambda: has_ended(rank), SOON_S, "the rank to end")
    assert not has_ended(other_rank)
    other.kill()
    other.wait()


@pytest.mark.parametrize("victim", ["zygote", "agent"])
def test_all_end_with_the_zygote_and_with_the_agent(node: ZygoteNode, victim: str) -> None:
    pairs = [node.sleeper(), node.sleeper()]
    if victim == "zygote":
        node.zygote.kill()
    else:
        node.agent.kill()
    for supervisor, _ in pairs:
        _, err = supervisor.communicate(timeout=SOON_S)
        assert supervisor.returncode == ExitCode.RANK_FAILED
        assert err == "lockstep: the zygote of rank 3 is gone, and the rank with it\n"
    wait_until(lambda: all(has_ended(rank) for _, rank in pairs), SOON_S, "the ranks to end")


def test_a_zygote_that_is_not_there(node: ZygoteNode) -> None:
    supervisor = node.supervisor("say", **{ZYGOTE_SOCKET: str(node.socket.parent / "other")})
    _, err = supervisor.communicate(timeout=SOON_S)
    assert supervisor.returncode == ExitCode.START_FAILED
    assert err == "lockstep: rank 3 cannot reach its zygote: [Errno 2] No such file or directory\n"


def test_a_process_with_threads_has_no_zygote(tmp_path: Path) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    outcome = subprocess.run(
        [sys.executable, "-c", AGENT.format(before=thread), str(tmp_path / "zygote")],
        env={**os.environ, "PYTHONPATH": PATH},
        input="",
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcome.stdout == "None\n"
    assert not (tmp_path / "zygote").exists()


def test_only_its_owner_reaches_it(node: ZygoteNode) -> None:
    assert node.socket.stat().st_mode & 0o777 == 0o600


def test_a_large_environment_arrives_whole() -> None:
    ours, theirs = socket.socketpair()
    request = ForkRequest(["a"], {f"name{number}": "v" * 100 for number in range(1000)}, "/")
    with ours, theirs:
        # More than a socket holds: both ends are needed at once.
        pid = os.fork()
        if pid == 0:
            send_request(ours, request)
            os._exit(0)
        received = receive_request(theirs)
        os.waitpid(pid, 0)
    assert received is not None
    assert received[0] == request
    for file in received[1]:
        os.close(file)


def test_a_side_that_leaves() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\0\0")
    ours.close()
    assert receive_request(theirs) is None
    assert receive_number(theirs) is None
    send_number(theirs, 1)
    theirs.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x80\x04\x95" + bytes(60),
        struct.pack("!I", 60) + bytes(60),
        struct.pack("!I", 1) + b"\xc1",
        struct.pack("!I", 1 << 31),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
    ids=["pickle", "zeros", "no message", "too large", "http", "nothing"],
)
def test_what_is_no_request_costs_its_sender_alone(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if sent:
            files = [os.open(os.devnull, os.O_RDONLY)]
            socket.send_fds(ours, [sent], files)
            os.close(files[0])
        ours.shutdown(socket.SHUT_WR)
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert receive_request(theirs) is None
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_request_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_request, "_REQUEST_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("!I", 100) + b"a")
        assert receive_request(theirs) is None
