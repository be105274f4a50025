"""Greedy tokens equal transformers' greedy tokens, token by token, whatever (tp, pp) and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from default_model import default_model_path
from engine_ranks import Case, Job, run_engine
from ranks import run_ranks
from tiny_checkpoints import EOS_TOKEN_ID, FAMILIES, write_tiny_checkpoint
from transformers import AutoModelForCausalLM

from runtime.tokenizer import Tokenizer
from sampler.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
NEAR_TIE = 1e-3
"""Where two orders of float32 sums may choose differently: the reference's two logits are at most this far apart."""

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a land far away, there lived",
    '{"name": "Ada Lovelace", "born": ',
    "Die Sonne scheint und die Kinder spielen",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water is made of hydrogen and oxygen because",
)


@dataclass(frozen=True)
class Reference:
    """What transformers generates for one prompt, and its logits at each step, [tokens, V]."""

    token_ids: tuple[int, ...]
    logits: torch.Tensor


def reference(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Reference]:
    results = []
    for prompt in prompts:
        with torch.no_grad():
            output = model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                eos_token_id=None,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        ids = tuple(output.sequences[0, len(prompt) :].tolist())
        results.append(Reference(ids, torch.cat(output.logits)))
    return results


def check_equal(got: Sequence[Sequence[int]], expected: Sequence[Reference]) -> None:
    """Fails when a token differs, unless the reference's logits of the two ids nearly tie; shows each such gap."""
    flips = []
    for row, (ids, want) in enumerate(zip(got, expected, strict=True)):
        assert len(ids) == len(want.token_ids)
        different = [at for at, (mine, theirs) in enumerate(zip(ids, want.token_ids, strict=True)) if mine != theirs]
        if different:
            at = different[0]
            gap = float(want.logits[at, want.token_ids[at]] - want.logits[at, ids[at]])
            flips.append((row, at, gap))
            print(f"prompt {row}: token {at} is {ids[at]}, not {want.token_ids[at]}: logits {gap:.2e} apart")
            assert gap <= NEAR_TIE, f"prompt {row}, token {at}: {ids[at]} instead of {want.token_ids[at]}, gap {gap}"
    assert len(flips) <= 1, f"near-ties should be rare: {flips}"


def engine_tokens(model: Path, prompts: Sequence[Sequence[int]], tp: int, pp: int, new_tokens: int) -> list[Any]:
    jobs = tuple(Job(tuple(prompt), new_tokens, GREEDY) for prompt in prompts)
    records = run_ranks(run_engine, tp * pp, Case(model, jobs, tp=tp, pp=pp), timeout_s=240)
    assert all(record.plans == records[0].plans for record in records)
    return [output.token_ids for output in records[0].outputs[0]]


# ---- tiny random checkpoints of all families

TINY_PROMPTS = tuple(tuple((7 * row + 3 * at) % 300 + 1 for at in range(3 + 2 * row)) for row in range(8))
TINY_TOKENS = 32


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Reference]]:
    family: str = request.param
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp(family), family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return folder, reference(model, TINY_PROMPTS, TINY_TOKENS)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3), (4, 2)])
def test_tiny_checkpoints(tiny: tuple[Path, list[Reference]], tp: int, pp: int) -> None:
    folder, expected = tiny
    check_equal(engine_tokens(folder, TINY_PROMPTS, tp, pp, TINY_TOKENS), expected)


def test_tiny_batch_equals_one_by_one(tiny: tuple[Path, list[Reference]]) -> None:
    folder, expected = tiny
    for prompt, want in zip(TINY_PROMPTS, expected, strict=True):
        check_equal(engine_tokens(folder, [prompt], 1, 1, TINY_TOKENS), [want])


def test_eos_is_in_the_reference_vocabulary(tiny: tuple[Path, list[Reference]]) -> None:
    _, expected = tiny
    assert all(0 <= EOS_TOKEN_ID < want.logits.shape[1] for want in expected)


# ---- the default model

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(default_model_path())
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[Reference]:
    path = default_model_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return reference(model, prompts, NEW_TOKENS)


@pytest.mark.model
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3)])
def test_default_model(prompts: list[list[int]], expected: list[Reference], tp: int, pp: int) -> None:
    check_equal(engine_tokens(default_model_path(), prompts, tp, pp, NEW_TOKENS), expected)


@pytest.mark.model
def test_default_model_batch_equals_one_by_one(prompts: list[list[int]], expected: list[Reference]) -> None:
    """The prompts one by one: as jobs of one engine that runs a single sequence at a time."""
    jobs = tuple(Job(tuple(prompt), NEW_TOKENS, GREEDY) for prompt in prompts)
    record = run_ranks(run_engine, 1, Case(default_model_path(), jobs, max_num_seqs=1), timeout_s=240)[0]
    assert all(len(rows) == 1 for rows in record.plans[0])
    check_equal([output.token_ids for output in record.outputs[0]], expected)
