"""``Engine`` as a Python program uses it, on real ranks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import psutil
import pytest
from command_line import wait_until
from tiny_checkpoints import write_tiny_checkpoint

from launch.cli.parse import UsageError
from launch.engine import Engine, Result
from launch.front.engine_errors import EngineClosedError, RequestFailedError, RequestRefusedError
from launch.node.rank_processes import RanksFailedError
from runtime.checkpoint_layout import CheckpointError

pytestmark = [pytest.mark.long(15), pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    before = set(psutil.Process().children(recursive=True))
    with Engine(model, tp_size=2, pp_size=2, max_num_seqs=16) as started:
        assert len(set(psutil.Process().children(recursive=True)) - before) > 4
        yield started
    assert set(psutil.Process().children(recursive=True)) <= before
    with pytest.raises(EngineClosedError):
        started.generate("a")
    started.close()


def test_what_it_is(engine: Engine) -> None:
    assert (engine.ready.tp_size, engine.ready.pp_size, engine.ready.max_model_len) == (2, 2, 2048)
    assert engine.options.max_num_seqs == 16


def test_requests_of_the_wrong_type(engine: Engine) -> None:
    for wrong in (5, b"a", {"a": 1}):
        with pytest.raises(RequestRefusedError, match=r"prompt is .*: a text or a list of token ids is needed"):
            engine.generate(cast("str", wrong))
    first, second = engine.generate_many([cast("dict[str, str]", "a"), {"prompt": "a"}])
    assert isinstance(first, RequestRefusedError)
    assert str(first) == "a request is 'a': a mapping of its fields is needed"
    assert isinstance(second, Result)


def test_the_same_from_every_method(engine: Engine) -> None:
    fields = {"max_tokens": 9, "temperature": 0, "logprobs": 1}
    result = engine.generate("One two", **fields)
    assert result.text == result.choices[0].text
    assert result.choices[0].usage.completion_tokens == 9 == len(result.choices[0].token_ids)
    chunks = list(engine.stream("One two", **fields))
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == result.choices[0].token_ids
    assert [info for chunk in chunks for info in chunk.logprobs] == result.choices[0].logprobs
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert engine.generate(engine.tokenize("One two"), **fields) == result

    async def at_once() -> tuple[list[Result], str]:
        results = await asyncio.gather(*(engine.generate_async("One two", **fields) for _ in range(4)))
        return results, "".join([chunk.text async for chunk in engine.stream_async("One two", **fields)])

    results, streamed = asyncio.run(at_once())
    # In a batch of another shape logprobs may differ in their last bits.
    assert [one.choices[0].token_ids for one in results] == [result.choices[0].token_ids] * 4
    assert streamed == result.text


def test_many(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    good, constrained, refused, failed = engine.generate_many(
        [
            {"prompt": "a", "n": 3, "seed": 1, "max_tokens": 4},
            {"prompt": "a", "json_schema": schema, "max_tokens": 60, "max_whitespace": 0},
            {"prompt": "a", "temprature": 1},
            {"prompt": "a", "regex": "a(?=b)b"},
        ]
    )
    assert isinstance(good, Result)
    assert [choice.index for choice in good.choices] == [0, 1, 2]
    assert isinstance(constrained, Result)
    assert json.loads(constrained.text)["a"] in (1, 2)
    assert constrained.choices[0].grammar is not None
    assert isinstance(refused, RequestRefusedError)
    assert refused.info.param == "temprature"
    assert isinstance(failed, RequestFailedError)
    assert failed.info.code == "grammar_error"


def test_errors(engine: Engine) -> None:
    with pytest.raises(RequestRefusedError, match="temperature"):
        engine.generate("a", temperature=-1)
    with pytest.raises(RequestRefusedError, match="exactly one"):
        next(engine.stream())
    with pytest.raises(RequestRefusedError, match=r"^allowed_token_ids cannot be sent as JSON: .* set ") as refused:
        engine.generate("a", allowed_token_ids={1, 2})
    assert refused.value.info.param == "allowed_token_ids"
    (result,) = engine.generate_many([{"prompt": "a", "stop": b"x"}])
    assert isinstance(result, RequestRefusedError)
    with pytest.raises(RequestRefusedError, match=r"^messages cannot be sent"):
        engine.tokenize(messages=[{"role": "user", "content": b"a"}])
    with pytest.raises(RequestFailedError, match="regex"):
        engine.generate("a", regex="(")


def test_what_is_left_off_ends(engine: Engine) -> None:
    def open_requests() -> int:
        return engine._running.client.open_requests

    endless = {"max_tokens": 1900, "ignore_eos": True}
    for number, _ in enumerate(engine.stream("a", **endless)):
        if number == 2:
            break
    wait_until(lambda: open_requests() == 0, 5, "the stream to be aborted")

    async def cancelled() -> None:
        task = asyncio.create_task(engine.generate_async("a", **endless))
        await asyncio.sleep(0.2)
        assert open_requests() == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_until(lambda: open_requests() == 0, 5, "the request to be aborted")


def test_tokens_and_scores(engine: Engine) -> None:
    ids = engine.tokenize("One two 😀")
    assert engine.detokenize(ids) == "One two 😀"
    scores = engine.score(ids, prompt_logprobs=2)
    assert scores[0] is None
    assert [entry.token_id for entry in scores[1:] if entry is not None] == ids[1:]


def test_options_that_are_wrong(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no option tensor_parallel"):
        Engine(model, tensor_parallel=2)
    with pytest.raises(UsageError, match="max_num_seqs"):
        Engine(model, max_num_seqs="many")
    with pytest.raises(CheckpointError):
        Engine(tmp_path / "nothing")


def command_name(process: psutil.Process) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


def test_a_rank_that_dies(model: Path) -> None:
    """Who waits is told why; the engine can still be closed."""
    before = set(psutil.Process().children(recursive=True))
    with Engine(model, tp_size=2, max_recoveries=0) as engine:
        caught: list[Exception] = []

        def wait() -> None:
            try:
                engine.generate("a", max_tokens=1900, ignore_eos=True)
            except RanksFailedError as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: engine._running.client.open_requests == 1, 10, "the request to be under way")
        started = set(psutil.Process().children(recursive=True)) - before
        (rank,) = [child for child in started if command_name(child) == "lockstep r1"]
        rank.kill()
        waiting.join(20)
        assert "rank 1" in str(caught[0])
        with pytest.raises(RanksFailedError):
            engine.generate("a")
