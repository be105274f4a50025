"""What ``lockstep bench decode`` measured, as a JSON document and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from rich.console import Console
from rich.table import Table

from launch.bench.spread import Spread

# A client that gets no time sees tokens of several steps at once.
_CLOCK_S = 1e-6


class DecodeFigures(msgspec.Struct, frozen=True):
    """One contestant in one case.

    Args:
        tokens_per_s: Of all sequences together, from their first tokens on: the median run's.
        first_token: Time to the last sequence's first token.
        inter_token: Time between a sequence's tokens.
    """

    tokens_per_s: float
    first_token: Spread
    inter_token: Spread

    @classmethod
    def of(cls, runs: Sequence[Sequence[Sequence[float]]]) -> DecodeFigures:
        """Returns the figures of runs.

        Args:
            runs: Of each run and sequence, when its tokens came, in seconds from the start; at least two tokens.
        """
        rates, firsts, gaps = [], [], []
        for run in runs:
            first, last = max(times[0] for times in run), max(times[-1] for times in run)
            rates.append(sum(len(times) - 1 for times in run) / max(last - first, _CLOCK_S))
            firsts.append(first)
            for times in run:
                gaps += [max(after - before, _CLOCK_S) for before, after in pairwise(times)]
        return cls(statistics.median(rates), Spread.of(firsts), Spread.of(gaps))


class DecodeCase(msgspec.Struct, frozen=True, kw_only=True):
    """One case.

    Args:
        batch: Sequences that decode together.
        prompt_tokens: Prompt of each.
        new_tokens: Tokens generated for each.
        ours: This engine.
        constrained: This engine with a JSON Schema on every row; None when that was not asked for.
        peer: The peer; None when there is none.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    ours: DecodeFigures
    constrained: DecodeFigures | None
    peer: DecodeFigures | None

    def ratios(self, floor_ms: float) -> dict[str, float]:
        """Returns the ratios that the table shows; of the floor and of constrained rows by the time between tokens."""
        step_ms = self.ours.inter_token.median_ms
        ratios = {"of_floor": step_ms / floor_ms}
        if self.constrained is not None:
            ratios["constrained"] = self.constrained.inter_token.median_ms / step_ms
        if self.peer is not None:
            ratios["times_peer"] = self.ours.tokens_per_s / self.peer.tokens_per_s
            ratios["first_token_of_peer"] = self.ours.first_token.median_ms / self.peer.first_token.median_ms
        return ratios


class DecodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Args:
        model: Folder or file.
        tp: Ranks of a stage.
        pp: Stages.
        threads: CPU threads of a rank; the peer had as many as all ranks together.
        dtype: Of weights and hidden states, the peer's too.
        device: The engine's.
        compute: How products were computed.
        peer: Name and version; empty when there was none.
        repeats: Runs of each contestant, in turn.
        weight_bytes: What a step reads of weights.
        copy_bytes_per_s: Measured, read and written together.
        cases: The cases; the last may be one of a long prompt and two tokens.
    """

    model: str
    tp: int
    pp: int
    threads: int
    dtype: str
    device: str
    compute: str
    peer: str
    repeats: int
    weight_bytes: int
    copy_bytes_per_s: float
    cases: list[DecodeCase]

    @property
    def floor_ms(self) -> float:
        """What reading all weights once takes at the speed of a copy."""
        return 1000.0 * self.weight_bytes / self.copy_bytes_per_s

    def document(self) -> bytes:
        """Returns one JSON document with every figure that the table shows."""
        document = msgspec.to_builtins(self)
        for case, fields in zip(self.cases, document["cases"], strict=True):
            fields["ratios"] = case.ratios(self.floor_ms)
        named = {"bench": "decode", **document, "floor_ms": self.floor_ms}
        return msgspec.json.format(msgspec.json.encode(named))

    def print(self, console: Console) -> None:
        """Prints the table."""
        title = (
            f"decode: {self.model}, {self.dtype} on {self.device}, tp {self.tp} x pp {self.pp} "
            f"({self.threads} threads a rank), medians of {self.repeats} runs in turn"
        )
        table = Table(title=title)
        names = [
            "batch",
            "prompt",
            "",
            "tokens/s",
            "first token ms",
            "between tokens ms: median / p90 / p99",
            "to ours",
        ]
        for name in names:
            table.add_column(name, justify="left" if name == "" else "right")
        for case in self.cases:
            ratios = case.ratios(self.floor_ms)
            note = f"{ratios['of_floor']:.2f} floors"
            table.add_row(str(case.batch), str(case.prompt_tokens), "ours", *_cells(case.ours), note)
            if case.constrained is not None:
                note = f"{ratios['constrained']:.2f} between tokens"
                table.add_row("", "", "ours, JSON Schema", *_cells(case.constrained), note)
            if case.peer is not None:
                note = f"{1 / ratios['times_peer']:.2f}x tokens/s, {1 / ratios['first_token_of_peer']:.2f} first token"
                table.add_row("", "", self.peer, *_cells(case.peer), note)
        console.print(table)
        console.print(
            f"floor: {self.weight_bytes / 1e6:.0f} MB of weights a step, copied at {self.copy_bytes_per_s / 1e9:.1f} "
            f"GB/s (read and written): {self.floor_ms:.1f} ms; {self.compute or 'plain products'}",
            soft_wrap=True,
        )


def _cells(figures: DecodeFigures) -> tuple[str, str, str]:
    gaps = figures.inter_token
    return (
        f"{figures.tokens_per_s:.1f}",
        f"{figures.first_token.median_ms:.1f}",
        f"{gaps.median_ms:.1f} / {gaps.p90_ms:.1f} / {gaps.p99_ms:.1f}",
    )
