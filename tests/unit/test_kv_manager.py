"""Which prompts share blocks, and what keeps them apart."""

from __future__ import annotations

from typing import Any

from runtime.kv_manager import Admission, KVBlockManager
from runtime.messages import AddSequence
from runtime.sequence import Sequence
from sampler.params import SamplingParams

SIZE = 4


def manager(num_blocks: int = 32, *, prefix_cache: bool = True) -> KVBlockManager:
    return KVBlockManager(num_blocks, SIZE, prefix_cache=prefix_cache)


def sequence(sequence_id: int, prompt: list[int], salt: str = "", max_tokens: int = 8, **params: Any) -> Sequence:
    return Sequence.from_action(
        AddSequence(
            sequence_id=sequence_id,
            choice=0,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            params=SamplingParams(**params),
            seed=0,
            cache_salt=salt,
        )
    )


def compute(blocks: KVBlockManager, one: Sequence, until: int | None = None) -> Admission | None:
    """Admits a sequence and has a plan compute its tokens; returns how it was admitted."""
    admission = blocks.admit(one, 0)
    start = one.num_computed
    one.num_computed = one.num_tokens if until is None else until
    blocks.computed(one, start, one.num_computed)
    return admission


def reused(blocks: KVBlockManager, prompt: list[int], salt: str = "", **params: Any) -> tuple[int, bool]:
    """Returns how many tokens a newcomer finds, and whether a block is copied for them."""
    newcomer = sequence(99, prompt, salt, **params)
    admission = blocks.admit(newcomer, 0)
    assert admission is not None
    blocks.free(newcomer)
    return newcomer.num_computed, admission.copied >= 0


def test_what_begins_alike_is_reused_to_the_token() -> None:
    blocks = manager()
    compute(blocks, sequence(1, list(range(12))))
    blocks.begin_plan()
    assert reused(blocks, [*range(8), 50, 51, 52]) == (8, False)
    assert reused(blocks, [*range(10), 50]) == (10, True)
    assert reused(blocks, [*range(2), 50]) == (2, True)
    assert reused(blocks, [50, *range(1, 12)]) == (0, False)
    assert reused(blocks, [*range(4), 50, *range(5, 12)]) == (4, False), "a block counts only behind an equal one"


def test_the_last_token_always_runs() -> None:
    blocks = manager()
    compute(blocks, sequence(1, list(range(12))))
    blocks.begin_plan()
    assert reused(blocks, list(range(12))) == (11, True)
    assert reused(blocks, list(range(9))) == (8, False)
    assert reused(blocks, list(range(8))) == (7, True)
    assert reused(blocks, [0]) == (0, False)


def test_salts_and_the_switch_keep_apart() -> None:
    blocks = manager()
    compute(blocks, sequence(1, list(range(12)), "a"))
    blocks.begin_plan()
    assert reused(blocks, list(range(12)), "a") == (11, True)
    assert reused(blocks, list(range(12)), "b") == (0, False)
    assert reused(blocks, list(range(12))) == (0, False)
    off = manager(prefix_cache=False)
    compute(off, sequence(1, list(range(12))))
    off.begin_plan()
    assert reused(off, list(range(12))) == (0, False)


def test_a_prompt_to_score_runs_whole() -> None:
    blocks = manager()
    compute(blocks, sequence(1, list(range(12))))
    blocks.begin_plan()
    assert reused(blocks, list(range(12)), prompt_logprobs=0) == (0, False)
    half = sequence(2, list(range(12)), prompt_logprobs=0)
    half.num_scored = 6
    assert blocks.admit(half, 0) is not None
    assert half.num_computed == 6, "what was scored before it was preempted need not run for it again"


def test_what_is_computed_is_shared_from_the_next_plan_on() -> None:
    blocks = manager()
    first = sequence(1, list(range(12)))
    compute(blocks, first, until=8)
    second = sequence(2, list(range(12)))
    assert blocks.waits_for(second) == 1
    assert reused(blocks, list(range(12))) == (0, False)
    blocks.begin_plan()
    assert reused(blocks, list(range(12))) == (8, False)
    assert blocks.waits_for(sequence(3, [*range(8), 50, 51])) is None
    blocks.free(first)
    assert blocks.waits_for(second) is None, "nobody computes the rest any more"
    assert blocks._computing == {}


def test_what_went_wrong_is_for_nobody_else() -> None:
    blocks = manager()
    first = sequence(1, list(range(12)))
    compute(blocks, first)
    blocks.forget(first)
    blocks.free(first)
    blocks.begin_plan()
    assert reused(blocks, list(range(12))) == (0, False)
    assert blocks.pool.cached == 0


def test_outputs_are_reused_as_well() -> None:
    blocks = manager()
    first = sequence(1, list(range(6)))
    compute(blocks, first)
    for token_id in (30, 31, 32):
        first.output_token_ids.append(token_id)
        assert blocks.grow(first)
        first.num_computed = first.num_tokens
        blocks.computed(first, first.num_tokens - 1, first.num_tokens)
    blocks.free(first)
    blocks.begin_plan()
    assert reused(blocks, [*range(6), 30, 31, 40, 41]) == (8, False)


def test_headroom_is_kept_free_and_nothing_changes_without_it() -> None:
    blocks = manager(num_blocks=4)
    one = sequence(1, list(range(9)))
    assert blocks.admit(one, 2) is None
    assert (len(blocks), blocks.pool.used, one.num_computed) == (0, 0, 0)
    assert blocks.admit(one, 1) == Admission()
    other = sequence(2, list(range(20, 23)), max_tokens=5)
    assert blocks.admit(other, 0) == Admission()
    other.output_token_ids += [1, 2]
    assert not blocks.grow(other)
    blocks.free(one)
    assert blocks.grow(other)
