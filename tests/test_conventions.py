"""Conventions of CONTRIBUTING for passes, checked for every pass."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from graphshard import passes
from graphshard.codec.converter import PASSES, decode_pass, encode_pass
from graphshard.passes import Pass
from tests.codec.test_round_trip import filled

HERE = Path(__file__).parent
PASSES_DIR = HERE.parent / "passes"
# Files of `passes` without a pass.
HELPERS = ("__init__", "base", "vocabulary_loss")
SOURCES = sorted(path for path in PASSES_DIR.rglob("*.py") if path.stem not in HELPERS)
# Maximum length of a golden in a test; longer ones are files.
GOLDEN_LINES = 25


def file_of_tests(source: Path) -> Path:
    """Return the test file of a pass: at the same place under `tests/passes`."""
    return HERE / "passes" / source.relative_to(PASSES_DIR).with_name(f"test_{source.name}")


def passes_of(source: Path) -> list[type[Pass]]:
    """Return the passes that a file defines."""
    name = ".".join(source.relative_to(PASSES_DIR).with_suffix("").parts)
    module = importlib.import_module(f"graphshard.passes.{name}")
    classes = inspect.getmembers(module, inspect.isclass)
    return [kind for _, kind in classes if issubclass(kind, Pass) and kind.__module__ == module.__name__]


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem)
def source(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def kind(source: Path) -> type[Pass]:
    """Return the pass of a file."""
    (found,) = passes_of(source)
    return found


def inline_goldens(test_file: Path) -> list[str]:
    """Return the goldens of `assert_expected_inline`."""
    calls = (node for node in ast.walk(ast.parse(test_file.read_text())) if isinstance(node, ast.Call))
    inline = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "assert_expected_inline"]
    texts = [node.args[1].value for node in inline if isinstance(node.args[1], ast.Constant)]
    assert len(texts) == len(inline), f"{test_file.name}: a golden must be a literal"
    return texts


def test_a_file_has_one_pass(source: Path) -> None:
    """`print(Pipeline())` shows the first line of its docstring, which must be a sentence."""
    assert len(passes_of(source)) == 1
    assert (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0].endswith((".", ":"))


def test_it_is_in_the_catalog(source: Path, kind: type[Pass]) -> None:
    """The exports of `graphshard.passes` and the list in its docstring agree."""
    assert kind.__name__ in passes.__all__
    assert getattr(passes, kind.__name__) is kind
    listed = re.findall(r"^    (\w+)  +\S", passes.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in SOURCES)


def test_the_catalog_has_nothing_else() -> None:
    defined = {kind for source in SOURCES for kind in passes_of(source)}
    assert {getattr(passes, name) for name in passes.__all__} == {Pass, *defined}
    assert set(PASSES.values()) == defined
    names = [kind.name for kind in defined]
    assert len(set(names)) == len(names)


def test_it_is_a_frozen_dataclass_with_a_name(kind: type[Pass]) -> None:
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", kind.name)
    assert kind.__doc__
    assert re.match(r"(Requires|Ensures|Preserves): ", kind.__doc__), "say what it requires, ensures and preserves"


def test_it_has_tests_and_a_golden(source: Path) -> None:
    test_file = file_of_tests(source)
    assert test_file.exists()
    files = list(test_file.parent.glob(f"{test_file.stem}*.txt"))
    assert inline_goldens(test_file) or files, "compare the printed program with assert_expected_inline, or with a file"


def test_no_tests_without_a_pass() -> None:
    assert set((HERE / "passes").rglob("test_*.py")) == set(map(file_of_tests, SOURCES))


def test_goldens_in_tests_are_short() -> None:
    """A test should be readable at once."""
    texts = [text for path in (HERE / "passes").rglob("test_*.py") for text in inline_goldens(path)]
    assert max(len(text.splitlines()) for text in texts) <= GOLDEN_LINES


def test_it_can_be_replayed(kind: type[Pass]) -> None:
    """`graphshard repro` builds it from a stage's file, with every option; `tests/debug/test_repro.py` runs it."""
    step = filled(kind)
    found = decode_pass(encode_pass(step))
    assert (found.step, found.name, found.problem) == (step, kind.name, "")
