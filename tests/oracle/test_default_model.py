"""The default model against transformers: logits, and greedy tokens one by one, whatever (tp, pp) and batch."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import gguf
import pytest
import torch
from default_model import DEFAULT_MODEL_PROMPTS, default_model_path
from greedy_reference import Reference, check_equal, engine_tokens, engine_tokens_one_by_one, reference_of
from model_pipeline import ModelPipeline, Part
from transformers import AutoModelForCausalLM

from runtime.tokenizer import Tokenizer

pytestmark = [pytest.mark.long(80), pytest.mark.model]

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
NEW_TOKENS = 64
ALONE_TOKENS = 16


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(default_model_path())
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def model() -> Any:
    """As transformers reads it, but with each header and each table of names read once instead of hundreds of times."""
    path = default_model_path()
    with (
        mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def of_four_ranks(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return engine_tokens(default_model_path(), prompts, NEW_TOKENS, tp=2, pp=2)


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]], of_four_ranks: list[tuple[int, ...]]) -> list[Reference]:
    return reference_of(model, prompts, of_four_ranks)


def test_logits_and_greedy_tokens_equal_those_of_transformers(model: Any) -> None:
    pipeline = ModelPipeline(default_model_path())
    starts = list(DEFAULT_MODEL_PROMPTS.values())
    for prompt, continuation in zip(starts, pipeline.greedy(starts, 24), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + continuation])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(dim=1).tolist() == continuation
        pipeline.add(0, len(prompt) + 24)
        got = pipeline.step([Part(0, prompt + continuation, 0, True)], all_rows=True)
        pipeline.remove(0)
        torch.testing.assert_close(got, logits, atol=2e-4, rtol=0)


# With ``-m sweep`` at every size, which runs no code that tiny checkpoints do not run at every size. One rank alone is
# asked for tokens below, one prompt at a time.
@pytest.mark.parametrize(
    ("tp", "pp"), [pytest.param(*size, marks=pytest.mark.sweep) for size in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))]
)
def test_engine_gives_the_greedy_tokens(prompts: list[list[int]], expected: list[Reference], tp: int, pp: int) -> None:
    check_equal(engine_tokens(default_model_path(), prompts, NEW_TOKENS, tp=tp, pp=pp), expected, NEW_TOKENS)


def test_four_ranks_give_the_greedy_tokens(expected: list[Reference], of_four_ranks: list[tuple[int, ...]]) -> None:
    check_equal(of_four_ranks, expected, NEW_TOKENS)


def test_batch_equals_one_by_one(prompts: list[list[int]], expected: list[Reference]) -> None:
    check_equal(engine_tokens_one_by_one(default_model_path(), prompts, ALONE_TOKENS), expected, ALONE_TOKENS)
