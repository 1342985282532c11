"""Guarantees of the repository's layout."""

import ast
import builtins
import copy
import importlib
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import graphshard
from graphshard import errors

ROOT = Path(__file__).parents[1]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_rejects_passes_as_a_top_level_package():
    """The directory is at the top level, where `import passes` would load a second copy of every pass."""
    result = python("import passes")
    assert result.returncode != 0
    assert "ImportError: import graphshard.passes" in result.stderr


def test_passes_is_a_relative_symlink():
    link = ROOT / "graphshard" / "passes"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "passes")


def test_packages_of_a_checkout_without_links(tmp_path: Path) -> None:
    """As on Windows, where `graphshard/passes` is a text file."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    python_only = shutil.ignore_patterns("__pycache__", "*.json")
    shutil.copytree(ROOT / "graphshard", tmp_path / "graphshard", symlinks=True, ignore=python_only)
    shutil.copytree(ROOT / "passes", tmp_path / "passes", ignore=python_only)
    (tmp_path / "graphshard" / "passes").unlink()
    (tmp_path / "graphshard" / "passes").write_text("../passes")
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    built = tmp_path / "built" / "graphshard" / "passes"
    assert {path.relative_to(built) for path in built.rglob("*.py")} == {
        path.relative_to(ROOT / "passes") for path in (ROOT / "passes").rglob("*.py")
    }


def test_one_version_and_one_list_of_dependencies() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    recipe = (ROOT / "packaging" / "conda" / "meta.yaml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert f'version: "{version}"' in recipe
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\ncopyright: graphshard {version}, " in (ROOT / "mkdocs.yml").read_text()
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()
    listed = re.findall(r"    - ([\w-]+) ?([<>=.,\d]*)\n", recipe.partition("  run:\n")[2].partition("test:")[0])
    wanted = re.findall(r'^    "([\w-]+)(.*)",$', project.partition("\ndependencies = [")[2].partition("\n]")[0], re.M)
    assert [("torch" if name == "pytorch" else name, limits) for name, limits in listed[1:]] == wanted


def test_import_has_no_side_effects():
    """Importing graphshard starts no process group, no compiler and no logging."""
    result = python(
        "import sys, logging, torch.distributed as dist\n"
        "from graphshard import *\n"
        "print(dist.is_initialized(), 'torch._inductor.async_compile' in sys.modules, logging.root.handlers)"
    )
    assert result.stdout.split("\n")[0] == "False False []", result.stdout + result.stderr


def test_import_does_not_import_torch():
    """Neither do errors, which a launcher may catch; importing torch takes seconds."""
    result = python(
        "import sys, graphshard\n"
        "print(graphshard.errors.ArgumentError.__name__, graphshard.__version__, 'torch' in sys.modules)"
    )
    assert result.stdout == f"ArgumentError {graphshard.__version__} False\n", result.stderr


def test_type_checkers_see_all_public_names():
    """A public name is imported for type checkers, listed in `__all__`, and lazily loaded."""
    tree = ast.parse((ROOT / "graphshard" / "__init__.py").read_text())
    (block,) = (node.body for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block if isinstance(node, ast.ImportFrom) for alias in node.names}
    modules = [name for name, home in seen.items() if home == "graphshard"]  # need no separate import
    assert modules == ["checkpoint", "passes", "profiling"]
    for name in modules:
        del seen[name]
    assert seen == graphshard._HOME
    assert sorted(seen) == graphshard.__all__
    assert {*seen, "__version__"} <= set(dir(graphshard))


def test_packages_are_importable_as_attributes():
    result = python("import graphshard; print(graphshard.passes.Bucketing.name, graphshard.errors.__name__)")
    assert result.stdout == "bucket graphshard.errors\n", result.stderr


def test_names_can_be_replaced_for_a_test():
    for name in ("compile", "explain", "__version__"):
        before = getattr(graphshard, name)
        with mock.patch.object(graphshard, name, "replaced"):
            assert getattr(graphshard, name) == "replaced"
        assert getattr(graphshard, name) is before


def test_a_missing_name():
    result = python("import graphshard; graphshard.complie")
    assert result.stderr.splitlines()[-1] == (
        "AttributeError: module 'graphshard' has no attribute 'complie'. Did you mean: 'compile'?"
    )
    assert not hasattr(graphshard, "__wrapped__")


def raised(docstring: str) -> Iterator[str]:
    """Yield the class names in a docstring's Raises section."""
    section = re.search(r"^Raises:\n((?:[ ]+.*\n|\n)*)", f"{inspect.cleandoc(docstring)}\n", re.MULTILINE)
    for names in re.findall(r"^ {4}(\w+(?:, \w+)*): ", section[1] if section else "", re.MULTILINE):
        yield from names.split(", ")


def documented() -> Iterator[tuple[str, str]]:
    """Yield names and docstrings of public functions, classes and methods."""
    homes = (graphshard, graphshard.checkpoint, graphshard.errors, graphshard.profiling)
    for name, public in [(name, getattr(home, name)) for home in homes for name in home.__all__]:
        members = inspect.getmembers(public) if inspect.isclass(public) else []
        for member, value in [("", public), *(item for item in members if not item[0].startswith("_"))]:
            yield f"{name}.{member}".rstrip("."), getattr(value, "__doc__", None) or ""


def test_errors_that_are_documented_can_be_caught():
    """Every documented exception is a name of `graphshard.errors` or a builtin."""
    found = {(name, error) for name, text in documented() for error in raised(text)}
    assert ("compile", "InfeasibleError") in found
    assert not {(name, error) for name, error in found if error not in (*errors.__all__, *vars(builtins))}


def test_all_errors_are_public():
    """Users catch a `GraphBreak` as a `CaptureError`."""
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert defined - {"GraphBreak"} == set(errors.__all__)


@pytest.mark.parametrize(("name", "module"), sorted(graphshard._MOVED_TO.items()))
def test_names_that_moved_into_a_module_warn(name: str, module: str) -> None:
    with pytest.warns(FutureWarning, match=re.escape(f"graphshard.{name} is now {module}.{name}")) as warned:
        moved = getattr(graphshard, name)
    assert moved is getattr(importlib.import_module(module), name)
    assert warned[0].filename == __file__
    assert name in importlib.import_module(module).__all__


def test_the_package_is_pickled_by_name() -> None:
    """As Ray does with a function of a script that uses it."""
    assert pickle.loads(pickle.dumps(graphshard)) is graphshard
    assert copy.deepcopy({"package": graphshard})["package"] is graphshard
