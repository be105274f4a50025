"""The front side while ranks are gone and others come: nothing fails, nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.exit_codes import ExitCode
from launch.front.engine_client import EngineClient
from launch.front.engine_errors import EngineClosedError, RequestRefusedError
from launch.front.engine_link import EngineLink
from launch.front.engine_output import RequestOutput, gathered
from launch.front.engine_process import wait_until_ready
from launch.front.metrics import EngineMetrics
from launch.node.rank_fault import FaultReport, RankFault
from launch.node.rank_processes import RanksFailedError
from launch.options import EngineOptions, HttpOptions
from launch.serve.models import health
from launch.serve.state import ServerState
from runtime.client_socket import FrontSocket, LeaderSocket
from runtime.messages import (
    Accepted,
    ChoiceProgress,
    ClientMessage,
    EngineMessage,
    EngineReady,
    ErrorInfo,
    Finished,
    Rejected,
    Resume,
    Settled,
    Submit,
    TokenDelta,
    Tokenize,
    Tokenized,
    Usage,
)

SETTLED = Settled(seed=7, prompt_tokens=3, max_tokens=9)
USAGE = Usage(3, 4, 7)
LIMIT_S = 20.0


@dataclass
class ScriptedEngine:
    """An engine whose leader is the test."""

    socket: FrontSocket
    is_ready: bool = True
    failure: RanksFailedError | None = None
    reports: list[FaultReport] = field(default_factory=list)
    faults_at_start: list[FaultReport] = field(default_factory=list)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def faults(self) -> list[FaultReport]:
        reports, self.reports = self.reports, []
        return reports

    def stop(self) -> None:
        self.socket.close(undelivered_s=0)


class Bench:
    """A client, and the leaders that it meets one after the other."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder / 'client'}"
        self.engine = ScriptedEngine(FrontSocket(self.endpoint))
        self.metrics = EngineMetrics()
        self.told: list[str] = []
        self.epoch = 0
        self.leader = LeaderSocket(self.endpoint)
        self.client: EngineClient

    def ready(self) -> EngineReady:
        return EngineReady(1, 1, "float32", "cpu", 64, epoch=self.epoch)

    def say(self, *messages: EngineMessage) -> None:
        self.leader.send(list(messages))

    async def asked(self, count: int) -> list[ClientMessage]:
        """Returns the next messages that the leader gets."""
        messages: list[ClientMessage] = []
        deadline_s = time.monotonic() + LIMIT_S
        while len(messages) < count:
            assert time.monotonic() < deadline_s, messages
            messages += self.leader.receive(0)
            await asyncio.sleep(0.01)
        return messages

    async def tokens(self, count: int) -> None:
        """Returns when so many tokens were heard."""
        await until(lambda: self.value("generation_tokens_total") == count)

    async def lose_leader(self) -> None:
        self.leader._socket.close(linger=0)
        await until(lambda: self.client.is_recovering)

    def start_leader(self) -> None:
        """Starts the next leader, and has it say that its ranks are ready."""
        self.leader.close()
        self.epoch += 1
        self.leader = LeaderSocket(self.endpoint, self.epoch)
        self.say(self.ready())

    def value(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.metrics.exposition().decode()):
            for sample in family.samples:
                if sample.name == f"lockstep:{name}" and sample.labels == labels:
                    return float(sample.value)
        raise AssertionError(name)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


@asynccontextmanager
async def bench_in(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    try:
        bench.say(bench.ready())
        ready: list[EngineMessage] = []
        while not ready:
            ready = bench.engine.socket.receive(0.1)
        assert ready == [bench.ready()]
        async with EngineClient(bench.engine, bench.ready(), bench.told.append, bench.metrics) as bench.client:
            yield bench
    finally:
        bench.leader.close()
        bench.engine.stop()


def delta(number: int, text: str, start: int) -> TokenDelta:
    return TokenDelta(number, 0, text, [ord(letter) for letter in text], start=start)


def test_a_stream_goes_on_behind_what_its_reader_has(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_in(tmp_path) as bench:
            reading = asyncio.create_task(gathered(bench.client.submit(["{}"])))
            (submit,) = await bench.asked(1)
            assert submit == Submit(1, "{}")
            bench.say(Accepted(1, 1, SETTLED), delta(1, "ab", 0))
            await bench.tokens(2)
            await bench.lose_leader()
            assert bench.value("recovering") == 1
            bench.engine.reports = [fault_report()]
            bench.start_leader()
            assert await bench.asked(1) == [Submit(1, "{}", resume=Resume(SETTLED, [ChoiceProgress([97, 98])]))]
            assert not bench.client.is_recovering
            assert bench.client.ready.epoch == 1
            bench.say(Accepted(1, 1, SETTLED), delta(1, "cd", 2), Finished(1, 0, "stop", USAGE))
            (output,) = await reading
            assert shown(output) == ("abcd", [97, 98, 99, 100], "stop")
            assert bench.value("requests_finished_total", finish_reason="stop") == 1
            assert bench.value("requests_resumed_total") == 1
            assert bench.value("recovery_seconds_count") == 1
            assert bench.value("recovering") == 0
            (line,) = bench.told
            assert line.startswith("rank 2 (stage 1, tensor-parallel rank 0) failed in step 5: killed; recovered in ")
            assert line.endswith(" s, 1 request went on")

    asyncio.run(run())


def test_requests_that_come_meanwhile_wait_and_those_that_leave_are_gone(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_in(tmp_path) as bench:
            leaving = bench.client.submit(["{}"])
            await bench.asked(1)
            bench.say(Accepted(1, 1, SETTLED), delta(1, "ab", 0))
            await bench.tokens(2)
            await bench.lose_leader()
            leaving.abort()
            gone = bench.client.submit(["{}"])
            gone.abort()
            waiting = asyncio.create_task(gathered(bench.client.submit(['{"n": 1}'])))
            question = asyncio.create_task(bench.client.tokenize({"prompt": "x"}))
            await until(lambda: bench.client.open_requests == 2)
            assert bench.value("requests_unfinished") == 3, "aborted ones end when the next leader is told"
            bench.start_leader()
            submit, tokenize = await bench.asked(2)
            assert submit == Submit(3, '{"n": 1}')
            assert isinstance(tokenize, Tokenize)
            await until(lambda: bench.value("requests_finished_total", finish_reason="abort") == 2)
            bench.say(Tokenized(tokenize.request_id, [5], ["x"]))
            bench.say(Accepted(3, 1, SETTLED), delta(3, "z", 0), Finished(3, 0, "stop", USAGE))
            assert shown((await waiting)[0]) == ("z", [122], "stop")
            assert (await question).token_ids == [5]
            assert bench.value("requests_unfinished") == 0
            assert bench.value("requests_received_total") == 3

    asyncio.run(run())


def test_several_leaders_may_be_lost_before_a_request_ends(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_in(tmp_path) as bench:
            reading = asyncio.create_task(gathered(bench.client.submit(["{}"])))
            for number in range(5):
                (submit,) = await bench.asked(1)
                assert isinstance(submit, Submit)
                assert len(submit.resume.choices[0].token_ids if submit.resume else ()) == number
                bench.say(Accepted(1, 1, SETTLED), delta(1, "x", number))
                await bench.tokens(number + 1)
                await bench.lose_leader()
                bench.start_leader()
            await bench.asked(1)
            bench.say(Finished(1, 0, "length", USAGE))
            assert shown((await reading)[0]) == ("xxxxx", [120] * 5, "length")
            assert len(bench.told) == 5

    asyncio.run(run())


def test_a_leader_that_is_lost_at_once_leaves_its_requests_to_the_next(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_in(tmp_path) as bench:
            reading = asyncio.create_task(gathered(bench.client.submit(["{}"])))
            await bench.asked(1)
            await bench.lose_leader()
            bench.start_leader()
            await until(lambda: bench.client.ready.epoch == 1)
            await bench.lose_leader()
            bench.start_leader()
            assert await bench.asked(1) == [Submit(1, "{}")]
            bench.say(Rejected(1, ErrorInfo("invalid_request", "no")))
            with pytest.raises(RequestRefusedError, match="no"):
                await reading

    asyncio.run(run())


def test_ranks_that_are_gone_for_good_fail_what_waits(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_in(tmp_path) as bench:
            reading = asyncio.create_task(gathered(bench.client.submit(["{}"])))
            await bench.asked(1)
            await bench.lose_leader()
            late = asyncio.create_task(gathered(bench.client.submit(["{}"])))
            bench.engine.failure = RanksFailedError("rank 1 failed too often", ExitCode.RANK_FAILED)
            for task in (reading, late):
                with pytest.raises(RanksFailedError, match="too often"):
                    await asyncio.wait_for(task, LIMIT_S)
            assert not bench.client.is_recovering
            with pytest.raises(RanksFailedError):
                bench.client.submit(["{}"])

    asyncio.run(run())


def test_a_fault_whose_recovery_failed_is_told_when_the_ranks_are_gone(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_in(tmp_path) as bench:
            await bench.lose_leader()
            last = msgspec.structs.replace(
                fault_report(2), epoch=1, recovers=False, why_not="more than 1 fault in 300 s"
            )
            first = fault_report(1)
            bench.engine.reports = [first, last]
            bench.engine.failure = RanksFailedError("rank 2 failed too often", ExitCode.RECOVERIES_EXHAUSTED)
            await asyncio.wait_for(bench.client.wait_for_failure(), LIMIT_S)
            assert bench.told == [f"{first.sentence()}; the ranks were started anew, and failed again"]
            assert [report.epoch for report in bench.client.faults] == [0, 1]

    asyncio.run(run())


def test_faults_of_the_first_start_are_told_before_any_rank_is_ready(tmp_path: Path) -> None:
    socket = FrontSocket(f"ipc://{tmp_path / 'client'}")
    early = fault_report(1)
    engine, lines = ScriptedEngine(socket, is_ready=False, reports=[early]), list[str]()
    with pytest.raises(RanksFailedError, match="were not ready"):
        wait_until_ready(engine, 0.5, lines.append)
    assert lines == [f"{early.sentence()}; the ranks are started anew"]
    engine.reports = [msgspec.structs.replace(fault_report(2), recovers=False, why_not="it would fail again")]
    engine.failure = RanksFailedError("rank 2 failed", ExitCode.START_FAILED)
    with pytest.raises(RanksFailedError, match="rank 2 failed"):
        wait_until_ready(engine, LIMIT_S, lines.append)
    assert len(lines) == 1, "the last line tells of it"
    engine.failure = None
    leader = LeaderSocket(f"ipc://{tmp_path / 'client'}")
    ready = EngineReady(1, 1, "float32", "cpu", 64, epoch=1)
    leader.send([ready])
    assert wait_until_ready(engine, LIMIT_S, lines.append) == ready
    leader.close()
    assert [one.culprits[0].rank for one in EngineLink(engine, ready, lines.append).faults] == [1, 2]
    engine.stop()


def test_closing_ends_what_waits_for_ranks(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_in(tmp_path) as bench:
            await bench.lose_leader()
            waiting = asyncio.create_task(gathered(bench.client.submit(["{}"])))
            await until(lambda: bench.client.open_requests == 1)
            bench.client.refuse_all("the server is shutting down")
            with pytest.raises(EngineClosedError, match="shutting down"):
                await asyncio.wait_for(waiting, LIMIT_S)

    asyncio.run(run())


def test_health_says_that_ranks_are_recovered(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench_in(tmp_path) as bench:
            http = HttpOptions()
            engine = EngineOptions(model=Path("m"))
            state = ServerState(bench.client, bench.metrics, engine, http, "m", "0", 0)
            assert health(state).status_code == 200
            await bench.lose_leader()
            reply = health(state)
            assert reply.status_code == 503
            assert told(bytes(reply.body))["status"] == "recovering"
            bench.start_leader()
            await until(lambda: not bench.client.is_recovering)
            assert health(state).status_code == 200

    asyncio.run(run())


def told(body: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(body)
    return fields


def shown(output: RequestOutput) -> tuple[str, list[int], str]:
    (choice,) = output.choices
    assert choice.finished is not None
    return "".join(choice.text), choice.token_ids, choice.finished.finish_reason


def fault_report(rank: int = 2) -> FaultReport:
    fault = RankFault(
        rank=rank,
        stage=1,
        tp_rank=0,
        kind="killed",
        message="killed",
        phase="decode",
        step=5,
        operation="",
        age_s=0.0,
        exit_code=-9,
    )
    return FaultReport(
        epoch=0,
        culprits=(fault,),
        consequences=(),
        recovers=True,
        why_not="",
        seen_at=time.time(),
        judged_after_s=0.03,
    )
