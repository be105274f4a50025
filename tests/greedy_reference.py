"""Greedy tokens of transformers, those of the engine, and what may lie between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_ranks import Case, Job, run_engine
from ranks import run_ranks

from sampler.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
NEAR_TIE = 1e-3
"""Where two orders of float32 sums may choose differently: the reference's two logits are at most this far apart."""


@dataclass(frozen=True)
class Reference:
    """What transformers generates for one prompt, and its logits at each step, [tokens, V]."""

    token_ids: tuple[int, ...]
    logits: torch.Tensor


def reference_of(model: Any, prompts: Sequence[Sequence[int]], guess: Sequence[Sequence[int]]) -> list[Reference]:
    """Returns what transformers continues each prompt with greedily: as many tokens as ``guess`` has.

    A guess all of whose tokens transformers chooses, each after those before it, is what it would generate, and takes
    one pass instead of one for each token. When any is not, all are generated.
    """
    guessed = [_alone(model, prompt, ids) for prompt, ids in zip(prompts, guess, strict=True)]
    if all(tuple(one.logits.argmax(dim=1).tolist()) == one.token_ids for one in guessed):
        return guessed
    (new_tokens,) = set(map(len, guess))
    return reference(model, prompts, new_tokens)


def reference(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Reference]:
    """Returns what transformers' ``generate`` continues each prompt with, and the logits of each text alone.

    The prompts are generated as one batch, padded on the left, in a fraction of the time. Then each text runs alone,
    without padding, and must choose the same tokens.
    """
    widest = max(map(len, prompts))
    padding = [widest - len(prompt) for prompt in prompts]
    with torch.no_grad():
        batch = model.generate(
            torch.tensor([[0] * blanks + list(prompt) for blanks, prompt in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * blanks + [1] * (widest - blanks) for blanks in padding]),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
        )
    found = [_alone(model, prompt, ids.tolist()) for prompt, ids in zip(prompts, batch[:, widest:], strict=True)]
    for one in found:
        chosen = one.logits.gather(1, torch.tensor(one.token_ids).unsqueeze(1)).squeeze(1)
        gap = float((one.logits.max(dim=1).values - chosen).max())
        assert gap <= NEAR_TIE, f"the padded batch and the prompt alone differ: logits {gap} apart"
    return found


def _alone(model: Any, prompt: Sequence[int], continuation: Sequence[int]) -> Reference:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *continuation]])).logits[0, len(prompt) - 1 : -1].clone()
    return Reference(tuple(continuation), logits)


def check_equal(got: Sequence[Sequence[int]], expected: Sequence[Reference], new_tokens: int) -> None:
    """Fails when a token differs, unless the reference's logits of the two ids nearly tie; shows each such gap.

    The first ``new_tokens`` of the reference's tokens are compared.
    """
    flips = []
    for row, (ids, want) in enumerate(zip(got, expected, strict=True)):
        wanted = want.token_ids[:new_tokens]
        assert len(ids) == len(wanted) == new_tokens
        different = [at for at, (mine, theirs) in enumerate(zip(ids, wanted, strict=True)) if mine != theirs]
        if different:
            at = different[0]
            gap = abs(float(want.logits[at, want.token_ids[at]] - want.logits[at, ids[at]]))
            flips.append((row, at, gap))
            print(f"prompt {row}: token {at} is {ids[at]}, not {want.token_ids[at]}: logits {gap:.2e} apart")
            assert gap <= NEAR_TIE, f"prompt {row}, token {at}: {ids[at]} instead of {want.token_ids[at]}, gap {gap}"
    assert len(flips) <= 1, f"near-ties should be rare: {flips}"


def engine_tokens(
    model: Path, prompts: Sequence[Sequence[int]], new_tokens: int, *, tp: int = 1, pp: int = 1
) -> list[tuple[int, ...]]:
    """Returns what the engine generates for the prompts as one batch."""
    records = run_ranks(run_engine, tp * pp, Case(model, _jobs(prompts, new_tokens), tp=tp, pp=pp), timeout_s=240)
    assert all(record.plans == records[0].plans for record in records)
    return [output.token_ids for output in records[0].outputs[0]]


def engine_tokens_one_by_one(model: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[int, ...]]:
    """Returns what the engine generates for the prompts as jobs of one engine that runs a single sequence at a time."""
    record = run_ranks(run_engine, 1, Case(model, _jobs(prompts, new_tokens), max_num_seqs=1), timeout_s=240)[0]
    assert all(len(rows) == 1 for rows in record.plans[0])
    return [output.token_ids for output in record.outputs[0]]


def _jobs(prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[Job, ...]:
    return tuple(Job(tuple(prompt), new_tokens, GREEDY) for prompt in prompts)
