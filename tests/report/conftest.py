"""A browser, and reports that are open in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphshard.report.page import Report, render
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
