"""The site in a browser: its search finds the page that people need, and pages fit a phone."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.browser import Browser, Page
from tests.debug.conftest import browser as browser  # a fixture
from tests.docs.test_pages import ROOT
from tests.docs.test_user_pages import SEARCHED

pytestmark = pytest.mark.slow

# The page that people need is among the first results.
FIRST = 5
TYPE = """
input.focus();
input.value = %s;
for (const kind of ["keyup", "input"]) input.dispatchEvent(new Event(kind, {bubbles: true}));
"""


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site, and serve it: search needs a server."""
    pytest.importorskip("material")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def opened(browser: Browser, url: str, width: int) -> Page:
    page = Page(browser, width)
    page.call("Page.navigate", url=url)
    page.wait("document.readyState === 'complete' && location.protocol === 'http:'")
    return page


def test_search(browser: Browser, address: str) -> None:
    page = opened(browser, f"{address}index.html", 1400)
    page.js("document.querySelector('#__search').checked = true")
    found = {}
    for words in SEARCHED:
        page.js(f"(input => {{ {TYPE % json.dumps(words)} }})(document.querySelector('.md-search__input'))")
        page.js("new Promise(done => setTimeout(done, 700))")
        links = page.js("[...document.querySelectorAll('.md-search-result__item > a')].map(a => a.pathname)")
        found[words] = list(dict.fromkeys(link.removeprefix("/").replace(".html", ".md") for link in links))[:FIRST]
    page.close()
    assert not {words: found[words] for words, wanted in SEARCHED.items() if wanted not in found[words]}


@pytest.mark.parametrize("name", ["index", "reference/supported", "reference/functions", "how_to/train"])
def test_pages_fit_a_phone(browser: Browser, address: str, name: str) -> None:
    """Wide tables and code scroll by themselves."""
    page = opened(browser, f"{address}{name}.html", 480)
    assert page.js("document.documentElement.scrollWidth") == 480
    page.close()
