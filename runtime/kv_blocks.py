"""The blocks of a KV pool: who refers to them, which are free, and which hold what a later prompt may reuse.

Part of the replicated scheduler: no tensors, no clock, no chance. Blocks are handed out so that those of one sequence
are often neighbours: attention then reads its keys and values in place. A block that nobody refers to but whose content
is known by its key stays until its place is needed, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

_FREE, _EARMARKED, _CACHED, _USED = range(4)
_EVICTED_AT_ONCE = 8
_COMPARED_BLOCKS = 32


class KVCacheError(RuntimeError):
    """The KV cache is asked for blocks that it does not have."""


class BlockContent(NamedTuple):
    """What a full block holds.

    Attributes:
        key: Stands for all tokens up to the block's end.
        before: Stands for all tokens up to its beginning.
        token_ids: The tokens between.
    """

    key: bytes
    before: bytes
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens.

    Attributes:
        owner: The sequence.
        blocks: Their ids.
        runs: The same as runs of neighbours: [first block, how many].
        earmark_stop: The free blocks behind the last one, up to this one (excluded), are left to it as long as no other
            sequence needs them.
        announced: How many of its blocks a plan has told of.
    """

    owner: int
    blocks: list[int] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    earmark_stop: int = 0
    announced: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def next_block(self) -> int:
        """The block behind the last one; −1 when there is none."""
        return self.blocks[-1] + 1 if self.blocks else -1

    def announce(self) -> tuple[int, ...]:
        """Returns the blocks that no plan has told of yet."""
        new = tuple(self.blocks[self.announced :])
        self.announced = len(self.blocks)
        return new

    def append(self, first: int, count: int) -> None:
        """Adds ``count`` neighbouring blocks from ``first`` on."""
        if self.runs and sum(self.runs[-1]) == first:
            self.runs[-1][1] += count
        else:
            self.runs.append([first, count])
        self.blocks.extend(range(first, first + count))

    def cut(self, keep: int) -> list[int]:
        """Takes all blocks behind the first ``keep`` away; returns them."""
        taken = self.blocks[keep:]
        for _ in taken:
            self.runs[-1][1] -= 1
            if not self.runs[-1][1]:
                self.runs.pop()
        del self.blocks[keep:]
        self.announced = min(self.announced, keep)
        return taken


class BlockPool:
    """All blocks of the pool, the same on every rank.

    Args:
        num_blocks: How many there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self._states = bytearray(num_blocks)
        self._references = [0] * num_blocks
        self._content_of: dict[int, BlockContent] = {}
        self._block_of: dict[bytes, int] = {}
        self._following: dict[bytes, dict[int, None]] = {}
        self._unreferenced: dict[int, None] = {}
        self._earmarks: dict[int, BlockTable] = {}
        self._num_earmarked = 0
        self._num_used = 0

    @property
    def used(self) -> int:
        """Blocks that a sequence refers to."""
        return self._num_used

    @property
    def cached(self) -> int:
        """Blocks that no sequence refers to, kept for what they hold."""
        return len(self._unreferenced)

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones and those that are only kept for what they hold."""
        return self.num_blocks - self._num_used

    def references(self, block: int) -> int:
        """Returns how many sequences refer to a block."""
        return self._references[block]

    def find(self, key: bytes) -> int | None:
        """Returns the block that holds what ``key`` stands for, if one does."""
        return self._block_of.get(key)

    def find_beginning(self, before: bytes, token_ids: Sequence[int], hidden: Container[int]) -> tuple[int, int]:
        """Returns the block behind ``before`` that begins with most of ``token_ids``, and how many; (−1, 0) if none.

        Blocks in ``hidden`` do not count.
        """
        best, longest = -1, 0
        for block in islice(reversed(self._following.get(before, {})), _COMPARED_BLOCKS):
            if block in hidden:
                continue
            common = 0
            for held, token_id in zip(self._content_of[block].token_ids, token_ids, strict=False):
                if held != token_id:
                    break
                common += 1
            if common > longest:
                best, longest = block, common
        return best, longest

    def remember(self, block: int, content: BlockContent) -> None:
        """Notes what a block in use holds; of blocks that hold the same the first one stays the one that is found."""
        if content.key not in self._block_of and block not in self._content_of:
            self._block_of[content.key] = block
            self._content_of[block] = content
            self._following.setdefault(content.before, {})[block] = None

    def forget(self, block: int) -> None:
        """Makes a block unfit for others."""
        content = self._content_of.pop(block, None)
        if content is None:
            return
        del self._block_of[content.key]
        following = self._following[content.before]
        del following[block]
        if not following:
            del self._following[content.before]

    def share(self, table: BlockTable, blocks: Iterable[int]) -> None:
        """Appends blocks that hold something already; each is referred to once more."""
        for block in blocks:
            if self._references[block] == 0:
                del self._unreferenced[block]
                self._use(block, 1)
            else:
                self._references[block] += 1
            table.append(block, 1)

    def take(self, table: BlockTable, count: int, ahead: int) -> None:
        """Appends blocks whose content is nobody's.

        Args:
            table: Whose they become.
            count: How many.
            ahead: How many more it may need: so many neighbours are earmarked where they are free.

        Raises:
            KVCacheError: Fewer are available.
        """
        if count > self.available:
            raise KVCacheError(f"sequence {table.owner} needs {count} blocks, {self.available} are available")
        if table.owner in self._earmarks:
            own = min(count, table.earmark_stop - table.next_block)
            self._num_earmarked -= own
            self._append(table, table.next_block, own)
            count -= own
            if table.next_block == table.earmark_stop:
                del self._earmarks[table.owner]
        if count == 0:
            return
        self._drop_earmark(table)
        self._make_free(count)
        while count:
            first, length = self._place(table.next_block, count, count + ahead)
            self._append(table, first, length)
            count -= length
        self._earmark(table, ahead)

    def give_back(self, table: BlockTable, keep: int, ahead: int) -> None:
        """Frees the blocks of a table behind the first ``keep``, which nobody shares and whose content nobody knows.

        Args:
            table: Whose they are.
            keep: How many stay.
            ahead: How many it may need again, as in ``take``.
        """
        if len(table) <= keep:
            return
        self._drop_earmark(table)
        for block in table.cut(keep):
            self._references[block] = 0
            self._states[block] = _FREE
            self._num_used -= 1
        self._earmark(table, ahead)

    def release(self, table: BlockTable) -> None:
        """Gives up a table and all its blocks, the last first, so that the head of what they hold stays longest."""
        self._drop_earmark(table)
        for block in reversed(table.blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._num_used -= 1
            if block in self._content_of:
                self._states[block] = _CACHED
                self._unreferenced[block] = None
            else:
                self._states[block] = _FREE

    def _append(self, table: BlockTable, first: int, count: int) -> None:
        for block in range(first, first + count):
            self._use(block, 1)
        table.append(first, count)

    def _use(self, block: int, references: int) -> None:
        self._states[block] = _USED
        self._references[block] = references
        self._num_used += 1

    def _place(self, near: int, count: int, wanted: int) -> tuple[int, int]:
        """Returns a run of at most ``count`` free blocks: behind ``near`` if it can be, with room for ``wanted``."""
        states = self._states
        for size in (wanted, count) if near >= 0 else ():
            if states.startswith(bytes(size), near):
                return near, count
        for size in (wanted, count):
            first = states.find(bytes(size))
            if first >= 0:
                return first, count
        size = count
        while first < 0:
            size //= 2
            first = states.find(bytes(size))
        return first, size

    def _make_free(self, count: int) -> None:
        """Makes ``count`` blocks free, as long as they are available: by eviction, then from others' earmarks."""
        free = self.num_blocks - self._num_used - len(self._unreferenced) - self._num_earmarked
        while free < count and self._unreferenced:
            free += self._evict()
        while free < count:
            table = self._earmarks[next(reversed(self._earmarks))]
            table.earmark_stop -= 1
            self._states[table.earmark_stop] = _FREE
            self._num_earmarked -= 1
            free += 1
            if table.earmark_stop == table.next_block:
                del self._earmarks[table.owner]

    def _evict(self) -> int:
        """Evicts the least recently used block, and the few after it that are its neighbours; returns how many."""
        evicted = 0
        last = -1
        while self._unreferenced and evicted < _EVICTED_AT_ONCE:
            block = next(iter(self._unreferenced))
            if evicted and abs(block - last) != 1:
                break
            del self._unreferenced[block]
            self.forget(block)
            self._states[block] = _FREE
            last = block
            evicted += 1
        self.evictions += evicted
        return evicted

    def _earmark(self, table: BlockTable, ahead: int) -> None:
        first = table.next_block
        stop = first
        while stop < min(first + ahead, self.num_blocks) and self._states[stop] == _FREE:
            self._states[stop] = _EARMARKED
            stop += 1
        table.earmark_stop = stop
        if stop > first:
            self._earmarks[table.owner] = table
            self._num_earmarked += stop - first

    def _drop_earmark(self, table: BlockTable) -> None:
        if self._earmarks.pop(table.owner, None) is not None:
            for block in range(table.next_block, table.earmark_stop):
                self._states[block] = _FREE
                self._num_earmarked -= 1
        table.earmark_stop = 0
