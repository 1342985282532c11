"""HTML report on small screens: one pane, no covering header, labels that fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from graphshard.debug.html_report import Span
from graphshard.schedule.memory_timeline import Alive
from tests.browser import Page, Show, texts
from tests.debug.test_page import CONTRAST, compare, lines
from tests.reports import measured_report, small_report

NARROW: dict[str, Any] = {"width": 480, "height": 800}


@pytest.mark.slow
def test_one_pane_shows_old_and_new_lines(show: Show) -> None:
    """Below 700 pixels; the counts equal two panes, and a changed line shows as an old one and a new one."""
    page = show(small_report(), **NARROW)
    assert compare(page, 0, 1) == {"removed": 1, "added": 1, "changed": 2, "moved": 1}
    assert page.js("[...document.querySelectorAll('.pane')].map(pane => pane.checkVisibility())") == [True, False]
    assert [line[:9] for line in lines(page, "removed", 0)] == ["- 4* %2: ", "- 9 %7: f", "- 10 %8: "]
    assert [line[:9] for line in lines(page, "added", 0)] == ["+ 4 %20: ", "+ 5* %2: ", "+ 11 %8: "]
    assert [line.split()[0] for line in lines(page, "moved", 0)] == ["+\u2195", "-\u2195"]
    assert texts(page, ".part") == ["f32", "%0", "bf16", "%20", "%7", "%6"]
    page.js("byId('find').value = 'detach'; find()")
    assert texts(page, "#found") == ["1 lines"]


def test_the_pane_has_all_lines_of_both_texts(show: Show) -> None:
    """In order, for any texts; equal lines appear once."""
    page = show(small_report(), **NARROW)
    assert page.js(
        """(() => {
          let seed = 1;
          const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
          const text = () => Array.from({ length: random(30) }, () => `  %${random(12)}: f32[] = f(%${random(3)})`);
          for (let round = 0; round < 300; round++) {
            const [a, b] = [text(), text()];
            const rows = unified(alignedRows(a, b).rows);
            const sides = [rows.map((r) => r.a), rows.map((r) => r.b)].map((n) => n.filter((i) => i >= 0));
            if (sides[0].some((n, i) => n !== i) || sides[0].length !== a.length) return ["left", a, b];
            if (sides[1].some((n, i) => n !== i) || sides[1].length !== b.length) return ["right", a, b];
            if (rows.some((r) => (r.left === "equal") !== (r.a >= 0 && r.b >= 0))) return ["twice", a, b];
          }
          return "agrees";
        })()"""
    ) == "agrees"  # fmt: skip


def test_walking_and_folding_in_one_pane(show: Show) -> None:
    page = show(small_report(), **NARROW)
    compare(page, 0, 1)
    page.key("n")
    assert texts(page, "#position") == ["2 of 4"]
    page.key("m")
    assert [line.split()[0] for line in lines(page, "at", 0)] == ["-\u2195"]
    page.key("m")
    assert [line.split()[0] for line in lines(page, "at", 0)] == ["+\u2195"]
    compare(page, 1, 2)
    page.click(".gap button")
    assert not texts(page, ".gap")


def resize(page: Page, width: int) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    page.settle()


def test_the_diff_follows_the_width(show: Show) -> None:
    page = show(small_report(), width=1280, height=800)
    compare(page, 0, 1)
    assert len(lines(page, "changed", 0)) == len(lines(page, "changed", 1)) == 2
    resize(page, 480)
    page.wait("diff.onePane")
    page.settle()
    assert not lines(page, "changed", 0)
    resize(page, 1280)
    page.wait("!diff.onePane")
    page.settle()
    assert len(lines(page, "changed", 1)) == 2


@pytest.mark.parametrize("width", [480, 720, 1400])
@pytest.mark.slow
def test_the_header_hides_no_heading(show: Show, width: int) -> None:
    """A link's target is below the header, even if the header has several lines."""
    long = "Transformer-0, 8.03 billion parameters, graphshard 0.1.0, " + "a longer title than there is room for " * 3
    page = show(measured_report() if width == 480 else small_report(title=long), width=width, height=400)
    for link in ("passes", "diff", "buckets", "timeline", "memory", "regions"):
        page.click(f"nav [href='#{link}']")
        page.settle()
        header = "document.querySelector('header').getBoundingClientRect().bottom"
        assert page.js(f"byId('{link}-title').getBoundingClientRect().top - {header}") >= 0, link
        assert 0 <= page.js(f"byId('{link}-title').getBoundingClientRect().top") < 400, link


@pytest.mark.parametrize("width", [480, 1400])
def test_labels_fit_or_are_hidden(show: Show, width: int) -> None:
    """No text of a span, a band, a tick or the peak exceeds its space, and no ticks overlap."""
    spans = tuple(
        Span("compute", "compute", f"region_{n} layers.{n}", start, start + (n % 7) * 4e-4)
        for n, start in ((n, n * 1e-3 / 3) for n in range(36))
    )
    plain = small_report()
    assert plain.timeline
    page = show(small_report(timeline=dataclasses.replace(plain.timeline, spans=spans)), width=width, height=800)
    assert page.js(
        """(() => {
          const outside = [];
          for (const text of document.querySelectorAll(".span text, .band + text")) {
            const [own, place] = [text, text.closest(".span")?.querySelector("rect") ?? text.previousSibling]
              .map((node) => node.getBoundingClientRect());
            if (own.right > place.right + 0.5 || own.left < place.left) outside.push(text.textContent);
          }
          for (const plot of document.querySelectorAll(".plot")) {
            const edge = plot.getBoundingClientRect();
            const all = [...plot.querySelectorAll(":scope > text")].map((node) => [node, node.getBoundingClientRect()]);
            for (const [node, box] of all) {
              if (box.right > edge.right + 0.5 || box.left < edge.left) outside.push(node.textContent);
              for (const [other, place] of all) {
                const apart = box.right <= place.left || place.right <= box.left;
                const level = box.top < place.bottom && place.top < box.bottom;
                if (other !== node && level && !apart) outside.push(`${node.textContent} over ${other.textContent}`);
              }
            }
          }
          return outside;
        })()"""
    ) == []  # fmt: skip
    shown = texts(page, ".span text")
    assert shown
    assert all(text.partition(" ")[0].startswith("region_") for text in shown)
    assert len(shown) < len(spans), "some are too short for any"


def test_twenty_rows_are_visible_at_the_peak(show: Show) -> None:
    plain = small_report()
    assert plain.memory
    alive = tuple(Alive(f"layers.{n}.attention.wq.saved", "saved for backward", 2**20 - n) for n in range(60))
    page = show(small_report(memory=dataclasses.replace(plain.memory, alive=alive)), width=1400, height=1200)
    assert page.js(
        "(box => [...box.querySelectorAll('tbody tr')].filter(row => row.getBoundingClientRect().bottom <= box"
        ".getBoundingClientRect().bottom).length)(document.querySelector('.alive'))"
    ) >= 20  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.quick_cases("light")
def test_no_overflow_and_readable_text(show: Show, dark: bool) -> None:
    page = show(measured_report(), dark=dark, **NARROW)
    compare(page, 0, 1)
    page.settle()
    assert page.js("document.documentElement.scrollWidth") == 480
    assert page.js(CONTRAST)[1] == []


def test_the_default_diff(show: Show) -> None:
    """The diff of the pass that inserts collectives, if there is one; otherwise of the last pass with changes."""
    stages = small_report().stages
    named = dataclasses.replace(stages[1], name="insert-collectives")
    assert show(small_report(stages=(stages[0], named, *stages[2:]))).js("[before.value, after.value]") == ["0", "1"]
    same = dataclasses.replace(stages[0], name="insert-collectives")
    assert show(small_report(stages=(stages[0], same, *stages[1:]))).js("[before.value, after.value]") == ["2", "3"]
