"""The sampling part keeps its batches: after any history they draw what a batch built from scratch draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_sync.masks import MaskError, MaskExchange, RowFault
from grammar_sync.spec import GrammarSpec
from pp.link import StageLink
from runtime.messages import AddSequence
from runtime.plan import PlanRow, StepPlan
from runtime.sampling import SamplingPart, row_status
from runtime.sequence import Sequence
from sampler.batch import SamplingBatchInfo
from sampler.params import SamplingParams
from sampler.sampler import RowReason, Sampler
from tp.group import TensorParallelGroup
from tp.partition import VocabularyBlocks

VOCAB = 60
EOS = 1
BLOCKS = VocabularyBlocks(VOCAB)
WORDS = BLOCKS.slice_of(0, 1).words
CPU = torch.device("cpu")


class RecordingSampler(Sampler):
    """Keeps the batch of the last call."""

    batch: SamplingBatchInfo

    def sample(self, logits: torch.Tensor, batch: SamplingBatchInfo, *arguments: Any, **named: Any) -> Any:
        self.batch = batch
        return super().sample(logits, batch, *arguments, **named)


class Bench:
    """A sampling part of one rank, which is both first and last stage."""

    def __init__(self, slots: int = 1) -> None:
        self.link = StageLink(0, (0,))
        self.masks = MaskExchange(self.link, WORDS)
        part = BLOCKS.slice_of(0, 1)
        self.sampler = RecordingSampler(
            TensorParallelGroup(0, 1), vocab_size=VOCAB, slice_start=0, block_length=part.block_length
        )
        self.part = SamplingPart(
            self.sampler, self.masks, eos_token_ids=frozenset({EOS}), in_flight_steps=slots, device=CPU
        )

    def sample(
        self,
        step: int,
        sequences: list[Sequence],
        logits: torch.Tensor,
        allowed: list[set[int] | None] | None = None,
        faults: list[RowFault] | None = None,
    ) -> list[int]:
        """Returns the ids, or minus the reason of a row that has none."""
        self.link.begin_step(step)
        allowed = allowed or [None] * len(sequences)
        rows = tuple(
            PlanRow(sequence.sequence_id, sequence.num_tokens - 1, 1, samples=True, constrained=ids is not None)
            for sequence, ids in zip(sequences, allowed, strict=True)
        )
        plan = StepPlan(step, rows, 0)
        if plan.constrained_rows:
            masks = torch.stack([mask_row(ids) for ids in allowed if ids is not None])
            self.masks.send(plan.constrained_rows, masks, faults or [RowFault.NONE] * len(masks))
        padding = torch.full((len(sequences), BLOCKS.padded_size - VOCAB), float("-inf"))
        drawn = self.part.sample(plan, sequences, torch.cat((logits, padding), dim=1))
        reasons = [row_status(status)[0] for status in drawn.statuses.tolist()]
        return [
            token_id if reason is RowReason.NONE else -reason
            for token_id, reason in zip(drawn.token_ids.tolist(), reasons, strict=True)
        ]


def mask_row(allowed: set[int]) -> torch.Tensor:
    words = [0] * BLOCKS.mask_words
    for token_id in allowed:
        words[token_id // 32] |= 1 << (token_id % 32)
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)


def sequence_of(
    sequence_id: int, *, grammar: bool = False, prompt: tuple[int, ...] = (2, 3, 4), **params: Any
) -> Sequence:
    return Sequence.from_action(
        AddSequence(
            sequence_id=sequence_id,
            choice=sequence_id % 3,
            prompt_token_ids=list(prompt),
            max_tokens=50,
            params=SamplingParams(**params),
            seed=1000 + sequence_id,
            grammar=GrammarSpec("regex", "a") if grammar else None,
        )
    )


def logits_of(sequences: list[Sequence]) -> torch.Tensor:
    """Returns [B, VOCAB] logits that depend on each sequence alone."""
    rows = []
    for sequence in sequences:
        generator = torch.Generator().manual_seed(97 * sequence.sequence_id + len(sequence.output_token_ids))
        rows.append(torch.randn(VOCAB, generator=generator))
    return torch.stack(rows)


_params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([1, 5]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "frequency_penalty": st.sampled_from([-1.5, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 3.0]),
        "min_tokens": st.sampled_from([2, 6]),
        "stop_token_ids": st.sampled_from([(5,), (6, 7)]),
        "logit_bias": st.sampled_from([{8: 4.0}, {9: -50.0, 10: 2.0}]),
    },
)


_history = given(
    pool=st.lists(_params, min_size=2, max_size=6),
    slots=st.integers(1, 3),
    steps=st.integers(3, 14),
    seed=st.integers(0, 2**32),
    ordered=st.booleans(),
)


@_history
@settings(max_examples=50, deadline=None)
def test_any_history_draws_what_a_batch_from_scratch_draws(
    pool: list[dict[str, Any]], slots: int, steps: int, seed: int, ordered: bool
) -> None:
    for drawn, from_scratch in _draws(pool, slots, steps, seed, ordered=ordered):
        assert drawn == from_scratch


@pytest.mark.sweep
@_history
@settings(max_examples=600, deadline=None)
def test_any_of_many_histories_draws_what_a_batch_from_scratch_draws(
    pool: list[dict[str, Any]], slots: int, steps: int, seed: int, ordered: bool
) -> None:
    for drawn, from_scratch in _draws(pool, slots, steps, seed, ordered=ordered):
        assert drawn == from_scratch


def _draws(
    pool: list[dict[str, Any]], slots: int, steps: int, seed: int, *, ordered: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields what a batch with a history draws, and what one from scratch does; of all rows, and of one alone.

    Rows leave, come back, change places and slots; each slot's rows are committed ``slots`` steps later.
    """
    draw = random.Random(seed)
    sequences = [sequence_of(index, **params) for index, params in enumerate(pool)]
    bench = Bench(slots)
    in_flight: list[tuple[list[Sequence], list[int]]] = []
    for step in range(steps):
        busy = {sequence.sequence_id for rows, _ in in_flight for sequence in rows}
        free = [sequence for sequence in sequences if sequence.sequence_id not in busy]
        rows = draw.sample(free, draw.randint(0, len(free)))
        if ordered:
            rows.sort(key=lambda sequence: sequence.sequence_id)
        if rows:
            allowed = [set(draw.sample(range(VOCAB), 30)) if draw.random() < 0.2 else None for _ in rows]
            drawn = bench.sample(step, rows, logits_of(rows), allowed)
            assert bench.sampler.batch.row_count == len(rows)
            yield drawn, Bench().sample(0, rows, logits_of(rows), allowed)
            index = draw.randrange(len(rows))
            yield [drawn[index]], Bench().sample(0, [rows[index]], logits_of([rows[index]]), [allowed[index]])
            in_flight.append((rows, drawn))
        if in_flight and (len(in_flight) == slots or not rows):
            for sequence, token_id in zip(*in_flight.pop(0), strict=True):
                sequence.output_token_ids.append(max(token_id, 0))


@given(
    pool=st.lists(_params, min_size=1, max_size=4),
    drafts=st.lists(st.lists(st.integers(2, 9), max_size=4), min_size=4, max_size=4),
    follow=st.lists(st.booleans(), min_size=4, max_size=4),
    outputs=st.lists(st.lists(st.integers(2, 9), max_size=5), min_size=4, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_behind_guesses_is_drawn_what_is_drawn_once_they_are_committed(
    pool: list[dict[str, Any]], drafts: list[list[int]], follow: list[bool], outputs: list[list[int]]
) -> None:
    """Penalties, min_tokens, seeds and positions: a guess counts as drawn for all that comes behind it."""
    sequences = [sequence_of(index, **params) for index, params in enumerate(pool)]
    for sequence, output in zip(sequences, outputs, strict=False):
        sequence.output_token_ids += output
    chosen = [tuple(draft) if wanted else () for draft, wanted in zip(drafts, follow, strict=True)][: len(pool)]
    one_by_one, logits = [], []
    for sequence, draft in zip(sequences, chosen, strict=True):
        before = list(sequence.output_token_ids)
        for guessed in range(1 + len(draft)):
            sequence.output_token_ids[:] = [*before, *draft[:guessed]]
            logits.append(logits_of([sequence])[0])
            one_by_one += Bench().sample(0, [sequence], logits_of([sequence]))
        sequence.output_token_ids[:] = before
    rows = tuple(
        PlanRow(one.sequence_id, one.num_tokens - 1, 1 + len(draft), samples=True, constrained=False, draft=draft)
        for one, draft in zip(sequences, chosen, strict=True)
    )
    bench = Bench()
    bench.link.begin_step(1)
    padding = torch.full((len(logits), BLOCKS.padded_size - VOCAB), float("-inf"))
    drawn = bench.part.sample(StepPlan(1, rows, 0), sequences, torch.cat((torch.stack(logits), padding), dim=1))
    assert drawn.token_ids.tolist() == one_by_one


def test_the_same_rows_keep_their_batch() -> None:
    bench = Bench()
    rows = [sequence_of(0, frequency_penalty=1.0), sequence_of(1)]
    batches = []
    for step in range(3):
        for sequence, token_id in zip(rows, bench.sample(step, rows, logits_of(rows)), strict=True):
            sequence.output_token_ids.append(token_id)
        batches.append(bench.sampler.batch)
    assert batches[0] is batches[1] is batches[2]


def test_rows_that_stay_keep_their_batch_when_others_leave_and_join() -> None:
    bench = Bench()
    first, second, third = (sequence_of(index, presence_penalty=1.0) for index in range(3))
    batches = []
    for step, rows in enumerate(([first, second], [second], [second, third], [third])):
        for sequence, token_id in zip(rows, bench.sample(step, rows, logits_of(rows)), strict=True):
            sequence.output_token_ids.append(token_id)
        batches.append(bench.sampler.batch)
    assert all(batch is batches[0] for batch in batches)


def test_penalties_are_skipped_again_when_the_last_such_row_left() -> None:
    bench = Bench()
    with_penalty, plain = sequence_of(0, frequency_penalty=1.0), sequence_of(1)
    bench.sample(0, [with_penalty, plain], logits_of([with_penalty, plain]))
    plain.output_token_ids.append(9)
    bench.sample(1, [plain], logits_of([plain]))
    assert bench.sampler.batch.penalties is None
    assert not bench.sampler.batch.flags.has_penalties


def test_a_penalty_sees_the_token_of_the_step_before() -> None:
    bench = Bench()
    sequence = sequence_of(0, temperature=0.0, presence_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 20], logits[0, 30], logits[0, 40] = 3.0, 2.5, 2.0
    drawn = []
    for step in range(3):
        drawn += bench.sample(step, [sequence], logits.clone())
        sequence.output_token_ids.append(drawn[-1])
    assert drawn == [20, 30, 40]


def test_eos_and_stop_ids_are_banned_until_min_tokens() -> None:
    bench = Bench()
    banned = sequence_of(0, temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    free = sequence_of(1, temperature=0.0, stop_token_ids=(7,))
    logits = torch.zeros(2, VOCAB)
    logits[:, EOS], logits[:, 7], logits[:, 12] = 9.0, 8.0, 1.0
    for step, expected in enumerate(([12, EOS], [12, EOS], [EOS, EOS])):
        drawn = bench.sample(step, [banned, free], logits.clone())
        assert drawn == expected
        for sequence in (banned, free):
            sequence.output_token_ids.append(12)


def test_masks_reach_their_own_rows() -> None:
    rows = [sequence_of(0), sequence_of(1, grammar=True), sequence_of(2), sequence_of(3, grammar=True)]
    for step in range(20):
        bench = Bench()
        drawn = bench.sample(step, rows, logits_of(rows), [None, {40}, None, {50, 51}])
        assert drawn[1] == 40
        assert drawn[3] in {50, 51}
        plain = [rows[0], rows[2]]
        assert [drawn[0], drawn[2]] == Bench().sample(step, plain, logits_of(plain))


def test_a_row_without_anything_to_draw_fails_alone() -> None:
    rows = [sequence_of(index) for index in range(3)]
    logits = logits_of(rows)
    logits[1] = float("-inf")
    drawn = Bench().sample(0, rows, logits)
    assert drawn[1] == -RowReason.EMPTY_SUPPORT
    alone = [rows[0], rows[2]]
    assert [drawn[0], drawn[2]] == Bench().sample(0, alone, logits_of(alone))
    logits[1, 3] = float("nan")
    assert Bench().sample(0, rows, logits) == [drawn[0], -RowReason.NON_FINITE, drawn[2]]


def test_a_constrained_row_without_its_mask_is_an_error_never_free() -> None:
    bench = Bench()
    sequence = sequence_of(0, grammar=True)
    plan = StepPlan(1, (PlanRow(0, 0, 3, samples=True, constrained=True),), 0)
    logits = torch.zeros(1, BLOCKS.padded_size)
    bench.link.begin_step(1)
    with pytest.raises(MaskError):
        bench.part.sample(plan, [sequence], logits)
    bench.masks.send((0,), mask_row({5}).unsqueeze(0), [RowFault.NONE])
    bench.link.begin_step(2)
    with pytest.raises(MaskError, match="step 1"):
        bench.part.sample(StepPlan(2, plan.rows, 0), [sequence], logits)
