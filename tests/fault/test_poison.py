"""A request that kills a rank each time that it runs ends alone, and no grammar is vetted twice on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from command_line import LOCKSTEP, ROOT, run
from prometheus_client.parser import text_string_to_metric_families
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode
from launch.node.rank_fault import FaultReport

PROCESSOR = """
import os
import signal


class Poison:
    needs_row_values = False

    def check(self, args):
        pass

    def process(self, rows):
        if rows.slice_start and any(len(output) >= 5 for output in rows.output_ids):
            os.kill(os.getpid(), signal.SIGKILL)
"""
REQUEST: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
POISON = {**REQUEST, "prompt": "poison", "logit_processors": [{"name": "Poison"}]}
LINES: list[dict[str, Any]] = [
    {"id": "plain", "prompt": "one", **REQUEST},
    {"id": "regex", "prompt": "two", "regex": "[ab]{200}", "max_tokens": 90, "temperature": 0},
    {"id": "poison", **POISON},
    {"id": "seeded", "prompt": "three", **REQUEST, "temperature": 1.0, "seed": 5},
    {"id": "twin", **POISON},
]


def test_one_poisonous_request_among_innocents(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny", "llama")
    (tmp_path / "poison_processor.py").write_text(PROCESSOR)
    reports, metrics = tmp_path / "faults.jsonl", tmp_path / "metrics.txt"
    outcome = run(
        *(*LOCKSTEP, "generate", "--model", str(model), "--tp", "2", "--input", "-"),
        *("--logit-processor", "poison_processor:Poison", "--fault-report", str(reports)),
        *("--metrics-file", str(metrics)),
        environ={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stdin="\n".join(map(json.dumps, LINES)).encode(),
    )
    assert outcome.returncode == ExitCode.REQUESTS_FAILED, outcome.stderr
    records = {record["id"]: record for record in outcome.records()}
    for name in ("plain", "regex", "seeded"):
        assert records[name]["error"] is None
        assert records[name]["finish_reason"] == "length"
    for name in ("poison", "twin"):
        assert records[name]["finish_reason"] == "error"
        assert records[name]["error"]["code"] == "quarantined"
        assert records[name]["error"]["message"].endswith("killed by SIGKILL")
        assert len(records[name]["token_ids"]) <= 5
    faults = [msgspec.json.decode(line, type=FaultReport) for line in reports.read_bytes().splitlines()]
    seen = [(fault.requests, [(one.rank, one.kind, one.step) for one in fault.culprits]) for fault in faults]
    assert 3 <= len(faults) <= 4, seen
    assert all(2 in fault.requests and fault.recovers for fault in faults)
    assert faults[-1].requests == (2,), "it ran by itself"
    counted = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.read_text())
        for sample in family.samples
    }
    assert counted["lockstep:grammars_vetted_total"] == 0, "the last ranks found it vetted by those before"
