"""The HTML report: what is in the file, and what the page does in a real browser.

The browser is driven over its own protocol, through a pipe: keys and clicks are real ones, and nothing has to be
installed but Chromium.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import json
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphshard.report import (
    Alive,
    BucketView,
    Memory,
    MemoryPoint,
    RegionView,
    Report,
    Span,
    StageView,
    Timeline,
    format_bytes,
    format_seconds,
    render,
)

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'{{ 7 * 7 }}<!--"

BEFORE = """\
forward:
  %0: f32[8, 64] = param:layers.0.weight
  %1: f32[4, 64] = input:0
* %2: f32[64, 64] = all_gather_into_tensor(%0, 8, shard)  # layers.0
  %3: f32[64, 64] = wait_tensor(%2)  # layers.0
  %4: f32[64, 64] = t(%3)  # layers.0
  %5: f32[4, 64] = mm(%1, %4)  # layers.0
  %6: f32[4, 64] = relu(%5)
  %7: f32[4, 64] = detach(%6)
  %8: f32[4, 64] = neg(%7)
  %9: f32[4, 64] = cos(%8)
  %10: f32[4, 64] = sin(%9)
  %11: f32[4, 64] = exp(%10)
  %12: f32[4, 64] = abs(%11)
  %13: f32[4, 64] = log(%12)
  return %13 as output:0
"""
# The cast %20 is added, %2 sends its result, %7 is gone, %13 moves up, %8 reads another value.
AFTER = """\
forward:
  %0: f32[8, 64] = param:layers.0.weight
  %1: f32[4, 64] = input:0
  %20: bf16[8, 64] = _to_copy(%0, dtype=bf16)  # layers.0
* %2: bf16[64, 64] = all_gather_into_tensor(%20, 8, shard)  # layers.0
  %3: f32[64, 64] = wait_tensor(%2)  # layers.0
  %4: f32[64, 64] = t(%3)  # layers.0
  %13: f32[4, 64] = log(%12)
  %5: f32[4, 64] = mm(%1, %4)  # layers.0
  %6: f32[4, 64] = relu(%5)
  %8: f32[4, 64] = neg(%6)
  %9: f32[4, 64] = cos(%8)
  %10: f32[4, 64] = sin(%9)
  %11: f32[4, 64] = exp(%10)
  %12: f32[4, 64] = abs(%11)
  return %13 as output:0
"""


def small_report(**changes: Any) -> Report:
    """Two layers: three gathers, two reductions, one of each exposed."""
    unfolded = "".join(f"  %{i}: f32[4] = relu(%{i - 1})\n" for i in range(30, 60))
    stages = (
        StageView("capture", 0, 1.5, 16, True, BEFORE, BEFORE, "00-capture.txt"),
        StageView("mixed-precision", 2, 0.002, 16, False, AFTER, AFTER, "01-mixed-precision.txt"),
        StageView("bucket", 5, 0.03, 46, True, AFTER + "  ... 30 times\n", AFTER + unfolded),
        StageView("reorder", 0, 0.0004, 46, True, AFTER + "  ... 30 times\n", AFTER + unfolded),
    )
    ms = 1e-3
    gather0 = Span("shard", "gather", "gather layers.0 in forward", 0, 2 * ms, "1.00 MiB over 8 ranks")
    spans = (
        gather0,
        Span("compute", "exposed", gather0.name, 0, 2 * ms, "nothing to compute yet"),
        Span("compute", "compute", "region_0", 2 * ms, 5 * ms, "16 ops in layers.0"),
        Span("shard", "gather", "gather layers.1 in forward", 2 * ms, 4 * ms),
        Span("compute", "compute", "region_0", 5 * ms, 8 * ms, "16 ops in layers.1"),
        Span("shard", "gather", "gather layers.1 in backward", 8 * ms, 8.5 * ms),
        Span("compute", "compute", "region_1", 8 * ms, 12 * ms),
        Span("replicate", "reduce", "reduce layers.1 in backward", 10 * ms, 11 * ms),
        Span("replicate", "reduce", "reduce layers.0 in backward", 12 * ms, 12.5 * ms),
        Span("compute", "exposed", "reduce layers.0 in backward", 12 * ms, 12.5 * ms),
    )
    timeline = Timeline(
        spans,
        (("forward", 0, 8 * ms), ("backward", 8 * ms, 12.5 * ms)),
        12.5 * ms,
        10 * ms,
        6 * ms,
        2.5 * ms,
        "H100, 400 GB/s per axis, 60 % of peak FLOP/s.",
    )
    buckets = tuple(
        BucketView(
            span.name,
            span.kind,
            span.name.rsplit(" ", 1)[-1],
            (f"{span.name.split()[1]}.weight",),
            (f"{span.name.split()[1]}.bias",) if span.kind == "reduce" else (),
            int((span.end - span.start) * 2**29),
            "bf16",
            span.lane,
            "after 12 of 340 ops, in layers.0",
            "after 30 of 340 ops, in layers.1",
            "" if span.start == 0 else "region_0",
            span.end - span.start,
            2 * ms if span.start == 0 else 0.0,
        )
        for span in spans
        if span.lane != "compute"
    )
    memory = Memory(
        tuple(MemoryPoint(i * ms, int((1 + (i if i < 8 else 16 - i)) * 2**30)) for i in range(13)),
        9 * 2**30,
        8 * ms,
        (
            Alive("layers.1.saved", "saved for backward", 5 * 2**30),
            Alive("layers.1.weight", "gathered parameters", 3 * 2**30),
            Alive("layers.0.saved", "saved for backward", 2**30),
        ),
    )
    regions = (
        RegionView("region_0", "3f2a" * 16, 2, 16, "layers.0 to layers.1", 3 * ms, "region_0.txt", "region_0.py"),
        RegionView("region_1", "91bc" * 16, 1, 40, "layers.1", 4 * ms, "region_1.txt"),
    )
    facts = (("torch", "2.13.0"), ("mesh", "replicate 2, shard 8"), ("captured because", "first call"))
    report = Report("Blocks(2) on 16 ranks", facts, stages, buckets, timeline, memory, regions)
    return dataclasses.replace(report, **changes)


def deep_report(num_layers: int = 126, ops: int = 160) -> Report:
    """As large as the largest models: 20,000 lines, a thousand spans."""

    def stage(i: int) -> str:
        lines = ["forward:"]
        for layer in range(num_layers):
            for op in range(ops):
                n = layer * ops + op
                if i > 2 and op == 5:
                    lines.append(
                        f"* %{n}: bf16[8192, 1024] = all_gather_into_tensor(%{n - 1}, 8, shard)  # layers.{layer}"
                    )
                elif not (i == 4 and op == 50):
                    other = i if op == 7 else 0
                    lines.append(f"  %{n}: bf16[8192, 1024] = mul(%{n - 1}, {other})  # layers.{layer}.feed_forward.w1")
            if i > 5:
                lines.insert(len(lines) - 20, lines.pop())
        return "\n".join(lines) + "\n"

    names = [
        "capture",
        "decompose",
        "insert-collectives",
        "mixed-precision",
        "reshard",
        "partition",
        "bucket",
        "reorder",
    ]
    stages = tuple(
        StageView(name, 1000 * i, 0.4 * i + 0.1, 20_000 + i, i != 3, "\n".join(text.splitlines()[:400]) + "\n", text)
        for i, (name, text) in enumerate((name, stage(i)) for i, name in enumerate(names))
    )
    spans: list[Span] = []
    buckets: list[BucketView] = []
    points: list[MemoryPoint] = []
    now = 0.0
    units = [(i, "forward") for i in range(num_layers)] + [(i, "backward") for i in reversed(range(num_layers))]
    for step, (i, phase) in enumerate(units):
        seconds = 0.004 if phase == "forward" else 0.008
        for k in range(3):
            part = seconds / 3
            spans.append(Span("compute", "compute", f"region_{k}", now + k * part, now + (k + 1) * part, f"layers.{i}"))
        for kind in ("gather", "reduce") if phase == "backward" else ("gather",):
            name = f"{kind} layers.{i} in {phase}"
            exposed = 0.0006 if i % 9 == 0 and kind == "gather" else 0.0
            end = now + seconds + exposed if exposed else now + seconds * (0.6 if kind == "gather" else 0.9)
            spans.append(
                Span("shard", kind, name, now + (0.3 * seconds if kind == "reduce" else 0), end, "1.70 GiB, 64 ranks")
            )
            if exposed:
                spans.append(Span("compute", "exposed", name, now + seconds, now + seconds + exposed, "too late"))
            params = tuple(f"layers.{i}.{m}.weight" for m in ("wq", "wk", "wv", "wo", "w1", "w2", "w3"))
            packed = tuple(f"layers.{i}.{m}.weight" for m in ("attention_norm", "ffn_norm"))
            hidden = ", ".join(f"region_{k} of layers.{i}" for k in range(3))
            buckets.append(
                BucketView(
                    name, kind, phase, params, packed, 1_700_000_000 + i, "bf16", "shard",
                    f"after {step * 40} of 20160 ops, in layers.{i}",
                    f"after {step * 40 + 40} of 20160 ops, in layers.{i}",
                    "" if exposed else hidden, seconds * 0.6, exposed,
                )
            )  # fmt: skip
            now += exposed
        now += seconds
        kept = step if phase == "forward" else 2 * num_layers - step
        points += [
            MemoryPoint(now - seconds * 0.9, (20 + kept // 3) * 2**30),
            MemoryPoint(now, (19 + kept // 3) * 2**30),
        ]
    compute = num_layers * 0.012
    phases = (("forward", 0.0, now / 3), ("backward", now / 3, now))
    timeline = Timeline(tuple(spans), phases, now, compute, 0.8 * compute, now - compute, "H100, 400 GB/s per axis.")
    peak = max(points, key=lambda point: point.num_bytes)
    alive = tuple(
        Alive(
            f"layers.{i % num_layers}.value_{i}",
            ["saved for backward", "gathered parameters", "shards"][i % 3],
            2**28 - i,
        )
        for i in range(1500)
    )
    regions = tuple(
        RegionView(
            f"region_{k}", f"{k:064x}", 252, 40 + k, f"layers.0 to layers.{num_layers - 1}", 0.0013, f"region_{k}.txt"
        )
        for k in range(12)
    )
    memory = Memory(tuple(points), peak.num_bytes, peak.time, alive)
    return Report(
        "Llama 3.1 405B on 8,192 ranks", small_report().facts, stages, tuple(buckets), timeline, memory, regions
    )


# The browser.


class Browser:
    """Headless Chromium, driven through a pipe by the DevTools protocol: JSON messages that end with a zero byte."""

    def __init__(self, program: str, profile: Path) -> None:
        # Chromium reads file descriptor 3 and writes 4.
        theirs_in, self._out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in os.pipe())
        self._in, theirs_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in os.pipe())
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
        command = [
            program,
            *flags.split(),
            "--disable-component-update",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._pid = os.posix_spawn(
            program,
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._id = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", /, timeout: float = 60, **params: Any) -> dict[str, Any]:
        """The result of one command; events that come meanwhile are kept in `events`."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            reply = self._read(end)
            if reply.get("id") != self._id:
                self.events.append(reply)
            elif "error" in reply:
                raise RuntimeError(f"{method}: {reply['error']}")
            else:
                return reply["result"]

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("Chromium does not answer" if not ready else "Chromium has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def close(self) -> None:
        try:
            self.call("Browser.close", timeout=10)
        except (TimeoutError, OSError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)


class Page:
    """One tab that shows one report."""

    def __init__(self, browser: Browser, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._target = target
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, file: Path) -> None:
        self.call("Page.navigate", url=file.as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def js(self, expression: str) -> Any:
        """The value of an expression, or of the promise it gives."""
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]["exception"]["description"]
        return reply["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def key(self, key: str, *, shift: bool = False) -> None:
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            " ": 32,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        common = {
            "key": key,
            "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper())),
            "modifiers": 8 if shift else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.settle()

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, which is scrolled into the middle if it is out of view."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{node}.checkVisibility() && {node}.scrollIntoView({{block: 'center'}})")
        return tuple(self.js(f"(b => [b.x, b.y, b.width, b.height])({node}.getBoundingClientRect())"))

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element."""
        left, top, width, height = self.box(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, left + width / 2, top + height / 2, clickCount=1)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **params: Any) -> None:
        button = {} if kind == "mouseWheel" else {"button": "left", "buttons": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button, **params)

    def wheel(self, selector: str, delta: int) -> None:
        left, top, width, _ = self.box(selector)
        self.mouse("mouseWheel", left + width / 2, top + 20, deltaX=0, deltaY=delta)
        self.settle()

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"clip": size | {"scale": 1}, "captureBeyondViewport": True} if whole else {}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **clip)["data"]))

    def problems(self) -> list[str]:
        """Exceptions, errors on the console, violated policies, and requests for anything but the file."""
        found = []
        for event in self._browser.events:
            params, method = event.get("params", {}), event.get("method")
            if event.get("sessionId") != self._session:
                continue
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["exception"]["description"])
            if method == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(str(params["args"]))
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
                ("file:", "data:", "blob:")
            ):
                found.append(f"request of {params['request']['url']}")
        return found

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None and os.environ.get("GRAPHSHARD_REQUIRE_BROWSER") == "1":
        pytest.fail("GRAPHSHARD_REQUIRE_BROWSER=1, but chromium is not on PATH")
    if program is None:
        pytest.skip("needs chromium on PATH")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


Show = Callable[..., Page]


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """`show(report)` opens the report and waits for its diff. At the end the page must not have had any problems."""
    pages = []

    def open_page(report: Report, **options: Any) -> Page:
        file = tmp_path / "report.html"
        file.write_text(render(report))
        pages.append(Page(browser, **options))
        pages[-1].open(file)
        pages[-1].wait("!document.getElementById('diff-summary')?.textContent.startsWith('Comparing')")
        pages[-1].settle()
        return pages[-1]

    yield open_page
    problems = [page.problems() for page in pages]
    for page in pages:
        page.close()
    assert problems == [[] for _ in pages]


def compare(page: Page, before: int, after: int) -> dict[str, int]:
    """Choose two stages as a reader does; what the summary counts."""
    page.js(
        f"for (const [id, value] of Object.entries({{ before: {before}, after: {after} }})) byId(id).value = value;"
        "byId('diff-summary').textContent = 'Comparing'; byId('after').dispatchEvent(new Event('change'))"
    )
    page.wait("byId('diff-summary').textContent !== 'Comparing'")
    return page.js(
        "Object.fromEntries([...document.querySelectorAll('[data-kind]')].map(n => [n.dataset.kind, +n.dataset.count]))"
    )


def lines(page: Page, kind: str, side: int) -> list[str]:
    """Lines of one kind that one side (0 left, 1 right) shows, from top to bottom, with their marks and numbers."""
    return page.js(
        f"[...document.querySelectorAll('.lines')[{side}].children].filter(n => n.classList.contains('{kind}'))"
        ".sort((m, n) => m.offsetTop - n.offsetTop).map(n => n.textContent.replace(/ +/g, ' ').trim())"
    )


def texts(page: Page, selector: str) -> list[str]:
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent.trim())")


# The file.


def test_hostile_names_are_text() -> None:
    stage = StageView(HOSTILE, 0, 1.0, 1, True, HOSTILE, HOSTILE + "\n", HOSTILE)
    plain = small_report()
    assert plain.timeline
    assert plain.memory
    report = Report(
        HOSTILE,
        ((HOSTILE, HOSTILE),),
        (stage, stage),
        (dataclasses.replace(plain.buckets[0], name=HOSTILE, params=(HOSTILE,), packed=(HOSTILE,), start=HOSTILE),),
        dataclasses.replace(
            plain.timeline, spans=(Span("shard", "gather", HOSTILE, 0, 1, HOSTILE),), assumptions=HOSTILE
        ),
        dataclasses.replace(plain.memory, alive=(Alive(HOSTILE, HOSTILE, 1),)),
        (RegionView(HOSTILE, HOSTILE, 1, 1, HOSTILE, 1.0, HOSTILE, HOSTILE),),
        HOSTILE,
    )
    page = render(report)
    assert "<img" not in page
    assert "onerror=alert(1)>" not in page
    assert page.count("</script>") == render(dataclasses.replace(plain, stages=(stage, stage), error="e")).count(
        "</script>"
    )


def test_links_cannot_run_scripts() -> None:
    region = RegionView("region_0", "key", 1, 1, "layers.0", 1.0, "javascript:alert(1)", "kernels/a b.py")
    page = render(small_report(regions=(region,)))
    assert 'href="javascript:' not in page
    assert 'href="kernels/a%20b.py"' in page


def test_nothing_is_loaded() -> None:
    page = render(small_report())
    assert not re.search(r"https?://|@import|\bsrc=|<iframe|<object", page)
    assert "default-src 'none'" in page
    assert set(re.findall(r"url\\(([^)]*)\\)", page)) <= {"#hatch"}


def test_equal_reports_are_equal_files() -> None:
    assert render(small_report()) == render(small_report())


def test_without_later_parts() -> None:
    """The failure comes first, and each missing part says so."""
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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
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


# The page.


def test_units_of_the_page_are_those_of_the_tables(show: Show) -> None:
    page = show(small_report())
    sizes = [0, 1023, 1536, 1023 * 1024, 80 * 2**30, 2**50, 999.6 * 1024]
    times = [0, 2e-6, 0.9999e-3, 0.0123, 0.456, 1.5, 3600, 9.996e-3]
    assert page.js(f"{sizes}.map(formatBytes)") == [format_bytes(size) for size in sizes]
    assert page.js(f"{times}.map(formatSeconds)") == [format_seconds(time) for time in times]


def test_default_diff_is_of_the_last_stages_that_differ(show: Show) -> None:
    page = show(small_report())
    assert page.js("[before.value, after.value]") == ["1", "2"]
    assert lines(page, "added", 1) == ["+ 17 ... 30 times"]


def test_diff(show: Show) -> None:
    """Removed, added, changed and moved lines, each with a mark of its own; %9 to %12 are equal."""
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
    """Left and right of the rows, read downwards, are the two texts, whatever they are; equal rows are equal."""
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
    """n and p go from change to change and stay at the ends; m goes to the other end of a move, and back."""
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
    long = dataclasses.replace(stages[1], full=AFTER + "  # " + "x" * 500, folded=AFTER + "  # " + "x" * 500)
    page = show(small_report(stages=(stages[0], long)))
    page.js("byId('diff-scroll').focus()")
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert page.js("[...document.querySelectorAll('.pane')].map(pane => pane.scrollLeft)") == [120, 120]


def test_expanding(show: Show) -> None:
    """The checkbox shows the whole text; the row of equal lines shows them."""
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
    stage = StageView("lower", 0, 1.0, 3, True, "", "forward:\n* %0: f32[] = g()\n> %1: f32[] = region_1(%0)\n")
    stage = dataclasses.replace(stage, folded=stage.full)
    page = show(small_report(stages=(dataclasses.replace(stage, full="", folded=""), stage)))
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
    assert texts(page, ".lane") == ["compute", "shard", "replicate"]
    assert "exposed 2.50 ms (25.0 % of compute)" in texts(page, "#timeline-summary")[0]
    assert page.js("getComputedStyle(document.querySelector('.span .exposed')).fill") == 'url("#hatch")'


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
    assert page.js("document.querySelector('.span.chosen').spans[0].lane") == "shard"
    assert page.js("document.querySelector('.span.same').spans[0].kind") == "exposed", "so is the wait for it"
    assert texts(page, "#span h3") == ["gather layers.0 in forward"]
    page.click(".span .reduce")
    assert texts(page, "tr.selected th") == ["reduce layers.1 in backward"]
    assert page.js("document.querySelector('tr.selected button').ariaPressed") == "true"
    page.key("Escape")
    assert not texts(page, "tr.selected")
    assert not texts(page, ".span.chosen")


def test_timeline_by_keyboard(show: Show) -> None:
    """All spans can be reached, and what is reached is told."""
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
        "shard 0.002", "replicate 0.01", "shard 0.008",
        "compute 0.012", "compute 0",
    ]  # fmt: skip
    assert page.js("!byId('tooltip').hidden")
    page.key("Escape")
    assert page.js("byId('tooltip').hidden")


def test_spans_that_overlap_lie_below_each_other(show: Show) -> None:
    overlapping = (
        Span("shard", "gather", "a", 0, 2),
        Span("shard", "reduce", "b", 1, 3),
        Span("shard", "gather", "c", 2, 3),
    )
    page = show(small_report(timeline=Timeline(overlapping, (), 3, 0, 4, 3, ""), memory=None))
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
    """Numbers sort by value, largest first at the first click; text sorts as people do."""
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


def test_keyboard_reaches_every_control(show: Show) -> None:
    """Tab visits, in the order of the document, all that a mouse can use."""
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


def test_focus_is_seen(show: Show) -> None:
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
def test_contrast(show: Show, dark: bool) -> None:
    """All text has the contrast that WCAG AA asks of small text, in marked, selected and changed places, too."""
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
def test_nothing_sticks_out(show: Show, width: int) -> None:
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
