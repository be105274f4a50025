"""Measures what hostile grammars cost plain streams: time between tokens, alone and among 60 hostile requests.

``python tests/hostile_latency.py --model M --tp 2 --pp 2 --rounds 3 --json figures.json``
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hostile_grammars import HOSTILE

from launch.cli.parse import parse_command
from launch.commands import GenerateCommand
from launch.front.engine_process import StartedEngine, wait_until_ready
from runtime.messages import Finished, Rejected, Submit, TokenDelta

STREAMS = 8
HOSTILE_REQUESTS = 60
_QUIET_S = 300.0


class Load:
    """Requests to a running engine, numbered on."""

    def __init__(self, engine: StartedEngine, tokens: int) -> None:
        self._engine = engine
        self._tokens = tokens
        self._next = 0

    def run(self, *, hostile: bool) -> list[float]:
        """Runs all streams to their end; returns the seconds between their tokens."""
        streams = {self._number(): index for index in range(STREAMS)}
        bodies: dict[int, dict[str, Any]] = {
            number: {"prompt": f"One two {index}", "max_tokens": self._tokens, "ignore_eos": True, "seed": index}
            for number, index in streams.items()
        }
        if hostile:
            grammars = list(HOSTILE.values())[:HOSTILE_REQUESTS]
            bodies |= {self._number(): {"prompt": "a", "max_tokens": 24, **one.fields} for one in grammars}
        self._engine.socket.send([Submit(number, json.dumps(body)) for number, body in bodies.items()])
        last_s: dict[int, float] = {}
        gaps: list[float] = []
        left = set(bodies)
        end_s = time.monotonic() + _QUIET_S
        while left and time.monotonic() < end_s:
            for message in self._engine.socket.receive(0.1):
                now_s = time.monotonic()
                match message:
                    case TokenDelta(request_id=number) if number in streams:
                        if number in last_s:
                            gaps.append(now_s - last_s[number])
                        last_s[number] = now_s
                    case Finished(request_id=number) | Rejected(request_id=number):
                        left.discard(number)
            self._engine.check()
        if left:
            raise SystemExit(f"{len(left)} requests did not end in {_QUIET_S:g} s")
        return gaps

    def _number(self) -> int:
        self._next += 1
        return self._next - 1


def main() -> int:
    """Prints the figures; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="alone, then among hostile requests: so often")
    parser.add_argument("--json", type=Path, help="where to write every figure")
    given = parser.parse_args()
    argv = ["generate", "x", "--tp", str(given.tp), "--pp", str(given.pp)]
    argv += [] if given.model is None else ["--model", str(given.model)]
    command = parse_command(argv)
    if not isinstance(command, GenerateCommand):
        raise SystemExit("no engine")
    engine = StartedEngine(command.engine, argv)
    try:
        wait_until_ready(engine, command.engine.start_timeout_s)
        load = Load(engine, given.tokens)
        load.run(hostile=False)
        pairs = [(load.run(hostile=False), load.run(hostile=True)) for _ in range(given.rounds)]
    finally:
        engine.stop()
    rounds = [{"alone": _figures(alone), "among hostile": _figures(among)} for alone, among in pairs]
    growth = statistics.median(one["among hostile"]["p99_ms"] / one["alone"]["p99_ms"] - 1 for one in rounds)
    for one in rounds:
        print("  ".join(f"{name}: p50 {f['p50_ms']:.1f} ms, p99 {f['p99_ms']:.1f} ms" for name, f in one.items()))
    print(f"growth of p99, median of {given.rounds} rounds: {growth:+.0%}")
    if given.json is not None:
        given.json.write_text(json.dumps({"rounds": rounds, "p99_growth": growth}, indent=2) + "\n", encoding="utf-8")
    return 0


def _figures(gaps: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(gaps, n=100)
    return {"tokens": len(gaps), "p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98]}


if __name__ == "__main__":
    sys.exit(main())
