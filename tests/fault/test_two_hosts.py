"""Two hosts as network namespaces with a cable between them: it is cut, slow or lossy, or one host is gone.

Several nodes are promised less than one (docs/operations.md): a fault ends the ranks, and torchrun starts all anew.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from command_line import LOCKSTEP, TORCHRUN, Outcome, Running, run, running
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]

START_S = 180.0
END_S = 240.0
CUT_S = 8.0
GROUP_TIMEOUT_S = 4
JOIN_S = 20
PORT = 29400
LINES = 9


def ip(*words: str) -> str:
    """Runs iproute2; returns what it said, or skips the test where it cannot do that here."""
    return tool("ip", *words)


def tool(name: str, *words: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} of iproute2 is not installed")
    done = subprocess.run([path, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"'{name} {' '.join(words)}' is not possible here: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    name: str
    address: str
    cable: str

    def cut(self) -> None:
        """Unplugs the cable here."""
        ip("-n", self.name, "link", "set", self.cable, "down")

    def mend(self) -> None:
        """Plugs it in again."""
        ip("-n", self.name, "link", "set", self.cable, "up")

    def shape(self, *words: str) -> None:
        """Has the cable be slow, late or lossy."""
        tool("tc", "-n", self.name, "qdisc", "replace", "dev", self.cable, "root", *words)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    if os.geteuid():
        pytest.skip("network namespaces need root")
    own = os.getpid()
    found = [Host(f"lockstep-{own}-{end}", f"10.231.77.{end + 1}", f"ls{own}e{end}") for end in range(2)]
    with ExitStack() as stack:
        for host in found:
            ip("netns", "add", host.name)
            stack.callback(ip, "netns", "delete", host.name)
        ip("link", "add", found[0].cable, "type", "veth", "peer", "name", found[1].cable)
        for host in found:
            ip("link", "set", host.cable, "netns", host.name)
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.cable)
            ip("-n", host.name, "link", "set", "lo", "up")
            host.mend()
        yield found


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Returns a batch whose first request ends at once and whose others take a while."""
    folder = tmp_path_factory.mktemp("batch")
    model = write_tiny_checkpoint(folder / "model", "llama", max_position_embeddings=1024)
    lines = [{"prompt": f"{at}", "max_tokens": 150, "ignore_eos": True, "temperature": 0} for at in range(LINES)]
    lines[0]["max_tokens"] = 1
    (folder / "input.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--model", str(model), "--input", str(folder / "input.jsonl"), "--max-num-seqs", "4", "--pp", "2")
    return ("generate", *options, "--threads-per-rank", "1", "--group-timeout", str(GROUP_TIMEOUT_S))


@pytest.fixture(scope="module")
def alone(command: tuple[str, ...]) -> Outcome:
    outcome = run(*LOCKSTEP, *command)
    assert outcome.returncode == ExitCode.OK
    return outcome


@contextmanager
def on_both(hosts: list[Host], command: tuple[str, ...], restarts: int) -> Iterator[list[Running]]:
    """Runs a rank and its agent on each host; the first has the leader."""
    with ExitStack() as stack:
        started = []
        for number, host in enumerate(hosts):
            meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--rdzv-id", "two")
            conf = f"is_host={number == 0},join_timeout={JOIN_S},last_call_timeout=1"
            agent = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(restarts), *meeting)
            own = ("--rdzv-conf", conf.lower(), "--local-addr", host.address, "--node-rank", str(number))
            environ = {"GLOO_SOCKET_IFNAME": host.cable}
            words = ("ip", "netns", "exec", host.name, *agent, *own, "-m", "launch", *command)
            started.append(stack.enter_context(running(*words, environ=environ)))
        yield started


def printed(outcomes: list[Outcome]) -> list[object]:
    """Returns the last records that the leader's host printed; those of an attempt before come first."""
    (text,) = [outcome.stdout for outcome in outcomes if outcome.stdout]
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")[-LINES:]]


def wait_for_output(started: list[Running]) -> None:
    """Returns when the first request has ended, whichever host has the leader."""
    deadline_s = time.monotonic() + START_S
    while not any('"line-1"' in (one.folder / "stdout").read_text() for one in started):
        assert time.monotonic() < deadline_s, [(one.folder / "stderr").read_text()[-2000:] for one in started]
        time.sleep(0.05)


@pytest.mark.parametrize(
    "shape",
    [
        ("tbf", "rate", "2mbit", "burst", "8kb", "latency", "400ms"),
        ("netem", "delay", "40ms", "10ms"),
        ("netem", "loss", "3%"),
    ],
    ids=["narrow", "delay", "loss"],
)
def test_a_narrow_cable_delay_and_loss_cost_only_time(
    hosts: list[Host], command: tuple[str, ...], alone: Outcome, shape: tuple[str, ...]
) -> None:
    for host in hosts:
        host.shape(*shape)
    try:
        with on_both(hosts, command, restarts=0) as started:
            outcomes = [one.wait(END_S) for one in started]
    finally:
        for host in hosts:
            host.shape("pfifo", "limit", "1000")
    assert [outcome.returncode for outcome in outcomes] == [ExitCode.OK, ExitCode.OK]
    assert printed(outcomes) == alone.records()


def test_a_cut_cable_ends_the_ranks_and_all_are_started_anew(
    hosts: list[Host], command: tuple[str, ...], alone: Outcome
) -> None:
    """Nobody is told by the network: the time-out of the groups is what notices it, on both hosts."""
    with on_both(hosts, command, restarts=2) as started:
        wait_for_output(started)
        hosts[0].cut()
        time.sleep(CUT_S)
        hosts[0].mend()
        outcomes = [one.wait(END_S) for one in started]
        for one in started:
            one.check_nothing_left()
    said = "\n".join(outcome.stderr for outcome in outcomes)
    assert [outcome.returncode for outcome in outcomes] == [ExitCode.OK, ExitCode.OK], said
    assert f"Timed out waiting {GROUP_TIMEOUT_S * 1000}ms" in said
    assert printed(outcomes) == alone.records()


def test_a_host_that_is_gone_ends_the_other_in_bounded_time(hosts: list[Host], command: tuple[str, ...]) -> None:
    """Its processes die with it, and the cable is dead: the other host waits for it as long as it was told to."""
    with on_both(hosts, command, restarts=1) as started:
        wait_for_output(started)
        hosts[1].cut()
        for process in started[1].family():
            process.send_signal(signal.SIGKILL)
        began_s = time.monotonic()
        outcome = started[0].wait(END_S)
        waited_s = time.monotonic() - began_s
        started[0].check_nothing_left()
        hosts[1].mend()
    assert outcome.returncode != ExitCode.OK
    assert "pp0 between stages 0 and 1" in outcome.stderr
    assert waited_s < END_S / 2
