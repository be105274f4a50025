"""Every cut covers its axis once, in order, evenly; what cannot be cut is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp.partition import StagePartitionError, layer_ranges
from tp.partition import (
    VOCABULARY_BLOCKS,
    PartitionError,
    VocabularyBlocks,
    attention_slice,
    even_run,
    mlp_slice,
    mlp_unit,
    mlp_units,
)

quick = settings(deadline=None, max_examples=60)


def _covers(runs: list[range], count: int) -> bool:
    return [item for run in runs for item in run] == list(range(count))


@quick
@given(count=st.integers(0, 300), size=st.integers(1, 80))
def test_even_runs_cover_and_differ_by_at_most_one(count: int, size: int) -> None:
    runs = [even_run(count, rank, size) for rank in range(size)]
    assert _covers(runs, count)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@quick
@given(vocab_size=st.integers(1, 200_000), size=st.integers(1, VOCABULARY_BLOCKS))
def test_vocabulary_slices_cover_the_vocabulary_and_its_mask_words(vocab_size: int, size: int) -> None:
    blocks = VocabularyBlocks(vocab_size)
    pieces = [blocks.slice_of(rank, size) for rank in range(size)]
    assert _covers([range(piece.start, piece.stop) for piece in pieces], blocks.padded_size)
    assert _covers([range(piece.start, piece.valid_stop) for piece in pieces if piece.valid_size], vocab_size)
    words = [range(piece.words.start, piece.words.stop) for piece in pieces]
    assert _covers(words, blocks.mask_words)
    assert all(0 <= piece.valid_size <= piece.size and piece.size % blocks.block_length == 0 for piece in pieces)


def test_more_ranks_than_vocabulary_blocks_are_refused() -> None:
    with pytest.raises(PartitionError, match="65 is more than the 64 vocabulary blocks"):
        VocabularyBlocks(1000).slice_of(0, 65)


@quick
@given(kv_heads=st.integers(1, 12), group=st.integers(1, 8), data=st.data())
def test_attention_slices_cover_the_heads_and_stay_with_their_kv_heads(
    kv_heads: int, group: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, kv_heads * group))
    slices = [attention_slice(kv_heads * group, kv_heads, rank, size) for rank in range(size)]
    assert _covers([piece.heads for piece in slices], kv_heads * group)
    assert sorted({head for piece in slices for head in piece.kv_heads}) == list(range(kv_heads))
    for piece in slices:
        assert len(piece.heads) > 0
        assert [head // group for head in piece.heads] == [
            kv_head for kv_head in piece.kv_heads for _ in range(len(piece.heads) // len(piece.kv_heads))
        ]


def test_nine_heads_of_three_kv_heads_split_six_and_three() -> None:
    slices = [attention_slice(9, 3, rank, 2) for rank in range(2)]
    assert [(piece.heads, piece.kv_heads) for piece in slices] == [(range(6), range(2)), (range(6, 9), range(2, 3))]


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    slices = [attention_slice(9, 3, rank, 4) for rank in range(4)]
    assert [piece.kv_heads.start for piece in slices] == [0, 0, 1, 2]
    assert [len(piece.heads) for piece in slices] == [2, 1, 3, 3]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [(9, 3, 10, "10 is more than the 9 attention heads"), (9, 2, 1, "9 is no multiple of num_key_value_heads 2")],
)
def test_heads_that_cannot_be_cut_are_named(heads: int, kv_heads: int, size: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        attention_slice(heads, kv_heads, 0, size)


@quick
@given(width=st.integers(1, 20_000), data=st.data())
def test_mlp_slices_cover_the_width_by_whole_units(width: int, data: st.DataObject) -> None:
    units, unit = mlp_units(width), mlp_unit(width)
    assert units <= 64
    size = data.draw(st.integers(1, units))
    runs = [mlp_slice(width, rank, size, unit) for rank in range(size)]
    assert _covers(runs, width)
    assert all(len(run) > 0 for run in runs)
    with pytest.raises(PartitionError, match=f"more than the {units} MLP units"):
        mlp_slice(width, 0, units + 1, unit)


@quick
@given(num_layers=st.integers(1, 100), data=st.data())
def test_layers_are_dealt_evenly_and_the_last_stage_has_fewest(num_layers: int, data: st.DataObject) -> None:
    pp_size = data.draw(st.integers(1, num_layers))
    ranges = layer_ranges(num_layers, pp_size)
    assert _covers(ranges, num_layers)
    counts = [len(layers) for layers in ranges]
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)
    assert layer_ranges(num_layers, pp_size, counts) == ranges


@pytest.mark.parametrize(
    ("pp_size", "explicit", "message"),
    [
        (0, None, r"pp_size 0 is not in 1\.\.10"),
        (11, None, r"pp_size 11 is not in 1\.\.10"),
        (2, [4, 3, 3], "name 3 stages, expected pp_size 2"),
        (2, [4, 5], "sum to the model's 10, not 9"),
        (2, [10, 0], "at least 1"),
        (3, [-1, 1, 10], "at least 1"),
    ],
)
def test_stages_that_do_not_add_up_are_refused(pp_size: int, explicit: list[int] | None, message: str) -> None:
    with pytest.raises(StagePartitionError, match=message):
        layer_ranges(10, pp_size, explicit)
