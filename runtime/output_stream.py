"""What the client sees of one choice while it is generated."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.messages import FinishReason, TokenDelta, TokenInfo
from runtime.output_text import OutputText, TextDelta


@dataclass(slots=True)
class OutputStream:
    """What the client sees of one sequence.

    Args:
        request_id: The client's number for its request.
        index: Which choice it is.
        output: Its text.
        grammar_moved_s: When its grammar was last seen to get on, monotonic clock; None when it does not wait for one.
        is_constrained: Whether it has a grammar, or thinks.
        schema: What its whole answer is checked against; None when it is not.
        text: Of the answer, not told yet.
        reasoning: What was thought, not told yet.
        token_ids: Tokens not told yet.
        logprobs: What was asked about them.
        answer: All of the answer, if it is checked.
        completion_tokens: All tokens.
        prompt_tokens: Prompt tokens, from the second on, that were told of.
    """

    request_id: int
    index: int
    output: OutputText
    grammar_moved_s: float | None
    is_constrained: bool
    schema: str | None
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell."""
        return bool(self.text or self.reasoning or self.token_ids)

    def add(self, delta: TextDelta) -> None:
        """Adds text that may be shown."""
        self.reasoning += delta.reasoning
        self.text += delta.text
        if self.schema is not None:
            self.answer.append(delta.text)

    def taken(self) -> TokenDelta:
        """Returns what is to be told, once."""
        start = self.completion_tokens - len(self.token_ids)
        delta = TokenDelta(self.request_id, self.index, self.text, self.token_ids, self.logprobs, self.reasoning, start)
        self.text, self.reasoning, self.token_ids, self.logprobs = "", "", [], []
        return delta

    def replay(self, token_ids: list[int], reason: FinishReason | None) -> FinishReason | None:
        """Brings a new stream to where it was by tokens that the client took, with their text.

        Args:
            token_ids: The tokens.
            reason: Why the last of them ends the output by what all ranks know; None if it does not.

        Returns:
            Why it ends, stop strings regarded; None if it goes on.
        """
        shown_ids = token_ids[:-1] if reason == "stop" else token_ids
        for token_id in shown_ids:
            self.add(self.output.push(token_id))
        if reason is not None:
            self.add(self.output.finish())
        self.text, self.reasoning, self.completion_tokens = "", "", len(token_ids)
        return reason if self.output.stopped is None else "stop"
