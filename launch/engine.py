"""An engine for Python programs: ``with Engine(tp_size=2) as engine: engine.generate("Once upon a time")``."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from grammar_sync.statistics import GrammarStatistics
from launch.checks import check_engine
from launch.cli.parse import UsageError
from launch.default_model import default_model
from launch.front.engine_client import EngineClient, Submission
from launch.front.engine_errors import EngineClosedError, RequestFailedError, RequestRefusedError, json_fields
from launch.front.engine_output import RequestOutput, gathered, raise_failure
from launch.front.engine_process import StartedEngine, wait_until_ready
from launch.options import EngineOptions
from runtime.messages import EngineReady, ErrorInfo, Finished, FinishReason, TokenDelta, TokenInfo, Usage
from sampler.shown_value import shown

_REQUESTS_AT_ONCE = 512
_LAST_WORD_S = 1.0
_LOG = logging.getLogger(__name__)
Value = TypeVar("Value")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a request.

    Args:
        index: Which.
        text: What was generated; without the token that ended it.
        token_ids: Its tokens, that one among them.
        finish_reason: ``stop`` or ``length``.
        usage: Tokens of prompt and output.
        logprobs: What was asked about its tokens; None when nothing was.
        reasoning: What the model thought before ``text``; None when it did not.
        grammar: What its grammar cost, and what of it was not enforced; None without one.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenInfo] | None = None
    reasoning: str | None = None
    grammar: GrammarStatistics | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request.

    Args:
        choices: Its choices in order; one unless ``n`` asked for more.
        prompt_logprobs: What was asked about the prompt's tokens, None for the first.
    """

    choices: list[Choice]
    prompt_logprobs: list[TokenInfo | None] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """What a step added to a choice.

    Args:
        index: Which choice.
        text: More of its text; may lag behind ``token_ids``.
        token_ids: Its new tokens.
        logprobs: What was asked about them.
        reasoning: More of what the model thinks before it answers.
        finish_reason: Why the choice ended, in its last chunk.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenInfo] = []
    reasoning: str = ""
    finish_reason: FinishReason | None = None


class Engine:
    """Ranks on this machine, started by this object and ended by ``close``, or at the end of the ``with`` block.

    Requests have the fields of JSONL input. Any thread, and any event loop, may use it.

    Args:
        model: Hugging Face folder or GGUF file; None = the default model.
        tp_size: Tensor-parallel ranks of a stage.
        pp_size: Pipeline stages.
        options: More fields of ``EngineOptions``, such as ``max_num_seqs=8``.

    Raises:
        UsageError: An option is wrong.
        DefaultModelError, CheckpointError, ModelConfigError, StagePartitionError: The model cannot be used so.
        RanksFailedError: The ranks did not come up.
    """

    def __init__(self, model: str | Path | None = None, *, tp_size: int = 1, pp_size: int = 1, **options: Any) -> None:
        path = default_model() if model is None else Path(model)
        given = {"tp": tp_size, "pp": pp_size} | options
        unknown = sorted(given.keys() - set(EngineOptions.__struct_fields__))
        if unknown:
            raise UsageError(
                f"Engine has no option {unknown[0]}: they are {', '.join(EngineOptions.__struct_fields__)}"
            )
        try:
            self.options = msgspec.convert(given | {"model": path}, EngineOptions, dec_hook=_path)
        except msgspec.ValidationError as error:
            what, _, place = str(error).removesuffix("`").partition(" - at `$.")
            got = f"{place} is {shown(given[place])}: {what}" if place in given else str(error)
            raise UsageError(f"Engine: {got}") from error
        check_engine(self.options)
        started: Future[_Running] = Future()
        self._thread = threading.Thread(target=_run, args=(self.options, started), name="lockstep-engine", daemon=True)
        self._thread.start()
        self._running = started.result()
        atexit.register(self.close)

    @property
    def ready(self) -> EngineReady:
        """What the leader said when all ranks were up."""
        return self._running.client.ready

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the ranks."""
        self.close()

    def close(self) -> None:
        """Ends all requests, then the ranks. Done twice it does nothing."""
        self._running.stop()
        self._thread.join()
        atexit.unregister(self.close)

    def generate(self, prompt: str | Sequence[int] | None = None, **fields: Any) -> Result:
        """Returns what a request gives.

        Args:
            prompt: A text or token ids; None when ``fields`` have ``messages``.
            fields: The request's other fields, such as ``max_tokens=20``.

        Raises:
            RequestRefusedError: A field is wrong.
            RequestFailedError: The request ended with an error.
            EngineClosedError, RanksFailedError: The engine is gone.
        """
        return self._call(self._generate(_body(prompt, fields)))

    async def generate_async(self, prompt: str | Sequence[int] | None = None, **fields: Any) -> Result:
        """Returns what a request gives, as ``generate`` does; a cancelled one is aborted."""
        return await self._call_async(self._generate(_body(prompt, fields)))

    def generate_many(
        self, requests: Sequence[Mapping[str, Any]]
    ) -> list[Result | RequestRefusedError | RequestFailedError]:
        """Returns what requests give, in their order, the errors of those that failed among them.

        Args:
            requests: The fields of each, as a line of JSONL input.

        Raises:
            EngineClosedError, RanksFailedError: The engine is gone.
        """
        return self._call(self._generate_many(requests))

    def stream(self, prompt: str | Sequence[int] | None = None, **fields: Any) -> Iterator[Chunk]:
        """Yields what a request gives, as it comes; leaving off aborts it. Raises what ``generate`` raises."""
        submission = self._call(self._submit([_body(prompt, fields)]))
        chunks = _chunks(submission)
        try:
            while (chunk := self._call(_next(chunks))) is not None:
                yield chunk
        finally:
            self._abort(submission)

    async def stream_async(self, prompt: str | Sequence[int] | None = None, **fields: Any) -> AsyncIterator[Chunk]:
        """Yields what a request gives, as ``stream`` does."""
        submission = await self._call_async(self._submit([_body(prompt, fields)]))
        chunks = _chunks(submission)
        try:
            while (chunk := await self._call_async(_next(chunks))) is not None:
                yield chunk
        finally:
            self._abort(submission)

    def score(self, prompt: str | Sequence[int] | None = None, **fields: Any) -> list[TokenInfo | None]:
        """Returns the logprob of every token of a prompt, None for the first; generates nothing."""
        return self._call(self._score(_body(prompt, fields)))

    def tokenize(self, prompt: str | None = None, **fields: Any) -> list[int]:
        """Returns the ids of a prompt, or of ``messages``."""
        given = fields if prompt is None else {"prompt": prompt} | fields
        return self._call(self._running.client.tokenize(given)).token_ids

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of ids."""
        fields = {"token_ids": list(token_ids), "skip_special_tokens": skip_special_tokens}
        return self._call(self._running.client.detokenize(fields)).text

    async def _submit(self, bodies: Sequence[str], *, score: bool = False) -> Submission:
        return self._running.client.submit(bodies, score=score)

    async def _generate(self, body: str) -> Result:
        (output,) = await gathered(await self._submit([body]))
        return _result(output)

    async def _generate_many(
        self, requests: Sequence[Mapping[str, Any]]
    ) -> list[Result | RequestRefusedError | RequestFailedError]:
        at_once = asyncio.Semaphore(_REQUESTS_AT_ONCE)

        async def one(fields: Mapping[str, Any]) -> Result | RequestRefusedError | RequestFailedError:
            async with at_once:
                try:
                    return await self._generate(_body(None, fields))
                except (RequestRefusedError, RequestFailedError) as error:
                    return error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(fields)) for fields in requests]
        return [task.result() for task in tasks]

    async def _score(self, body: str) -> list[TokenInfo | None]:
        (output,) = await gathered(await self._submit([body], score=True))
        return output.prompt_logprobs() or [None]

    def _abort(self, submission: Submission) -> None:
        if not self._running.is_closed:
            self._running.loop.call_soon_threadsafe(submission.abort)

    def _call(self, work: Coroutine[Any, Any, Value]) -> Value:
        return self._scheduled(work).result()

    async def _call_async(self, work: Coroutine[Any, Any, Value]) -> Value:
        return await asyncio.wrap_future(self._scheduled(work))

    def _scheduled(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        if self._running.is_closed:
            work.close()
            raise EngineClosedError("the engine was closed")
        return asyncio.run_coroutine_threadsafe(work, self._running.loop)


class _Running:
    """The engine within its thread."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        self._leave = asyncio.Event()

    def stop(self) -> None:
        """Has the thread end; any thread may call it."""
        if not self.is_closed:
            self.is_closed = True
            self.loop.call_soon_threadsafe(self._leave.set)

    async def wait(self) -> None:
        """Returns when it is to leave."""
        await self._leave.wait()


def _path(kind: type, value: Any) -> Any:
    """Returns a path that is given as text; what is neither is left as it is, and refused by its type."""
    return Path(value) if kind is Path and isinstance(value, str) else value


def _run(options: EngineOptions, started: Future[_Running]) -> None:
    """Is the engine's thread: the kernel ends the ranks when the thread that started them ends."""
    try:
        command_line = ["rank", msgspec.json.encode(options, enc_hook=str).decode()]
        engine = StartedEngine(options, command_line)
        try:
            ready = wait_until_ready(engine, options.start_timeout_s, _LOG.warning)
            asyncio.run(_serve(engine, ready, started))
        finally:
            engine.stop()
    except Exception as error:
        # The thread's boundary: until the engine runs, whoever makes it waits for this, and must hear whatever it was.
        if started.done():
            raise
        started.set_exception(error)


async def _serve(engine: StartedEngine, ready: EngineReady, started: Future[_Running]) -> None:
    async with EngineClient(engine, ready, _LOG.warning) as client:
        running = _Running(client)
        started.set_result(running)
        await running.wait()
    # Those who wait hear of the end before the loop ends.
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_LAST_WORD_S)


async def _chunks(submission: Submission) -> AsyncIterator[Chunk]:
    await submission.wait_for_output()
    async for _, message in submission:
        raise_failure(message)
        match message:
            case TokenDelta():
                yield Chunk(
                    index=message.index,
                    text=message.text,
                    token_ids=message.token_ids,
                    logprobs=message.logprobs,
                    reasoning=message.reasoning,
                )
            case Finished():
                yield Chunk(index=message.index, finish_reason=message.finish_reason)
            case _:
                pass


async def _next(chunks: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(chunks, None)


def _body(prompt: str | Sequence[int] | None, fields: Mapping[str, Any]) -> str:
    if not isinstance(fields, Mapping):
        raise _refused(f"a request is {shown(fields)}: a mapping of its fields is needed", None)
    given = dict(fields)
    if isinstance(prompt, str):
        given["prompt"] = prompt
    elif prompt is not None:
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise _refused(f"prompt is {shown(prompt)}: a text or a list of token ids is needed", "prompt")
        given["prompt_token_ids"] = list(prompt)
    return json_fields(given)


def _refused(message: str, field: str | None) -> RequestRefusedError:
    return RequestRefusedError(ErrorInfo("invalid_request", message, field))


def _result(output: RequestOutput) -> Result:
    return Result(
        choices=[
            Choice(
                index=index,
                text="".join(choice.text),
                token_ids=choice.token_ids,
                finish_reason=choice.finished.finish_reason,
                usage=choice.finished.usage,
                logprobs=choice.logprobs or None,
                reasoning="".join(choice.reasoning) or None,
                grammar=choice.finished.grammar,
            )
            for index, choice in enumerate(output.choices)
            if choice.finished is not None
        ],
        prompt_logprobs=output.prompt_logprobs(),
    )
