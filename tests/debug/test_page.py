"""Behavior of the HTML report in a real browser."""

from __future__ import annotations

import dataclasses
import time

import pytest

from graphshard.debug.html_report import Span, Timeline, format_bytes, format_seconds
from tests.browser import Page, Show, texts
from tests.reports import AFTER, HOSTILE, StageView, deep_report, small_report


def compare(page: Page, before: int, after: int) -> dict[str, int]:
    """Choose two stages as a reader does; return the counts in the summary."""
    page.js(
        f"for (const [id, value] of Object.entries({{ before: {before}, after: {after} }})) byId(id).value = value;"
        "byId('diff-summary').textContent = 'Comparing'; byId('after').dispatchEvent(new Event('change'))"
    )
    page.wait("byId('diff-summary').textContent !== 'Comparing'")
    return page.js(
        "Object.fromEntries([...document.querySelectorAll('[data-kind]')].map(n => [n.dataset.kind, +n.dataset.count]))"
    )


def lines(page: Page, kind: str, side: int) -> list[str]:
    """Return the lines of one kind on one side (0 left, 1 right), top to bottom, with marks and numbers."""
    return page.js(
        f"[...document.querySelectorAll('.lines')[{side}].children].filter(n => n.classList.contains('{kind}'))"
        ".sort((m, n) => m.offsetTop - n.offsetTop).map(n => n.textContent.replace(/ +/g, ' ').trim())"
    )


def test_units_of_the_page_match_the_tables(show: Show) -> None:
    page = show(small_report())
    sizes = [0, 1023, 1536, -7476224, 1023 * 1024, 80 * 2**30, 2**50, 999.6 * 1024]
    times = [0, 2e-6, 0.9999e-3, 0.0123, 0.456, 1.5, 3600, 9.996e-3]
    assert page.js(f"{sizes}.map(formatBytes)") == [format_bytes(size) for size in sizes]
    assert page.js(f"{times}.map(formatSeconds)") == [format_seconds(time) for time in times]


def test_default_diff_is_of_the_last_stages_that_differ(show: Show) -> None:
    page = show(small_report())
    assert page.js("[before.value, after.value]") == ["1", "2"]
    assert lines(page, "added", 1) == ["+ 17 ... 30 times"]


def test_diff(show: Show) -> None:
    """Removed, added, changed and moved lines, each with a different mark; %9 to %12 are equal."""
    page = show(small_report())
    assert compare(page, 0, 1) == {"removed": 1, "added": 1, "changed": 2, "moved": 1}
    assert lines(page, "removed", 0) == ["- 9 %7: f32[4, 64] = detach(%6)"]
    assert lines(page, "added", 1) == ["+ 4 %20: bf16[8, 64] = _to_copy(%0, dtype=bf16) # layers.0"]
    assert lines(page, "moved", 0) == ["\u2195 15 %13: f32[4, 64] = log(%12)"]
    assert lines(page, "moved", 1) == ["\u2195 8 %13: f32[4, 64] = log(%12)"]
    assert [line[:4] for line in lines(page, "changed", 0)] == ["~ 4*", "~ 10"]
    assert texts(page, ".part") == ["f32", "%0", "%7", "bf16", "%20", "%6"]
    assert compare(page, 1, 0) == {"removed": 1, "added": 1, "changed": 2, "moved": 1}
    compare(page, 2, 3)
    assert texts(page, "#diff-summary") == ["Both texts are equal."]


def test_diff_agrees_with_the_texts(show: Show) -> None:
    """For any texts, left and right columns read downwards are the two texts; equal rows are equal."""
    page = show(small_report())
    assert page.js(
        """(() => {
          let seed = 1;
          const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
          const text = () => Array.from({ length: random(30) }, () => `  %${random(12)}: f32[] = f(%${random(3)})`);
          for (let round = 0; round < 500; round++) {
            const [a, b] = [text(), text()];
            const { rows, to } = alignedRows(a, b);
            const sides = [rows.map((r) => r.a), rows.map((r) => r.b)].map((n) => n.filter((i) => i >= 0));
            if (sides[0].some((n, i) => n !== i) || sides[0].length !== a.length) return ["left", a, b];
            if (sides[1].some((n, i) => n !== i) || sides[1].length !== b.length) return ["right", a, b];
            if (rows.some((r) => r.left === "equal" && a[r.a] !== b[r.b])) return ["equal", a, b];
            if ([...to].some(([i, j]) => a[i] !== b[j])) return ["moved", a, b];
            const shown = foldEqual(rows).flatMap((r) => r.hidden ?? [r]);
            if (shown.length !== rows.length || shown.some((r, i) => r !== rows[i])) return ["fold", a, b];
          }
          return "agrees";
        })()"""
    ) == "agrees"  # fmt: skip


def test_walking_through_changes(show: Show) -> None:
    """n and p move between changes and stop at the ends; m jumps to the other end of a move, and back."""
    page = show(small_report())
    compare(page, 0, 1)
    seen = [texts(page, "#position")[0]]
    for key in "nnnnpp":
        page.key(key)
        seen += texts(page, "#position")
    assert seen == ["1 of 4", "2 of 4", "3 of 4", "4 of 4", "4 of 4", "3 of 4", "2 of 4"]
    page.key("m")
    assert lines(page, "at", 0) == ["\u2195 15 %13: f32[4, 64] = log(%12)"]
    page.key("m")
    assert lines(page, "at", 1) == ["\u2195 8 %13: f32[4, 64] = log(%12)"]
    page.click("#next")
    assert texts(page, "#position") == ["3 of 4"]
    page.js("byId('after').focus()")
    page.key("n")
    assert texts(page, "#position") == ["4 of 4"]
    page.js("byId('find').focus()")
    page.key("p")
    assert texts(page, "#position") == ["4 of 4"], "p is a letter in a text field"


def test_long_lines_scroll_together(show: Show) -> None:
    stages = small_report().stages
    long = dataclasses.replace(stages[1], text=AFTER + "  # " + "x" * 500, folded=AFTER + "  # " + "x" * 500)  # type: ignore[call-arg]
    page = show(small_report(stages=(stages[0], long)))
    page.js("byId('diff-scroll').focus()")
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert page.js("[...document.querySelectorAll('.pane')].map(pane => pane.scrollLeft)") == [120, 120]


def test_expanding(show: Show) -> None:
    """The checkbox shows the whole text; clicking a row of equal lines expands it."""
    page = show(small_report())
    page.click("#expand")
    page.wait("document.querySelector('[data-kind=added]').dataset.count === '30'")
    assert texts(page, ".gap button") == ["... 13 equal lines, show"]
    page.click(".gap button")
    assert not texts(page, ".gap")
    assert len(lines(page, "equal", 0)) == 16
    page.click("#expand")
    page.wait("document.querySelector('[data-kind=added]').dataset.count === '1'")


def test_uses_of_a_value(show: Show) -> None:
    page = show(small_report())
    compare(page, 0, 1)
    page.click(".lines:first-child .row:nth-child(2) .value")
    assert page.js("byId('find').value") == "%0"
    assert texts(page, ".hit") == ["%0"] * 4
    assert texts(page, "#found") == ["3 lines"]
    page.js("byId('find').select()")
    page.type("relu")
    page.key("Enter")
    assert lines(page, "at", 1) == ["10 %6: f32[4, 64] = relu(%5)"]


def test_collectives_and_calls_stand_out(show: Show) -> None:
    text = "forward:\n* %0: f32[] = g()\n> %1: f32[] = region_1(%0)\n"
    stage = StageView("lower", 0, 1.0, text, 3, True, text)
    page = show(small_report(stages=(dataclasses.replace(stage, text="", folded=""), stage)))
    assert texts(page, ".collective") == ["* %0: f32[] = g()"]
    assert texts(page, ".call") == ["> %1: f32[] = region_1(%0)"]


def spans(page: Page) -> dict[str, int]:
    return page.js(
        "[...document.querySelectorAll('.span')].reduce((n, g) => { const kind = g.firstChild.getAttribute('class');"
        "n[kind] = (n[kind] ?? 0) + 1; return n; }, {})"
    )


def test_timeline(show: Show) -> None:
    page = show(small_report())
    assert spans(page) == {"compute": 3, "gather": 3, "reduce": 2, "exposed": 2}
    assert texts(page, ".lane") == ["compute", "communication", "communication between nodes"]
    assert "exposed 2.50 ms (25.0 % of compute)" in texts(page, "#timeline-summary")[0]
    assert page.js("getComputedStyle(document.querySelector('.span .exposed')).fill") == 'url("#hatch")'


def test_critical_path(show: Show) -> None:
    """Its spans are underlined, the legend explains it, selecting one shows it; the others have slack."""
    page = show(small_report())
    marked = page.js("[...document.querySelectorAll('.span line.critical')].map(n => n.parentNode.spans[0].name)")
    assert sorted(marked) == sorted(
        ["region_0 layers.0", "region_0", "region_1", "gather layers.0 in forward", "reduce layers.0 in backward"]
    )
    assert "critical path: the step is as long as these spans together" in texts(page, ".legend li")
    assert "On the critical path are 2.50 ms of communication." in texts(page, "#timeline-summary")[0]
    line, other = (
        page.js(f"getComputedStyle(document.querySelector('{selector}')).stroke")
        for selector in (".legend line", ".span line.critical")
    )
    assert line == other != "none"
    page.click("tr[data-bucket='gather layers.0 in forward'] button")
    assert texts(page, "#span .detail") == [
        "on the critical path: if it takes longer, so does the step\n1.00 MiB over 8 ranks"
    ]
    page.click("tr[data-bucket='gather layers.1 in forward'] button")
    assert texts(page, "#span .detail") == ["could be 1.00 ms later or longer, and the step no longer"]
    assert page.js("[...document.querySelectorAll('#span dt')].find(n => n.textContent === 'Slack').nextSibling"
                   ".textContent") == "1.00 ms"  # fmt: skip


def test_slack_of_buckets(show: Show) -> None:
    """A sortable column: minimum, maximum, and an explanation."""
    page = show(small_report())
    heading = texts(page, "#buckets-table thead th").index("Slack") + 1
    page.click(f"#buckets-table th:nth-child({heading}) button")
    assert texts(page, f"#buckets-table tbody tr > :nth-child({heading})") == [
        "3.50 ms",
        "1.00 ms",
        "1.00 ms",
        "0",
        "0",
    ]
    assert "Slack: the bucket could be so much later or longer" in texts(page, "#buckets .help")[0]


def test_all_reduces_look_like_reductions(show: Show) -> None:
    """In the table and in the timeline, where the kind is removed from a name only as a prefix."""
    plain = small_report()
    assert plain.timeline
    name = "all_reduce layers.1 in backward"
    (view,) = (view for view in plain.buckets if view.bucket.name == "reduce layers.1 in backward")
    view = dataclasses.replace(view, bucket=dataclasses.replace(view.bucket, name=name, kind="all_reduce"))
    spans = (Span("replicate", "reduce", name, 0, 9), Span("shard", "gather", "gather layers.0", 0, 9))
    timeline = dataclasses.replace(plain.timeline, spans=spans, seconds=9)
    page = show(small_report(buckets=(view,), timeline=timeline))
    assert texts(page, ".span text") == [name, "layers.0"]
    swatch = page.js("getComputedStyle(document.querySelector('#buckets-table .swatch')).backgroundColor")
    assert swatch == page.js("getComputedStyle(document.querySelector('.span .reduce')).fill")


def test_zoom_and_pan(show: Show) -> None:
    """Keys, buttons, wheel and drag change the view of both plots; without focus the wheel scrolls the page."""
    page = show(small_report())
    page.click("#zoom [data-key='+']")
    assert texts(page, "#range") == ["3.13 ms to 9.38 ms"]
    ticks = [texts(page, f"#{plot}-plot text") for plot in ("timeline", "memory")]
    assert {t for t in ticks[0] if t.endswith(" ms")} == {t for t in ticks[1] if t.endswith(" ms") and "peak" not in t}
    page.js("document.activeElement.blur(); byId('timeline').scrollIntoView()")
    page.wheel("#timeline-plot", -300)
    assert texts(page, "#range") == ["3.13 ms to 9.38 ms"]
    page.js("byId('timeline-plot').focus()")
    page.wheel("#timeline-plot", -300)
    page.wait("byId('range').textContent !== '3.13 ms to 9.38 ms'")
    page.key("0")
    assert texts(page, "#range") == ["0 to 12.5 ms"]
    page.key("+")
    page.key("ArrowRight")
    assert texts(page, "#range") == ["4.06 ms to 10.3 ms"]
    page.key("ArrowLeft")
    page.key("-")
    assert texts(page, "#range") == ["0 to 12.5 ms"]
    page.key("+")
    left, top, _, _ = page.box("#memory-plot")
    for kind, x in (("mousePressed", 400), ("mouseMoved", 350), ("mouseMoved", 300), ("mouseReleased", 300)):
        page.mouse(kind, left + x, top + 100, clickCount=1)
    page.settle()
    assert float(texts(page, "#range")[0].split()[0]) > 3.5


def test_bucket_and_span_select_each_other(show: Show) -> None:
    page = show(small_report())
    page.click("tr[data-bucket='gather layers.0 in forward'] button")
    assert page.js("document.querySelector('.span.chosen').spans[0].lane") == "communication"
    assert page.js("document.querySelector('.span.same').spans[0].kind") == "exposed", "so is the wait for it"
    assert texts(page, "#span h3") == ["gather layers.0 in forward"]
    page.click(".span .reduce")
    assert texts(page, "tr.selected th") == ["reduce layers.1 in backward"]
    assert page.js("document.querySelector('tr.selected button').ariaPressed") == "true"
    page.key("Escape")
    assert not texts(page, "tr.selected")
    assert not texts(page, ".span.chosen")


def test_timeline_by_keyboard(show: Show) -> None:
    """All spans are reachable, and the selected one is announced."""
    page = show(small_report())
    page.js("byId('timeline-plot').focus()")
    page.key("e")
    assert texts(page, "#tooltip") == [
        "waiting for gather layers.0 in forward\nstart 0, duration 2.00 ms\nnothing to compute yet"
    ]
    assert texts(page, "tr.selected th") == ["gather layers.0 in forward"]
    names = []
    for key in ("]", "]", "[", "ArrowDown", "ArrowDown", "ArrowUp", "e", "e"):
        page.key(key)
        names.append(page.js("(s => `${s.lane} ${s.start}`)(document.querySelector('.span.chosen').spans[0])"))
    assert names == [
        "compute 0.002", "compute 0.005", "compute 0.002",
        "communication 0.002", "communication between nodes 0.01", "communication 0.008",
        "compute 0.012", "compute 0",
    ]  # fmt: skip
    assert page.js("!byId('tooltip').hidden")
    page.key("Escape")
    assert page.js("byId('tooltip').hidden")


def test_overlapping_spans_are_stacked(show: Show) -> None:
    overlapping = (
        Span("shard", "gather", "a", 0, 2),
        Span("shard", "reduce", "b", 1, 3),
        Span("shard", "gather", "c", 2, 3),
    )
    page = show(small_report(timeline=Timeline(overlapping, (), 3, 0, 4, 3, 0, ""), memory=None))
    tops = page.js("[...document.querySelectorAll('.span')].map(g => +g.firstChild.getAttribute('y'))")
    assert tops[0] == tops[2] < tops[1]


def test_memory(show: Show) -> None:
    page = show(small_report())
    assert texts(page, ".peak-text") == ["peak 9.00 GiB at 8.00 ms"]
    assert texts(page, "#memory-summary") == ["The peak is 9.00 GiB, at 8.00 ms."]
    assert texts(page, ".groups li span") == ["saved for backward", "6.00 GiB", "gathered parameters", "3.00 GiB"]
    assert texts(page, "#alive-table tbody th") == ["layers.1.saved", "layers.1.weight", "layers.0.saved"]
    assert page.js("document.querySelector('.curve').getAttribute('d').split('V').length") == 15


def test_memory_without_timeline(show: Show) -> None:
    page = show(small_report(timeline=None))
    assert texts(page, ".peak-text") == ["peak 9.00 GiB at 8.00 ms"]
    assert texts(page, "#range") == ["0 to 12.0 ms"]


def test_sorting(show: Show) -> None:
    """Numbers sort by value, largest first at the first click; text sorts naturally."""
    page = show(small_report())
    bytes_header = "#buckets-table th:nth-child(3)"
    page.click(f"{bytes_header} button")
    assert page.js(f"document.querySelector('{bytes_header}').ariaSort") == "descending"
    sizes = page.js("[...document.querySelectorAll('#buckets-table tbody td:nth-child(3)')].map(n => +n.dataset.value)")
    assert sizes == sorted(sizes, reverse=True)
    page.key("Enter")
    assert page.js(f"document.querySelector('{bytes_header}').ariaSort") == "ascending"
    page.click("#buckets-table th:first-child button")
    names = texts(page, "#buckets-table tbody th")
    assert names == sorted(names)
    assert page.js("document.querySelectorAll('#buckets-table [aria-sort]:not([aria-sort=none])').length") == 1


def test_filter(show: Show) -> None:
    page = show(small_report())
    page.js("document.querySelector('[data-filters]').focus()")
    page.type("backward layers.1")
    shown = page.js("[...document.querySelectorAll('#buckets-table tbody tr')].filter(r => !r.hidden).length")
    assert shown < 5
    assert texts(page, "#buckets output") == [f"{shown} of 5 buckets"]


@pytest.mark.slow
def test_keyboard_reaches_every_control(show: Show) -> None:
    """Tab visits every mouse control in document order."""
    page = show(small_report(error="PassError: reorder"))
    controls = 'a, button, input, select, summary, [tabindex="0"]'
    page.js(f"window.wanted = [...document.querySelectorAll('{controls}')]; 0")
    for _ in range(page.js("wanted.length") + 1):
        page.key("Tab")
        page.js("(window.visited ??= []).push(document.activeElement)")
    assert page.js("wanted.filter(node => !visited.includes(node)).map(node => node.outerHTML.slice(0, 200))") == []
    assert page.js("visited.slice(0, wanted.length).every((node, i) => node === wanted[i])")
    assert (
        page.js("visited.filter(n => n !== document.body && getComputedStyle(n).outlineStyle === 'none').length") >= 0
    )
    assert page.js("wanted.every(node => node.textContent.trim() || node.ariaLabel || node.labels?.length)"), (
        "all have names"
    )


@pytest.mark.slow
def test_focus_is_visible(show: Show) -> None:
    page = show(small_report())
    for _ in range(25):
        page.key("Tab")
        assert page.js("getComputedStyle(document.activeElement).outlineStyle") in ("solid", "auto")


CONTRAST = """(() => {
  const parse = (color) => { const n = color.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const light = (color) => {
    const [r, g, b] = color.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const own = parse(getComputedStyle(node).backgroundColor);
    return own[3] === 1 || !node.parentElement ? own.slice(0, 3) : over(own, behind(node.parentElement));
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.matches("script, .skip")) continue;
    const svg = node instanceof SVGElement;
    const style = getComputedStyle(node);
    const rect = node.closest(".span")?.querySelector("rect");
    const back = rect ? parse(getComputedStyle(rect).fill).slice(0, 3) : behind(node);
    const color = parse(svg ? style.fill : style.color);
    const front = over([...color.slice(0, 3), color[3] * Number(style.opacity)], back);
    const [low, high] = [light(front), light(back)].sort((a, b) => a - b);
    count++;
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) bad.push(`${contrast.toFixed(2)} ${node.outerHTML.slice(0, 80)}`);
  }
  return [count, bad];
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.slow
def test_contrast(show: Show, dark: bool) -> None:
    """All text has WCAG AA contrast for small text, also when marked, selected or changed."""
    page = show(small_report(error="PassError: reorder"), dark=dark)
    background = page.js("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark
    compare(page, 0, 1)
    page.js("byId('find').value = '%0'; find()")
    page.click("tr[data-bucket] button")
    page.settle()
    count, bad = page.js(CONTRAST)
    assert count > 200
    assert bad == []


@pytest.mark.parametrize("width", [800, 1280])
def test_no_overflow(show: Show, width: int) -> None:
    page = show(small_report(), width=width)
    assert page.js("document.documentElement.scrollWidth") == width


def test_failure_is_an_alert(show: Show) -> None:
    page = show(small_report(buckets=(), timeline=None, memory=None, regions=(), error=f"PassError: {HOSTILE}"))
    assert texts(page, "[role=alert] pre") == [f"PassError: {HOSTILE}"]
    assert page.js("document.querySelector('main').firstElementChild.role") == "alert"
    assert len(texts(page, ".missing")) == 4


def test_126_layers(show: Show) -> None:
    """20,000 lines and a thousand spans: the page is ready within seconds, and its document stays small."""
    report = deep_report()
    start = time.monotonic()
    page = show(report)
    assert time.monotonic() - start < 15
    nodes = page.js("document.querySelectorAll('*').length")
    assert nodes < 15_000
    start = time.monotonic()
    page.js("byId('expand').checked = true")
    assert compare(page, 1, 6) == {"removed": 0, "added": 0, "changed": 252, "moved": 126}
    assert time.monotonic() - start < 10
    while page.js("(b => (b?.click(), Boolean(b)))(document.querySelector('.gap button'))"):
        pass
    page.js("byId('diff-scroll').scrollTop = 200000")
    page.settle()
    assert len(texts(page, ".row")) < 200
    assert page.js("document.querySelectorAll('.span').length") < 2000
    page.key("e")
    assert page.js("document.querySelectorAll('*').length") < nodes + 2500
