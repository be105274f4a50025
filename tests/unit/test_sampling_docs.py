"""docs/sampling.md, docs/sample.md and docs/logit-processors.md say what the code does; their examples run."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling_tables import DOCUMENT, generated
from simulated_ranks import SlicedSampler

from launch.cli.parse import sample
from launch.line_error import LineError
from launch.sample.lines import MEANINGLESS, SHORT_NAMES, STEP_FIELDS, SampleRecord, parse_step
from sampler import params
from sampler.params import RowSampling, SamplingParams, SamplingParamsError
from sampler.processor_names import ENTRY_POINT_GROUP
from sampler.processors import (
    LogitProcessor,
    ProcessorRegistry,
    ProcessorRows,
    load_processors,
)
from sampler.sampler import MAX_SUPPORT
from sampler.slices import VOCABULARY_BLOCKS
from sampler.supports import RowStatus

_FOLDER = DOCUMENT.parent
_VOCAB = 2048


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_tables_are_those_of_the_code() -> None:
    text = _text("sampling.md")
    assert text == generated(text), "run: python tests/sampling_tables.py"


def test_limits_in_other_pages_are_those_of_the_code() -> None:
    """The README's table of requests is for people: its numbers are checked, not made."""
    rows = {}
    for line in (_FOLDER.parent / "README.md").read_text(encoding="utf-8").splitlines():
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if line.startswith("|") else ""):
            rows[name] = line
    numbers = {name: f"{low:g} … {high:g}" for name, (low, high) in params.NUMBER_RANGES.items()}
    numbers |= {"temperature": "0 … 1e9", "frequency_penalty": "−2 … 2", "presence_penalty": "−2 … 2"}
    expected = numbers | {
        "n": f"1 … {params.MAX_CHOICES}; 1",
        "stop": f"up to {params.MAX_STOP_STRINGS};",
        "logit_bias": f"−{params.MAX_BIAS:g} … {params.MAX_BIAS:g}",
        "logprobs": f"0 … {params.MAX_LOGPROBS}; ",
        "logprob_token_ids": f"at most {params.MAX_NAMED_LOGPROBS} ids",
        "prompt_logprobs": f"; 0 … {params.MAX_LOGPROBS} |",
        "return_support": f"up to {MAX_SUPPORT:,} |",
        "seed": "0 … 2⁶⁴−1",
    }
    for name, text in expected.items():
        assert text in rows[name], name
    assert f"at most {params.MAX_PROCESSORS} of them" in _text("logit-processors.md")
    assert f"nested at most {params.MAX_ARGS_DEPTH}\ndeep" in _text("logit-processors.md")
    assert f"0 to {params.MAX_CHOICES - 1}" in _text("sample.md")
    assert f"1 to {VOCABULARY_BLOCKS};" in _text("sample.md")


def test_every_status_and_every_field_of_a_request_is_told() -> None:
    readme = (_FOLDER.parent / "README.md").read_text(encoding="utf-8")
    for name in SamplingParams.__struct_fields__:
        assert f"`{name}`" in readme, name
    for status in RowStatus:
        assert f"`{status.name}`" in _text("sampling.md")
        assert f"`{status.name}`" in _text("sample.md")


def test_sample_s_page_has_every_key_and_option() -> None:
    text = _text("sample.md")
    for name in (*STEP_FIELDS, *SHORT_NAMES, *MEANINGLESS, *SampleRecord.__struct_fields__):
        assert f"`{name}`" in text, name
    for option in inspect.signature(sample).parameters:
        assert f"`--{option.removesuffix('_file').replace('_', '-')}" in text, option


def test_sample_s_example_means_what_is_said_of_it() -> None:
    text = _text("sample.md")
    lines, records = _blocks(text, "json")
    steps, refused = {}, {}
    for line in map(json.loads, lines.splitlines()):
        try:
            steps[line["id"]] = parse_step(line)
        except LineError as error:
            refused[line["id"]] = error.info
    assert {name: info.param for name, info in refused.items()} == {"wrong": "top_p"}
    assert steps["history"].ignored == ["n"]
    record = json.loads(records)
    assert list(record) == list(SampleRecord.__struct_fields__)
    step = steps[record["id"]]
    logits = torch.tensor([step.logits])
    sampler = SlicedSampler(2, len(step.logits))
    support = sampler.support(logits, [step.row], [0])[0]
    assert (support.status.name, support.ids.tolist()) == (record["status"], record["support"])
    assert support.probabilities.tolist() == pytest.approx(record["probs"], abs=1e-3)
    assert sampler.sample(logits, [step.row], [0]).token_ids.tolist() == [record["token"]]
    (draws,) = re.findall(r"--draws (\d+)", "".join(_blocks(text, "console")))
    drawn = sampler.draw_many(logits, [step.row], [0], range(int(draws)))[0].tolist()
    assert {str(one): drawn.count(one) for one in sorted(set(drawn))} == record["counts"]


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessorRegistry:
    """Returns the registry after a launch as docs/logit-processors.md has it."""
    text = _text("logit-processors.md")
    (code,) = _blocks(text, "python")
    (tmp_path / "my_processors.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (command,) = _blocks(text, "console")
    specs = re.findall(r"--logit-processor (\S+)", command)
    assert len(specs) == 2
    return load_processors(specs)


def _request() -> dict[str, Any]:
    (line,) = _blocks(_text("logit-processors.md"), "json")
    fields: dict[str, Any] = json.loads(line)
    return fields


@pytest.mark.parametrize("size", [1, 3])
def test_the_documented_processors_do_what_they_say(documented: ProcessorRegistry, size: int) -> None:
    fields = _request()
    del fields["prompt"]
    asked = SamplingParams.parse(fields, vocab_size=_VOCAB, max_model_len=99)
    documented.check(asked.logit_processors)
    logits = torch.randn(1, _VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    best = logits[0].sort(descending=True)
    # The five best ids were generated, the first of them five tokens ago.
    row = RowSampling(params=asked, seed=1, output_ids=best.indices[:5].tolist())
    sampler = SlicedSampler(size, _VOCAB, processors=documented)
    expected = sorted(
        int(token_id)
        for token_id, value in zip(best.indices, best.values, strict=True)
        if token_id not in best.indices[1:5] and value >= best.values[0] - 3.5
    )
    assert len(expected) > 3
    assert sampler.support(logits, [row], [5])[0].ids.tolist() == expected


@pytest.mark.parametrize(
    ("name", "args", "named"),
    [
        ("NoRepeat", {"window": 0}, "window must be an integer from 1 to 1000, not 0"),
        ("NoRepeat", {}, "not None"),
        ("Margin", {"margin": "x"}, "margin must be a number from 0 to 100, not 'x'"),
        ("Other", {}, "must be a registered processor"),
    ],
)
def test_the_documented_processors_refuse(
    documented: ProcessorRegistry, name: str, args: Mapping[str, Any], named: str
) -> None:
    fields = {"logit_processors": [{"name": name, "args": args}]}
    calls = SamplingParams.parse(fields, vocab_size=_VOCAB, max_model_len=99).logit_processors
    with pytest.raises(SamplingParamsError, match=named):
        documented.check(calls)


def test_the_whole_interface_is_told() -> None:
    text = _text("logit-processors.md")
    assert f"`{ENTRY_POINT_GROUP}`" in text
    for protocol in (ProcessorRows, LogitProcessor):
        members = {*vars(protocol), *inspect.get_annotations(protocol)}
        for name in (one for one in members if not one.startswith("_")):
            assert re.search(rf"`{name}\b", text) or re.search(rf"`(rows\.)?{name}\(", text), name
