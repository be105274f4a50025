"""What ``lockstep bench sampler`` measured, as a JSON document and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds of one contestant.

    Args:
        median_ms: Median.
        p90_ms: 90th percentile.
        min_ms: Smallest.
    """

    median_ms: float
    p90_ms: float
    min_ms: float

    @classmethod
    def of(cls, elapsed_s: Sequence[float]) -> Timing:
        """Returns the figures of some repeats."""
        ordered = sorted(1000.0 * one for one in elapsed_s)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[-(-9 * last // 10)], ordered[0])


def added(elapsed_s: Sequence[float], base_s: Sequence[float]) -> float:
    """Returns the share that a step adds to a plainer one: the median over the repeats, each beside its own base."""
    return statistics.median(ours / base for ours, base in zip(elapsed_s, base_s, strict=True)) - 1.0


class Traffic(msgspec.Struct, frozen=True):
    """What one step moves between the ranks, against a gather of whole float32 logits.

    Args:
        collectives: Their names with the bytes that a rank hands to each.
        received_bytes: What a rank receives when a gather passes each part on once and a reduction runs as a ring.
        full_gather_bytes: The same for the full gather.
    """

    collectives: list[tuple[str, int]]
    received_bytes: int
    full_gather_bytes: int

    @classmethod
    def of(cls, payloads: list[tuple[str, int]], size: int, whole_bytes: int) -> Traffic:
        """Returns the figures of one step.

        Args:
            payloads: Name and bytes of each collective on one rank.
            size: How many ranks there are.
            whole_bytes: Bytes of whole logits.
        """
        received = 0.0
        for name, count in payloads:
            received += count * (size - 1) * (2 / size if name == "all_reduce" else 1)
        return cls(payloads, round(received), round(whole_bytes * (size - 1) / size))


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One case.

    Args:
        name: Its name.
        logits: Which logits it ran on.
        ours: This sampler.
        floor: One pass over this rank's logits, a max reduction.
        base: This sampler without what the case adds; None where it adds nothing.
        adds: The share that the case adds to it, from ``added``; None where it adds nothing.
        peers: Plain torch samplers.
        traffic: What the ranks exchange; None for one rank.
    """

    name: str
    logits: str
    ours: Timing
    floor: Timing
    base: Timing | None
    adds: float | None
    peers: dict[str, Timing]
    traffic: Traffic | None

    def figures(self) -> dict[str, float]:
        """Returns the ratios that the table shows: of medians, but for ``adds``."""
        ours = self.ours.median_ms
        ratios = {f"times_{name}": peer.median_ms / ours for name, peer in self.peers.items()}
        ratios["floors"] = ours / self.floor.median_ms
        if self.adds is not None:
            ratios["adds"] = self.adds
        if self.traffic is not None:
            ratios["of_full_gather"] = self.traffic.received_bytes / self.traffic.full_gather_bytes
        return ratios


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Args:
        batch: Rows.
        vocab: Vocabulary size.
        tp: Ranks, which are processes over gloo or NCCL.
        threads: Torch threads of a rank.
        repeats: Repeats of each contestant, in turn.
        device: Rank 0's device.
        torch: Version.
        cpu: The vector instructions that torch uses.
        logits: Where each kind of logits comes from.
        nucleus_ids: 10th, 50th and 90th percentile of the ids that hold nine tenths of the mass.
        cases: The cases.
    """

    batch: int
    vocab: int
    tp: int
    threads: int
    repeats: int
    device: str
    torch: str
    cpu: str
    logits: dict[str, str]
    nucleus_ids: dict[str, list[int]]
    cases: list[CaseReport]

    def document(self) -> bytes:
        """Returns one JSON document with every figure that the table shows."""
        document = msgspec.to_builtins(self)
        for case, fields in zip(self.cases, document["cases"], strict=True):
            fields["ratios"] = case.figures()
        return msgspec.json.format(msgspec.json.encode({"bench": "sampler", **document}))

    def print(self, console: Console) -> None:
        """Prints the table."""
        title = (
            f"sampler: batch {self.batch}, vocabulary {self.vocab}, tp {self.tp} ({self.threads} threads a rank), "
            f"median / p90 of {self.repeats} in ms"
        )
        table = Table(title=title)
        columns = ["case", "ours", "plain torch", "", "faster", "floor", "floors", "adds"]
        columns += ["of a full gather"] if self.tp > 1 else []
        for name in columns:
            table.add_column(name, justify="left" if name in ("case", "plain torch") else "right")
        for case in self.cases:
            ratios = case.figures()
            cells = [case.name, _shown(case.ours)]
            rest = [
                _shown(case.floor),
                f"{ratios['floors']:.1f}",
                f"{100 * case.adds:.0f} %" if case.adds is not None else "",
            ]
            rest += [f"1/{1 / ratios['of_full_gather']:.0f}"] if case.traffic else []
            for name, peer in case.peers.items():
                table.add_row(*cells, name, _shown(peer), f"{ratios[f'times_{name}']:.1f}x", *rest)
                cells, rest = ["", ""], [""] * len(rest)
        console.print(table)
        for shape, source in self.logits.items():
            low, middle, high = self.nucleus_ids[shape]
            console.print(f"{shape}: {source}; nucleus of 0.9: {low} / {middle} / {high} ids (p10 / median / p90)")
        if self.tp > 1:
            console.print("plain torch at tp > 1: a float32 gather over the ranks, then rank 0 samples alone")


def _shown(timing: Timing) -> str:
    return f"{timing.median_ms:.1f} / {timing.p90_ms:.1f}"
