"""Measures what records, digests, checks and late release cost a decode step: runs with and without them, in turn.

``PYTHONPATH=. python tests/seam_overhead.py --tp 2 --rounds 6 --json figures.json``; the default model without
``--model``. The ranks stay the same from run to run, and which of a pair is first changes, so that whatever else the
machine does meets both. CPU time says more than the clock where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from default_model import default_model_path
from engine_ranks import Job, ScriptedLeader
from ranks import run_ranks

from launch.node.progress_record import ProgressRecord
from launch.rank.groups import RankGroups, build_groups, warm_up
from pp.partition import layer_ranges
from runtime.assembly import build_engine
from runtime.checkpoint import open_checkpoint
from runtime.consensus import Consensus
from runtime.engine import RankEngine
from runtime.model import DecoderStage
from runtime.release import ReleaseClock
from runtime.scheduler import Scheduler
from runtime.step_planner import SchedulerLimits
from runtime.weights import WeightReader
from tp.schedule import ForwardSchedule

BATCH = 8
_NO = (
    ("check_plan", Consensus),
    ("_check_draw", RankEngine),
    ("tell", ReleaseClock),
    ("problem", ForwardSchedule),
    ("end", ForwardSchedule),
)


@contextmanager
def without_the_seam(groups: RankGroups) -> Iterator[None]:
    """Takes out what is measured."""
    with ExitStack() as stack:
        for name, owner in _NO:
            stack.enter_context(mock.patch.object(owner, name, return_value=None))
        for part in (groups.tensor_parallel, groups.link):
            stack.enter_context(mock.patch.object(part, "_record", None))
        yield


class UnheardLeader(ScriptedLeader):
    """Starts a batch and hears tokens only to know when it has ended."""

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.unagreed.clear()


def measure(rank: int, world_size: int, model: Path, tp: int, pp: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Returns CPU and wall seconds of each run of this rank, ``with`` and ``without``; for ``run_ranks``."""
    record = ProgressRecord.create()
    groups = build_groups(tp, pp, timeout_s=120, record=record)
    warm_up(groups)
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    layers = layer_ranges(config.num_layers, pp)[groups.link.stage]
    stage = DecoderStage(
        config,
        WeightReader(checkpoint),
        layers,
        groups.tensor_parallel,
        dtype=torch.float32,
        device=torch.device("cpu"),
        products=None,
    )
    jobs = [Job([5 + index, 6, 7, 8], tokens) for index in range(BATCH)]
    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}

    def run(*, seam: bool) -> tuple[float, float]:
        leader = UnheardLeader(jobs) if rank == 0 else None
        limits = SchedulerLimits(BATCH, 2048, 1 << 14, pp)
        engine = build_engine(
            group=groups.tensor_parallel,
            link=groups.link,
            stage=stage,
            scheduler=Scheduler(limits, ()),
            eos_token_ids=(),
            in_flight_steps=pp,
            leader=leader,
            record=record if seam else None,
        )
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        with ExitStack() as stack:
            if not seam:
                stack.enter_context(without_the_seam(groups))
            engine.run()
        return time.process_time() - cpu_s, time.perf_counter() - wall_s

    run(seam=True)
    for number in range(rounds):
        for seam in (number % 2 == 0, number % 2 == 1):
            found["with" if seam else "without"].append(run(seam=seam))
    return found


def main() -> None:
    """Prints the figures, and writes them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model = given.model or default_model_path()
    ranks = run_ranks(
        measure, given.tp * given.pp, model, given.tp, given.pp, given.rounds, given.tokens, timeout_s=1800.0
    )
    steps = given.tokens * given.pp
    figures: dict[str, float] = {}
    for at, clock in enumerate(("cpu", "wall")):
        sums = {
            kind: [sum(rank[kind][number][at] for rank in ranks) / len(ranks) for number in range(given.rounds)]
            for kind in ("with", "without")
        }
        pairs = [one / other for one, other in zip(sums["with"], sums["without"], strict=True)]
        for kind, values in sums.items():
            figures[f"{clock} ms a step, {kind}"] = 1e3 * statistics.median(values) / steps
            figures[f"{clock} ms a step, {kind}, least"] = 1e3 * min(values) / steps
        figures[f"{clock} ratio, median of pairs"] = statistics.median(pairs)
        figures[f"{clock} ratio of the least"] = min(sums["with"]) / min(sums["without"])
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
