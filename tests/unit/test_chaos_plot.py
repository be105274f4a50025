"""The picture of a chaos report: every time is a dot at its place, and the document is well-formed."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from launch.chaos.engine.plot import Times, times_plot

SVG = "{http://www.w3.org/2000/svg}"


def dots(document: str) -> list[tuple[float, float]]:
    """Returns where the dots of times are; the first two explain the colours."""
    circles = ET.fromstring(document).findall(f"{SVG}circle")
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles][2:]


def test_a_dot_for_each_time_the_longer_the_further_right() -> None:
    document = times_plot("a <title> & more", {"kill": Times([0.02, 0.05], [0.9]), "stop": Times([3.1], [])})
    (first, second, again, stopped) = dots(document)
    assert first[0] < second[0] < again[0] < stopped[0]
    assert first[1] == second[1] == again[1] < stopped[1]
    texts = [one.text for one in ET.fromstring(document).findall(f"{SVG}text")]
    assert "a <title> & more" in texts
    assert texts.count("kill") == texts.count("stop") == 1


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.01, 1.0, 999.0])
def test_every_dot_is_within_the_picture(seconds: float) -> None:
    document = times_plot("t", {"kill": Times([seconds], [seconds])})
    width = float(ET.fromstring(document).attrib["width"])
    assert all(0 < x < width for x, _ in dots(document))


def test_nothing_to_show() -> None:
    assert dots(times_plot("t", {"none": Times([], [])})) == []
    assert dots(times_plot("t", {})) == []
