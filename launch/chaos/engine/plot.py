"""The report's times as a picture: one line for each kind of fault, one dot for each cell, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

_WIDTH: Final = 760
_LEFT: Final = 110
_RIGHT: Final = 20
_TOP: Final = 46
_LINE: Final = 22
_FIRST_S: Final = 0.01
_COLORS: Final = {"noticed": "#3465a4", "tokens again": "#cc6600"}


class Times(NamedTuple):
    """What cells of one kind of fault took.

    Args:
        noticed_s: Seconds from each fault until it was noticed.
        recovered_s: Seconds until tokens flowed again.
    """

    noticed_s: Sequence[float]
    recovered_s: Sequence[float]


def times_plot(title: str, times: Mapping[str, Times]) -> str:
    """Returns an SVG document: a line for each name in ``times``, seconds on a logarithmic scale."""
    most_s = max((max((*one.noticed_s, *one.recovered_s), default=1.0) for one in times.values()), default=1.0)
    decades = max(1, math.ceil(math.log10(max(most_s, 10 * _FIRST_S) / _FIRST_S)))
    height = _TOP + _LINE * len(times) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (word, color) in enumerate(_COLORS.items()):
        left = _LEFT + 100 * number
        parts.append(
            f'<circle cx="{left + 5}" cy="30" r="4" fill="{color}"/><text x="{left + 14}" y="34">{word}</text>'
        )
    bottom = _TOP + _LINE * len(times)
    for decade in range(decades + 1):
        x = _x(_FIRST_S * 10**decade, decades)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_FIRST_S * 10**decade:g} s</text>')
    for number, (name, one) in enumerate(times.items()):
        y = _TOP + _LINE * number + _LINE / 2
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        for seconds, color in zip((one.noticed_s, one.recovered_s), _COLORS.values(), strict=True):
            parts += [
                f'<circle cx="{_x(value, decades):.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.6"/>'
                for value in seconds
            ]
    return "\n".join([*parts, "</svg>", ""])


def _x(seconds: float, decades: int) -> float:
    share = math.log10(max(seconds, _FIRST_S) / _FIRST_S) / decades
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
