"""Code that Inductor made for a region, kept beside the libraries of its kernels, and run without importing Inductor.

    cpp_fused_0 = async_compile.cpp_pybinding(...)      taken out; the library is there
    class Runner: def call(self, args): ...             kept as it is

The lines that call kernels are Python, and name little of Inductor besides. What names more of it has no such form, and
is compiled again, from Inductor's own cache.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib.machinery
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from graphshard.torch_compat.inductor_settings import data_pointer
from graphshard.utils.source_lines import codes_of

# What generated code calls of torch, by the names that Inductor gives it.
EXTERN_KERNELS: Mapping[str, Any] = {
    "mm": torch.mm,
    "bmm": torch.bmm,
    "addmm": torch.addmm,
    "baddbmm": torch.baddbmm,
}
_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
_NEVER_RUN = ("get_args", "benchmark_compiled_module")


class _ExternKernels:
    """What `extern_kernels` is in generated code."""

    def __init__(self) -> None:
        vars(self).update(EXTERN_KERNELS)


@dataclass(frozen=True)
class Kernels:
    """The code of a region.

    Attributes:
        source: Python that calls kernels; it ends with `call`.
        libraries: shared libraries of the kernels, by the names that the source calls them by.
    """

    source: str
    libraries: Mapping[str, bytes] = field(default_factory=dict)


def trimmed(source: str, libraries: Mapping[str, bytes]) -> Kernels | None:
    """Generated code without what makes kernels; None if it names more of Inductor than can be had without it."""
    kept = []
    for statement in ast.parse(source).body:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if isinstance(statement, ast.If) or (isinstance(statement, ast.FunctionDef) and statement.name in _NEVER_RUN):
            continue
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("torch._inductor"):
            continue
        making = names & {"async_compile", "AsyncCompile"}
        if making and isinstance(statement, (ast.Assign, ast.Expr, ast.Delete)):
            continue
        used = {n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute) and _is_extern(n.value)}
        if making or not used <= EXTERN_KERNELS.keys():
            return None
        kept.append(statement)
    text = ast.unparse(ast.Module(kept, []))
    defined = {"extern_kernels", *libraries, *vars(builtins)}
    code = compile(text, "<region>", "exec")
    defined |= set(code.co_names)  # of the module itself, or taken from what is imported
    wanted = {name for part in _within(code) for name in _globals_of(part)}
    return Kernels(text, libraries) if wanted <= defined else None


def _is_extern(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "extern_kernels"


def _within(code: CodeType) -> list[CodeType]:
    return [part for part in codes_of(code) if part is not code]


def _globals_of(code: CodeType) -> set[str]:
    return {str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}


class KeptRegion:
    """Runs the code of a region; it is loaded at once, so that what is wrong with it is found before it is needed.

    Args:
        source_code: what is shown of it; by default the code that runs, without that of kernels.

    Raises:
        ImportError, SyntaxError, ...: it cannot be loaded.
    """

    def __init__(self, key: str, kernels: Kernels, source_code: str = "") -> None:
        self.kernels = kernels
        self.source_code = source_code or kernels.source
        names: dict[str, Any] = {"extern_kernels": _ExternKernels(), "__name__": f"graphshard_region_{key}"}
        names |= _loaded(key, kernels.libraries)
        exec(compile(kernels.source, f"<region {key}>", "exec"), names)
        self._call = names["call"]

    def __call__(self, inputs: list[Any]) -> Any:
        return self._call(inputs)


def _loaded(key: str, libraries: Mapping[str, bytes]) -> dict[str, Any]:
    """The functions of shared libraries."""
    pointer = data_pointer()
    os.environ[_POINTER] = str(pointer)
    found = {}
    with tempfile.TemporaryDirectory(prefix="graphshard-", ignore_cleanup_errors=True) as directory:
        for name, content in libraries.items():
            path = Path(directory) / f"{name}.so"
            path.write_bytes(content)
            full = f"graphshard_region_{key}.{name}.kernel"  # libraries initialise what the last part names
            loader = importlib.machinery.ExtensionFileLoader(full, str(path))
            spec = importlib.util.spec_from_file_location(full, path, loader=loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            found[name] = module.kernel
    return found
