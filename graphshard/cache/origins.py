"""Whose code is: the user's, or that of torch, Python, graphshard and what these need."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types

import torch

# What torch and graphshard run besides: compared by version, and not followed.
NEEDED = frozenset(
    {
        *(
            "torchgen",
            "functorch",
            "numpy",
            "sympy",
            "isympy",
            "mpmath",
            "networkx",
            "jinja2",
            "markupsafe",
            "filelock",
        ),
        *("fsspec", "typing_extensions", "triton", "setuptools", "pkg_resources", "_distutils_hack", "exceptiongroup"),
        *("cattrs", "attr", "attrs", "msgspec", "rich", "packaging", "yaml", "psutil", "pytest", "_pytest", "pluggy"),
    }
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGES = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# The package `passes` is linked into this one.
_PASSES = os.path.realpath(os.path.join(_HERE, "passes")) + os.sep
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


@functools.cache
def origin(file: str) -> str:
    """Whose a source file is: "torch", "python", "graphshard", "needed", "generated" or "users"."""
    if file.startswith("<"):
        return "python" if file.startswith("<frozen ") else "generated"
    if file.startswith(_TORCH):
        return "torch"
    if file.startswith((_HERE, _PASSES)):
        return "graphshard"
    if file.startswith(_PACKAGES):
        root = file[len(_PACKAGES) :].partition(os.sep)[0].removesuffix(".py")
        return "needed" if root in NEEDED else "users"
    return "python" if file.startswith(_STDLIB) and f"{os.sep}site-packages{os.sep}" not in file else "users"


def origin_of_module(name: str) -> str:
    """Whose a module of Python's is, by its name."""
    root = name.partition(".")[0]
    if root in ("torch", "graphshard"):
        return root
    if root in NEEDED:
        return "needed"
    return "python" if root in sys.stdlib_module_names and root != "__main__" else "users"


def origin_of_code(code: types.CodeType, module: str) -> str:
    """Whose code is; what was generated is whose module it was generated for."""
    found = origin(code.co_filename)
    if found != "generated":
        return found
    # collections.namedtuple and torch.fx name modules that there are not.
    return "python" if module.startswith("namedtuple_") else origin_of_module(module or "torch")
