"""The same command line is a rank under torchrun: on one node, and with two agents as two nodes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from command_line import LOCKSTEP, TORCHRUN, Outcome, run, running
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode
from launch.trace.summary import summarize

pytestmark = pytest.mark.long(38)

GENERATE = ("hello", "one two three", "x", "--max-tokens", "12", "--temperature", "0", "--format", "jsonl")
START_S = 150.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3"))


@pytest.fixture(scope="module")
def alone(tiny: str) -> Outcome:
    outcome = run(*LOCKSTEP, "generate", "--model", tiny, *GENERATE)
    assert outcome.returncode == ExitCode.OK
    assert [record["id"] for record in outcome.records()] == ["prompt-1", "prompt-2", "prompt-3"]
    return outcome


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.slow
def test_eight_ranks(tiny: str, alone: Outcome) -> None:
    torchrun = (*TORCHRUN, "--nproc-per-node", "8", "-m", "launch")
    outcome = run(*torchrun, "generate", "--model", tiny, "--tp", "4", "--pp", "2", *GENERATE, timeout_s=START_S)
    assert outcome.returncode == ExitCode.OK
    assert outcome.records() == alone.records()
    assert "on TP4 x PP2" in outcome.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start", ["torchrun", "lockstep"])
def test_two_agents_of_two_ranks(tiny: str, alone: Outcome, start: str, tmp_path: Path) -> None:
    """Two agents meet at an endpoint; whichever holds rank 0 prints the results, and writes the trace of both."""
    endpoint = f"127.0.0.1:{free_port()}"
    trace = tmp_path / "trace.json"
    options = ("generate", "--model", tiny, "--tp", "2", "--pp", "2", *GENERATE, "--trace", str(trace))
    command: tuple[str, ...]
    if start == "torchrun":
        nodes = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
        command = (*TORCHRUN, *nodes, "--rdzv-endpoint", endpoint, "--rdzv-id", "two", "-m", "launch", *options)
    else:
        command = (*LOCKSTEP, *options, "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-id", "two")
    # The program itself is executed here, as a user does.
    executed = start == "torchrun"
    with running(*command, executed=executed) as first, running(*command, executed=executed) as second:
        outcomes = [first.wait(START_S), second.wait(START_S)]
        first.check_nothing_left()
        second.check_nothing_left()
    assert [outcome.returncode for outcome in outcomes] == [ExitCode.OK, ExitCode.OK]
    printed = [outcome for outcome in outcomes if outcome.stdout]
    assert len(printed) == 1
    assert printed[0].records() == alone.records()
    assert [one.rank for one in summarize(trace)] == [0, 1, 2, 3]
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.slow
def test_rank_count_that_does_not_fit(tiny: str) -> None:
    torchrun = (*TORCHRUN, "--nproc-per-node", "2", "-m", "launch")
    outcome = run(*torchrun, "generate", "--model", tiny, "--tp", "2", "--pp", "2", *GENERATE, timeout_s=START_S)
    assert outcome.returncode != ExitCode.OK
    assert "torchrun started 2 ranks: --tp 2 x --pp 2 needs 4" in outcome.stderr
