"""Contents of the HTML report's file."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import graphshard
from graphshard.debug.html_report import (
    RegionView,
    Report,
    Span,
    Spread,
    format_bytes,
    format_seconds,
    render,
    report_of,
)
from graphshard.schedule.memory_timeline import Alive
from graphshard.utils.text import format_count
from tests.helpers import Blocks
from tests.reports import HOSTILE, StageView, small_report


def test_hostile_names_are_text() -> None:
    stage = StageView(HOSTILE, 0, 1.0, HOSTILE, 1, True, HOSTILE + "\n")
    plain = small_report()
    assert plain.timeline
    assert plain.memory
    bucket = dataclasses.replace(plain.buckets[0].bucket, name=HOSTILE, params=(HOSTILE,), packed=(HOSTILE,))
    report = Report(
        HOSTILE,
        ((HOSTILE, HOSTILE),),
        (stage, stage),
        (dataclasses.replace(plain.buckets[0], bucket=bucket, start=HOSTILE),),
        dataclasses.replace(
            plain.timeline, spans=(Span("shard", "gather", HOSTILE, 0, 1, HOSTILE),), assumptions=HOSTILE
        ),
        dataclasses.replace(plain.memory, alive=(Alive(HOSTILE, HOSTILE, 1),)),
        (RegionView(HOSTILE, HOSTILE, 1, 1, HOSTILE, 1.0, (HOSTILE,)),),
        HOSTILE,
    )
    page = render(report)
    assert "<img" not in page
    assert "onerror=alert(1)>" not in page
    assert page.count("</script>") == render(dataclasses.replace(plain, stages=(stage, stage), error="e")).count(
        "</script>"
    )


def test_links_cannot_run_scripts() -> None:
    page = render(small_report(regions=(RegionView("javascript:alert(1) b", "key", 1, 1, "layers.0", 1.0, ()),)))
    assert 'href="javascript:' not in page
    assert 'href="regions/javascript%3Aalert%281%29%20b.kernels.py"' in page


def test_nothing_is_loaded() -> None:
    page = render(small_report())
    assert not re.search(r"https?://|@import|\bsrc=|<iframe|<object", page)
    assert "default-src 'none'" in page
    assert set(re.findall(r"url\\(([^)]*)\\)", page)) <= {"#hatch"}


def test_equal_reports_are_equal_files() -> None:
    assert render(small_report()) == render(small_report())


def test_without_later_parts() -> None:
    """The failure comes first, and each missing part is marked."""
    failed = small_report(
        buckets=(), timeline=None, memory=None, regions=(), error="PassError: bucket left a <broken> graph"
    )
    page = render(failed)
    assert "PassError: bucket left a &lt;broken&gt; graph" in page
    assert page.index('role="alert"') < page.index('id="passes"')
    assert page.count("; compilation failed before this part.") == 4
    page = render(Report("empty", (), ()))
    assert page.count('class="missing"') == 6
    assert "failed" not in re.sub(r"<style>.*?</style>|<script.*?</script>", "", page, flags=re.DOTALL)


def test_report_of_a_program() -> None:
    """The title names model and options, lanes have names, and sizes have units."""
    found = graphshard.explain(Blocks(2), (2,), example_inputs=(torch.ones(3, 4),), backend="eager")
    report = report_of(found._program, costs=found._costs)
    assert report.title == f"Blocks-0, 32 parameters, graphshard {graphshard.__version__}"
    assert report.timeline
    assert {span.lane for span in report.timeline.spans} == {"compute", "communication"}
    assert {span.detail for span in report.timeline.spans if span.kind == "gather"} == {"64 B"}
    assert 'href="00-capture.txt"' in render(report)
    assert 'href="regions/region_0.py"' in render(report)
    alone = report_of(found._program, costs=found._costs, files=False)
    assert 'href="0' not in render(alone), "there is no dump to link to"
    assert 'href="regions/' not in render(alone)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999_499, "999,499"),
        (999_500, "1.00 million"),
        (8_030_261_248, "8.03 billion"),
        (1_500_000_000_000, "1.50 trillion"),
    ],
)
def test_counts(count: int, text: str) -> None:
    assert format_count(count) == text


def test_spread_of_ranks() -> None:
    assert Spread.of([3.0, 1.0, 8.0, 2.0]) == Spread(1.0, 2.5, 8.0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (-7476224, "-7.13 MiB"),
        (1023 * 1024, "1.00 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (2e-6, "2.00 us"),
        (0.9999e-3, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.456, "456 ms"),
        (1.5, "1.50 s"),
        (3600, "3600 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
