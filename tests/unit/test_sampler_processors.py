"""Custom logit processors: loading, checking, agreement over ranks, and what their faults may touch."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import example_processors
import pytest
import torch
from example_processors import Faulty, FaultyRow, NoRepeat, Normalised, TopNSigma
from simulated_ranks import SimulatedRank, SlicedSampler, mask_of, run_simulated

from sampler.batch import SamplingBatchInfo
from sampler.params import ProcessorCall, RowSampling, SamplingParams, SamplingParamsError
from sampler.processor_names import ENTRY_POINT_GROUP, ProcessorLoadError
from sampler.processors import ProcessorRegistry, load_processors
from sampler.sampler import RowReason, Sampler

_VOCAB = 64 * 32
_REGISTRY = ProcessorRegistry(
    {
        "no_repeat": NoRepeat(),
        "sigma": TopNSigma(),
        "normalised": Normalised(),
        "faulty": Faulty(),
        "faulty_asking": Faulty(needs_row_values=True),
        "faulty_row": FaultyRow(needs_row_values=False),
        "faulty_row_asking": FaultyRow(needs_row_values=True),
    }
)


def _row(*calls: tuple[str, dict[str, Any]], output: tuple[int, ...] = (), **fields: Any) -> RowSampling:
    processors = tuple(ProcessorCall(name=name, args=args) for name, args in calls)
    return RowSampling(params=SamplingParams(logit_processors=processors, **fields), seed=3, output_ids=output)


def _logits(count: int) -> torch.Tensor:
    return torch.randn(count, _VOCAB, generator=torch.Generator().manual_seed(4)) * 3


def _sampler(size: int, **more: Any) -> SlicedSampler:
    return SlicedSampler(size, _VOCAB, processors=_REGISTRY, **more)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_processors_work_on_slices_and_ask_for_row_values(size: int) -> None:
    logits = _logits(5)
    best = logits.sort(dim=1, descending=True)
    rows = [
        _row(("no_repeat", {"window": 2}), output=tuple(best.indices[0, :4].tolist()), temperature=0.0),
        _row(("sigma", {"margin": 0.5})),
        _row(),
        _row(("sigma", {"margin": 1.5}), ("normalised", {}), top_p=0.9),
        _row(("normalised", {}), ("sigma", {"margin": 2.0})),
    ]
    supports = _sampler(size).support(logits, rows, [0] * 5)
    assert supports[0].ids.tolist() == [int(best.indices[0, 0])]
    for place, margin in ((1, 0.5), (4, 2.0)):
        expected = (logits[place] >= best.values[place, 0] - margin).nonzero().squeeze(1)
        assert supports[place].ids.tolist() == expected.tolist()
    assert len(supports[2].ids) == _VOCAB
    assert 0 < len(supports[3].ids) <= int((logits[3] >= best.values[3, 0] - 1.5).sum())
    for place, row in enumerate(rows):
        (alone,) = _sampler(size).support(logits[place : place + 1], [row], [0])
        assert torch.equal(alone.ids, supports[place].ids)
        assert torch.equal(alone.logprobs, supports[place].logprobs)


def test_results_do_not_depend_on_tp_size() -> None:
    logits = _logits(8)
    rows = [
        _row(("normalised", {}), ("sigma", {"margin": 3.0 + place}), logprobs=5, logprobs_mode="processed")
        for place in range(8)
    ]
    outputs = [_sampler(size).sample(logits, rows, list(range(8))) for size in (1, 2, 3, 4, 8)]
    for output in outputs[1:]:
        assert torch.equal(output.token_ids, outputs[0].token_ids)
        assert output.logprobs is not None
        assert outputs[0].logprobs is not None
        assert torch.equal(output.logprobs.top_logprobs, outputs[0].logprobs.top_logprobs)


def test_raw_logprobs_are_of_what_the_model_put_out() -> None:
    logits = _logits(1)
    row = _row(("sigma", {"margin": 0.0}), logprobs=2)
    output = _sampler(2).sample(logits, [row], [0])
    assert output.logprobs is not None
    expected = logits[0].double().log_softmax(dim=0)
    assert float(output.logprobs.logprobs[0]) == pytest.approx(float(expected.max()), abs=1e-5)
    assert output.logprobs.top_ids[0].tolist() == expected.topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("faulty", {"how": "raise"}),
        ("faulty", {"how": "raise", "at": 0}),
        ("faulty", {"how": "resize", "at": 0}),
        ("faulty", {"how": "dtype", "at": 0}),
        ("faulty", {"how": "rebind", "at": 0}),
        ("faulty", {"how": "ask unasked"}),
        ("faulty_asking", {"how": "raise", "at": 0}),
        ("faulty_asking", {"how": "raise"}),
        ("faulty_asking", {"how": "raise between", "at": 0}),
        ("faulty_asking", {"how": "raise between"}),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_fault_ends_the_rows_of_its_processor_alone(
    name: str, args: dict[str, Any], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    logits = _logits(5)
    good = [_row(("sigma", {"margin": 3.0})), _row(top_k=5), _row(temperature=0.0)]
    expected = _sampler(size).sample(logits[[0, 2, 4]], good, [1] * 3)
    rows = [good[0], _row((name, args)), good[1], _row(("sigma", {"margin": 1.0}), (name, args)), good[2]]
    with caplog.at_level(logging.ERROR):
        output = _sampler(size).sample(logits, rows, [1] * 5)
    failed = int(RowReason.PROCESSOR_FAILED)
    assert output.reasons.tolist() == [0, failed, 0, failed, 0]
    assert output.token_ids[[1, 3]].tolist() == [-1, -1]
    assert output.token_ids[[0, 2, 4]].tolist() == expected.token_ids.tolist()
    assert output.fault_ranks.tolist() == [-1, 0, -1, 0, -1]
    assert any(name in record.message for record in caplog.records)
    assert list(output.failures) == [1, 3]
    assert all(why.startswith(f"logit processor {name} ") for why in output.failures.values())


@pytest.mark.parametrize("name", ["faulty_row", "faulty_row_asking"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_fault_over_one_row_spares_the_others_of_the_processor(name: str, size: int) -> None:
    rows = [_row((name, {"bad": place in (1, 2)}), ("sigma", {"margin": 4.0})) for place in range(5)]
    output = _sampler(size).sample(_logits(5), rows, [0] * 5)
    failed = int(RowReason.PROCESSOR_FAILED)
    assert output.reasons.tolist() == [0, failed, failed, 0, 0]
    good = [0, 3, 4]
    expected = _sampler(size).sample(_logits(5)[good], [rows[place] for place in good], [0] * 3)
    assert not expected.status.any()
    assert output.token_ids[good].tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("how", ["ask other", "ask once"])
def test_ranks_that_ask_differently_end_those_rows(how: str) -> None:
    rows = [_row(("faulty_asking", {"how": how, "at": 32 * 32})), _row(), _row(("sigma", {"margin": 1.0}))]
    output = _sampler(2).sample(_logits(3), rows, [0] * 3)
    assert output.reasons.tolist() == [RowReason.PROCESSOR_FAILED, 0, 0]
    alone = _sampler(2).sample(_logits(3)[1:], rows[1:], [0] * 2)
    assert output.token_ids[1:].tolist() == alone.token_ids.tolist()


@pytest.mark.parametrize(("how", "cause"), [("raise", "RuntimeError: broken"), ("leave", "SystemExit: 3")])
@pytest.mark.parametrize("name", ["faulty", "faulty_asking"])
def test_the_lowest_rank_whose_processor_failed_is_named_with_the_cause(name: str, how: str, cause: str) -> None:
    rows = [_row(), _row((name, {"how": how, "at": 32 * 32}))]
    output = _sampler(4).sample(_logits(2), rows, [0, 0])
    assert output.fault_ranks.tolist() == [-1, 2]
    assert output.failures == {1: f"logit processor {name} failed: {cause}"}


@pytest.mark.parametrize(
    ("how", "why"),
    [("resize", "changed the shape or dtype of its rows"), ("rebind", "failed: FrozenInstanceError: cannot assign.*")],
)
def test_other_faults_are_told_too(how: str, why: str) -> None:
    output = _sampler(2).sample(_logits(1), [_row(("faulty", {"how": how}))], [0])
    assert re.fullmatch(f"logit processor faulty {why}", output.failures[0])


def test_the_first_of_a_rows_failures_is_told_however_long_it_is() -> None:
    class Broken:
        needs_row_values = False

        def check(self, args: Any) -> None:
            """Takes anything."""

        def process(self, rows: Any) -> None:
            raise ValueError("ß" * 900 * len(rows.args))

    registry = ProcessorRegistry({"x" * 400: Broken(), "faulty": Faulty()})
    row = _row(("x" * 400, {}), ("faulty", {"how": "raise"}))
    why = SlicedSampler(2, _VOCAB, processors=registry).sample(_logits(1), [row], [0]).failures[0]
    assert why.startswith("logit processor xxxx")
    assert "failed: ValueError: ßßß" in why


def test_a_processor_cannot_make_padding_drawable() -> None:
    sampler = SlicedSampler(2, 33, processors=_REGISTRY)
    rows = [_row(("faulty", {"how": "padding"}))] * 20
    support = sampler.support(torch.zeros(20, 33), rows, [0] * 20)[0]
    assert support.ids.tolist() == list(range(33))


def test_the_mask_has_the_last_word_over_processors() -> None:
    rows = [_row(("faulty", {"how": "none"}))]
    support = _sampler(3).support(_logits(1), rows, [0], mask_of([[7, 900]], _VOCAB))[0]
    assert support.ids.tolist() == [7, 900]
    assert support.probabilities.tolist() == [0.5, 0.5]


def test_processors_see_prompt_and_output_as_they_grow() -> None:
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Spy:
        needs_row_values = False

        def check(self, args: Any) -> None:
            """Takes anything."""

        def process(self, rows: Any) -> None:
            seen.extend(zip(rows.prompt_ids, rows.output_ids, strict=True))

    def run(group: SimulatedRank) -> None:
        sampler = Sampler(
            group, vocab_size=_VOCAB, slice_start=0, block_length=32, processors=ProcessorRegistry({"spy": Spy()})
        )
        row = RowSampling(
            params=SamplingParams(logit_processors=(ProcessorCall(name="spy"),)),
            seed=1,
            prompt_ids=[1, 2],
            output_ids=[3],
        )
        batch = SamplingBatchInfo.from_rows([row])
        for token in (4, 5):
            sampler.sample(_logits(1), batch, [1])
            batch.append_tokens(torch.tensor([token]))
        sampler.sample(_logits(1), batch, [1])

    run_simulated(1, run)
    assert seen == [((1, 2), (3,)), ((1, 2), (3, 4)), ((1, 2), (3, 4, 5))]


def test_no_value_asked_for_no_collective() -> None:
    sampler = _sampler(2)
    sampler.sample(_logits(1), [_row(("no_repeat", {"window": 2}), output=(3,), top_k=5)], [0])
    assert len(sampler.payload_bytes) == 1
    sampler.sample(_logits(1), [_row(("sigma", {"margin": 2.0}), top_k=5)], [0])
    # Agreeing to ask, asking, agreeing on the end: none larger than a number a row.
    assert [size for _, size in sampler.payload_bytes[:3]] == [8, 4, 8]
    assert len(sampler.payload_bytes) == 4


def test_calls_are_checked_by_name_and_arguments() -> None:
    _REGISTRY.check((ProcessorCall(name="no_repeat", args={"window": 3}), ProcessorCall(name="normalised")))
    bad = [
        (
            ProcessorCall(name="nowhere"),
            r"logit_processors\[1\].name must be a registered processor \(faulty, .*\), not",
        ),
        (
            ProcessorCall(name="no_repeat", args={"window": 0}),
            r"logit_processors\[1\].args of no_repeat: window must be an integer from 1 to 1000, not 0",
        ),
        (ProcessorCall(name="sigma"), r"logit_processors\[1\].args of sigma: KeyError: 'margin'"),
        (ProcessorCall(name="sigma", args={"margin": "x"}), r"margin must be a number, not 'x'"),
    ]
    for call, message in bad:
        with pytest.raises(SamplingParamsError, match=message) as error:
            _REGISTRY.check((ProcessorCall(name="normalised"), call))
        assert error.value.param == "logit_processors"
    with pytest.raises(SamplingParamsError, match="none is registered"):
        ProcessorRegistry({}).check((ProcessorCall(name="x"),))


def test_processors_are_loaded_by_module_and_name() -> None:
    registry = load_processors(["example_processors:no_repeat", "example_processors:top_n_sigma"])
    assert set(registry.names) >= {"no_repeat", "top_n_sigma"}
    assert isinstance(registry["no_repeat"], NoRepeat)
    assert registry["top_n_sigma"] is example_processors.top_n_sigma
    assert load_processors().names == tuple(sorted(set(registry.names) - {"no_repeat", "top_n_sigma"}))


def test_entry_points_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "from_a_package", "example_processors:no_repeat"

    asked = []

    def points(*, group: str) -> list[type[Point]]:
        asked.append(group)
        return [Point]

    monkeypatch.setattr("sampler.processor_names.entry_points", points)
    assert load_processors().names == ("from_a_package",)
    assert asked == [ENTRY_POINT_GROUP]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["nothing"], "module:name is needed"),
        (["a:b.c"], "module:name is needed"),
        ([":x"], "module:name is needed"),
        (["a..b:x"], "module:name is needed"),
        (["no_such_module_at_all:x"], "No module named 'no_such_module_at_all'"),
        (["example_processors:nowhere"], "has no attribute 'nowhere'"),
        (["example_processors:not_a_processor"], "is no processor"),
        (["example_processors:Unfinished"], "is no processor"),
        (["example_processors:no_repeat"] * 2, "another processor is registered as 'no_repeat'"),
    ],
)
def test_what_cannot_be_loaded_is_named(specs: list[str], message: str) -> None:
    with pytest.raises(ProcessorLoadError, match=message) as error:
        load_processors(specs)
    assert specs[0] in str(error.value)


class Untold(Exception):
    """Has no text to be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Refusing:
    """Raises what it is given when its arguments are checked, after it spoiled them."""

    needs_row_values = False

    def __init__(self, error: Exception | SystemExit) -> None:
        self._error = error

    def check(self, args: Mapping[str, Any]) -> None:
        args["list"].append(object())
        raise self._error

    def process(self, rows: Any) -> None:
        """Does nothing."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("out of luck"), "RuntimeError: out of luck"),
        (AssertionError(), "AssertionError"),
        (OSError(2, "No such file"), r"OSError: \[Errno 2\] No such file|FileNotFoundError: .*No such file"),
        (RecursionError("deep\nline"), "RecursionError: deep line"),
        (ValueError("window is 0"), "window is 0"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 900), r"x+\.\.\."),
        (Untold(), "Untold: .*failed>"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_whatever_a_check_raises_refuses_the_request_alone(error: Exception | SystemExit, told: str) -> None:
    args = {"list": [1]}
    with pytest.raises(SamplingParamsError, match=rf"^logit_processors\[0\].args of odd: ({told})$") as caught:
        ProcessorRegistry({"odd": Refusing(error)}).check((ProcessorCall(name="odd", args=args),))
    assert caught.value.param == "logit_processors"
    assert args == {"list": [1]}


@pytest.mark.parametrize("name", ["breaks_when_made", "breaks_when_asked"])
def test_a_processor_that_breaks_while_it_is_loaded_is_named(name: str) -> None:
    with pytest.raises(ProcessorLoadError, match=f"'example_processors:{name}': RuntimeError: not today"):
        load_processors([f"example_processors:{name}"])
