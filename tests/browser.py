"""A real headless browser, driven by the DevTools protocol through a pipe, with real keys and clicks.

Chromium is the only dependency.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
        """Run a command and return its result; events that arrive meanwhile are kept in `events`."""
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
    """A tab that shows one report."""

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
        """Evaluate an expression and return its value; a promise is awaited."""
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]["exception"]["description"]
        return reply["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until the page is drawn."""
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
        """Return left, top, width and height of an element; scroll it to the middle if it is out of view."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{node}.checkVisibility() && {node}.scrollIntoView({{block: 'center'}})")
        return tuple(self.js(f"(b => [b.x, b.y, b.width, b.height])({node}.getBoundingClientRect())"))

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
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
        """Return exceptions, console errors, policy violations, and requests for anything but the file."""
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


# Opens a report, see `tests/debug/conftest.py`.
Show = Callable[..., Page]


def texts(page: Page, selector: str) -> list[str]:
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent.trim())")
