"""The model against transformers: logits in prefill, chunked prefill and decode, over stages, and greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_pipeline import ModelPipeline, Part
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tp.product_measure import onednn_supports
from tp.products import ProductMode

ATOL = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-llama3-biases": (
        "llama",
        {
            "rope_parameters": LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}, "max_shard_size": "60KB"},
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN, "use_sliding_window": False}),
    "qwen3-bias-padded-vocabulary": ("qwen3", {"attention_bias": True, "vocab_size": 1000}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=VARIANTS, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    family, overrides = VARIANTS[request.param]
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp(request.param), family, seed=1, **overrides)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits


def reference_greedy(reference: Any, token_ids: list[int], new_tokens: int) -> list[int]:
    prompt = torch.tensor([token_ids])
    output = reference.generate(prompt, do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)
    continuation: list[int] = output[0].tolist()[len(token_ids) :]
    return continuation


def random_ids(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(320) for _ in range(length)]


def test_prefill_gives_the_logits_of_transformers(model: tuple[Path, Any]) -> None:
    folder, reference = model
    token_ids = random_ids(45, seed=2)
    pipeline = ModelPipeline(folder)
    pipeline.add(7, 45)
    got = pipeline.step([Part(7, token_ids, 0, True)], all_rows=True)
    expected = reference_logits(reference, token_ids)
    assert expected.std() > 0.3, "the reference's logits are too flat to tell anything"
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("products", ProductMode)
def test_mixed_batches_of_chunks_and_decodes_give_the_same_logits(
    model: tuple[Path, Any], products: ProductMode
) -> None:
    folder, reference = model
    sequences = {3: random_ids(40, seed=3), 5: random_ids(23, seed=4), 9: random_ids(31, seed=5)}
    expected = {key: reference_logits(reference, ids) for key, ids in sequences.items()}
    pipeline = ModelPipeline(folder, pp_size=3, products=products)
    for key, ids in sequences.items():
        pipeline.add(key, len(ids))
    done = dict.fromkeys(sequences, 0)
    generator = random.Random(6)
    while any(done[key] < len(ids) for key, ids in sequences.items()):
        chunks = []
        for key, ids in sequences.items():
            length = min(generator.choice([0, 1, 1, 1, 2, 7, 15]), len(ids) - done[key])
            if length:
                chunks.append(Part(key, ids[done[key] : done[key] + length], done[key], generator.random() < 0.8))
        generator.shuffle(chunks)
        if not chunks:
            continue
        got = pipeline.step(chunks)
        for chunk in chunks:
            done[chunk.sequence_id] += len(chunk.token_ids)
        sampled = [chunk.sequence_id for chunk in chunks if chunk.logit_rows]
        assert got.shape[0] == len(sampled)
        for row, key in zip(got, sampled, strict=True):
            torch.testing.assert_close(row, expected[key][done[key] - 1], atol=ATOL, rtol=0)


def test_blocks_in_several_runs_change_nothing(model: tuple[Path, Any]) -> None:
    """The same steps over one run of slots a sequence, which is as good as no paging, give the same logits."""
    folder, _ = model
    first, second = random_ids(40, seed=3), random_ids(31, seed=5)
    steps = [
        [Part(1, first[:17], 0, 1), Part(2, second[:1], 0, 1)],
        [Part(2, second[1:29], 1, 1), Part(1, first[17:18], 17, 1)],
        [Part(1, first[18:19], 18, 1), Part(2, second[29:30], 29, 1)],
        [Part(1, first[19:], 19, 1), Part(2, second[30:], 30, 1)],
    ]
    paged, whole = (ModelPipeline(folder, paged=flag) for flag in (True, False))
    for pipeline in (paged, whole):
        pipeline.add(1, 40)
        pipeline.add(2, 31)
    for parts in steps:
        got, expected = (pipeline.step(parts, all_rows=True) for pipeline in (paged, whole))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_greedy_tokens_equal_those_of_transformers(model: tuple[Path, Any]) -> None:
    folder, reference = model
    prompts = [random_ids(length, seed=length) for length in (1, 5, 17)]
    expected = [reference_greedy(reference, ids, 24) for ids in prompts]
    batched = ModelPipeline(folder).greedy(prompts, 24)
    alone = [ModelPipeline(folder, pp_size=2).greedy([ids], 24)[0] for ids in prompts]
    assert batched == expected
    assert alone == expected


@pytest.mark.parametrize("products", ProductMode)
def test_bfloat16_stays_near_float32(model: tuple[Path, Any], products: ProductMode) -> None:
    if products is ProductMode.ONEDNN and not onednn_supports(torch.bfloat16):
        pytest.skip("this CPU has no oneDNN products in bfloat16")
    folder, reference = model
    token_ids = random_ids(20, seed=8)
    pipeline = ModelPipeline(folder, dtype=torch.bfloat16, products=products)
    pipeline.add(0, 20)
    got = pipeline.step([Part(0, token_ids, 0, True)], all_rows=True)
    expected = reference_logits(reference, token_ids)
    ours = (got - expected).abs().mean()
    theirs = (reference_logits(reference.to(torch.bfloat16), token_ids).float() - expected).abs().mean()
    reference.to(torch.float32)
    assert ours < 1.5 * theirs
