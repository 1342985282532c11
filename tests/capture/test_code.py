"""The hash of a model's code: what changes it, what does not, and how little is parsed for it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from graphshard.capture.code import code_hash, hash_of

MODEL = """
import functools
import math
from torch import nn

def doubled(function):
    @functools.wraps(function)
    def call(*args):
        return {factor} * scaled(function(*args))
    return call

def scaled(x):
    return x * {scale}

def helper(x):
    return x.{method}()  # {comment}

class Net(nn.Module):
    scale = {scale}

    @doubled
    def forward(self, x):
        return helper(x) * self.scale * math.pi

act, other = lambda x: x + {scale}, lambda x: x - {scale}
"""


def imported(folder: Path, method: str = "relu", comment: str = "first", scale: str = "1", factor: str = "2") -> Any:
    """The module of `MODEL` in a file of its own, as a fresh process would import it."""
    name, path = "nets", folder / "nets.py"
    folder.mkdir(exist_ok=True)
    path.write_text(MODEL.format(method=method, comment=comment, scale=scale, factor=factor))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fresh_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`imported`, with its module among `sys.modules` for the test."""

    def load(*args: Any, **options: Any) -> Any:
        module = imported(*args, **options)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    return load


def test_code_hash_follows_functions_but_not_comments(tmp_path: Path, fresh_modules: Callable[..., Any]) -> None:
    """Through a decorator that wraps forward, and in it, too."""
    before = code_hash(fresh_modules(tmp_path).Net())
    assert code_hash(fresh_modules(tmp_path, comment="another comment, longer than the first").Net()) == before
    assert code_hash(fresh_modules(tmp_path, method="tanh").Net()) != before
    assert code_hash(fresh_modules(tmp_path, scale="2").Net()) != before
    assert code_hash(fresh_modules(tmp_path, factor="3").Net()) != before


def test_lambdas_are_told_apart_by_what_they_are_compiled_to(tmp_path: Path, fresh_modules: Callable[..., Any]) -> None:
    """In the user's files and in those of packages."""
    for folder in (tmp_path / "own", tmp_path / "site-packages"):
        module = fresh_modules(folder)
        assert hash_of([module.act]) != hash_of([module.other])
        before = hash_of([module.act])
        assert hash_of([fresh_modules(folder).act]) == before
        assert hash_of([fresh_modules(folder, scale="2").act]) != before


def test_files_of_installed_packages_are_compared_whole_without_parsing(
    tmp_path: Path, fresh_modules: Callable[..., Any]
) -> None:
    """A model of a library refers to hundreds of its functions; the file's place must not matter."""
    here, elsewhere, changed = (tmp_path / name / "site-packages" for name in ("a", "b", "c"))
    for folder in (here, elsewhere, changed):
        folder.parent.mkdir()
    with mock.patch("graphshard.capture.code.ast.parse", side_effect=AssertionError("parsed")):
        before = code_hash(fresh_modules(here).Net())
        assert code_hash(fresh_modules(elsewhere).Net()) == before
        assert code_hash(fresh_modules(changed, comment="a patched package").Net()) != before


def test_each_file_is_parsed_once(tmp_path: Path, fresh_modules: Callable[..., Any]) -> None:
    net = fresh_modules(tmp_path, comment="parsed once").Net()
    with mock.patch("graphshard.capture.code.ast.parse", side_effect=ast.parse) as parse:
        assert code_hash(net) == code_hash(net)
    assert parse.call_count == 1


def test_functions_without_a_source_are_what_they_are_compiled_to() -> None:
    """Those within them, too."""

    def made(text: str) -> Any:
        space: dict[str, Any] = {"__name__": "session"}
        exec(text, space)
        return space["f"]

    text = "def f(x):\n    return [y {} 1 for y in x if y in {{'a', 'b'}}]"
    assert hash_of([made(text.format("+"))]) == hash_of([made("\n" + text.format("+"))])
    assert hash_of([made(text.format("+"))]) != hash_of([made(text.format("-"))])
