"""One rank has a wrong token, plan, grammar state or mask: no wrong token ever leaves, and the rank is named."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corrupt_ranks import Corruption, Seen, draw_moment, run_corrupted
from engine_ranks import Case, Job, RankRecord, grammar, run_engine
from faulty_parts import FillFault
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from launch.node.digests import first_disagreement
from launch.node.progress_record import DigestKind
from sampler.params import SamplingParams

pytestmark = pytest.mark.long(15)

# What may come next depends on what came before.
GRAMMAR = grammar(regex="(a[x-z]|b[0-9]|c[A-F]){9}")
TOKENS = 12
SIZES = [(2, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def case_of(model: Path, tp: int, pp: int) -> Case:
    params = SamplingParams(temperature=1.0)
    jobs = (
        Job([5, 6, 7], TOKENS, params, seed=1, grammar=GRAMMAR),
        Job([9, 8], TOKENS, SamplingParams(temperature=0.0)),
        Job([10, 11, 12, 13], TOKENS, params, seed=3),
        Job([14, 15], TOKENS, params, seed=4),
    )
    return Case(model, jobs, tp=tp, pp=pp)


@pytest.fixture(scope="module")
def clean(model: Path) -> dict[tuple[int, int], RankRecord]:
    return {size: run_ranks(run_engine, size[0] * size[1], case_of(model, *size))[0] for size in SIZES}


def check_nothing_wrong_left(seen: list[Seen], clean: RankRecord) -> int:
    """Fails if a token left that an undisturbed run does not have there; returns how many left."""
    for sequence_id, token_ids in seen[0].emitted.items():
        assert tuple(token_ids) == clean.outputs[0][sequence_id].token_ids[: len(token_ids)]
    assert any(one.is_primary for one in seen), [one.message for one in seen]
    return sum(map(len, seen[0].emitted.values()))


def run(model: Path, size: tuple[int, int], corruption: Corruption) -> list[Seen]:
    seen = run_ranks(run_corrupted, size[0] * size[1], case_of(model, *size), corruption)
    assert seen[corruption.rank].fired >= corruption.at, "it must have happened"
    return seen


def some(chosen: list[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Returns all cases, those that were not chosen for the sweep."""
    rest = [pytest.param(*case, marks=pytest.mark.sweep) for case in every if case not in chosen]
    return [*chosen, *rest]


@pytest.mark.parametrize(
    ("what", "size", "rank"),
    some(
        [
            ("token", (2, 1), 0),
            ("token", (1, 2), 1),
            ("token", (2, 2), 1),
            ("drop row", (2, 1), 1),
            ("swap rows", (1, 2), 0),
            ("swap rows", (2, 2), 2),
        ],
        (
            (what, size, rank)
            for what, size in itertools.product(("token", "drop row", "swap rows"), SIZES)
            for rank in range(size[0] * size[1])
        ),
    ),
)
def test_a_rank_that_plans_or_commits_something_else(
    model: Path, clean: dict[tuple[int, int], RankRecord], what: str, size: tuple[int, int], rank: int
) -> None:
    seen = run(model, size, Corruption(what, rank, draw_moment(f"{what}/{size}/{rank}", 8)))
    check_nothing_wrong_left(seen, clean[size])
    found = first_disagreement({one: seen[one].digests for one in range(len(seen))})
    assert found is not None
    assert found.kind is (DigestKind.STATE if what == "token" else DigestKind.PLAN)
    assert found.suspects == ((rank,) if size == (2, 2) else (0, 1))
    desync = [one for one in seen if one.kind == "DesyncError"]
    said = "".join(one.message for one in seen)
    assert desync or "HIDDEN" in said or "got masks for rows" in said


@pytest.mark.parametrize(
    ("size", "what", "rank"),
    some(
        [((2, 1), "forget", 1), ((2, 2), "flip", 0)],
        itertools.product([(2, 1), (2, 2)], ["forget", "flip"], [0, 1]),
    ),
)
def test_a_grammar_state_or_mask_of_one_rank(
    model: Path, clean: dict[tuple[int, int], RankRecord], size: tuple[int, int], what: str, rank: int
) -> None:
    after = draw_moment(f"{what}/{size}/{rank}", 6)
    faulty = replace(case_of(model, *size), fill_faults=(FillFault(GRAMMAR.source, rank, what, after),))
    seen = run_ranks(run_corrupted, size[0] * size[1], faulty, None)
    if what == "forget" and not any(one.kind for one in seen):
        # A state that allows the same until the output ends: nothing follows from it.
        whole = {index: list(output.token_ids) for index, output in enumerate(clean[size].outputs[0])}
        assert seen[0].emitted == whole
        return
    check_nothing_wrong_left(seen, clean[size])
    assert any("drawn under masks of digest" in one.message for one in seen)
    found = first_disagreement({one: seen[one].digests for one in range(len(seen))})
    assert found is not None
    assert found.kind is DigestKind.MASKS
    assert found.suspects == (0, 1)


@pytest.mark.parametrize(("size", "victim"), some([((1, 2), 1)], [((2, 2), 2), ((2, 2), 3)]))
def test_a_mask_that_changes_on_its_way(
    model: Path, clean: dict[tuple[int, int], RankRecord], size: tuple[int, int], victim: int
) -> None:
    seen = run(model, size, Corruption("mask on the way", victim, draw_moment(f"way/{size}/{victim}", 8)))
    check_nothing_wrong_left(seen, clean[size])
    assert seen[victim].kind == "MaskError"
    assert "the masks that came have checksums" in seen[victim].message


@pytest.mark.parametrize(("size", "of_stage"), some([((2, 1), 0)], itertools.product([(2, 1), (2, 2)], [0, 1])))
def test_a_rank_that_draws_something_else(
    model: Path, clean: dict[tuple[int, int], RankRecord], size: tuple[int, int], of_stage: int
) -> None:
    victim = size[0] * size[1] - 2 + of_stage
    seen = run(model, size, Corruption("draw", victim, draw_moment(f"draw/{size}/{of_stage}", 8)))
    check_nothing_wrong_left(seen, clean[size])
    other = seen[size[0] * size[1] - 1]
    assert other.kind == "DesyncError"
    assert other.message.startswith(f"draw at stage {size[1] - 1} rank 1 of tp{size[1] - 1}, step ")


@pytest.mark.parametrize(
    ("what", "victim"), some([("skip", 0), ("half", 3)], itertools.product(["skip", "half"], [0, 3]))
)
def test_a_rank_whose_forward_pass_makes_other_operations_says_so_itself(
    model: Path, clean: dict[tuple[int, int], RankRecord], what: str, victim: int
) -> None:
    at = draw_moment(f"{what}/{victim}", 20)
    seen = run(model, (2, 2), Corruption(what, victim, at))
    check_nothing_wrong_left(seen, clean[2, 2])
    own = seen[victim]
    assert (own.kind, own.is_primary, own.named_rank) == ("CollectiveError", True, victim)
    assert "of a forward pass" in own.message or "the forward pass made" in own.message
    assert [one.is_primary for one in seen] == [rank == victim for rank in range(4)]


@pytest.mark.parametrize("size", SIZES)
def test_tokens_leave_a_step_later_and_the_last_ones_at_once(
    clean: dict[tuple[int, int], RankRecord], size: tuple[int, int]
) -> None:
    lags = clean[size].lags
    assert len(lags) == 4 * TOKENS
    assert min(lags) >= 1
    assert max(lags) <= size[1]


def test_with_a_single_rank_nothing_waits(model: Path) -> None:
    assert run_ranks(run_engine, 1, case_of(model, 1, 1))[0].lags == (0,) * 4 * TOKENS
