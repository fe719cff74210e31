"""Compute the geometry of the report's charts on a plane of 100 x 100, which the page stretches.

This module places values and thins long curves. `templates/` decide how everything looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 400
"""Largest number of points that `thinned` keeps: the lowest and highest point of each stretch of a
longer curve, so that no peak is lost."""
MAX_DOTS = 60
"""Largest number of points that are drawn as dots; with more only the curve is drawn."""


@dataclass(frozen=True)
class Scale:
    """A range of values that is drawn from 0 to 100."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the place of a value, rounded to what can be seen.

        A value outside the range is at the edge.
        """
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(100.0 * min(1.0, max(0.0, share)), 3)


@dataclass(frozen=True)
class Tick:
    """A number at an axis."""

    at: float
    text: str


def ticks(scale: Scale, about: int, *, whole: bool = False) -> tuple[Tick, ...]:
    """Return about `about` round numbers on a scale, in equal steps.

    A step is 1, 2 or 5 times a power of ten. `whole`: integers only.
    """
    span = scale.high - scale.low
    if span <= 0:
        return (Tick(scale.at(scale.low), f"{scale.low:g}"),)
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next((factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= about), 10 * power)
    if whole:
        step = max(1.0, round(step))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
    return tuple(Tick(scale.at(number * step), f"{number * step:,.{digits}f}") for number in range(first, last + 1))


@dataclass(frozen=True)
class Dot:
    """A point that shows a text when it is pointed at."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    """A line through points."""

    name: str
    kind: str
    """Style: `run`, `reference` or `ideal`."""
    path: str
    """Data of an SVG path."""
    dots: tuple[Dot, ...] = ()


@dataclass(frozen=True)
class Mark:
    """A vertical line at the place of an event."""

    at: float
    name: str
    """Text beside the line: the number of a fault, or a short name; or empty."""
    text: str
    row: int
    """Row from 0 on. Names of neighbours that would overlap are in different rows."""


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes."""

    name: str
    about: str
    """Description of the chart for readers who cannot see it."""
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()


Points = Sequence[tuple[float, float]]


def thinned(points: Points) -> Points:
    """Return at most about `MAX_POINTS` of the points, in order.

    Of more points these are the lowest and the highest one of each stretch.
    """
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda one: one[1]), max(stretch, key=lambda one: one[1])})
    return kept


def path(pieces: Sequence[Points], x: Scale, y: Scale) -> str:
    """Return the data of an SVG path through each piece, with a gap between pieces.

    A piece of one point is a line of length 0, which is drawn as a dot.
    """
    drawn = []
    for piece in pieces:
        places = [f"{x.at(one):g} {100 - y.at(other):g}" for one, other in piece]
        if places:
            drawn.append(f"M{' '.join(places)}" if len(places) > 1 else f"M{places[0]}h0")
    return "".join(drawn)


def rows(places: Sequence[float], room: float = 7.0) -> list[int]:
    """Return for each place the first row in which no earlier place is nearer than `room`."""
    last: list[float] = []
    found = []
    for place in places:
        row = next((row for row, other in enumerate(last) if abs(place - other) >= room), len(last))
        last[row:] = [place, *last[row + 1 :]]
        found.append(row)
    return found
