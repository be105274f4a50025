"""What ``lockstep bench serve`` measured, as a JSON document and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from rich.console import Console
from rich.table import Table

from launch.bench.serve_load import Reply
from launch.bench.spread import Spread
from launch.commands import BenchServeCommand


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one kind; the times are those of requests without an error.

    Args:
        requests: How many were sent.
        finished: How many ended without an error.
        cut: How many of them were cut by ``max_tokens``.
        output_tokens: Of the finished ones.
        tokens_per_s: Output tokens of the finished ones, over the whole run.
        first_token: From when a request was due to its first text; None when there was none.
        inter_token: Between two events with text of a request; None when no request had two.
        per_token: Of each request, from its first text to its last, over its tokens but one; likewise.
        end_to_end: From when a request was due to the end of its stream; None when none finished.
    """

    requests: int
    finished: int
    cut: int
    output_tokens: int
    tokens_per_s: float
    first_token: Spread | None
    inter_token: Spread | None
    per_token: Spread | None
    end_to_end: Spread | None

    @classmethod
    def of(cls, replies: Sequence[Reply], duration_s: float) -> LoadFigures:
        """Returns the figures of some requests, of a run of ``duration_s``."""
        done = [reply for reply in replies if not reply.error]
        tokens = sum(reply.completion_tokens for reply in done)
        return cls(
            requests=len(replies),
            finished=len(done),
            cut=sum(reply.finish_reason == "length" for reply in done),
            output_tokens=tokens,
            tokens_per_s=tokens / duration_s,
            first_token=_spread([reply.token_times_s[0] - reply.due_s for reply in done if reply.token_times_s]),
            inter_token=_spread([after - before for one in done for before, after in pairwise(one.token_times_s)]),
            per_token=_spread([one for one in map(tpot_s, done) if one is not None]),
            end_to_end=_spread([reply.end_s - reply.due_s for reply in done]),
        )


class ErrorFigures(msgspec.Struct, frozen=True):
    """Requests that failed alike.

    Args:
        count: How many.
        example: What is known of the first.
    """

    count: int
    example: str


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Args:
        url: The server.
        model: The model's name.
        load: How the requests came.
        seed: Of the requests.
        workload: What is equal for runs that sent the same requests.
        duration_s: From the first request to the end of the last.
        requests_per_s: Requests without an error.
        good_per_s: Those of them that met both goals.
        good_share: Of all requests, those that met both goals.
        ttft_goal_s: The goal for the time to the first token.
        tpot_goal_s: The goal for the mean time between tokens.
        all: Every request.
        plain: Those without a schema.
        constrained: Those with one.
        errors: The errors by class.
    """

    url: str
    model: str
    load: str
    seed: int
    workload: str
    duration_s: float
    requests_per_s: float
    good_per_s: float
    good_share: float
    ttft_goal_s: float
    tpot_goal_s: float
    all: LoadFigures
    plain: LoadFigures
    constrained: LoadFigures
    errors: dict[str, ErrorFigures]

    @classmethod
    def of(cls, command: BenchServeCommand, model: str, workload: str, replies: Sequence[Reply]) -> ServeReport:
        """Returns the figures of a run, of at least one request."""
        duration_s = max(reply.end_s for reply in replies) - min(reply.due_s for reply in replies)
        good = sum(is_good(reply, command) for reply in replies)
        everything, plain, constrained = (
            LoadFigures.of([reply for reply in replies if (reply.request.schema is not None) in kinds], duration_s)
            for kinds in ((False, True), (False,), (True,))
        )
        return cls(
            url=command.url,
            model=model,
            load=f"{command.concurrency} at once" if command.rate is None else f"Poisson, {command.rate:g} a second",
            seed=command.seed,
            workload=workload,
            duration_s=duration_s,
            requests_per_s=everything.finished / duration_s,
            good_per_s=good / duration_s,
            good_share=good / len(replies),
            ttft_goal_s=command.ttft_goal_s,
            tpot_goal_s=command.tpot_goal_s,
            all=everything,
            plain=plain,
            constrained=constrained,
            errors=_errors(replies),
        )

    def document(self) -> bytes:
        """Returns one JSON document with every figure that the table shows."""
        return msgspec.json.format(msgspec.json.encode({"bench": "serve", **msgspec.to_builtins(self)}))

    def print(self, console: Console) -> None:
        """Prints the table, and the errors."""
        table = Table(title=f"serve: {self.model} at {self.url}, {self.load}, milliseconds as p50 / p90 / p99")
        for name in ("", "done", "tokens/s", "first token", "between tokens", "per token", "end to end"):
            table.add_column(name, justify="left" if name == "" else "right")
        for name, figures in (("all", self.all), ("plain", self.plain), ("JSON Schema", self.constrained)):
            if figures.requests:
                table.add_row(name, *_cells(figures))
        console.print(table)
        console.print(
            f"{self.duration_s:.1f} s, {self.requests_per_s:.2f} requests/s; good: {self.good_per_s:.2f}/s, "
            f"{100 * self.good_share:.0f} % (first token in {self.ttft_goal_s:g} s, then {self.tpot_goal_s:g} s each); "
            f"{self.all.cut} cut by max_tokens; seed {self.seed}, requests {self.workload}",
            soft_wrap=True,
            highlight=False,
        )
        for kind, errors in self.errors.items():
            console.print(f"{errors.count} x {kind}: {errors.example}", soft_wrap=True, highlight=False, markup=False)


def tpot_s(reply: Reply) -> float | None:
    """Returns a request's mean time from token to token; None when it has too few to tell."""
    if len(reply.token_times_s) < 2 or reply.completion_tokens < 2:
        return None
    return (reply.token_times_s[-1] - reply.token_times_s[0]) / (reply.completion_tokens - 1)


def is_good(reply: Reply, command: BenchServeCommand) -> bool:
    """Returns whether a request ended without an error and met both goals."""
    if reply.error or not reply.token_times_s:
        return False
    per_token_s = tpot_s(reply)
    is_fluent = per_token_s is None or per_token_s <= command.tpot_goal_s
    return is_fluent and reply.token_times_s[0] - reply.due_s <= command.ttft_goal_s


def _spread(seconds: list[float]) -> Spread | None:
    return Spread.of(seconds) if seconds else None


def _errors(replies: Sequence[Reply]) -> dict[str, ErrorFigures]:
    counts = Counter(reply.error for reply in replies if reply.error)
    examples = {reply.error: " ".join(reply.message.split()) for reply in reversed(replies)}
    return {kind: ErrorFigures(count, examples[kind]) for kind, count in sorted(counts.items())}


def _cells(figures: LoadFigures) -> list[str]:
    spreads = (figures.first_token, figures.inter_token, figures.per_token, figures.end_to_end)
    told = ["-" if one is None else f"{one.median_ms:.1f} / {one.p90_ms:.1f} / {one.p99_ms:.1f}" for one in spreads]
    return [f"{figures.finished} of {figures.requests}", f"{figures.tokens_per_s:.1f}", *told]
