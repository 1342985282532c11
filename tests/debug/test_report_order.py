"""HTML report in the reader's order: cards, timeline and memory, ranks, layers, buckets, diff, passes, regions."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from graphshard.debug.html_report import Card, Layer, Order, RankBar, Report, Span, Spread, render
from graphshard.schedule.memory_timeline import Alive, MemoryPoint, MemoryTimeline
from tests.browser import Show, texts
from tests.reports import measured_report, small_report

MS = 1e-3


def whole_report(**changes: Any) -> Report:
    """Build a report with every section: FSDP2's order is 2 ms longer, and three gathers are alike."""
    report = measured_report()
    assert report.timeline
    assert report.timeline.measured
    bars = tuple(RankBar(rank, 11 * MS, (3 + rank) * MS, 1 * MS) for rank in range(4))
    late = (Span("compute", "compute", "region_0 layers.0", 4 * MS, 14.5 * MS),)
    timeline = dataclasses.replace(
        report.timeline,
        measured=dataclasses.replace(report.timeline.measured, bars=bars),
        fsdp2=Order(late, (("forward", 0.0, 14.5 * MS),), 14.5 * MS, 4 * MS),
    )
    memory = MemoryTimeline(
        tuple(MemoryPoint(time * MS, size) for time, size in ((0, 3 << 30), (4, 5 << 30), (8, 4 << 30))),
        *(5 << 30, 4 * MS, (Alive("layers.1.attention mm %4", "activations", 2 << 30),)),
        {
            "activations": (MemoryPoint(4 * MS, 2 << 30), MemoryPoint(8 * MS, 1 << 30)),
            "shards": (MemoryPoint(0.0, 3 << 30),),
        },
    )
    changes = {
        "timeline": timeline,
        "memory": memory,
        "cards": (Card("Step", "12.5 ms", "11.0 ms to 14.0 ms"), Card("Exposed", "2.50 ms", "", warn=True)),
        "advice": ("the tail is <reduce>",),
        "layers": (Layer("layers.0", 3 * MS, 4 * MS, 2 * MS), Layer("layers.1", 3 * MS, 4 * MS, 0.0)),
        "compiled": (("region_0", 0.0003),),
        **changes,
    }
    return dataclasses.replace(report, **changes)


def test_sections_are_in_the_readers_order() -> None:
    """Sections that a program lacks are left out, and their links."""
    page = render(whole_report())
    order = ["timeline", "memory", "ranks", "layers", "buckets", "diff", "passes", "regions"]
    assert re.findall(r'<section id="(\w+)"', page) == re.findall(r'<a href="#(\w+)">', page) == order
    assert page.index('class="tiles"') < page.index("the tail is &lt;reduce&gt;") < page.index('id="timeline"')
    assert page.index('id="timeline-plot"') < page.index('id="memory-plot"') < page.index('id="memory"')
    assert "11.0 ms to 14.0 ms" in page
    plain = render(small_report())
    assert not {"ranks", "layers"} & set(re.findall(r'<section id="(\w+)"', plain))


def test_fsdp2_order_is_above_the_plan(show: Show) -> None:
    """On the same axis; where the plan is the same, a sentence says so and nothing is drawn twice."""
    page = show(whole_report())
    lanes = texts(page, ".lane")
    assert lanes[:2] == ["compute, FSDP2's order", "compute, predicted"]
    assert lanes[-1] == "communication, measured on rank 1"
    assert "The plan is 2.00 ms (13.8 %) shorter." in texts(page, "#fsdp2-summary")[0]
    report = whole_report()
    assert report.timeline
    assert report.timeline.fsdp2
    same = dataclasses.replace(report.timeline, fsdp2=dataclasses.replace(report.timeline.fsdp2, spans=()))
    page = show(whole_report(timeline=same))
    assert "FSDP2's order" not in "".join(texts(page, ".lane"))
    assert texts(page, "#fsdp2-summary") == ["The plan is FSDP2's order: no other gains enough to depart from it."]


def test_lanes_that_differ_twofold_have_separate_axes(show: Show) -> None:
    """Both fill the width, a warning says so, and a span shows its measured time."""
    page = show(whole_report())
    assert not texts(page, "#apart")
    report = whole_report()
    assert report.timeline
    assert report.timeline.measured
    spans = tuple(dataclasses.replace(s, start=9 * s.start, end=9 * s.end) for s in report.timeline.measured.spans)
    measured = dataclasses.replace(report.timeline.measured, spans=spans, step=Spread(0.12, 0.15, 0.16))
    page = show(whole_report(timeline=dataclasses.replace(report.timeline, measured=measured, fsdp2=None)))
    assert "12.0 times longer than the predicted one: each has a separate axis" in texts(page, "#apart")[0]
    ends = page.js("tracks.map(track => Math.max(...track.lanes.flatMap(lane => lane.spans.map(span => span.to))))")
    assert ends == pytest.approx([12.5 * MS] * 2)
    page.js("pick(spans.findLast(span => span.measured))")
    page.settle()
    assert "43.2 ms" in texts(page, "#span dd"), "the duration that was measured"
    ticks = [text for text in texts(page, "#timeline-plot > text") if text.endswith(" ms")]
    assert {"10 ms", "100 ms"} <= set(ticks), "of both axes"


def test_memory_is_stacked_by_group(show: Show) -> None:
    """Shards at the bottom; the list has the colors of the plot."""
    page = show(whole_report())
    assert page.js("[...document.querySelectorAll('#memory-plot .group')].map(n => n.dataset.group)") == [
        "shards",
        "activations",
    ]
    area = page.js("document.querySelector('#memory-plot [data-group=activations]').getBoundingClientRect().height")
    assert area > 40
    drawn, listed = (
        page.js(f"getComputedStyle(document.querySelector('{selector}')).{what}")
        for selector, what in (("[data-group=activations]", "fill"), (".groups div", "backgroundColor"))
    )
    assert drawn == listed


def test_what_regions_free_is_no_group() -> None:
    """It is taken off the activations, and then off the largest group: no bar is negative."""
    alive = (Alive("a", "activations", 5), Alive("s", "saved for backward", 9), Alive("f", "freed inside regions", -7))
    found = MemoryTimeline((), 7, 0.0, alive).by_kind()
    assert found == {"saved for backward": 7}


def test_alike_buckets_are_folded(show: Show) -> None:
    """One row for the gathers of many layers; it opens by a click, by a filter and with a selected span."""
    plain = small_report()
    (view,) = (view for view in plain.buckets if view.bucket.name == "gather layers.1 in backward")
    alike = tuple(
        dataclasses.replace(view, bucket=dataclasses.replace(view.bucket, name=f"gather layers.{n} in backward"))
        for n in range(40)
    )
    others = tuple(each for each in plain.buckets if each is not view)
    page = show(small_report(buckets=(*others, *alike)))
    shown = "[...document.querySelectorAll('#buckets-table tbody tr')].filter(row => !row.hidden).length"
    assert page.js(shown) == len(others) + 1
    assert "40 like gather layers.0 in backward" in texts(page, "[data-head] button")
    page.click("[data-head] button")
    assert page.js(shown) == len(others) + 41
    page.click("[data-head] button")
    page.js("byId('timeline-plot').focus(); pick(spans.find(span => span.name === 'gather layers.1 in backward'))")
    page.settle()
    assert texts(page, "tr.selected th") == ["gather layers.1 in backward"]
    assert page.js("document.querySelector('tr.selected').checkVisibility()")
    page.js("document.querySelector('[data-filters]').focus()")
    page.type("layers.33")
    assert page.js(shown) == 1
    page.click("#buckets-table th:nth-child(3) button")
    order = (
        "[...document.querySelectorAll('#buckets-table tbody tr')].map(row => row.dataset.head ?? row.dataset.group)"
    )
    rows = [row for row in page.js(order) if row]
    assert len(rows) == 41, "sorting leaves the members with their row"
    assert len(set(rows)) == 1


def test_ranks_layers_and_passes_have_bars(show: Show) -> None:
    """Also on a narrow screen, which does not scroll."""
    page = show(whole_report(), width=480, height=800)
    assert "The slowest rank's step is 30.0 % of the median longer" in texts(page, "#ranks p")[0]
    widths = (
        "[...document.querySelectorAll('{} .stacked')].map(n => [...n.children].map(i => parseFloat(i.style.width)))"
    )
    assert [len(parts) for parts in page.js(widths.format("#ranks"))] == [3] * 4
    assert page.js(widths.format("#layers"))[0] == pytest.approx([33.33, 44.44, 22.22])
    assert page.js("document.querySelector('#layers .stacked').checkVisibility()")
    assert texts(page, ".flame b")[0] == "capture"
    assert page.js("document.documentElement.scrollWidth") == 480
