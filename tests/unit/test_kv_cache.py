"""The KV cache gives back what was written, by sequence, layer and position, and refuses what has no room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv_cache import KVCache, KVCacheError, SequenceKVCache, Span


def new_cache(num_layers: int = 2) -> SequenceKVCache:
    return SequenceKVCache(num_layers, 3, 4, dtype=torch.float32, device=torch.device("cpu"))


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data())
def test_reads_what_was_written_in_any_chunks_and_order(lengths: list[int], data: st.DataObject) -> None:
    cache: KVCache = (store := new_cache())
    truth = [torch.randn(2, 2, length, 3, 4) for length in lengths]
    for sequence_id, length in enumerate(lengths):
        store.add(sequence_id, length)
    done = [0] * len(lengths)
    while done != lengths:
        running = [index for index, length in enumerate(lengths) if done[index] < length]
        spans: list[Span] = []
        for index in data.draw(st.permutations(running)):
            length = data.draw(st.integers(1, lengths[index] - done[index]))
            spans.append(Span(index, spans[-1].stop if spans else 0, length, done[index]))
        for layer in range(2):
            keys, values = (
                torch.cat([truth[s.sequence_id][layer, part, s.context_length : s.total_length] for s in spans])
                for part in range(2)
            )
            cache.write(layer, spans, keys, values)
        for span in spans:
            done[span.sequence_id] = span.total_length
            first = data.draw(st.integers(0, span.context_length))
            for layer in range(2):
                for part, got in enumerate(cache.read(layer, span, first)):
                    expected = truth[span.sequence_id][layer, part, first : span.total_length].transpose(0, 1)
                    assert torch.equal(got, expected)


def test_room_is_set_aside_and_freed() -> None:
    cache = new_cache()
    cache.add(4, 2)
    assert 4 in cache
    assert len(cache) == 1
    with pytest.raises(KVCacheError, match="sequence 4 is in the KV cache already"):
        cache.add(4, 2)
    cache.remove(4)
    assert 4 not in cache
    with pytest.raises(KVCacheError, match="sequence 4 is not in the KV cache"):
        cache.remove(4)


def test_writes_without_room_are_refused() -> None:
    cache, tokens = new_cache(), torch.zeros(3, 3, 4)
    with pytest.raises(KVCacheError, match="sequence 1 is not in the KV cache"):
        cache.write(0, [Span(1, 0, 3, 0)], tokens, tokens)
    cache.add(1, 4)
    cache.write(0, [Span(1, 0, 3, 1)], tokens, tokens)
    with pytest.raises(KVCacheError, match="sequence 1 needs 5 positions, its room has 4"):
        cache.write(0, [Span(1, 0, 3, 2)], tokens, tokens)
