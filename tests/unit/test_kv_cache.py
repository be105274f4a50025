"""The KV pool gives back what was written, by slot, layer and position, whatever runs a sequence's slots make."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.batch import Chunk, pack
from runtime.kv_blocks import BlockPool, BlockTable, KVCacheError
from runtime.kv_cache import KVCache, PagedKVCache, cut_runs

CPU = torch.device("cpu")
BLOCK_TOKENS = 3


def new_cache(num_blocks: int = 32) -> PagedKVCache:
    return PagedKVCache(2, 3, 4, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, dtype=torch.float32, device=CPU)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data())
def test_reads_what_was_written_in_any_chunks_and_order(lengths: list[int], data: st.DataObject) -> None:
    cache: KVCache = new_cache()
    pool = BlockPool(32)
    truth = [torch.randn(2, 2, length, 3, 4) for length in lengths]
    tables = [BlockTable(index) for index in range(len(lengths))]
    done = [0] * len(lengths)
    while done != lengths:
        running = [index for index, length in enumerate(lengths) if done[index] < length]
        chunks: list[Chunk] = []
        for index in data.draw(st.permutations(running)):
            length = data.draw(st.integers(1, lengths[index] - done[index]))
            missing = -(-(done[index] + length) // BLOCK_TOKENS) - len(tables[index])
            pool.take(tables[index], missing, data.draw(st.integers(0, 2)))
            chunks.append(Chunk(index, [0] * length, done[index], 0, tables[index]))
        batch = pack(chunks, BLOCK_TOKENS, CPU)
        for layer in range(2):
            keys, values = (
                torch.cat([truth[s.sequence_id][layer, part, s.context_length : s.total_length] for s in batch.spans])
                for part in range(2)
            )
            cache.write(layer, batch.slots, keys, values)
        for span in batch.spans:
            done[span.sequence_id] = span.total_length
            first = data.draw(st.integers(0, span.context_length))
            for layer in range(2):
                for part, got in enumerate(cache.read(layer, cut_runs(span.runs, first))):
                    expected = truth[span.sequence_id][layer, part, first : span.total_length].transpose(0, 1)
                    assert torch.equal(got, expected.unsqueeze(0))


def test_neighbouring_blocks_are_read_in_place() -> None:
    cache = new_cache()
    cache.write(0, torch.arange(9, 15), torch.ones(6, 3, 4), torch.ones(6, 3, 4))
    one_run, two_runs = ((11, 4),), ((11, 1), (12, 3))
    for got, copied in zip(cache.read(0, one_run), cache.read(0, two_runs), strict=True):
        assert torch.equal(got, copied)
        storage = got.untyped_storage().data_ptr()
        cache.write(0, torch.arange(9, 15), torch.zeros(6, 3, 4), torch.zeros(6, 3, 4))
        assert got.untyped_storage().data_ptr() == storage
        assert torch.all(got == 0)
        assert torch.all(copied == 1)
        cache.write(0, torch.arange(9, 15), torch.ones(6, 3, 4), torch.ones(6, 3, 4))


def test_views_of_all_layers_are_what_is_read_of_each() -> None:
    cache = new_cache()
    for layer in range(2):
        cache.write(layer, torch.arange(96), *torch.randn(2, 96, 3, 4))
    views = cache.views(7, 11)
    assert len(views) == 4
    for layer in range(2):
        for part, got in enumerate(cache.read(layer, ((7, 11),))):
            view = views[2 * layer + part]
            assert torch.equal(view, got)
            assert view.data_ptr() == got.data_ptr()


def test_a_block_is_copied_with_all_its_layers() -> None:
    cache = new_cache()
    rows = torch.randn(2, BLOCK_TOKENS, 3, 4)
    for layer in range(2):
        cache.write(layer, torch.arange(6, 9), rows[layer], -rows[layer])
    cache.copy([(2, 5)])
    for layer in range(2):
        keys, values = cache.read(layer, ((15, BLOCK_TOKENS),))
        assert torch.equal(keys[0], rows[layer].transpose(0, 1))
        assert torch.equal(values, -keys)


def test_tokens_without_a_block_are_refused() -> None:
    table = BlockTable(7)
    BlockPool(4).take(table, 2, 0)
    assert pack([Chunk(7, [0] * 6, 0, 0, table)], BLOCK_TOKENS, CPU).slots.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(KVCacheError, match="sequence 7 needs 7 positions, its 2 blocks have 6"):
        pack([Chunk(7, [0], 6, 0, table)], BLOCK_TOKENS, CPU)
