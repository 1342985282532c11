"""A prediction and its answers as one HTML page for those who decide: no scripts, no network, and it prints.

Numbers come as texts, with their units. What is drawn (bars of gains, the curve of scaling) is SVG and CSS, made here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# Of the drawing of scaling, in its own units: its size, and the margins for labels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 230, 62, 22, 26, 34


@dataclass(frozen=True)
class Tile:
    """A headline number; `note` is a line below it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A change.

    Attributes:
        gain: as a share.
        cells: texts of further columns, as the headings are.
        reason: in words.
    """

    name: str
    gain: float
    fits: bool
    cells: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Point:
    """A number of ranks.

    Attributes:
        speed: tokens per second per GPU.
        efficiency: as a share of the given mesh's speed.
        here: it is the given mesh.
        cells: texts of the table, as the headings are.
    """

    ranks: int
    speed: float
    efficiency: float
    here: bool
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """All that the page shows.

    Attributes:
        lead: sentences that say the most important.
        headings: of the cells of changes.
        fits: sentences.
        scaling_headings: of the cells of points.
        assumptions: sentences.
        left_out: what could not be predicted, and why.
    """

    title: str
    lead: tuple[str, ...]
    tiles: tuple[Tile, ...]
    headings: tuple[str, ...]
    changes: tuple[Row, ...]
    fits: tuple[str, ...]
    scaling_headings: tuple[str, ...]
    scaling: tuple[Point, ...]
    assumptions: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Mark:
    """A point of the drawing."""

    x: float
    y: float
    ranks: str
    efficiency: str
    here: bool


@dataclass(frozen=True)
class Drawing:
    """The curve of scaling: marks, the line that an ideal network would give, and ticks of speed."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    ideal: float
    marks: tuple[_Mark, ...]
    ticks: tuple[tuple[float, str], ...]


def render_summary(data: Summary, timeline: str) -> str:
    """The page as the text of one HTML file.

    Args:
        timeline: relative link to the report for engineers.
    """
    loader = PackageLoader("graphshard.debug", "")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.globals["asset"] = lambda name: Markup(loader.get_source(env, name)[0])
    most = max((abs(row.gain) for row in data.changes), default=0.0)
    widths = [round(100 * abs(row.gain) / most) if most else 0 for row in data.changes]
    page = env.get_template("summary.html.j2")
    return page.render(summary=data, timeline=timeline, widths=widths, drawing=drawing_of(data.scaling))


def drawing_of(points: Sequence[Point]) -> Drawing | None:
    """The curve of several points, over the logarithm of their ranks; None if there are not two."""
    if len(points) < 2:
        return None
    logs = [math.log2(point.ranks) for point in points]
    here = next((point.speed for point in points if point.here), points[0].speed)
    step = _round_step(max(here, *(point.speed for point in points)) / 4)
    top = step * math.ceil(max(here, *(point.speed for point in points)) / step)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def y(speed: float) -> float:
        return round(bottom - (bottom - _TOP) * speed / top, 1)

    marks = tuple(
        _Mark(
            round(_LEFT + 24 + (right - _LEFT - 48) * (log - logs[0]) / ((logs[-1] - logs[0]) or 1), 1),
            y(point.speed),
            f"{point.ranks:,}",
            f"{point.efficiency:.0%}",
            point.here,
        )
        for point, log in zip(points, logs)
    )
    ticks = tuple((y(step * count), f"{step * count:,.0f}") for count in range(round(top / step) + 1))
    return Drawing(_WIDTH, _HEIGHT, _LEFT, right, bottom, y(here), marks, ticks)


def _round_step(value: float) -> float:
    """1, 2 or 5 times a power of ten, from the value on."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * 0.999)
