"""The faulty backend around real gloo: without a fault nothing changes, with one it strikes at the call it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos_ranks import all_calls, summed, told
from ranks import RankFailure, run_ranks

from launch.chaos.faults import Action, Injection, Place
from launch.chaos.record import CellFolder

GROUP = "0,1"


def cell(tmp_path: Path, action: Action, *, call: str = "all_reduce", armed: bool = True, **fields: Any) -> CellFolder:
    injection = Injection(action=action, rank=1, call=call, group=GROUP, **fields)
    return CellFolder.create(tmp_path / "cell", (injection,), armed=armed)


def test_without_a_fault_everything_is_as_it_was(tmp_path: Path) -> None:
    folder = CellFolder.create(tmp_path / "cell", (), armed=True)
    seen = run_ranks(all_calls, 2, str(folder.path))
    for rank, one in enumerate(seen):
        assert one["backend"] == "gloo"
        assert one["sum"] == [3.0] * 3
        assert one["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert one["listed"] == [[0]]
        assert one["received"] == [float(1 - rank)] * 2
        assert one["calls"] == {
            "all_reduce@0,1": 2,
            "all_gather@0,1": 2,
            "broadcast@0,1": 2,
            "recv:4@0,1": 1,
            "send:4@0,1": 1,
            "barrier@0,1": 2,
        }
        assert one["place"] == "outside"
    assert folder.fired() == []


def test_a_slow_call_is_late_and_right(tmp_path: Path) -> None:
    folder = cell(tmp_path, "slow", number=1, seconds=0.6)
    first, second = run_ranks(summed, 2, str(folder.path), 3, -1)
    assert [value for value, _ in first] == [value for value, _ in second] == [110.0, 220.0, 330.0]
    assert first[1][1] > 0.4
    (fired,) = folder.fired()
    assert (fired.rank, fired.where) == (1, "inside all_reduce@0,1 #2")


def test_calls_are_counted_from_when_the_fault_was_armed(tmp_path: Path) -> None:
    folder = cell(tmp_path, "slow", armed=False, number=1, seconds=0.1)
    run_ranks(summed, 2, str(folder.path), 5, 2)
    assert [it.where for it in folder.fired()] == ["inside all_reduce@0,1 #4"]


def test_a_skipped_call_shifts_the_results_without_an_error(tmp_path: Path) -> None:
    """As measured of gloo: the next call of the victim meets this one of the other rank."""
    folder = cell(tmp_path, "skip", number=1)
    first, second = run_ranks(summed, 2, str(folder.path), 3, -1)
    assert [value for value, _ in second][:3] == [110.0, 200.0, 320.0]
    assert first[1][0] == 320.0
    assert str(first[2][0]).startswith("RuntimeError")


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("error", "RuntimeError: injected: all_reduce is refused by the backend"),
        ("async_error", "RuntimeError: injected: all_reduce failed in the backend"),
        ("raise", "InjectedError: injected: the program raises"),
    ],
)
def test_an_error_is_raised_where_it_was_to(tmp_path: Path, action: Action, text: str) -> None:
    folder = cell(tmp_path, action, number=1, place="before")
    first, second = run_ranks(summed, 2, str(folder.path), 2, -1)
    assert [value for value, _ in second] == [110.0, text]
    # A call that fails when it is waited for was made.
    assert str(first[1][0]).startswith("220" if action == "async_error" else "RuntimeError")
    (fired,) = folder.fired()
    assert fired.where.endswith("all_reduce@0,1 #2")


@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_a_victim_dies_at_its_place(tmp_path: Path, place: Place) -> None:
    folder = cell(tmp_path, "exit", number=1, place=place)
    with pytest.raises(RankFailure, match="rank 1 died without a word"):
        run_ranks(summed, 2, str(folder.path), 3, -1, timeout_s=20)
    assert [it.where for it in folder.fired()] == [f"{place} all_reduce@0,1 #2"]


def test_a_received_number_is_corrupted_on_the_victim_alone(tmp_path: Path) -> None:
    folder = cell(tmp_path, "corrupt", call="broadcast", number=1)
    first, second = run_ranks(told, 2, str(folder.path), 3)
    assert first == [100, 101, 102]
    assert (second[0], second[2]) == (100, 102)
    assert second[1] == 101 ^ (0x40 << 56)


def test_a_chosen_byte_is_corrupted(tmp_path: Path) -> None:
    folder = cell(tmp_path, "corrupt", call="broadcast", number=1, byte=1)
    _, second = run_ranks(told, 2, str(folder.path), 3)
    assert second == [100, 101 ^ 0x100, 102]


def test_a_contribution_is_corrupted_for_all(tmp_path: Path) -> None:
    folder = cell(tmp_path, "corrupt", number=1)
    first, second = run_ranks(summed, 2, str(folder.path), 3, -1)
    assert [value for value, _ in first] == [value for value, _ in second]
    assert first[1][0] != 220.0
    assert (first[0][0], first[2][0]) == (110.0, 330.0)
