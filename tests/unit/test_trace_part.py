"""A rank's part of a trace: what was written is read back, the latest spans survive, damage is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.trace.file import leader_ns, merge_parts, part_path
from launch.trace.summary import summarize
from runtime.trace_part import ClockReading, PartHeader, ReadPart, Span, SpanKind, TraceFileError, TracePart
from runtime.tracer import KINDS, Tracer

STEP, FORWARD = ([kind.name for kind in KINDS].index(name) for name in ("step", "forward"))
HEADER = PartHeader(3, 1, 1, "host", KINDS, (ClockReading(5, 7, 1),))


@pytest.fixture
def ticks() -> Iterator[int]:
    return iter(range(1_000, 10_000_000, 1_000))


@settings(deadline=None, max_examples=40)
@given(count=st.integers(0, 25), kept=st.integers(1, 12))
def test_the_latest_spans_are_read_back(tmp_path_factory: pytest.TempPathFactory, count: int, kept: int) -> None:
    path = tmp_path_factory.mktemp("part") / "3.0.part"
    spans = [
        Span(number, 10 * number + 1, 10 * number + 5, number // 3, number, number % 4, 0) for number in range(count)
    ]
    part = TracePart(path, HEADER, kept)
    for span in spans:
        part.put(span)
    size = path.stat().st_size
    part.close()
    with closing(ReadPart(path)) as read:
        assert read.header == HEADER
        assert list(read.spans()) == spans[-kept:]
        assert read.lost == max(count - kept, 0)
    assert size == path.stat().st_size


def test_a_span_can_be_prolonged_and_a_hole_is_passed_over(tmp_path: Path) -> None:
    part = TracePart(tmp_path / "3.0.part", HEADER, 8)
    part.put(Span(0, 1, 2, 1, 1, 0, 0))
    part.put(Span(2, 5, 6, 1, 1, 0, 0))
    part.put(Span(2, 5, 9, 1, 2, 0, 0))
    part.write_header(PartHeader(3, 1, 1, "another", KINDS, ()))
    with closing(ReadPart(tmp_path / "3.0.part")) as read:
        assert [(span.number, span.end_ns, span.value) for span in read.spans()] == [(0, 2, 1), (2, 9, 2)]
        assert read.header.host == "another"


def test_a_value_too_large_is_the_largest(tmp_path: Path) -> None:
    TracePart(tmp_path / "3.0.part", HEADER, 8).put(Span(0, 1, 2, 1, 1 << 40, 0, 0))
    with closing(ReadPart(tmp_path / "3.0.part")) as read:
        assert next(read.spans()).value == (1 << 32) - 1


@pytest.mark.parametrize("content", [b"", b"LSTR", b"x" * 20_000, b"LSTRACE1" + b"\x05\x00\x00\x00" + b"\xc1" * 20_000])
def test_what_is_no_part_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0.0.part").write_bytes(content)
    with pytest.raises(TraceFileError, match=r"part of a trace|header|cannot read"):
        ReadPart(tmp_path / "0.0.part")
    with pytest.raises(TraceFileError, match=r"part of a trace|header|cannot read"):
        merge_parts(tmp_path / "trace.json", tmp_path, 1)


def test_no_part_and_no_trace_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="no rank left a part"):
        merge_parts(tmp_path / "trace.json", tmp_path / "nowhere", 1)
    with pytest.raises(TraceFileError, match="cannot make"):
        TracePart(tmp_path / "nowhere" / "0.0.part", HEADER)
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(TraceFileError, match="no trace that lockstep wrote"):
        summarize(tmp_path / "other.json")
    with pytest.raises(TraceFileError, match="cannot read"):
        summarize(tmp_path / "nowhere.json")


def test_ranks_without_a_part_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    TracePart(folder / "3.0.part", HEADER, 8).put(Span(0, 1_000, 3_000, 1, 0, 0, 0))
    assert merge_parts(tmp_path / "trace.json", folder, 4) == [0, 1, 2]
    assert not folder.exists()
    assert summarize(tmp_path / "trace.json")[0].steps == 1


def test_the_parts_of_all_epochs_are_merged(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for epoch in range(2):
        header = msgspec.structs.replace(HEADER, rank=0, stage=0, epoch=epoch)
        part = TracePart(part_path(folder, 0, epoch), header, 8)
        for step in (1, 2):
            begin_ns = 10_000 * epoch + 1_000 * step
            part.put(Span(2 * step, begin_ns, begin_ns + 900, step, 0, STEP, 0))
            part.put(Span(2 * step + 1, begin_ns, begin_ns + 500, step, 0, FORWARD, 0))
    assert merge_parts(tmp_path / "trace.json", folder, 1) == []
    (summary,) = summarize(tmp_path / "trace.json")
    assert (summary.steps, summary.busy_steps) == (4, 4)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {(event["args"]["epoch"], event["args"]["step"]) for event in events if event["ph"] == "X"} == {
        (epoch, step) for epoch in range(2) for step in (1, 2)
    }


def test_clocks_of_another_machine_are_laid_on_the_leaders() -> None:
    clocks = (ClockReading(1_000_000, 500, 1), ClockReading(3_000_000, 700, 1))
    header = PartHeader(1, 0, 1, "there", (), clocks)
    times = [1_000_000, 2_000_000, 3_000_000, 4_000_000]
    assert [leader_ns(header, "here", at_ns) - at_ns for at_ns in times] == [500, 600, 700, 800]
    assert [leader_ns(header, "there", at_ns) for at_ns in times] == times
    once = PartHeader(1, 0, 1, "there", (), clocks[:1])
    assert [leader_ns(once, "here", at_ns) - at_ns for at_ns in times] == [500] * 4


@settings(deadline=None, max_examples=50)
@given(drift_ns=st.integers(-10_000, 10_000), times=st.lists(st.integers(0, 10**10), min_size=2, max_size=8))
def test_order_survives_the_change_of_clock(drift_ns: int, times: list[int]) -> None:
    """Spans that nest by one clock nest by the other."""
    clocks = (ClockReading(0, 12_345, 1), ClockReading(10**9, 12_345 + drift_ns, 1))
    header = PartHeader(1, 0, 1, "there", (), clocks)
    moved = [leader_ns(header, "here", at_ns) for at_ns in sorted(times)]
    assert moved == sorted(moved)


def test_neighbours_of_a_name_and_step_are_merged(tmp_path: Path, ticks: Iterator[int]) -> None:
    part = TracePart(tmp_path / "3.0.part", HEADER, 16)
    tracer = Tracer(part, lambda: next(ticks))
    tracer.add("emit", 500, 1, 1, merge=True)
    tracer.add("emit", 1_200, 1, 1, merge=True)
    tracer.add("emit", 2_200, 2, 1, merge=True)
    tracer.add("emit", 3_300, 2, 1)
    tracer.add("accept", 4_400, 2, 1, merge=True)
    with closing(ReadPart(tmp_path / "3.0.part")) as read:
        got = [(KINDS[one.kind].name, one.start_ns, one.end_ns, one.step, one.value) for one in read.spans()]
    assert got == [
        ("emit", 500, 2_000, 1, 2),
        ("emit", 2_200, 3_000, 2, 1),
        ("emit", 3_300, 4_000, 2, 1),
        ("accept", 4_400, 5_000, 2, 1),
    ]


def test_threads_have_tracks_of_their_own(tmp_path: Path) -> None:
    tracer = Tracer(TracePart(tmp_path / "3.0.part", HEADER, 4096))

    def work() -> None:
        for _ in range(100):
            tracer.add("fill mask", tracer.clock(), 1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    tracer.add("step", tracer.clock(), 1)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with closing(ReadPart(tmp_path / "3.0.part")) as read:
        spans = list(read.spans())
    assert len(spans) == 301
    assert {one.track for one in spans if one.kind == 0} == {0}
    assert {one.track for one in spans if one.kind != 0} <= {1, 2, 3}


def test_kinds_have_names_of_their_own() -> None:
    names = [kind.name for kind in KINDS]
    assert len(names) == len(set(names))
    assert all(isinstance(kind, SpanKind) for kind in KINDS)
