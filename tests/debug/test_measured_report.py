"""HTML report of a measured step: measured numbers and lanes next to the predicted ones."""

from __future__ import annotations

import pytest

from tests.browser import Show, texts
from tests.reports import measured_report, small_report


@pytest.mark.slow
def test_measured_lanes_are_below_the_predicted_ones(show: Show) -> None:
    """On a common time axis as long as the longer one."""
    page = show(measured_report())
    assert texts(page, ".lane") == [
        "compute, predicted",
        "communication, predicted",
        "communication between nodes, predicted",
        "compute, measured on rank 1",
        "communication, measured on rank 1",
    ]
    tops = page.js("[...document.querySelectorAll('.lane')].map(node => +node.getAttribute('y'))")
    assert tops == sorted(tops)
    assert texts(page, "#range") == ["0 to 16.0 ms"]
    ends = page.js("[...document.querySelectorAll('.curve')][0].getAttribute('d').match(/H([\\d.]+)V[\\d.]+Z/)[1]")
    assert float(ends) < page.js("atPixel(0.0126)"), "the memory is that of the predicted step, and ends with it"


def test_a_measured_span_shows_the_times_of_all_ranks(show: Show) -> None:
    page = show(measured_report())
    page.js("pick(spans.find(span => span.measured && span.kind === 'compute'))")
    page.settle()
    assert texts(page, "#span h3") == ["region_0 layers.0"]
    assert texts(page, "#span .detail") == ["all ranks, in a step: 4.00 ms, 3.60 ms to 4.80 ms"]
    assert texts(page, "#span dt") == ["Kind", "Lane", "Start", "Duration"], "neither slack nor memory was measured"
    assert "compute, measured on rank 1" in texts(page, "#span dd")
    page.click("tr[data-bucket='gather layers.1 in forward'] button")
    same = "[...document.querySelectorAll('.span.same, .span.chosen')].map(node => node.spans[0].measured ?? false)"
    assert sorted(page.js(same)) == [False, True, True], "its span, and the measured one with its wait"


@pytest.mark.slow
def test_measured_numbers_are_next_to_the_predicted_ones(show: Show) -> None:
    """With minimum and maximum of all ranks, in sortable columns; a report of a prediction has none."""
    page = show(measured_report())
    tiles = [" ".join(text.split()) for text in texts(page, ".tiles .measured")]
    assert tiles == [
        "measured 16.5 ms 14.8 ms to 19.8 ms",
        "measured 11.5 ms 10.3 ms to 13.8 ms",
        "measured 3.40 ms 3.06 ms to 4.08 ms",
        "measured 9.00 GiB 8.00 GiB to 10.0 GiB",
    ]
    heading = texts(page, "#buckets-table thead th").index("Measured wait") + 1
    assert texts(page, "#buckets-table thead th")[heading - 2] == "Measured, at most"
    assert "Measured, all calls" in texts(page, "#regions-table thead th")
    page.click(f"#buckets-table th:nth-child({heading}) button")
    cells = texts(page, f"#buckets-table tbody tr:first-child > :nth-child({heading})")
    assert [" ".join(text.split()) for text in cells] == ["2.00 ms 1.80 ms to 2.40 ms"]
    page = show(small_report())
    assert not texts(page, ".measured")
    assert not [text for text in texts(page, "th") if "easured" in text]
