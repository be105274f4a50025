"""``--trace``: a real run's file has every rank, its spans nest, and it says what the run did."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, TORCHRUN, Outcome, run, running
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode
from launch.trace.summary import RankSummary, summarize

pytestmark = pytest.mark.long(20)

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}}, "required": ["a", "b"]}
REQUESTS = [
    *({"prompt": "a", "json_schema": SCHEMA, "max_tokens": 40, "seed": seed} for seed in range(4)),
    {"prompt": "One two three " * 8, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    {"prompt": "One two", "max_tokens": 30, "temperature": 0, "ignore_eos": True},
]
START_S = 90.0


@dataclass(frozen=True)
class Spans:
    """A trace: its head, and the spans of each (rank, thread)."""

    head: dict[str, Any]
    tracks: dict[tuple[int, int], list[dict[str, Any]]]

    def loop(self, rank: int) -> list[dict[str, Any]]:
        """Returns the spans of a rank's step loop."""
        return next(spans for (owner, _), spans in sorted(self.tracks.items()) if owner == rank)

    def named(self, rank: int, name: str) -> list[dict[str, Any]]:
        """Returns the spans of a rank that have a name, on all its threads."""
        return [
            one for (owner, _), spans in self.tracks.items() if owner == rank for one in spans if one["name"] == name
        ]


def read_trace(path: Path) -> Spans:
    document = json.loads(path.read_text(encoding="utf-8"))
    tracks = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            # Microseconds with three decimals: nanoseconds are exact.
            event["start"] = round(event["ts"] * 1000)
            event["end"] = event["start"] + round(event["dur"] * 1000)
            tracks[event["args"]["rank"], event["tid"]].append(event)
    return Spans(document["otherData"], dict(tracks))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def traced(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, REQUESTS)))
    options = ("--model", tiny, "--tp", "2", "--pp", "2", "--input", str(folder / "in.jsonl"))
    outcome = run(*LOCKSTEP, "generate", *options, "--trace", str(folder / "trace.json"))
    assert outcome.returncode == ExitCode.OK, outcome.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "trace.json"]
    return folder / "trace.json", outcome


@pytest.fixture(scope="module")
def spans(traced: tuple[Path, Outcome]) -> Spans:
    return read_trace(traced[0])


def test_every_rank_is_there_with_one_clock(spans: Spans) -> None:
    assert [(one["rank"], one["stage"], one["tp_rank"]) for one in spans.head["ranks"]] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert spans.head["missing_ranks"] == []
    assert all(one["lost_spans"] == 0 for one in spans.head["ranks"])
    for one in spans.head["ranks"]:
        for offset_ns, error_ns in zip(one["clock_offset_ns"], one["clock_error_ns"], strict=True):
            assert abs(offset_ns) <= error_ns
    assert {rank for rank, _ in spans.tracks} == {0, 1, 2, 3}


def test_spans_of_a_thread_nest_and_do_not_overlap(spans: Spans) -> None:
    for track in spans.tracks.values():
        stack: list[dict[str, Any]] = []
        for span in sorted(track, key=lambda one: (one["start"], -one["end"])):
            while stack and stack[-1]["end"] <= span["start"]:
                stack.pop()
            assert not stack or span["end"] <= stack[-1]["end"], (stack[-1], span)
            stack.append(span)


def test_every_phase_is_seen_where_it_happens(spans: Spans) -> None:
    everywhere = {"step", "intake", "agree", "schedule", "forward", "settle", "all_reduce"}
    first = {"begin masks", "fill mask", "wait for masks", "send masks", "send hidden", "send mask", "receive ids"}
    last = {"receive hidden", "receive mask", "logits", "sample", "share ids", "send tokens", "broadcast"}
    leader = {"client", "emit"}
    names = {
        rank: {span["name"] for (owner, _), track in spans.tracks.items() if owner == rank for span in track}
        for rank in range(4)
    }
    for rank in range(4):
        assert everywhere <= names[rank]
        own, other = (first, last - {"broadcast"}) if rank < 2 else (last, first)
        assert own <= names[rank]
        assert not other & names[rank]
        assert (leader <= names[rank]) == (rank == 0)


def test_every_rank_ran_the_same_steps(spans: Spans) -> None:
    steps = [[span["args"]["step"] for span in spans.named(rank, "step")] for rank in range(4)]
    assert steps[0] == list(range(1, len(steps[0]) + 1))
    assert steps[1] == steps[2] == steps[3] == steps[0]
    planned = [
        [(span["args"]["step"], span["args"]["rows"]) for span in spans.named(rank, "schedule")] for rank in range(4)
    ]
    assert planned[1] == planned[2] == planned[3] == planned[0]
    tokens = [[span["args"]["tokens"] for span in spans.named(rank, "forward")] for rank in range(4)]
    assert tokens[1] == tokens[2] == tokens[3] == tokens[0]
    assert len(tokens[0]) == sum(rows > 0 for _, rows in planned[0])


def test_counts_agree_with_the_results(traced: tuple[Path, Outcome], spans: Spans) -> None:
    made = sum(record["usage"]["completion_tokens"] for record in traced[1].records())
    masked = sum(record["grammar"]["mask_rows"] for record in traced[1].records() if "grammar" in record)
    for rank in range(4):
        assert sum(span["args"]["rows"] for span in spans.named(rank, "settle")) == made
    assert sum(span["args"]["rows"] for span in spans.named(0, "fill mask")) == masked > 0
    assert sum(span["args"]["rows"] for span in spans.named(1, "fill mask")) == masked
    assert sum(span["args"]["rows"] for span in spans.named(2, "sample")) == made


def test_masks_fill_under_the_forward_pass(spans: Spans) -> None:
    for rank in (0, 1):
        forwards = spans.named(rank, "forward")
        under = [
            fill
            for fill in spans.named(rank, "fill mask")
            if any(one["start"] < fill["end"] and fill["start"] < one["end"] for one in forwards)
        ]
        assert under
        assert all(fill["tid"] != forwards[0]["tid"] for fill in under)


def test_hidden_states_arrive_after_they_were_sent(spans: Spans) -> None:
    """Clocks are aligned: what is received was sent before, by the clock of another rank."""
    for sender, receiver in ((0, 2), (1, 3)):
        sent = {span["args"]["step"]: span for span in spans.named(sender, "send hidden")}
        received = {span["args"]["step"]: span for span in spans.named(receiver, "receive hidden")}
        assert sent.keys() == received.keys()
        assert all(sent[step]["start"] < received[step]["end"] for step in sent)
        assert all(sent[step]["args"]["bytes"] == received[step]["args"]["bytes"] for step in sent)


def test_summary(traced: tuple[Path, Outcome], spans: Spans) -> None:
    summaries = summarize(traced[0])
    assert [(one.rank, one.stage) for one in summaries] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    idle = {span["args"]["step"] for span in spans.named(0, "client") if span["end"] - span["start"] >= 1_000_000}
    for one in summaries:
        steps = spans.named(one.rank, "step")
        assert one.steps == len(steps)
        settled = {span["args"]["step"] for span in spans.named(one.rank, "settle")}
        busy = (settled | {span["args"]["step"] for span in spans.named(one.rank, "forward")}) - idle
        assert one.busy_steps == len(busy)
        busy_s = sum(span["dur"] for span in steps if span["args"]["step"] in busy) / 1e6
        assert one.busy_s == pytest.approx(busy_s)
        assert sum(one.own_s.values()) == pytest.approx(one.busy_s)
        assert all(own_s >= 0 for own_s in one.own_s.values())
        assert 0 < one.stage_wait < 1
        assert 0 < one.group_wait < 1
        assert (one.fill_s > 0) == (one.stage == 0)
    assert all(0 < one.fill_hidden <= 1 for one in summaries[:2])
    printed = run(*LOCKSTEP, "trace-summary", str(traced[0]))
    assert printed.returncode == ExitCode.OK
    assert [line.split()[:2] for line in printed.stdout.splitlines()[1:]] == [
        ["0", "0"],
        ["1", "0"],
        ["2", "1"],
        ["3", "1"],
    ]
    as_json = run(*LOCKSTEP, "trace-summary", "--json", str(traced[0]))
    assert [RankSummary(**one) for one in json.loads(as_json.stdout)] == summaries


def test_under_torchrun(tiny: str, tmp_path: Path) -> None:
    """Ranks of a torchrun of one's own write beside the trace; the leader's front side merges and removes the parts."""
    torchrun = (*TORCHRUN, "--nproc-per-node", "2", "-m", "launch")
    options = ("--model", tiny, "--tp", "2", "a", "--max-tokens", "4", "--trace", str(tmp_path / "trace.json"))
    outcome = run(*torchrun, "generate", *options)
    assert outcome.returncode == ExitCode.OK, outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    spans = read_trace(tmp_path / "trace.json")
    assert spans.head["missing_ranks"] == []
    assert len(spans.named(0, "step")) == len(spans.named(1, "step")) > 4


def test_a_killed_rank_leaves_what_it_did(tiny: str, tmp_path: Path) -> None:
    lines = [{"prompt": "a", "max_tokens": 1}, *({"prompt": "b", "max_tokens": 480, "ignore_eos": True},) * 400]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--model", tiny, "--tp", "2", "--input", str(tmp_path / "in.jsonl"), "--max-num-seqs", "2")
    trace = tmp_path / "trace.json"
    with running(*LOCKSTEP, "generate", *options, "--trace", str(trace), "--max-recoveries", "0") as started:
        started.wait_for_output('"line-1"', START_S)
        started.ranks()[1].send_signal(signal.SIGKILL)
        outcome = started.wait(60)
        started.check_nothing_left()
    assert outcome.returncode == ExitCode.RANK_FAILED
    spans = read_trace(trace)
    assert spans.head["missing_ranks"] == []
    assert all(spans.named(rank, "forward") for rank in (0, 1))
    assert all(len(one["clock_offset_ns"]) == 1 for one in spans.head["ranks"])


def test_a_trace_that_cannot_be_written_is_said_at_once(tiny: str, tmp_path: Path) -> None:
    target = tmp_path / "missing" / "trace.json"
    outcome = run(*LOCKSTEP, "generate", "--model", tiny, "a", "--trace", str(target))
    assert outcome.returncode == ExitCode.USAGE
    assert outcome.message == f"lockstep: --trace {target}: its folder does not exist"
