"""Entry points into a compiled model: submodules that are called directly, and methods that are not forward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphshard.utils.source_lines import MISSING

# Attributes of units of a compiled model that belong to graphshard.
OF_UNITS = frozenset({"_graphshard", "_graphshard_unit", "_graphshard_forward"})
# Attribute of a compiled model: the forward that was an attribute of it before.
OWN_FORWARD = "_graphshard_forward"


class EntryPoint:
    """Replacement of a module's method that runs a program captured for that method.

    The compiled forward of the whole model never calls it, and it is removed while a module is captured. `replaced` is
    the instance attribute that it replaces; MISSING if the method was the class's.
    """

    def __init__(self, module: nn.Module, name: str, run: Callable[..., Any], method: str = "forward") -> None:
        self.replaced = module.__dict__.get(method, MISSING)
        functools.update_wrapper(self, getattr(module, method))
        self._module, self._name, self._run, self._method = module, name, run, method

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._name or is_compiled(self._module)):  # uncompiled for now, and called by what wraps this
            return self.__func__(*args, **kwargs)
        return self._run(self._name, self._method, self._module, args, kwargs)

    @property
    def __func__(self) -> Any:
        """Function of the method, which Dynamo's guards inspect if forward calls the method."""
        found = getattr(type(self._module), self._method) if self.replaced is MISSING else self.replaced
        return getattr(found, "__func__", found)

    @property
    def __self__(self) -> nn.Module:
        return self._module

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the function that Dynamo's guards read, such as its defaults."""
        if name.startswith("__") and name.endswith("__"):
            return getattr(self.__func__, name)
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise copy.Error(
            f"{self._name} is a part of a compiled model and cannot be copied alone: its parameters are shards of the "
            "model's. Copy the whole model, or copy the parameters."
        )


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a compiled model, not a part of one."""
    return "_graphshard" in module.__dict__


def own_method(module: nn.Module, method: str) -> Any:
    """Return a method that the user has put on a module, MISSING if there is none.

    One that was put on a compiled model later runs around the compiled forward, and is not meant.
    """
    found = module.__dict__.get(method, MISSING)
    if type(found) is EntryPoint:
        return found.replaced
    if is_compiled(module):
        return module.__dict__.get(OWN_FORWARD, MISSING) if method == "forward" else MISSING
    return found


def install_entries(root: nn.Module, run: Callable[..., Any]) -> None:
    """Install an entry point on every submodule with parameters; `run` receives name, method, module and inputs."""
    for name, module in root.named_modules():
        found = module.__dict__.get("forward")
        implements_forward = type(module).forward is not nn.Module.forward or found is not None
        if name and implements_forward and type(found) is not EntryPoint and any(True for _ in module.parameters()):
            entry = EntryPoint(module, name, run)
            attributes = {key: value for key, value in module.__dict__.items() if key != "forward"}
            module.__dict__.clear()
            # First, so that copying the module fails here and not at a shard.
            module.__dict__.update({"forward": entry, **attributes})


def without_entries(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes as they were before `install_entries`."""
    found = {name: value.replaced if type(value) is EntryPoint else value for name, value in module.__dict__.items()}
    return {name: value for name, value in found.items() if value is not MISSING and name not in OF_UNITS}
