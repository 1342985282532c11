"""Private torch names are imported in `torch_compat` only, and are listed in its table."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphshard.errors import UnsupportedError
from graphshard.frontend import dynamo_capture
from graphshard.torch_compat import autograd_state, dynamo
from graphshard.torch_compat.dynamo import dynamo_config
from graphshard.torch_compat.names import (
    ATTRIBUTES,
    DOORS,
    OPTIONAL,
    check_names,
    imported_by,
    missing_attributes,
    missing_names,
)
from tests.layers import modules, package

OTHERS = {name: path for name, path in modules().items() if package(name) != "torch_compat"}
# Private attributes of Python and of tools that graphshard uses.
FOREIGN = {
    "_HEADER_DIR",  # a name in Inductor's generated code
    "_SubParsersAction",
    "_Unpickler",
    "_ZN2at6detail12getCUDAHooksEv",
    "_check_value",
    "_current_frames",
    "_expr",  # set on new SymNodes
    "_flat_weights_names",  # set on new RNNs
    "_getframe",
    "_ignore_bidirectional_mask_sdpa",
    "_is_accelerate_prepared",
    "_lru_cache_wrapper",
    "_replace",
}


def private_attributes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match("_[A-Za-z]", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and not re.match(r"(torch\.ops\.)?(aten|prims|_c10d_functional)\b", owner):
                yield node.attr


def defined_here(path: Path) -> Iterator[str]:
    """Yield names of functions, fields and variables that a file defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_torch_has_the_names() -> None:
    assert [*missing_names(*DOORS), *missing_attributes()] == []


@pytest.mark.slow
def test_no_other_package_imports_private_names() -> None:
    found = {name: set(imported_by(path)) for name, path in OTHERS.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_doors_show_what_they_import() -> None:
    path = Path(dynamo.__file__)
    assert {"torch._dynamo.pgo", "torch._guards.Guard", "torch.export.dynamic_shapes._combine_args"} <= {
        *imported_by(path)
    }
    assert "torch._C._functorch.maybe_current_level" in set(imported_by(Path(autograd_state.__file__)))


@pytest.mark.slow
def test_private_attributes_are_in_the_table() -> None:
    """Attributes of torch objects that other packages read."""
    known = {name for names in ATTRIBUTES.values() for name in names.split()} | FOREIGN
    known |= {name.rpartition(".")[2] for name in OPTIONAL}
    ours = {name for path in modules().values() for name in defined_here(path)}
    found = {attribute: name for name, path in OTHERS.items() for attribute in private_attributes(path)}
    assert {name: where for name, where in found.items() if name not in known | ours} == {}


@pytest.mark.parametrize(
    "settings", [dynamo_capture._SETTINGS, dynamo_capture._GUARD_SETTINGS], ids=["trace", "guards"]
)
def test_dynamo_has_the_settings(settings: dict[str, object]) -> None:
    """A trace skips a missing setting, so only this test notices."""
    assert [name for name in settings if not hasattr(dynamo_config, name)] == []


def test_missing_names_are_one_error_with_the_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._dynamo.pgo.CodeState")
    monkeypatch.delattr("torch._dynamo.exc.ObservedException")
    with pytest.raises(UnsupportedError) as caught:
        check_names("dynamo")
    assert str(caught.value) == (
        f"torch {torch.__version__} does not have torch._dynamo.exc.ObservedException; torch._dynamo.pgo.CodeState. "
        "Install a release of torch from 2.11 to 2.15."
    )


def test_the_command_lists_missing_names() -> None:
    command = [sys.executable, "-m", "graphshard.torch_compat"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"torch {torch.__version__} (tested: 2.11 to 2.15): 0 private names are missing\n"
