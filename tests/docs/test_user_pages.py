"""Pages are for readers: no test files, commits or dates; tables that fit a phone; words that people search for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import diagrams
from graphshard.cli.main import _parser
from tests.docs.test_pages import PAGES, ROOT

EVIDENCE = "docs/evidence/"
USER_PAGES = [page for page in PAGES if page.startswith("docs/") and not page.startswith(EVIDENCE)]
# Most characters of a table's cell, as shown.
CELL = 200
LINK = re.compile(r"\]\([^)]*\)")
HIDDEN = re.compile(r"<!--.*?-->", re.DOTALL)
# A file of tests, a commit, a date.
NOT_FOR_USERS = re.compile(r"\btests/\w|\btest_\w+\.py|\bat [0-9a-f]{7}\b|\bcommit `?[0-9a-f]{7}|\b\w+ember 20\d\d")

# What people type, and the first page that they need.
SEARCHED = {
    "compile cache": "how_to/cache.md",
    "external FX graphs": "how_to/foreign_graphs.md",
    "gradient accumulation": "how_to/train.md",
    "hang": "how_to/troubleshooting.md",
    "HSDP": "how_to/parallelism.md",
    "loss differs": "how_to/troubleshooting.md",
    "multi-node": "integrations/nodes.md",
    "NCCL": "how_to/troubleshooting.md",
    "no_sync": "how_to/train.md",
    "OOM": "how_to/troubleshooting.md",
    "out of memory": "how_to/troubleshooting.md",
    "recompile": "how_to/train.md",
    "resume": "how_to/state.md",
    "throughput": "how_to/throughput.md",
    "variable length": "how_to/train.md",
    "wandb": "how_to/throughput.md",
}


def shown(page: str) -> str:
    """Return the text of a page without hidden blocks and targets of links."""
    return LINK.sub("]", HIDDEN.sub("", (ROOT / page).read_text()))


def headings(page: str) -> str:
    return "\n".join(re.findall(r"^#+ .*", shown(page), re.MULTILINE))


@pytest.mark.parametrize("page", USER_PAGES)
def test_no_test_files_commits_or_dates(page: str) -> None:
    """They are in `docs/evidence/`."""
    assert not NOT_FOR_USERS.findall(shown(page))


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_cells_of_tables_fit(page: str) -> None:
    rows = re.findall(r"^\|(.*)\|$", shown(page), re.MULTILINE)
    long = [cell for row in rows for cell in row.split(" | ") if len(cell.strip()) > CELL]
    assert not long


@pytest.mark.parametrize(("words", "page"), SEARCHED.items())
def test_words_that_people_search_for_are_in_a_heading(words: str, page: str) -> None:
    """Headings count most in the search of the site, which `test_site.py` tries in a browser."""
    assert words.lower() in headings(f"docs/{page}").lower()
    assert (ROOT / "docs" / page).is_file()


@pytest.mark.parametrize("draw", [diagrams.pipeline, diagrams.unit, diagrams.hsdp], ids=lambda draw: draw.__name__)
def test_diagrams_are_current(draw: Callable[[], str]) -> None:
    """`python -m benchmarks.diagrams` writes them."""
    assert (ROOT / "docs/images" / f"{draw.__name__}.svg").read_text() == draw()


def test_every_command_and_option_is_on_a_page() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        _, _, section = page.partition(f"\n## {name}\n")
        section = section.partition("\n## ")[0]
        flags = [flag for action in command._actions for flag in action.option_strings if flag not in ("-h", "--help")]
        assert not [flag for flag in flags if flag not in section], name


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [Path(page).relative_to("docs") for page in PAGES if page.startswith("docs/")]
    assert not [page for page in pages if f": {page}\n" not in navigation]
