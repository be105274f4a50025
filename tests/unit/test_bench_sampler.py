"""``lockstep bench sampler``: the document's shape, and that what it compares draws from the same supports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from launch.bench import logits
from launch.bench.cases import CASES, BenchCase, chosen
from launch.bench.sampler import SamplerBench
from launch.bench.sampler_peer import PeerRows, sample_argmax, sample_full_sort, sample_multinomial, sample_top_k
from launch.bench.sampler_report import BenchReport, CaseReport, Timing, Traffic, added
from launch.cli.parse import UsageError, parse_command
from launch.commands import BenchSamplerCommand
from launch.default_model import DefaultModelError
from launch.options import RankOptions
from sampler.batch import SamplingBatchInfo
from sampler.params import RowSampling, SamplingParams
from sampler.sampler import Sampler
from tp.group import TensorParallelGroup
from tp.partition import VocabularyBlocks

_BATCH, _VOCAB = 3, 700


@pytest.fixture(autouse=True)
def _synthetic_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise DefaultModelError("not installed")

    monkeypatch.setattr(logits, "default_model", missing)


def _command(**fields: Any) -> BenchSamplerCommand:
    given: dict[str, Any] = {"batch": _BATCH, "vocab": _VOCAB, "cases": (), "repeats": 3, "json_file": None} | fields
    return BenchSamplerCommand(ranks=RankOptions(), **given)


def _run(command: BenchSamplerCommand) -> BenchReport:
    return SamplerBench(command, TensorParallelGroup(0, 1), torch.device("cpu")).run()


def test_the_document_holds_every_figure_of_every_case() -> None:
    report = _run(_command())
    document = json.loads(report.document())
    assert document["bench"] == "sampler"
    assert (document["batch"], document["vocab"], document["tp"], document["repeats"]) == (_BATCH, _VOCAB, 1, 3)
    assert document["logits"].keys() == document["nucleus_ids"].keys() == {"lm", "flat"}
    assert "synthetic" in document["logits"]["lm"]
    assert [case["name"] for case in document["cases"]] == [case.name for case in CASES]
    for fields, case in zip(document["cases"], CASES, strict=True):
        timings = [fields["ours"], fields["floor"], *fields["peers"].values()]
        assert fields["peers"].keys() == set(case.peers)
        assert (fields["base"] is not None) == (fields["adds"] is not None) == (case.base is not None)
        for timing in timings:
            assert 0 < timing["min_ms"] <= timing["median_ms"] <= timing["p90_ms"]
        ratio = fields["peers"][case.peers[0]]["median_ms"] / fields["ours"]["median_ms"]
        assert fields["ratios"][f"times_{case.peers[0]}"] == pytest.approx(ratio)
        assert fields["traffic"] is None
    console = Console(width=120, record=True, quiet=True)
    report.print(console)


def test_the_cases_asked_for_run_alone() -> None:
    report = _run(_command(cases=("min_p", "greedy"), repeats=1))
    assert [case.name for case in report.cases] == ["greedy", "min_p"]
    assert report.logits.keys() == {"lm"}


def test_figures_and_traffic() -> None:
    timing = Timing.of([0.004, 0.001, 0.003, 0.002, 0.005])
    assert timing == Timing(median_ms=3.0, p90_ms=5.0, min_ms=1.0)
    traffic = Traffic.of([("all_gather", 1000), ("all_reduce", 400)], 8, 80_000)
    assert traffic.received_bytes == 7 * 1000 + 700
    assert traffic.full_gather_bytes == 70_000
    case = CaseReport(
        name="x", logits="lm", ours=timing, floor=timing, base=timing, adds=0.5, peers={}, traffic=traffic
    )
    assert case.figures() == {"floors": 1.0, "adds": 0.5, "of_full_gather": pytest.approx(0.11)}


def test_what_a_case_adds_is_judged_repeat_by_repeat() -> None:
    # The machine is three times slower in the second half: the medians' ratio would be 3.3 / 2.
    assert added([1.1, 1.1, 3.3, 3.3, 3.3], [1.0, 1.0, 3.0, 3.0, 2.0]) == pytest.approx(0.1)


def _peer_rows(params: SamplingParams, count: int, *, seeded: bool) -> PeerRows:
    def column(value: float) -> torch.Tensor:
        return torch.full((count, 1), value)

    return PeerRows(
        temperature=column(params.temperature),
        top_k=column(params.top_k if params.top_k > 0 else _VOCAB).to(torch.int64),
        top_p=column(params.top_p),
        min_p=column(params.min_p),
        frequency=column(params.frequency_penalty),
        presence=column(params.presence_penalty),
        repetition=column(params.repetition_penalty),
        generators=tuple(torch.Generator().manual_seed(seed) for seed in range(count)) if seeded else (),
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.masked and not case.seen_ids], ids=lambda c: c.name
)
def test_ours_and_the_peers_draw_from_the_same_support(case: BenchCase) -> None:
    torch.manual_seed(0)
    draws = 400
    whole, _ = logits.recorded_logits(1, _VOCAB)
    whole = whole.expand(draws, -1).contiguous()
    params = SamplingParams.parse(case.params, vocab_size=_VOCAB, max_model_len=100)
    own = VocabularyBlocks(_VOCAB).slice_of(0, 1)
    padded = torch.nn.functional.pad(whole, (0, own.size - _VOCAB), value=-torch.inf)
    sampler = Sampler(TensorParallelGroup(0, 1), vocab_size=_VOCAB, slice_start=0, block_length=own.block_length)
    batch = SamplingBatchInfo.from_rows([RowSampling(params=params, seed=seed) for seed in range(draws)])
    (support, *_) = sampler.support(padded.clone(), batch, [0] * draws)
    allowed = set(support.ids.tolist())
    assert set(sampler.sample(padded.clone(), batch, [0] * draws).token_ids.tolist()) <= allowed
    peers = {
        "argmax": sample_argmax,
        "multinomial": sample_multinomial,
        "full_sort": sample_full_sort,
        "top_k": sample_top_k,
    }
    for name in case.peers:
        drawn = peers[name](whole, _peer_rows(params, draws, seeded=case.seeded))
        assert drawn.shape == (draws,)
        assert set(drawn.tolist()) <= allowed
        expected = torch.zeros(_VOCAB).index_add_(0, support.ids, support.probabilities.to(torch.float32))
        shares = torch.bincount(drawn, minlength=_VOCAB) / draws
        assert float((shares - expected).abs().max()) < 0.12


def test_masks_and_penalties_of_the_peers() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0, -2.0]])
    rows = _peer_rows(SamplingParams(), 1, seeded=False)
    allowed = torch.tensor([[False, True, True, False]])
    masked = PeerRows(**{name: getattr(rows, name) for name in PeerRows.__dataclass_fields__} | {"allowed": allowed})
    assert sample_argmax(logits, masked).tolist() == [1]
    strengths = {"frequency": torch.tensor([[50.0]]), "counts": torch.tensor([[1.0, 1.0, 0.0, 1.0]])}
    fields = {name: getattr(rows, name) for name in PeerRows.__dataclass_fields__} | strengths
    penalised = PeerRows(**fields | {"seen": torch.tensor([[True, True, False, True]])})
    assert sample_multinomial(logits, penalised).tolist() == [2]


def test_the_command_line() -> None:
    command = parse_command(["bench", "sampler", "--batch", "8", "--tp", "2", "--cases", "top_p,greedy", "--json", "f"])
    assert isinstance(command, BenchSamplerCommand)
    assert (command.batch, command.vocab, command.repeats, command.ranks.tp) == (8, 151_936, 20, 2)
    assert command.cases == ("top_p", "greedy")
    assert [case.name for case in chosen(command.cases)] == ["greedy", "top_p"]
    assert command.json_file == Path("f")
    with pytest.raises(UsageError, match="'nope' is no case; there are greedy,"):
        parse_command(["bench", "sampler", "--cases", "nope"])
