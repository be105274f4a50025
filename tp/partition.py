"""How a model's axes are cut over tensor-parallel ranks: vocabulary blocks, attention heads, MLP units.

Cuts depend on the model alone; a rank owns a contiguous run of them, as even as possible, so that any size up to the
number of cuts works, divisor or not.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY_BLOCKS = 64
_MASK_WORD_BITS = 32
_MLP_UNITS = 64
_LEAST_INVARIANT_MLP_UNITS = 8


class PartitionError(ValueError):
    """A model cannot be cut over this many ranks."""


def even_run(count: int, rank: int, size: int) -> range:
    """Returns the contiguous run of ``count`` items that ``rank`` of ``size`` owns; lengths differ by at most one."""
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


@dataclass(frozen=True)
class VocabularySlice:
    """The ids ``start`` to ``stop`` (excluded) that one rank owns; ids from ``valid_stop`` on are padding."""

    start: int
    stop: int
    valid_stop: int
    block_length: int

    @property
    def size(self) -> int:
        """How many ids the slice has, padding included: a multiple of ``block_length``."""
        return self.stop - self.start

    @property
    def valid_size(self) -> int:
        """How many real ids the slice has; 0 when it is all padding."""
        return self.valid_stop - self.start

    @property
    def words(self) -> slice:
        """The mask words (32 ids each) of this slice within a whole row."""
        return slice(self.start // _MASK_WORD_BITS, self.stop // _MASK_WORD_BITS)


@dataclass(frozen=True)
class VocabularyBlocks:
    """The 64 canonical blocks of a vocabulary; their length is a multiple of 32, so that mask words cut cleanly.

    Args:
        vocab_size: How many ids the model's LM head has; ids from there to ``padded_size`` are padding.
    """

    vocab_size: int

    @property
    def block_length(self) -> int:
        """How many ids one block has."""
        per_block = -(-self.vocab_size // VOCABULARY_BLOCKS)
        return -(-per_block // _MASK_WORD_BITS) * _MASK_WORD_BITS

    @property
    def padded_size(self) -> int:
        """How many ids all blocks have together."""
        return VOCABULARY_BLOCKS * self.block_length

    @property
    def mask_words(self) -> int:
        """How many 32-bit words a whole mask row has."""
        return self.padded_size // _MASK_WORD_BITS

    def slice_of(self, rank: int, size: int) -> VocabularySlice:
        """Returns the slice that ``rank`` of ``size`` ranks owns."""
        if size > VOCABULARY_BLOCKS:
            raise PartitionError(f"tp_size {size} is more than the {VOCABULARY_BLOCKS} vocabulary blocks")
        blocks = even_run(VOCABULARY_BLOCKS, rank, size)
        start, stop = blocks.start * self.block_length, blocks.stop * self.block_length
        return VocabularySlice(start, stop, max(start, min(stop, self.vocab_size)), self.block_length)


@dataclass(frozen=True)
class AttentionSlice:
    """The query heads and the KV heads of one rank; each KV head serves ``len(heads) / len(kv_heads)`` query heads."""

    heads: range
    kv_heads: range


def attention_slice(num_heads: int, num_kv_heads: int, rank: int, size: int) -> AttentionSlice:
    """Returns the heads of ``rank`` of ``size``: whole KV groups while there are enough, then parts of one group.

    Beyond ``num_kv_heads`` ranks, the ranks are dealt to the groups as evenly as possible, every rank of a group holds
    that group's KV head (replicated) and a run of its query heads.

    Raises:
        PartitionError: ``size`` is more than the query heads allow, or the heads are no multiple of the KV heads.
    """
    if num_heads % num_kv_heads:
        raise PartitionError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv_heads = even_run(num_kv_heads, rank, size)
        return AttentionSlice(range(kv_heads.start * group, kv_heads.stop * group), kv_heads)
    if size > num_heads:
        raise PartitionError(f"tp_size {size} is more than the {num_heads} attention heads of the model")
    for kv_head in range(num_kv_heads):
        ranks = even_run(size, kv_head, num_kv_heads)
        if rank in ranks:
            heads = even_run(group, rank - ranks.start, len(ranks))
            first = kv_head * group
            return AttentionSlice(range(first + heads.start, first + heads.stop), range(kv_head, kv_head + 1))
    raise PartitionError(f"rank {rank} is not in 0..{size - 1}")


def mlp_units(intermediate_size: int) -> int:
    """Returns how many units an MLP of this width is cut into: at most 64, of one length but the last."""
    return -(-intermediate_size // mlp_unit(intermediate_size))


def mlp_slice(intermediate_size: int, rank: int, size: int, unit: int) -> range:
    """Returns the MLP columns of ``rank`` of ``size``: a run of units of one length (the last is shorter).

    Args:
        intermediate_size: The MLP's width.
        rank: Which rank.
        size: Of how many.
        unit: Columns of a unit.

    Raises:
        PartitionError: There are fewer units than ranks.
    """
    units = -(-intermediate_size // unit)
    if size > units:
        raise PartitionError(f"tp_size {size} is more than the {units} MLP units of the model")
    run = even_run(units, rank, size)
    return range(run.start * unit, min(run.stop * unit, intermediate_size))


def invariant_mlp_unit(intermediate_size: int, num_kv_heads: int) -> int:
    """Returns the MLP columns of a unit of invariant mode, from the model alone.

    There are few units, since each is a product of its own, but at least two for every rank there may be.
    """
    units = max(_LEAST_INVARIANT_MLP_UNITS, 2 << (num_kv_heads - 1).bit_length())
    return -(-intermediate_size // units)


def mlp_unit(intermediate_size: int) -> int:
    """Returns the MLP columns of a unit, of which there are at most 64."""
    return -(-intermediate_size // _MLP_UNITS)
