"""Private names of torch that the frontend uses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch._dynamo import config

import graphshard
from graphshard.frontend import dynamo_capture
from graphshard.ir.torch_names import NAMES, Releases, check_names, missing_names

FRONTEND = Path(dynamo_capture.__file__).parent


def test_torch_has_the_names() -> None:
    assert list(missing_names(NAMES)) == []


@pytest.mark.parametrize(
    "settings", [dynamo_capture._SETTINGS, dynamo_capture._GUARD_SETTINGS], ids=["trace", "guards"]
)
def test_dynamo_has_the_settings(settings: dict[str, object]) -> None:
    """One that is gone is left out of a trace, so that only this test tells."""
    assert [name for name in settings if not hasattr(config, name)] == []


def test_a_name_that_is_gone_is_one_error_with_the_release() -> None:
    gone = {
        "torch._dynamo.pgo": {"CodeState": Releases("2.11", "2.14"), "CodeStates": Releases("2.11", "2.13")},
        "torch._guards": {"Source.names": Releases("2.10", "2.12")},
        "torch._lost": {"name": Releases("2.9", "2.9")},
    }
    with pytest.raises(graphshard.UnsupportedError) as caught:
        check_names(gone)
    assert str(caught.value) == (
        f"graphshard.frontend: torch {torch.__version__} does not have torch._dynamo.pgo.CodeStates (torch 2.11 to "
        "2.13); torch._guards.Source.names (torch 2.10 to 2.12); torch._lost.name (torch 2.9 to 2.9). Install a "
        "release of torch that has all of them."
    )


def test_imports_of_private_names_are_in_the_table() -> None:
    """Modules that are imported whole, such as `config`, have their names in the table of the module."""
    known = {f"{module}.{name.partition('.')[0]}" for module, names in NAMES.items() for name in names}
    modules = {*NAMES, "torch._dynamo.config"}
    for file in FRONTEND.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PRIVATE):
                found = {f"{node.module}.{each.name}" for each in node.names}
                assert found <= known | modules, f"{file.name} imports {found - known - modules}"


# torch._ops is imported by many packages of graphshard, and is not the frontend's.
_PRIVATE = (
    "torch._C",
    "torch._dynamo",
    "torch._functorch",
    "torch._guards",
    "torch._subclasses",
    "torch.utils._ordered_set",
)
