"""The Grafana dashboard: it asks for nothing that is not there, and panels do not lie over each other."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from launch.front.metrics import EngineMetrics

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "lockstep.json"


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = document["panels"]
    return found


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_every_metric_that_it_names_exists(panels: list[dict[str, Any]]) -> None:
    exists = set(EngineMetrics().names())
    named = {name for one in expressions(panels) for name in re.findall(r"lockstep:\w+", one)}
    assert len(named) > 30
    assert named <= exists


def test_labels_that_it_shows_exist(panels: list[dict[str, Any]]) -> None:
    documented = (DASHBOARD.parents[1] / "metrics.md").read_text(encoding="utf-8")
    labels = {
        name: {label.strip() for label in cells.split(",")}
        for name, cells in re.findall(r"^\| `(lockstep:\w+)` \| \w+ \| ([^|]*) \|", documented, re.MULTILINE)
    }
    for panel in panels:
        for target in panel.get("targets", ()):
            names = re.findall(r"lockstep:\w+", target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert all(label in labels[name] for name in names), target


def test_counters_are_shown_as_rates(panels: list[dict[str, Any]]) -> None:
    for one in expressions(panels):
        for name in re.findall(r"lockstep:\w+_(?:total|bucket|sum|count)\b", one):
            assert f"rate({name}[$__rate_interval])" in one


def test_panels_are_numbered_and_do_not_overlap(panels: list[dict[str, Any]]) -> None:
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
