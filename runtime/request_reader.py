"""What clients ask is read in the order in which it comes: short texts at once, others beside the step loop.

Reading makes ids of a text, at a millisecond or two for a thousand; some texts have millions. The tokenizer lets other
threads run meanwhile, so that a long prompt delays those that come after it, and no sequence that runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Final

from runtime.messages import Detokenize, Detokenized, Rejected, Submit, Tokenize, Tokenized
from runtime.request_builder import Request, RequestBuilder
from runtime.request_error import RequestError, parse_object
from runtime.resume import check_resume
from runtime.tokenizer import Tokenizer

Question = Submit | Tokenize | Detokenize
Answer = Request | Tokenized | Detokenized | Rejected
"""What comes of a question: an answer for its client, or of a ``Submit`` that is right a request."""

_BUSY_CHARS: Final = 8 << 10
_IDLE_CHARS: Final = 256 << 10


class RequestReader:
    """Reads what clients ask.

    One thread, the owner, calls all methods.

    Args:
        builder: Validates and tokenizes requests.
        tokenizer: The model's.
        wake: Called from another thread when something that did not fit in was read.
    """

    def __init__(self, builder: RequestBuilder, tokenizer: Tokenizer, wake: Callable[[], None]) -> None:
        self._builder = builder
        self._tokenizer = tokenizer
        self._wake = wake
        self._left_chars = 0
        self._unread: deque[tuple[Question, Future[Answer]]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="request-reader")
        self._closing = Lock()
        self._is_closed = False

    def begin(self, *, is_busy: bool) -> None:
        """Begins a step: as much as ``is_busy`` (whether sequences run) allows is read at once."""
        self._left_chars = _BUSY_CHARS if is_busy else _IDLE_CHARS

    def put(self, question: Question) -> None:
        """Takes a question: reads it at once if none waits before it and it fits in, else later; once closed, never."""
        if self._is_closed:
            return
        self._left_chars -= len(question.body)
        if self._unread or self._left_chars < 0:
            future = self._pool.submit(self._read, question)
            future.add_done_callback(self._tell)
        else:
            future = Future()
            future.set_result(self._read(question))
        self._unread.append((question, future))

    def read(self) -> Iterator[tuple[Question, Answer]]:
        """Yields the questions that were read, in order, and what came of them."""
        while self._unread and self._unread[0][1].done():
            question, future = self._unread.popleft()
            yield question, future.result()

    @property
    def unread(self) -> tuple[int, ...]:
        """The requests that are not read, or not taken, yet."""
        return tuple(question.request_id for question, _ in self._unread)

    def holds(self, request_id: int) -> bool:
        """Returns whether a question is not read, or not taken, yet."""
        return any(question.request_id == request_id for question, _ in self._unread)

    def close(self) -> None:
        """Reads no more, and wakes nobody from now on."""
        with self._closing:
            self._is_closed = True
        self._unread.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _tell(self, _: Future[Answer]) -> None:
        with self._closing:
            if not self._is_closed:
                self._wake()

    def _read(self, question: Question) -> Answer:
        try:
            match question:
                case Submit():
                    return self._request(question)
                case Tokenize():
                    token_ids = self._builder.prompts.tokenize(parse_object(question.body))
                    texts = [self._tokenizer.decode([one], skip_special_tokens=False) for one in token_ids]
                    return Tokenized(question.request_id, token_ids, texts)
                case Detokenize():
                    text = self._builder.prompts.detokenize(parse_object(question.body))
                    return Detokenized(question.request_id, text)
        except RequestError as error:
            return Rejected(question.request_id, error.info)

    def _request(self, submit: Submit) -> Request:
        resume = submit.resume
        settled = None if resume is None else resume.settled
        request = self._builder.parse(submit.body, score=submit.score, settled=settled)
        if resume is not None:
            check_resume(resume, request)
        return request
