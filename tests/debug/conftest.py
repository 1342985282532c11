"""A browser, and reports opened in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphshard.debug.html_report import Report, render
from tests.browser import Browser, Page, Show


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


OpenText = Callable[..., Page]


@pytest.fixture
def open_text(browser: Browser, tmp_path: Path) -> Iterator[OpenText]:
    """Yield `open_text(html, **options)`, which opens a page. At the end no page may have had problems."""
    pages = []

    def open_page(html: str, **options: Any) -> Page:
        file = tmp_path / "page.html"
        file.write_text(html)
        pages.append(Page(browser, **options))
        pages[-1].open(file)
        return pages[-1]

    yield open_page
    problems = [page.problems() for page in pages]
    for page in pages:
        page.close()
    assert problems == [[] for _ in pages]


@pytest.fixture
def show(open_text: OpenText) -> Show:
    """Return `show(report)`, which opens the report and waits for its diff."""

    def open_page(report: Report, **options: Any) -> Page:
        page = open_text(render(report), **options)
        page.wait("!document.getElementById('diff-summary')?.textContent.startsWith('Comparing')")
        page.settle()
        return page

    return open_page
