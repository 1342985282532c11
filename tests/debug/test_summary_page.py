"""Summary page for decision makers: its content, and its readability in a real browser, wide and narrow."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import graphshard
from graphshard.predict.answers import Answer, Fit, Scaled, WhatIf, drawing_of, render_summary
from tests.browser import Page, Show, texts
from tests.debug.conftest import OpenText
from tests.debug.test_page import CONTRAST
from tests.helpers import Blocks
from tests.predict.test_fitting import ROOM, outcome
from tests.reports import HOSTILE

TITLE = "Llama, 8.03 billion parameters, on 64 x h100"


@functools.cache
def base() -> graphshard.Explanation:
    """Return a step with a cost and a range."""
    found = graphshard.explain(Blocks(2), (64,), example_inputs=(torch.ones(3, 4),), tokens=2e12, price=2.5)
    return replace(found, step_range_s=(0.9 * found.step_time_s, 1.1 * found.step_time_s))


def points(*speeds: float) -> tuple[Scaled, ...]:
    """Return rows for 64, 128, 256 ... ranks."""
    rows = [replace(outcome(64 << place, 4, 500), tokens_per_second_per_gpu=s) for place, s in enumerate(speeds)]
    return tuple(Scaled(row.num_ranks, row, row.tokens_per_second_per_gpu / speeds[0]) for row in rows)


def small(**changes: Any) -> WhatIf:
    reason = "per token waiting for parameters and gradients -7.9%, compute +1.2%, the optimizer +0.3%"
    long = "the same money per token at 4.86 for a GPU hour"
    fits, too_large = replace(outcome(64, 4, 500), step_time_s=0.442), outcome(64, 4, 2 * ROOM)
    found = WhatIf(
        base=base(),
        here=fits,
        changes=(
            Answer("hardware", "hardware b200", 0.94, fits, f"{reason}; {long}"),
            Answer("reshard", "reshard_after_forward=False", 0.02, fits, reason),
            Answer("network", "network in-training", -0.31, fits, reason),
            Answer("batch", "batch 8 per rank", 0.12, too_large, reason),
        ),
        fits=(Fit("the largest batch", fits, ""), Fit("the smallest mesh", fits, "")),
        scaling=points(9263.0, 9207.0, 8810.0, 7450.0, 4100.0),
        left_out=("mesh replicate 8, shard 8: memory_limit cannot be kept",),
    )
    return replace(found, **changes)


@pytest.fixture
def show(open_text: OpenText) -> Show:
    """Return `show(found, title)`, which opens the page."""

    def open_page(found: WhatIf, title: str = TITLE, **options: Any) -> Page:
        page = open_text(render_summary(found, "plan.timeline.html", title), **options)
        page.settle()
        return page

    return open_page


def test_hostile_names_are_text() -> None:
    row = replace(small().changes[0], change=HOSTILE, reason=HOSTILE)
    found = small(changes=(row,), fits=(Fit(HOSTILE, None, HOSTILE),), left_out=(HOSTILE,), scaling=points(2.0, 1.0))
    named = replace(base(), model=HOSTILE, hardware=HOSTILE, network=HOSTILE, mesh={HOSTILE: 64}, profile_hash=HOSTILE)
    page = render_summary(replace(found, base=named), f"{HOSTILE}.html", HOSTILE)
    assert "<img" not in page
    assert "<script" not in page
    assert "49" not in page.partition("</style>")[2].replace(HOSTILE, "").partition("<svg")[0]


def test_there_are_no_scripts_and_no_network() -> None:
    page = render_summary(small(), "plan.timeline.html", TITLE)
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('href="plan.timeline.html') == 2


def test_missing_parts_are_hidden() -> None:
    page = render_summary(small(changes=(), scaling=(), left_out=()), "t.html", TITLE)
    assert "No changes were asked for." in page
    assert 'id="scaling"' not in page
    assert "could not be predicted" not in page
    alone = render_summary(small(scaling=points(2.0)), "t.html", TITLE)
    assert 'id="scaling"' in alone
    assert "<svg" not in alone


def test_the_drawing_has_the_numbers() -> None:
    """Speeds from zero, ranks on a logarithmic axis; the line of the given mesh passes through its mark."""
    drawing = drawing_of(points(9263.0, 4631.5, 2315.75), 64)
    assert drawing is not None
    first, second, third = drawing["marks"]
    assert first["y"] == drawing["ideal"]
    ground = drawing["ticks"][0][0]
    assert ground - second["y"] == pytest.approx((ground - first["y"]) / 2, abs=0.1)
    assert ground - third["y"] == pytest.approx((ground - first["y"]) / 4, abs=0.1)
    assert second["x"] - first["x"] == pytest.approx(third["x"] - second["x"], abs=0.1)
    assert [mark["ranks"] for mark in drawing["marks"]] == ["64", "128", "256"]
    assert [mark["efficiency"] for mark in drawing["marks"]] == ["100%", "50%", "25%"]
    assert [label for _, label in drawing["ticks"]] == ["0", "5,000", "10,000"]
    assert drawing_of(points(1.0), 64) is None


def test_bars_are_proportional_to_gains(show: Show) -> None:
    """Relative to the largest one; losses have another color."""
    page = show(small())
    assert texts(page, "#changes tbody tr td:nth-child(2)") == ["+94.0 %", "+2.0 %", "-31.0 %", "+12.0 %"]
    widths = page.js("[...document.querySelectorAll('.bar div')].map(bar => bar.getBoundingClientRect().width)")
    assert widths[2] == pytest.approx(widths[0] * 33 / 100, abs=1)
    colors = page.js("[...document.querySelectorAll('.bar div')].map(bar => getComputedStyle(bar).backgroundColor)")
    assert colors[0] == colors[1] != colors[2]
    assert texts(page, "#changes .warn") == ["no"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [480, 1400])
def test_no_overflow_and_readable_text(show: Show, width: int, dark: bool) -> None:
    """Tables may scroll in their frames, the page does not. Small text has WCAG AA contrast."""
    page = show(small(), f"{TITLE}, with a longer title than there is room for", width=width, dark=dark)
    page.js("document.querySelector('details').open = true")
    page.settle()
    assert page.js("document.documentElement.scrollWidth") == width
    shown = "[...document.querySelectorAll('#changes tr')].map(row => [...row.cells].filter(c => c.checkVisibility()))"
    edges = page.js(f"{shown}.map(cells => cells.map(cell => Math.round(cell.getBoundingClientRect().right)))")
    assert all(row == edges[0] for row in edges), "headings are above their columns"
    if width > 1000:
        assert max(edges[0]) <= width
    count, bad = page.js(CONTRAST)
    assert count > 80
    assert bad == []


@pytest.mark.parametrize("width", [480, 1400])
def test_labels_of_the_drawing_do_not_overlap(show: Show, width: int) -> None:
    page = show(small(), width=width)
    assert page.js(
        """(() => {
          const edge = document.querySelector(".chart").getBoundingClientRect();
          const nodes = [...document.querySelectorAll(".chart text")];
          const all = nodes.map((node) => [node.textContent, node.getBoundingClientRect()]);
          const apart = (a, b) => a.left >= b.right || b.left >= a.right || a.top >= b.bottom || b.top >= a.bottom;
          const bad = [];
          for (const [text, a] of all) {
            if (a.left < edge.left - 1 || a.right > edge.right + 1) bad.push(text);
            for (const [other, b] of all) if (a !== b && !apart(a, b)) bad.push(`${text} over ${other}`);
          }
          return bad;
        })()"""
    ) == []  # fmt: skip
    sizes = page.js("[...document.querySelectorAll('.chart text')].map(n => n.getBoundingClientRect().height)")
    assert min(sizes) > 10


def test_links_to_the_timeline(show: Show) -> None:
    """Links of the header go to sections, and to the engineers' page."""
    page = show(small(), width=480)
    links = page.js("[...document.querySelectorAll('nav a')].map(link => link.getAttribute('href'))")
    assert links == ["#faster", "#fits", "#scaling", "#assumptions", "plan.timeline.html#timeline"]
    for link in links[:4]:
        assert page.js(f"document.querySelector('{link} h2') !== null")
