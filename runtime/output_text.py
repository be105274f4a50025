"""The text of an output as its client sees it: what was thought apart from what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from grammar_sync.reasoning import Phase, ThinkingState
from runtime.detokenizer import IncrementalDetokenizer, TokenPieces


class TextDelta(NamedTuple):
    """What a token adds to what was thought, and to the answer."""

    reasoning: str = ""
    text: str = ""


class OutputText:
    """The text of one output, in deltas.

    Markers are part of neither text. Stop strings are looked for in the answer alone.

    Args:
        tokenizer: Gives the bytes of each token.
        prompt_token_ids: The prompt.
        stop: Texts that end the answer.
        thinking: Where the output stands at its start; None when it does not think.
    """

    def __init__(
        self,
        tokenizer: TokenPieces,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        thinking: ThinkingState | None = None,
    ) -> None:
        self._thinking = thinking
        self._thought: IncrementalDetokenizer | None = None
        before_answer = prompt_token_ids
        if thinking is not None:
            markers = thinking.markers
            before_thought = markers.start_ids if thinking.phase is Phase.START else prompt_token_ids
            before_answer = markers.end_ids
            # A marker that is no single token is found in the text, special tokens in it included.
            in_text = not markers.end_is_token
            self._thought = IncrementalDetokenizer(
                tokenizer, before_thought, stop=(markers.end,) if in_text else (), skip_special_tokens=not in_text
            )
        self._answer = IncrementalDetokenizer(tokenizer, before_answer, stop=stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer, None while there is none."""
        return self._answer.stopped

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens came before the answer, markers among them; None for an output that does not think."""
        return None if self._thinking is None else self._thinking.reasoning_tokens

    def push(self, token_id: int) -> TextDelta:
        """Returns what may be shown now that ``token_id`` came."""
        state, thought = self._thinking, self._thought
        if state is None or thought is None or state.answers:
            return TextDelta(text=self._answer.push(token_id))
        before = state.phase
        state.accept(token_id)
        if before is Phase.START:
            return TextDelta()
        if not state.answers:
            return TextDelta(thought.push(token_id))
        last = "" if state.markers.end_is_token else thought.push(token_id)
        return TextDelta(last + thought.finish())

    def finish(self) -> TextDelta:
        """Returns the text that was held back."""
        if self._thinking is not None and self._thought is not None and not self._thinking.answers:
            return TextDelta(self._thought.finish())
        return TextDelta(text=self._answer.finish())
