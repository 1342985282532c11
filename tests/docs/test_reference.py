"""Names and files in the manual exist, and the manual covers all public names."""

from __future__ import annotations

import ast
import pkgutil
import re
from types import ModuleType

import pytest

import graphshard
import graphshard.passes
from tests.docs.test_pages import PAGES, ROOT
from tests.layers import FLOORS
from tests.upstream.counterparts import UPSTREAM

PACKAGES = [name for floor in FLOORS for name in floor if (ROOT / "graphshard" / name).is_dir()]
# Files by their path from the root, or from the package whose docstring names them.
FILE = re.compile(r"`([\w/]+\.py)`")

SOURCES = ("graphshard", "passes", "tests", "benchmarks", "examples")
WRITTEN = {"forward.py", "backward.py", "train.py"}  # in dumps; the script of the README


def documented() -> list[str]:
    """Return the dotted names that the site documents from docstrings."""
    return [name for page in PAGES for name in re.findall(r"^::: (\S+)$", (ROOT / page).read_text(), re.MULTILINE)]


def docstring(package: str) -> str:
    """Return the docstring of a package, or of a top-level module."""
    path = ROOT / "graphshard" / package
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text())) or ""


@pytest.mark.parametrize("module", [graphshard, graphshard.passes], ids=lambda module: module.__name__)
def test_public_names_are_in_the_reference(module: ModuleType) -> None:
    found = []
    for value in map(pkgutil.resolve_name, documented()):
        found += vars(value).values() if isinstance(value, ModuleType) else [value]
    # By identity: a public function may have the name of a package.
    missing = [name for name in module.__all__ if not any(getattr(module, name) is value for value in found)]
    assert not missing


def test_every_package_describes_its_design() -> None:
    assert [f"graphshard.{package}" for package in PACKAGES] == [
        name for name in documented() if name.removeprefix("graphshard.") in PACKAGES
    ]


def test_table_of_packages() -> None:
    """The table equals the list that imports are checked with, with the first lines of docstrings."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)` \| (.+) \|$", text, re.MULTILINE)
    numbered = list(enumerate(FLOORS, start=1))
    assert rows == [
        (str(number), name, docstring(name).splitlines()[0]) for number, floor in reversed(numbered) for name in floor
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_files_that_a_docstring_names(package: str) -> None:
    folders = [ROOT, ROOT / "graphshard", ROOT / "graphshard" / package]
    missing = [name for name in FILE.findall(docstring(package)) if not any((at / name).is_file() for at in folders)]
    assert not missing


def test_environment_variables() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "graphshard").rglob("*.py"))
    used = set(re.findall(r"GRAPHSHARD_[A-Z_]*[A-Z]", sources))
    assert set(re.findall(r"^\| `(GRAPHSHARD_\w+)`", page, re.MULTILINE)) == used


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_files_that_a_page_names(page: str) -> None:
    ours = {path.name for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}
    for name in set(FILE.findall((ROOT / page).read_text())) - WRITTEN - UPSTREAM.keys():
        assert (ROOT / name).is_file() or (ROOT / "graphshard" / name).is_file() or name in ours, name
