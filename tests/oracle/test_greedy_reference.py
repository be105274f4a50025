"""Greedy tokens equal transformers' greedy tokens, token by token, whatever (tp, pp) and batch: tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from greedy_reference import Reference, check_equal, engine_tokens, engine_tokens_one_by_one, reference
from tiny_checkpoints import EOS_TOKEN_ID, FAMILIES, write_tiny_checkpoint
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long(30)

PROMPTS = tuple(tuple((7 * row + 3 * at) % 300 + 1 for at in range(3 + 2 * row)) for row in range(8))
# Beyond the sliding windows of the tiny models.
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Reference]]:
    family: str = request.param
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp(family), family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return folder, reference(model, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3), (4, 2)])
def test_tiny_checkpoints(tiny: tuple[Path, list[Reference]], tp: int, pp: int) -> None:
    folder, expected = tiny
    check_equal(engine_tokens(folder, PROMPTS, NEW_TOKENS, tp=tp, pp=pp), expected, NEW_TOKENS)


def test_tiny_batch_equals_one_by_one(tiny: tuple[Path, list[Reference]]) -> None:
    folder, expected = tiny
    check_equal(engine_tokens_one_by_one(folder, PROMPTS, NEW_TOKENS), expected, NEW_TOKENS)


def test_eos_is_in_the_reference_vocabulary(tiny: tuple[Path, list[Reference]]) -> None:
    _, expected = tiny
    assert all(0 <= EOS_TOKEN_ID < want.logits.shape[1] for want in expected)
