"""A rank that is killed or stopped costs a pause: every request ends with the bytes of an undisturbed run."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from command_line import LOCKSTEP, Running, run, running, wait_until
from http_server import Server, serving
from soak import SoakLoad, check_counters, counted, soak
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode
from launch.node.rank_fault import FaultReport

pytestmark = pytest.mark.long(100)

START_S = 90.0
END_S = 120.0
STALL_S = 1.5
STREAMS = 16
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}


def requests() -> list[dict[str, Any]]:
    """Returns sixteen requests: half of them constrained, half sampled with seeds."""
    bodies: list[dict[str, Any]] = []
    for number in range(STREAMS):
        body: dict[str, Any] = {"prompt": f"{number} " * (1 + 4 * number), "max_tokens": 40 + 2 * number}
        if number % 2:
            body |= {"temperature": 0.9, "seed": number, "top_p": 0.9, "frequency_penalty": 0.3, "logprobs": 2}
        else:
            body |= {"temperature": 0}
        if number % 4 < 2:
            body |= {"json_schema": SCHEMA} if number % 8 < 4 else {"regex": "(ab|c[de]){20,30}"}
        else:
            body |= {"ignore_eos": True}
        bodies.append(body | {"n": 2} if number in (3, 6) else body)
    return bodies


@dataclass
class Read:
    """What came of a stream, choice by choice."""

    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Adds an event."""
        assert "error" not in event, event
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            self.text[index] = self.text.get(index, "") + choice["text"]
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"]:
                assert index not in self.ends
                self.ends[index] = choice["finish_reason"]


class Streams:
    """Sixteen streams at a server, read at the same time."""

    def __init__(self, server: Server) -> None:
        self.begun = threading.Event()
        self._server = server
        self._left = STREAMS
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(STREAMS)
        self._reads: list[Future[Read]] = [self._pool.submit(self._read, body) for body in requests()]

    def results(self) -> list[Read]:
        """Returns what came of all of them once they have ended."""
        found = [read.result(END_S) for read in self._reads]
        self._pool.shutdown()
        return found

    def _read(self, body: dict[str, Any]) -> Read:
        read, is_first = Read(), True
        body = body | {"model": self._server.model, "stream": True, "return_token_ids": True}
        body |= {"stream_options": {"include_usage": True}}
        with self._server.http() as http, http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    read.take(json.loads(line.removeprefix("data: ")))
                    is_first = is_first and self._count_begun()
        return read

    def _count_begun(self) -> bool:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.begun.set()
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    options = ("--tp", "2", "--pp", "2", "--invariant", "--max-recoveries", "1000", "--stall-timeout", str(STALL_S))
    with serving("--model", str(model), *options) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Read]:
    found = Streams(server).results()
    assert all(set(read.ends.values()) <= {"stop", "length"} for read in found)
    return found


def test_a_short_soak(server: Server) -> None:
    """Seconds of what ``test_soak.py`` does for minutes."""
    load, before = SoakLoad(streams=10, cut=3, slow=1, bad=1, requests=6), counted(server)
    soaked = soak(server, load, 1.0)
    assert soaked.wrong == []
    assert min(soaked.finished, soaked.cut, soaked.refused) >= 1
    check_counters(server, load, soaked, before)


def kill(started: Running, rank: int) -> psutil.Process:
    """Kills a rank; returns the process that it was."""
    victim = started.ranks()[rank]
    victim.kill()
    return victim


def next_rank(started: Running, rank: int, before: psutil.Process) -> psutil.Process:
    """Returns a rank's process of the next epoch once it is there."""
    wait_until(lambda: started.ranks().get(rank, before) != before, START_S, f"a new rank {rank}")
    return started.ranks()[rank]


def recoveries(server: Server) -> int:
    """Returns how many there were so far."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(r"^lockstep:recovery_seconds_count (\S+)", text, re.MULTILINE)
    assert found is not None, text
    return int(float(found.group(1)))


def times_named(server: Server, rank: int) -> int:
    """Returns how often the server said that a rank failed."""
    return (server.command.folder / "stderr").read_text().count(f"rank {rank} (")


def in_prefill(server: Server, _: Streams, victim: int) -> None:
    wait_until(lambda: httpx.get(f"{server.url}/health").json()["open_requests"] > 0, 10, "a request")
    kill(server.command, victim)


def in_decode(server: Server, streams: Streams, victim: int) -> None:
    assert streams.begun.wait(60)
    kill(server.command, victim)


def in_agreement(server: Server, streams: Streams, victim: int) -> None:
    """A grammar that nobody has seen waits to be compiled meanwhile."""
    fresh = {"model": server.model, "prompt": "a", "max_tokens": 8, "regex": f"x{{{2 + victim},{9 + victim}}}"}
    with ThreadPoolExecutor(1) as pool, server.http() as http:
        reply = pool.submit(http.post, "/v1/completions", json=fresh | {"temperature": 0})
        kill(server.command, victim)
        assert reply.result(60).status_code == 200
    assert streams.begun.wait(60)


def in_recovery(server: Server, streams: Streams, victim: int) -> None:
    assert streams.begun.wait(60)
    before = kill(server.command, victim)
    next_rank(server.command, victim, before).kill()


Moment = Callable[[Server, Streams, int], None]
MOMENTS: tuple[Moment, ...] = (in_prefill, in_decode, in_agreement, in_recovery)
SHORT = {(in_prefill, 3), (in_decode, 0), (in_agreement, 1), (in_recovery, 2), (in_decode, 2)}


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        pytest.param(
            *(moment, victim),
            id=f"{moment.__name__}-{victim}",
            marks=() if (moment, victim) in SHORT else pytest.mark.sweep,
        )
        for moment, victim in itertools.product(MOMENTS, range(4))
    ],
)
def test_t19_a_killed_rank_costs_no_byte(server: Server, undisturbed: list[Read], moment: Moment, victim: int) -> None:
    """SCENARIOS T19: SIGKILL of each rank in turn, with sixteen streams open."""
    before, named_before = recoveries(server), times_named(server, victim)
    streams = Streams(server)
    moment(server, streams, victim)
    assert streams.results() == undisturbed
    kills = 2 if moment is in_recovery else 1
    assert times_named(server, victim) - named_before == kills
    # An epoch that ends before its ranks are up never reaches the front side.
    assert 1 <= recoveries(server) - before <= kills


@pytest.mark.parametrize("victim", [3, pytest.param(0, marks=pytest.mark.sweep)])
def test_t19_a_stopped_rank_costs_no_byte(server: Server, undisturbed: list[Read], victim: int) -> None:
    """SCENARIOS T19: SIGSTOP of a rank, with sixteen streams open."""
    before = recoveries(server)
    streams = Streams(server)
    assert streams.begun.wait(60)
    server.command.ranks()[victim].suspend()
    assert streams.results() == undisturbed
    assert recoveries(server) - before == 1
    with server.http() as http:
        told = http.get("/v1/ranks").json()
    assert told["epoch"] >= recoveries(server)
    (culprit,) = told["faults"][-1]["culprits"]
    assert (culprit["rank"], culprit["kind"]) == (victim, "stalled")
    # The server lives through many faults: the last line about one counts.
    server.command.wait_for_message("the process is stopped", 1)
    stopped = [
        line for line in (server.command.folder / "stderr").read_text().splitlines() if "the process is stopped" in line
    ]
    assert f"rank {victim} (" in stopped[-1]


def test_t19_a_stopped_front_side_or_agent_costs_nothing_but_time(server: Server, undisturbed: list[Read]) -> None:
    """SCENARIOS T19: SIGSTOP of the agent all the while, and of the HTTP process for longer than the stall limit."""
    before = recoveries(server)
    (agent,) = server.command.named("pt_elastic").values()
    front = psutil.Process(server.command.process.pid)
    agent.suspend()
    try:
        streams = Streams(server)
        assert streams.begun.wait(60)
        front.suspend()
        time.sleep(STALL_S + 0.5)
        front.resume()
        assert streams.results() == undisturbed
    finally:
        agent.resume()
    assert recoveries(server) == before


def test_a_batch_of_lines(model: Path, tmp_path: Path) -> None:
    """``generate`` goes on too, and says what happened."""
    lines = [{"prompt": "a", "max_tokens": 1, "temperature": 0}, *requests()[:6]]
    (tmp_path / "input.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--model", str(model), "--input", str(tmp_path / "input.jsonl"), "--tp", "2", "--invariant")
    alone = run(*LOCKSTEP, "generate", *options)
    assert alone.returncode == ExitCode.OK
    reports = tmp_path / "faults.jsonl"
    with running(*LOCKSTEP, "generate", *options, "--fault-report", str(reports)) as started:
        started.wait_for_output('"line-1"', START_S)
        kill(started, 1)
        outcome = started.wait(END_S)
        started.check_nothing_left()
    assert outcome.returncode == ExitCode.OK
    said = r"lockstep: rank 1 \(stage 0, tensor-parallel rank 1\) failed in step \d+: killed by SIGKILL; recovered in "
    assert re.search(said, outcome.stderr)
    (report,) = [msgspec.json.decode(line, type=FaultReport) for line in reports.read_bytes().splitlines()]
    assert (report.epoch, report.recovers) == (0, True)
    assert [(one.rank, one.kind, one.exit_code) for one in report.culprits] == [(1, "killed", -signal.SIGKILL)]
    assert [without_times(record) for record in outcome.records()] == list(map(without_times, alone.records()))


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record without what its grammar cost."""
    return {name: value for name, value in record.items() if name != "grammar"}


def test_more_faults_than_are_survived_end_the_run(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "a", "max_tokens": 1}, *({"prompt": "b", "max_tokens": 900, "ignore_eos": True},) * 40]
    (tmp_path / "input.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--model", str(model), "--input", str(tmp_path / "input.jsonl"), "--tp", "2", "--max-recoveries", "1")
    report = ("--fault-report", str(tmp_path / "faults.jsonl"))
    with running(*LOCKSTEP, "generate", *options, *report) as started:
        started.wait_for_output('"line-1"', START_S)
        before = kill(started, 0)
        next_rank(started, 0, before).kill()
        outcome = started.wait(END_S)
        started.check_nothing_left()
    assert outcome.returncode == ExitCode.RECOVERIES_EXHAUSTED
    assert outcome.message.startswith("lockstep: rank 0 (stage 0, tensor-parallel rank 0) failed at ")
    why = "more than 1 fault in 300 s: --max-recoveries and --recovery-window allow no more"
    assert outcome.message.endswith(f"killed by SIGKILL; {why}")
    told = [line for line in outcome.stderr.splitlines() if " failed " in line]
    assert len(told) >= 2, "the fault that was survived is told too"
    reports = [msgspec.json.decode(line, type=FaultReport) for line in (tmp_path / "faults.jsonl").open("rb")]
    assert [(one.epoch, one.recovers, one.why_not) for one in reports] == [
        (0, True, ""),
        (1, False, "more than 1 fault in 300 s"),
    ]
