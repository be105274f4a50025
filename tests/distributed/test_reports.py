"""What requests ask to know beside their tokens, over real ranks: logprobs, supports, scores, and the audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import Case, Job, Output, grammar, run_engine
from model_pipeline import ModelPipeline, Part
from ranks import RankFailure, run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from sampler.params import SamplingParams

pytestmark = pytest.mark.long(20)

PROMPT = tuple(range(5, 35))
ASKS = SamplingParams(
    temperature=1.0, logprobs=4, logprob_token_ids=(7, 300), prompt_logprobs=2, top_k=9, return_support=True
)
LAYOUTS = [(1, 1), (2, 1), (2, 2), (1, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Large enough that every rank owns ids: the 64 blocks of a vocabulary have 32 ids at least.
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", vocab_size=2048)


def outputs(model: Path, jobs: tuple[Job, ...], tp: int = 1, pp: int = 1, **case: Any) -> tuple[Output, ...]:
    return run_ranks(run_engine, tp * pp, Case(model, jobs, tp=tp, pp=pp, **case))[0].outputs[0]


def reference(model: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Returns log_softmax in float64 after each token, [T, V], by one whole prefill in one process."""
    pipeline = ModelPipeline(model)
    pipeline.add(0, len(token_ids))
    return pipeline.step([Part(0, token_ids, 0, 1)], all_rows=True).double().log_softmax(dim=1)


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_logprobs_and_supports(model: Path, tp: int, pp: int) -> None:
    silent = Job(PROMPT, 8, SamplingParams(temperature=1.0), seed=3)
    (asked, quiet) = outputs(model, (Job(PROMPT, 8, ASKS, seed=3), silent), tp, pp)
    assert quiet.reports == quiet.prompt_reports == ()
    assert len(asked.reports) == len(asked.token_ids) == 8
    expected = reference(model, PROMPT + asked.token_ids)
    for at, report in enumerate(asked.reports):
        row = expected[len(PROMPT) - 1 + at]
        assert report.token_id == asked.token_ids[at]
        assert report.logprob == pytest.approx(float(row[report.token_id]), abs=2e-4)
        best, ids = row.topk(4)
        assert [token_id for token_id, _ in report.top] == ids.tolist()
        assert [logprob for _, logprob in report.top] == pytest.approx(best.tolist(), abs=2e-4)
        assert dict(report.named) == pytest.approx({7: float(row[7]), 300: float(row[300])}, abs=2e-4)
        assert report.support is not None
        assert [token_id for token_id, _ in report.support.entries] == sorted(row.topk(9).indices.tolist())
        assert sum(torch.tensor([logprob for _, logprob in report.support.entries]).exp()) == pytest.approx(1, abs=1e-4)
    assert [report.token_id for report in asked.prompt_reports] == list(PROMPT[1:])
    for at, report in enumerate(asked.prompt_reports):
        assert report.logprob == pytest.approx(float(expected[at, PROMPT[at + 1]]), abs=2e-4)
        assert [token_id for token_id, _ in report.top] == expected[at].topk(2).indices.tolist()


def test_asking_changes_no_token_and_layouts_agree(model: Path) -> None:
    plain = Job(PROMPT, 8, replace_params(ASKS, logprobs=None, logprob_token_ids=(), return_support=False), seed=3)
    wanted = outputs(model, (plain,))[0].token_ids
    for tp, pp in LAYOUTS:
        assert outputs(model, (Job(PROMPT, 8, ASKS, seed=3),), tp, pp)[0].token_ids == wanted


def replace_params(params: SamplingParams, **fields: object) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | fields)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("budget", [7, 2048])
def test_a_score_equals_what_generating_recorded(model: Path, tp: int, pp: int, budget: int) -> None:
    """Teacher-forced replay: the text that was generated, scored as a prompt, has the logprobs that were recorded."""
    params = SamplingParams(temperature=0.7, logprobs=0)
    (generated,) = outputs(model, (Job(PROMPT, 12, params, seed=5),), tp, pp)
    recorded = [report.logprob for report in generated.reports]
    score = Job(PROMPT + generated.token_ids, 0, SamplingParams(prompt_logprobs=0))
    (scored, other) = outputs(model, (score, Job(PROMPT, 3)), tp, pp, max_batch_tokens=budget)
    assert (scored.token_ids, scored.finish_reason) == ((), "length")
    assert len(other.token_ids) == 3
    assert [report.token_id for report in scored.prompt_reports] == [*PROMPT[1:], *generated.token_ids]
    replayed = [report.logprob for report in scored.prompt_reports[len(PROMPT) - 1 :]]
    assert replayed == pytest.approx(recorded, abs=1e-4)


def test_processed_logprobs_are_of_what_is_drawn_from(model: Path) -> None:
    params = SamplingParams(
        temperature=0.5, logprobs=3, logprobs_mode="processed", banned_token_ids=(7,), logit_bias={9: 5.0}
    )
    job = Job(PROMPT, 4, params, seed=1, grammar=grammar(regex="[a-z]{9}"))
    (one,) = outputs(model, (job,))
    raw = reference(model, PROMPT + one.token_ids)
    for at, report in enumerate(one.reports):
        assert report.logprob is not None
        assert report.logprob >= float(raw[len(PROMPT) - 1 + at, report.token_id]) - 1e-4, "fewer ids share the mass"
        assert sum(torch.tensor([logprob for _, logprob in report.top]).exp()) <= 1 + 1e-6
        assert 7 not in [token_id for token_id, logprob in report.top if logprob > -9999]


@pytest.mark.parametrize("bad_words", [((20, 21),), ((30,),)])
def test_bad_words_never_come(model: Path, bad_words: tuple[tuple[int, ...], ...]) -> None:
    base = SamplingParams(temperature=0.0, logit_bias={20: 60.0, 21: 59.0, 30: 40.0})
    free = Job(PROMPT, 6, base)
    barred = replace(free, bad_words_token_ids=bad_words)
    without, with_ban = outputs(model, (free, barred))
    assert set(without.token_ids) == {20}
    text = with_ban.token_ids
    for word in bad_words:
        assert all(text[at : at + len(word)] != word for at in range(len(text)))


# ---- the audit

AUDITED = (
    Job(PROMPT, 10, SamplingParams(temperature=1.0), seed=1),
    Job(PROMPT[:5], 10, SamplingParams(temperature=1.0, top_p=0.9), seed=2, grammar=grammar(regex="[a-z]{8}")),
    Job(PROMPT[:7], 10, SamplingParams(temperature=0.0, presence_penalty=1.0)),
)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_an_audit_of_healthy_ranks_finds_nothing(model: Path, tp: int, pp: int) -> None:
    assert outputs(model, AUDITED, tp, pp, audit=True) == outputs(model, AUDITED, tp, pp)


@pytest.mark.parametrize(("noisy_rank", "tp", "pp"), [(0, 2, 1), (1, 2, 1), (3, 2, 2)])
def test_noise_on_one_ranks_logits_is_seen(model: Path, noisy_rank: int, tp: int, pp: int) -> None:
    with pytest.raises(
        RankFailure, match=r"AuditError: audit on tp\d rank \d, step \d+, row \d.*agreed on token.*draws"
    ):
        outputs(model, AUDITED, tp, pp, audit=True, noisy_rank=noisy_rank)
    outputs(model, AUDITED, tp, pp, noisy_rank=noisy_rank)
