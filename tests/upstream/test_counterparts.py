"""Checks of `counterparts.py`: the tests exist, docstrings name their counterparts, and the manual has the tables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.upstream.counterparts import UPSTREAM, tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# (PyTorch's test, test here)
PAIRS = {
    (name, test)
    for tests in UPSTREAM.values()
    for name, where in tests.items()
    for test in ([] if isinstance(where, str) else where)
}


def _docstrings(file: Path) -> dict[str, str]:
    """Return the tests of a file with their docstrings."""
    nodes = ast.parse(file.read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: ast.get_docstring(node) or "" for node in functions}


@pytest.mark.parametrize("test", sorted({test for _, test in PAIRS}))
def test_the_counterpart_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in _docstrings(ROOT / file)


def test_docstrings_name_the_counterparts() -> None:
    """Tests in this folder name exactly the tests of PyTorch that they are counterparts of."""
    named = set()
    for file in sorted(HERE.glob("test_*.py")):
        if file != Path(__file__):
            for test, text in _docstrings(file).items():
                found = re.findall(r"`(Test\w+\.test_\w+)`", text)
                assert found, f"{file.name}::{test} names no test of PyTorch"
                named |= {(name, f"tests/upstream/{file.name}::{test}") for name in found}
    assert named == {(name, test) for name, test in PAIRS if test.startswith("tests/upstream/")}


def test_the_manual_has_these_tables() -> None:
    text = (ROOT / "docs" / "upstream.md").read_text()
    assert tables() in text, f"docs/upstream.md must have\n{tables()}"
