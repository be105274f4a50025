"""Every way a run can end: the documented exit code, one line that says why, in bounded time, nothing left running."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from command_line import LOCKSTEP, run, running, wait_until
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode
from launch.front import main as front

pytestmark = pytest.mark.long(30)

CLEAN_S = 5.0
RAISE_S = 10.0
START_S = 90.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """Returns an input whose first request ends at once and whose others run for minutes."""
    lines = [{"prompt": "a", "max_tokens": 1}, *({"prompt": "b", "max_tokens": 480, "ignore_eos": True},) * 400]
    path = tmp_path / "input.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize(
    ("sig", "code", "message"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED, "lockstep: interrupted"),
        (signal.SIGTERM, ExitCode.TERMINATED, "lockstep: terminated"),
    ],
)
def test_t21_signal_while_generating(tiny: str, endless: str, sig: signal.Signals, code: int, message: str) -> None:
    """SCENARIOS T21: Ctrl-C and SIGTERM end a run in five seconds."""
    command = (
        *LOCKSTEP,
        "generate",
        "--model",
        tiny,
        "--tp",
        "2",
        "--pp",
        "2",
        "--input",
        endless,
        "--max-num-seqs",
        "2",
    )
    with running(*command, executed=True) as started:
        started.wait_for_output('"line-1"', START_S)
        assert sorted(started.ranks()) == [0, 1, 2, 3]
        outcome, seconds = started.interrupt(sig, 30)
        assert outcome.returncode == code
        assert outcome.message == message
        assert seconds <= CLEAN_S
        started.check_nothing_left()


def test_signal_while_ranks_start(tiny: str) -> None:
    with running(*LOCKSTEP, "generate", "--model", tiny, "--tp", "2", "hello") as started:
        wait_until(started.ranks, START_S, "a rank to start")
        outcome, seconds = started.interrupt(signal.SIGINT, 30)
        assert outcome.returncode == ExitCode.INTERRUPTED
        assert outcome.message == "lockstep: interrupted"
        assert seconds <= CLEAN_S
        started.check_nothing_left()


def test_t19_front_side_killed(tiny: str, endless: str) -> None:
    """SCENARIOS T19: nobody is left to clean up the folder, but no process may outlive the front side."""
    with running(*LOCKSTEP, "generate", "--model", tiny, "--tp", "2", "--input", endless) as started:
        started.wait_for_output('"line-1"', START_S)
        started.process.kill()
        assert started.process.wait(10) == -signal.SIGKILL
        wait_until(lambda: not started.family(), CLEAN_S, "all processes to end")
        assert started.ranks() == {}


@pytest.mark.parametrize("victim", [0, 3])
def test_rank_killed(tiny: str, endless: str, victim: int) -> None:
    options = ("--tp", "2", "--pp", "2", "--input", endless, "--max-recoveries", "0")
    with running(*LOCKSTEP, "generate", "--model", tiny, *options) as started:
        started.wait_for_output('"line-1"', START_S)
        started.ranks()[victim].send_signal(signal.SIGKILL)
        outcome = started.wait(RAISE_S)
        assert outcome.returncode == ExitCode.RANK_FAILED
        where = f"rank {victim} (stage {victim // 2}, tensor-parallel rank {victim % 2})"
        assert outcome.message == f"lockstep: {where} failed at run: killed by SIGKILL"
        started.check_nothing_left()


def test_t19_agent_killed(tiny: str, endless: str) -> None:
    """SCENARIOS T19: the ranks end with torchrun's agent, and the front side says so."""
    with running(*LOCKSTEP, "generate", "--model", tiny, "--tp", "2", "--input", endless) as started:
        started.wait_for_output('"line-1"', START_S)
        (agent,) = started.named("pt_elastic").values()  # torchrun's own name
        agent.kill()
        outcome = started.wait(RAISE_S)
        assert outcome.returncode == ExitCode.RANK_FAILED
        assert outcome.message == "lockstep: torchrun's agent, and the ranks with it, was killed by SIGKILL"
        started.check_nothing_left()


def test_zygote_killed(tiny: str, endless: str) -> None:
    with running(*LOCKSTEP, "generate", "--model", tiny, "--tp", "2", "--input", endless) as started:
        started.wait_for_output('"line-1"', START_S)
        (zygote,) = started.named("lockstep zygote").values()
        assert {rank.ppid() for rank in started.ranks().values()} == {zygote.pid}
        zygote.kill()
        outcome = started.wait(RAISE_S)
        assert outcome.returncode == ExitCode.RANK_FAILED
        assert "the zygote of rank" in outcome.stderr
        started.check_nothing_left()


def handles_sigterm(pid: int) -> bool:
    """Returns whether a process is this program, and not Python on its way to it: SIGTERM is handled from then on."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("after_s", [0.0, 0.25, 0.6])
def test_interrupt_while_the_program_is_imported(tiny: str, after_s: float) -> None:
    with running(*LOCKSTEP, "generate", "--model", tiny, "hello", executed=True) as started:
        wait_until(lambda: handles_sigterm(started.process.pid), START_S, "the program's first lines")
        time.sleep(after_s)
        outcome, seconds = started.interrupt(signal.SIGINT, 30)
        assert outcome.returncode == ExitCode.INTERRUPTED
        assert outcome.stderr == "lockstep: interrupted\n"
        assert seconds <= CLEAN_S
        started.check_nothing_left()


RAISING = """
import os, runtime.model as model
init = model.DecoderStage.__init__
def raising(self, *args, **kwargs):
    if os.environ.get("RANK") == "{rank}":
        raise {error}
    init(self, *args, **kwargs)
model.DecoderStage.__init__ = raising
"""

# For the process that ranks are forked from.
SITE = "import sys\nif 'launch.node.agent' in sys.orig_argv:\n    import raising\n"


@pytest.mark.parametrize(
    ("rank", "error", "text"),
    [
        (0, "MemoryError()", "MemoryError"),
        (2, "RuntimeError('the device is on fire')", "the device is on fire"),
        (1, "os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        (3, "os._exit(7)", "left with exit code 7 without a word"),
    ],
)
def test_t21_rank_raises_at_start(tiny: str, tmp_path: Path, rank: int, error: str, text: str) -> None:
    """SCENARIOS T21: a rank that raises while it loads ends the others, and is the one that is named."""
    (tmp_path / "raising.py").write_text(RAISING.format(rank=rank, error=error))
    (tmp_path / "sitecustomize.py").write_text(SITE)
    root = Path(__file__).resolve().parents[2]
    environ = {"PYTHONPATH": f"{tmp_path}:{root}"}
    command = (*LOCKSTEP, "generate", "--model", tiny, "--tp", "2", "--pp", "2", "hi")
    with running(*command, environ=environ, executed=True) as started:
        outcome = started.wait(START_S)
        stage, tp_rank = divmod(rank, 2)
        assert outcome.returncode == ExitCode.START_FAILED
        assert outcome.message == (
            f"lockstep: rank {rank} (stage {stage}, tensor-parallel rank {tp_rank}) failed at start: {text}"
        )
        started.check_nothing_left()


def test_model_path_that_does_not_exist() -> None:
    outcome = run(*LOCKSTEP, "generate", "--model", "/no/such/model", "hi", timeout_s=CLEAN_S)
    assert outcome.returncode == ExitCode.USAGE
    assert outcome.stderr == "lockstep: /no/such/model does not exist\n"
    assert outcome.stdout == ""


def test_tp_size_larger_than_the_model_allows(tiny: str) -> None:
    outcome = run(*LOCKSTEP, "generate", "--model", tiny, "--tp", "10", "hi", timeout_s=CLEAN_S)
    assert outcome.returncode == ExitCode.USAGE
    assert len(outcome.stderr.splitlines()) == 1
    assert "10" in outcome.message
    assert "9" in outcome.message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--pp", "9", "hi"), "9"),
        (("--pp", "2", "--pp-layers", "1,1", "hi"), "[1, 1]"),
        (("--pp", "2", "--pp-layers", "x", "hi"), "--pp-layers"),
        (("--input", "/no/such/file.jsonl"), "/no/such/file.jsonl"),
        (("--json-schema", "{", "hi"), "--json-schema"),
        (("--nnodes", "2", "hi"), "--rdzv-endpoint"),
        (("--temperature", "-1", "hi"), "temperature"),
        (("--seed", "-1", "hi"), "seed"),
        (("--max-tokens", "0", "hi"), "--max-tokens"),
        (("--logit-processor", "nothing", "hi"), "logit processor 'nothing': module:name is needed"),
        (("--logit-processor", "a:x", "--logit-processor", "b:x", "hi"), "another processor is registered as 'x'"),
        (("--regex", "a", "--choice", "b", "hi"), "choice"),
        (("--kv-cache-bytes", "1", "hi"), "--kv-cache-bytes"),
        (("--output", "/no/such/folder/file", "hi"), "/no/such/folder/file"),
        (("--dtype", "float8", "hi"), "--dtype"),
    ],
)
def test_wrong_usage(
    tiny: str,
    arguments: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The front side in this process: what it says of a wrong command line."""
    monkeypatch.setattr(front, "raise_on_signals", lambda: None)
    code = front.main(["generate", "--model", tiny, *arguments])
    said = capfd.readouterr()
    assert code == ExitCode.USAGE
    assert len(said.err.splitlines()) == 1
    assert named in said.err
    assert said.out == ""


def test_nothing_to_generate_is_wrong_usage(tiny: str) -> None:
    outcome = run(*LOCKSTEP, "generate", "--model", tiny, timeout_s=CLEAN_S)
    assert outcome.returncode == ExitCode.USAGE
    assert len(outcome.stderr.splitlines()) == 1
    assert "--input" in outcome.message


def test_a_logit_processor_that_cannot_be_had_is_wrong_usage(tiny: str) -> None:
    arguments = ("--logit-processor", "no_such_module:x", "hi")
    outcome = run(*LOCKSTEP, "generate", "--model", tiny, *arguments, timeout_s=START_S)
    assert outcome.returncode == ExitCode.USAGE
    assert outcome.message.endswith("logit processor 'no_such_module:x': No module named 'no_such_module'")


def test_input_is_not_overwritten(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "hi"}')
    same = str(tmp_path / ".." / tmp_path.name / path.name)
    outcome = run(*LOCKSTEP, "generate", "--model", tiny, "--input", str(path), "--output", same, timeout_s=CLEAN_S)
    assert outcome.returncode == ExitCode.USAGE
    assert "same file" in outcome.message
    assert path.read_text() == '{"prompt": "hi"}'
