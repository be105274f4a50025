"""Mask rows: filled from matchers on the first stage, cut by vocabulary slice, sent to the last stage.

A row is int32 words, bit ``id % 32`` of word ``id // 32`` set when the id is allowed; a whole row has
``VocabularyBlocks.mask_words`` words. Every row travels with the number of the plan row it is for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from grammar_sync.backend import Matcher
from grammar_sync.vocabulary import GrammarVocabulary
from pp.link import StageLink, Tag

_UNCONSTRAINED = -1
_WORD_BITS = 32


class MaskError(RuntimeError):
    """A constrained row has no mask, or a mask came for another row: the rank must not sample."""


class MaskFiller:
    """Fills mask rows for one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._row_words = vocabulary.mask_words
        self._filled_words = -(-vocabulary.vocab_size // _WORD_BITS)
        tail_bits = vocabulary.vocab_size % _WORD_BITS
        self._last_word = (1 << tail_bits) - 1 if tail_bits else _UNCONSTRAINED

    def fill(self, matchers: Sequence[Matcher]) -> tuple[torch.Tensor, list[float]]:
        """Returns the masks of ``matchers``, and the seconds each took; releases the GIL while it fills.

        None of the matchers may have terminated. The rows are a new tensor, because a send may still hold the last one.

        Returns:
            masks: int32 [R, mask_words] on the CPU; bits of ids at or beyond vocab_size are 0.
            seconds: One a row.
        """
        # An engine may leave words untouched where it has no constraint; padding is never allowed.
        masks = torch.full((len(matchers), self._row_words), _UNCONSTRAINED, dtype=torch.int32)
        masks[:, self._filled_words :] = 0
        seconds: list[float] = []
        for row, matcher in enumerate(matchers):
            start = time.perf_counter()
            matcher.fill(masks[row, : self._filled_words])
            seconds.append(time.perf_counter() - start)
        masks[:, self._filled_words - 1] &= self._last_word
        return masks, seconds


class MaskExchange:
    """Takes masks from a first-stage rank to the last stage's rank of the same pipeline, one vocabulary slice of them.

    With one stage the slice stays here, cut and checked in the same way.

    Args:
        link: This rank's pipeline.
        words: ``VocabularyBlocks.slice_of(tp_rank, tp_size).words``, the same on all stages of a pipeline.
    """

    def __init__(self, link: StageLink, words: slice) -> None:
        self._link = link
        self._words = words
        self._kept: tuple[int, torch.Tensor] | None = None

    def send(self, rows: Sequence[int], masks: torch.Tensor) -> None:
        """Sends this rank's slice of the masks without waiting; called on first-stage ranks, once a step.

        Nothing is sent when no row is constrained: the last stage knows that from its own plan.

        Args:
            rows: The plan row of each mask, R of them.
            masks: int32 [R, mask_words] on the CPU, whole rows.

        Raises:
            MaskError: There are more or fewer masks than rows.
            LinkError: The send failed.
        """
        if masks.shape[0] != len(rows):
            raise self._error(f"{masks.shape[0]} masks for {len(rows)} rows")
        if not rows:
            return
        numbers = torch.tensor(rows, dtype=torch.int32).reshape(-1, 1)
        framed = torch.cat((numbers, masks[:, self._words]), dim=1)
        if self._link.is_last:
            self._kept = (self._link.step, framed)
        else:
            self._link.send_tensor(framed, self._link.size - 1, Tag.MASK)

    def receive(self, rows: Sequence[int]) -> torch.Tensor:
        """Returns this rank's slice of the masks of ``rows``, in their order; waits for it.

        Called on last-stage ranks, once a step; nothing is received when no row is constrained.

        Args:
            rows: The plan rows that are constrained, R of them.

        Returns:
            int32 [R, words] on the CPU.

        Raises:
            MaskError: A row has no mask, or the masks are for other rows or another step.
            LinkError: The message failed, or has another step, shape or dtype.
        """
        words = self._words.stop - self._words.start
        if not rows:
            return torch.empty((0, words), dtype=torch.int32)
        if self._link.is_first:
            framed = self._take_kept(rows)
        else:
            framed = self._link.receive_tensor(0, Tag.MASK, shape=(len(rows), 1 + words), dtype=torch.int32)
        got_rows = framed[:, 0].tolist()
        if got_rows != list(rows):
            raise self._error(f"got masks for rows {got_rows}, expected rows {list(rows)}")
        return framed[:, 1:].contiguous()

    def _take_kept(self, rows: Sequence[int]) -> torch.Tensor:
        kept, self._kept = self._kept, None
        if kept is None or kept[0] != self._link.step:
            have = "none were filled" if kept is None else f"got masks of step {kept[0]}"
            raise self._error(f"{have}, expected rows {list(rows)}")
        return kept[1]

    def _error(self, problem: str) -> MaskError:
        return MaskError(f"masks on {self._link.name} at stage {self._link.stage}, step {self._link.step}: {problem}")
