"""Mask rows: filled from matchers on the first stage, cut by vocabulary slice, sent to the last stage.

A row is int32 words, bit ``id % 32`` of word ``id // 32`` set when the id is allowed; a whole row has
``VocabularyBlocks.mask_words`` words. Every row travels with the number of the plan row it is for, and with what went
wrong on the rank that filled it: that may be this rank's alone, so the last stage agrees on it before the row ends.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import torch

from grammar_sync.engines.backend import Matcher, MatcherError
from grammar_sync.fill_pool import CallBatch, CallState, FillPool
from grammar_sync.vocabulary import GrammarVocabulary
from pp.link import StageLink, Tag

_UNCONSTRAINED = -1
_WORD_BITS = 32
_HEAD = 4
"""Words before a row: its number, its fault, the checksums of the whole row and of the slice that follows."""


class MaskError(RuntimeError):
    """A constrained row has no mask, or a mask came for another row: the rank must not sample."""


class RowFault(IntEnum):
    """Why a constrained row has no mask; the larger one counts where ranks differ."""

    NONE = 0
    EMPTY = 1
    REFUSED = 2
    FAILED = 3
    LATE = 4


class FilledMasks(NamedTuple):
    """The masks of a step.

    Attributes:
        words: int32 [R, mask_words] on the CPU; bits of ids at or beyond vocab_size are 0, and so is a faulty row.
        faults: Why a row has no mask, one a row.
        seconds: How long each fill took.
        messages: What went wrong with each row, in one line; empty where nothing did.
    """

    words: torch.Tensor
    faults: list[RowFault]
    seconds: list[float]
    messages: list[str]


class PendingMasks(NamedTuple):
    """Fills under way: the rows' words, the calls that fill them, and which rows each call is for."""

    words: torch.Tensor
    batch: CallBatch
    rows: list[range]


class MaskFiller:
    """Fills mask rows for one vocabulary, beside the thread that asks for them.

    Args:
        vocabulary: The vocabulary.
        pool: Runs the fills; one of its own when left out.
    """

    def __init__(self, vocabulary: GrammarVocabulary, pool: FillPool | None = None) -> None:
        self._pool = pool or FillPool()
        self._row_words = vocabulary.mask_words
        self._filled_words = -(-vocabulary.vocab_size // _WORD_BITS)
        tail_bits = vocabulary.vocab_size % _WORD_BITS
        self._last_word = (1 << tail_bits) - 1 if tail_bits else _UNCONSTRAINED

    def begin(
        self, matchers: Sequence[Matcher | None], drafts: Sequence[tuple[int, ...]] | None = None
    ) -> PendingMasks:
        """Begins to fill the masks of ``matchers``; engines release the GIL meanwhile.

        None of the matchers may have terminated, nor be used before ``finish``. A row without a matcher is refused.
        The rows are a new tensor, because a send may still hold the last one, and a fill that was given up its row.

        Args:
            matchers: Of the sequences, each in its state.
            drafts: What is guessed to come next in each: its row is followed by one for every token, the mask of what
                comes after it. A row behind a guess that the grammar does not allow allows everything: nobody will
                draw that guess. None = nothing is guessed.
        """
        drafts = [()] * len(matchers) if drafts is None else drafts
        starts, row_count = [], 0
        for draft in drafts:
            starts.append(row_count)
            row_count += 1 + len(draft)
        # Other threads write to it, which a tensor that is born in inference mode would not let them.
        with torch.inference_mode(mode=False):
            # An engine may leave words untouched where it has no constraint; padding is never allowed.
            words = torch.full((row_count, self._row_words), _UNCONSTRAINED, dtype=torch.int32)
            words[:, self._filled_words :] = 0
            filled = words[:, : self._filled_words]
            calls: list[Callable[[], None]] = []
            rows: list[range] = []
            for row, matcher in zip(starts, matchers, strict=True):
                if matcher is not None:
                    calls.append(partial(matcher.fill, filled[row]))
                    rows.append(range(row, row + 1))
            for row, matcher, draft in zip(starts, matchers, drafts, strict=True):
                ahead = None if matcher is None or not draft else _copied(matcher)
                if ahead is not None:
                    rows.append(range(row + 1, row + 1 + len(draft)))
                    calls.append(partial(_fill_behind, ahead, draft, filled[row + 1 : row + 1 + len(draft)]))
        return PendingMasks(words, self._pool.submit(calls), rows)

    def finish(self, pending: PendingMasks) -> FilledMasks:
        """Returns the masks; waits for them, but for no fill beyond the pool's deadline."""
        words = pending.words
        faults = [RowFault.REFUSED] * len(words)
        seconds, messages = [0.0] * len(words), [""] * len(words)
        for rows, result in zip(pending.rows, self._pool.wait(pending.batch), strict=True):
            seconds[rows.start] = result.seconds
            for row in rows:
                faults[row], messages[row] = _FAULT_OF[result.state], result.message
        words[:, self._filled_words - 1] &= self._last_word
        # A fill that was given up may still write to its row: what is sent is a copy.
        if any(fault is RowFault.LATE for fault in faults):
            words = words.clone()
        for row, has_any in enumerate(words.any(dim=1).tolist()):
            if faults[row] is not RowFault.NONE:
                words[row] = 0
            elif not has_any:
                faults[row], messages[row] = RowFault.EMPTY, "it allows no token at all"
        return FilledMasks(words, faults, seconds, messages)

    def fill(self, matchers: Sequence[Matcher]) -> FilledMasks:
        """Returns the masks of ``matchers``, none of which may have terminated."""
        return self.finish(self.begin(matchers))


def _copied(matcher: Matcher) -> Matcher | None:
    """Returns a copy to try guesses on: whatever becomes of it, the matcher itself stays where it is."""
    try:
        return matcher.copy()
    except MatcherError:
        return None


def _fill_behind(matcher: Matcher, draft: tuple[int, ...], rows: torch.Tensor) -> None:
    """Fills, for each token of a draft, what may follow it, up to the first that the grammar does not allow.

    Args:
        matcher: Its own; it is moved on.
        draft: K tokens.
        rows: int32 [K, words].
    """
    for token_id, row in zip(draft, rows.unbind(), strict=True):
        if not matcher.accept(token_id) or matcher.is_terminated():
            return
        matcher.fill(row)


_FAULT_OF = {CallState.DONE: RowFault.NONE, CallState.FAILED: RowFault.FAILED, CallState.LATE: RowFault.LATE}


class ReceivedMasks(NamedTuple):
    """A rank's slice of a step's masks.

    Attributes:
        words: int32 [R, words] on the CPU.
        faults: int32 [R], the ``RowFault`` of each row on the rank that filled it.
        checksums: Of each whole row, as the rank that filled it had it.
    """

    words: torch.Tensor
    faults: torch.Tensor
    checksums: tuple[int, ...]


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

    def send(self, rows: Sequence[int], masks: torch.Tensor, faults: Sequence[RowFault]) -> tuple[int, ...]:
        """Sends this rank's slice of the masks without waiting; called on first-stage ranks, once a step.

        Returns the checksum of each whole row: equal on all ranks of the stage where they have the same mask.

        Nothing is sent when no row is constrained: the last stage knows that from its own plan.

        Args:
            rows: The plan row of each mask, R of them.
            masks: int32 [R, mask_words] on the CPU, whole rows.
            faults: Why a row has no mask on this rank, R of them.

        Raises:
            MaskError: There are more or fewer masks than rows.
            LinkError: The send failed.
        """
        if not len(rows) == len(masks) == len(faults):
            raise self._error(f"{len(masks)} masks and {len(faults)} faults for {len(rows)} rows")
        if not rows:
            return ()
        own = masks[:, self._words].contiguous()
        checksums = _checksums(masks)
        heads = torch.tensor([rows, [int(fault) for fault in faults], checksums, _checksums(own)], dtype=torch.int32)
        framed = torch.cat((heads.T, own), dim=1)
        if self._link.is_last:
            self._kept = (self._link.step, framed)
        else:
            self._link.send_tensor(framed, self._link.size - 1, Tag.MASK)
        return tuple(checksums)

    def receive(self, rows: Sequence[int]) -> ReceivedMasks:
        """Returns this rank's slice of the masks of ``rows``, in their order; waits for it.

        Called on last-stage ranks, once a step; nothing is received when no row is constrained.

        Args:
            rows: The plan rows that are constrained, R of them.

        Raises:
            MaskError: A row has no mask, or the masks are for other rows or another step, or not as they were sent.
            LinkError: The message failed, or has another step, shape or dtype.
        """
        words = self._words.stop - self._words.start
        if not rows:
            return ReceivedMasks(torch.empty((0, words), dtype=torch.int32), torch.empty(0, dtype=torch.int32), ())
        if self._link.is_first:
            framed = self._take_kept(rows)
        else:
            framed = self._link.receive_tensor(0, Tag.MASK, shape=(len(rows), _HEAD + words), dtype=torch.int32)
        got_rows = framed[:, 0].tolist()
        if got_rows != list(rows):
            raise self._error(f"got masks for rows {got_rows}, expected rows {list(rows)}")
        received = framed[:, _HEAD:].contiguous()
        sent_checksums, checksums = framed[:, 3].tolist(), _checksums(received)
        if checksums != sent_checksums:
            raise self._error(f"the masks that came have checksums {checksums}, those sent {sent_checksums}")
        return ReceivedMasks(received, framed[:, 1].contiguous(), tuple(framed[:, 2].tolist()))

    def _take_kept(self, rows: Sequence[int]) -> torch.Tensor:
        kept, self._kept = self._kept, None
        if kept is None or kept[0] != self._link.step:
            have = "none were filled" if kept is None else f"got masks of step {kept[0]}"
            raise self._error(f"{have}, expected rows {list(rows)}")
        return kept[1]

    def _error(self, problem: str) -> MaskError:
        return MaskError(f"masks on {self._link.name} at stage {self._link.stage}, step {self._link.step}: {problem}")


def checksums_digest(checksums: Sequence[int]) -> int:
    """Returns a signed 64-bit digest of the checksums of some masks."""
    digest = blake2b(struct.pack(f"<{len(checksums)}q", *checksums), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _checksums(masks: torch.Tensor) -> list[int]:
    """Returns a checksum of 31 bits for each row of int32 [R, words], contiguous."""
    return [zlib.crc32(row) >> 1 for row in masks.numpy()]
