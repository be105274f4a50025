"""Which blocks of the KV pool each sequence has, and which prompts share them.

Part of the replicated scheduler. A full block is known by a chain hash over all tokens up to its end and over the
request's salt, so that two sequences share a block only where everything before it is equal too. What a plan computes
can be shared from the next plan on. Of the block behind the last shared one the beginning may be equal too: the
sequence then starts with a copy of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

from runtime.kv_blocks import BlockContent, BlockPool, BlockTable
from runtime.sequence import Sequence

_AHEAD_BLOCKS = 32
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence has its blocks.

    Attributes:
        copied: The block whose contents have to be copied into the one that holds position ``num_computed``, before
            the sequence's first step; −1 = none.
    """

    copied: int = -1


class KVBlockManager:
    """The block tables of all sequences that run.

    Args:
        num_blocks: Blocks of the pool.
        block_tokens: Tokens of a block.
        prefix_cache: Whether sequences may reuse blocks that others computed.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, prefix_cache: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_tokens = block_tokens
        self._prefix_cache = prefix_cache
        self._tables: dict[int, BlockTable] = {}
        self._computing: dict[bytes, int] = {}
        self._fresh: dict[int, bytes] = {}

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def table(self, sequence_id: int) -> BlockTable:
        """Returns the blocks of a sequence that runs."""
        return self._tables[sequence_id]

    def begin_plan(self) -> None:
        """Lets the blocks that the plan before computes be shared."""
        for key in self._fresh.values():
            self._computing.pop(key, None)
        self._fresh.clear()

    def waits_for(self, sequence: Sequence) -> int | None:
        """Returns the sequence that is about to compute the next block this one could reuse, if there is one."""
        if not self._computing:
            return None
        hits = len(self._hits(sequence))
        more = hits < self._reusable_tokens(sequence) // self.block_tokens
        return self._computing.get(self._key(sequence, hits)) if more else None

    def admit(self, sequence: Sequence, headroom: int) -> Admission | None:
        """Gives a sequence blocks for all its tokens and sets ``num_computed`` to what they hold already.

        Args:
            sequence: One that has none.
            headroom: How many blocks must be left.

        Returns:
            None, and nothing is changed, when there are too few.
        """
        hits, size = self._hits(sequence), self.block_tokens
        start = len(hits) * size
        copied, length = -1, 0
        more = min(self._reusable_tokens(sequence) - start, size)
        if more > 0:
            before = self._key_before(sequence, len(hits))
            copied, length = self.pool.find_beginning(before, sequence.token_ids(start, more), self._fresh)
        return Admission(copied) if self._open(sequence, hits, start + length, headroom) else None

    def fork(self, parent: Sequence, sequence: Sequence, headroom: int) -> Admission | None:
        """Does as ``admit``, sharing all the prompt but its last token with ``parent``, which has computed it.

        A block that the shared tokens fill partly is copied: both sequences will write behind them.
        """
        source = self._tables[parent.sequence_id].blocks
        whole, rest = divmod(len(sequence.prompt_token_ids) - 1, self.block_tokens)
        if not self._open(sequence, source[:whole], whole * self.block_tokens + rest, headroom):
            return None
        return Admission(source[whole] if rest else -1)

    def grow(self, sequence: Sequence) -> bool:
        """Makes room for all tokens of a sequence that runs; returns whether it has it."""
        table = self._tables[sequence.sequence_id]
        missing = self._blocks_for(sequence.num_tokens) - len(table)
        if missing > self.pool.available:
            return False
        if missing > 0:
            self.pool.take(table, missing, self._ahead(sequence))
        return True

    def grow_ahead(self, sequence: Sequence, wanted: int, headroom: int) -> int:
        """Makes room for up to ``wanted`` guessed tokens behind those of a sequence that runs; returns for how many.

        Args:
            sequence: One that has room for all its tokens.
            wanted: How many are guessed.
            headroom: How many blocks must be left.
        """
        table = self._tables[sequence.sequence_id]
        most = len(table) + max(self.pool.available - headroom, 0)
        fitting = min(wanted, most * self.block_tokens - sequence.num_tokens)
        missing = self._blocks_for(sequence.num_tokens + fitting) - len(table)
        if missing > 0:
            self.pool.take(table, missing, self._ahead(sequence))
        return fitting

    def shrink(self, sequence: Sequence) -> None:
        """Takes back the blocks behind a sequence's tokens: those of guesses that were wrong."""
        table = self._tables[sequence.sequence_id]
        self.pool.give_back(table, self._blocks_for(sequence.num_tokens), self._ahead(sequence))

    def computed(self, sequence: Sequence, start: int, stop: int) -> None:
        """Notes that a sequence's tokens from ``start`` up to ``stop`` (excluded) are computed, by a plan at last."""
        if not self._prefix_cache:
            return
        blocks, size = self._tables[sequence.sequence_id].blocks, self.block_tokens
        for index in range(start // size, stop // size):
            key, before = self._key(sequence, index), self._key_before(sequence, index)
            token_ids = tuple(sequence.token_ids(index * size, size))
            self.pool.remember(blocks[index], BlockContent(key, before, token_ids))
            if self.pool.find(key) == blocks[index]:
                self._fresh[blocks[index]] = key
            elif self._computing.get(key) == sequence.sequence_id:
                del self._computing[key]

    def forget(self, sequence: Sequence) -> None:
        """Makes what a sequence computed itself unfit for others."""
        for block in self._tables[sequence.sequence_id].blocks:
            if self.pool.references(block) == 1:
                self.pool.forget(block)

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks back from a sequence, if it has any."""
        table = self._tables.pop(sequence.sequence_id, None)
        if table is None:
            return
        self.pool.release(table)
        for key in sequence.block_keys:
            if self._computing.get(key) == sequence.sequence_id:
                del self._computing[key]

    def _open(self, sequence: Sequence, shared: list[int], computed_tokens: int, headroom: int) -> bool:
        pool = self.pool
        own = self._blocks_for(sequence.num_tokens) - len(shared)
        unreferenced = sum(pool.references(block) == 0 for block in shared)
        if own + unreferenced + headroom > pool.available:
            return False
        table = BlockTable(sequence.sequence_id)
        self._tables[sequence.sequence_id] = table
        pool.share(table, shared)
        pool.take(table, own, self._ahead(sequence))
        sequence.num_computed = computed_tokens
        if self._prefix_cache:
            for index in range(len(shared), sequence.num_tokens // self.block_tokens):
                self._computing.setdefault(self._key(sequence, index), sequence.sequence_id)
        return True

    def _hits(self, sequence: Sequence) -> list[int]:
        hits: list[int] = []
        while len(hits) < self._reusable_tokens(sequence) // self.block_tokens:
            block = self.pool.find(self._key(sequence, len(hits)))
            if block is None or block in self._fresh:
                break
            hits.append(block)
        return hits

    def _reusable_tokens(self, sequence: Sequence) -> int:
        """Returns how many tokens may come from others: the last one runs in any case, and so do those to score."""
        if not self._prefix_cache:
            return 0
        limit = sequence.num_tokens - 1
        return min(limit, sequence.num_scored) if sequence.scores_prompt else limit

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Returns the key of a sequence's full block: of its salt and of all its tokens up to the block's end."""
        keys, size = sequence.block_keys, self.block_tokens
        while len(keys) <= index:
            before, token_ids = self._key_before(sequence, len(keys)), sequence.token_ids(len(keys) * size, size)
            keys.append(blake2b(before + struct.pack(f"<{size}q", *token_ids), digest_size=_KEY_BYTES).digest())
        return keys[index]

    def _key_before(self, sequence: Sequence, index: int) -> bytes:
        """Returns what stands for all before a sequence's block: the key of the block before, first the salt's."""
        if index > 0:
            return self._key(sequence, index - 1)
        return blake2b(sequence.cache_salt.encode(), digest_size=_KEY_BYTES).digest()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _ahead(self, sequence: Sequence) -> int:
        more = self._blocks_for(sequence.capacity_tokens) - self._blocks_for(sequence.num_tokens)
        return min(more, _AHEAD_BLOCKS)
