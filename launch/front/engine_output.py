"""What has come of a request, gathered from the leader's messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from launch.front.engine_client import Submission
from launch.front.engine_errors import EngineClosedError, RequestFailedError
from runtime.messages import Accepted, ErrorInfo, Finished, PromptInfo, Rejected, RequestMessage, TokenDelta, TokenInfo


@dataclass(slots=True)
class ChoiceOutput:
    """What has come of one choice; ``finished`` is None until it ended."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, delta: TokenDelta) -> None:
        """Adds what a step brought."""
        self.text.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs


@dataclass(slots=True)
class RequestOutput:
    """What has come of one request.

    Attributes:
        error: Why it was refused, if it was.
        choices: Its choices; empty until it was accepted.
        prompt: What was asked about prompt tokens, from the second on; None until something is told.
    """

    error: ErrorInfo | None = None
    choices: list[ChoiceOutput] = field(default_factory=list)
    prompt: list[TokenInfo] | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or (
            bool(self.choices) and all(choice.finished is not None for choice in self.choices)
        )

    def take(self, message: RequestMessage) -> None:
        """Adds what a message of this request says."""
        match message:
            case Accepted():
                self.choices = [ChoiceOutput() for _ in range(message.choices)]
            case Rejected():
                self.error = message.error
            case TokenDelta():
                self.choices[message.index].add(message)
            case PromptInfo():
                self.prompt = self.prompt or []
                self.prompt += message.tokens
            case Finished():
                self.choices[message.index].finished = message
            case _:
                pass

    def prompt_logprobs(self) -> list[TokenInfo | None] | None:
        """Returns an entry for each prompt token, None for the first, since nothing comes before it."""
        return None if self.prompt is None else [None, *self.prompt]


async def gathered(submission: Submission) -> list[RequestOutput]:
    """Returns the outputs of all requests of a submission, once they are done; whatever happens, nothing runs on.

    Raises:
        RequestRefusedError: A request was refused.
        RequestFailedError: A choice ended with an error.
        EngineClosedError, RanksFailedError: The engine is gone.
    """
    outputs = [RequestOutput() for _ in submission.request_ids]
    try:
        await submission.wait_for_output()
        async for position, message in submission:
            raise_failure(message)
            outputs[position].take(message)
    finally:
        submission.abort()
    return outputs


def raise_failure(message: RequestMessage) -> None:
    """Returns if a message is no end of a choice that failed.

    Raises:
        RequestFailedError: It ended with an error.
        EngineClosedError: The engine ended it, as it was told to leave.
    """
    if isinstance(message, Finished):
        if message.error is not None:
            raise RequestFailedError(message.error)
        if message.finish_reason == "abort":
            raise EngineClosedError("the engine ended this request")
