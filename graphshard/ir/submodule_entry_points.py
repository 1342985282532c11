"""Other entries into a compiled model: a submodule that is called on its own, a method that is no forward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphshard.utils.plain_values import MISSING

# Where a unit of a compiled model keeps what belongs to graphshard.
OF_UNITS = frozenset({"_graphshard", "_graphshard_unit"})


class EntryPoint:
    """Stands in for a method of a module: runs a program captured for that method.

    The compiled forward of the whole model never calls it, and it is taken away while a module is captured.

    Attributes:
        replaced: what stood in the method's place on this module; MISSING if it was the class's own.
    """

    def __init__(self, module: nn.Module, name: str, run: Callable[..., Any], method: str = "forward") -> None:
        self.replaced = module.__dict__.get(method, MISSING)
        functools.update_wrapper(self, getattr(module, method))
        self._module, self._name, self._run, self._method = module, name, run, method

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._name, self._method, self._module, args, kwargs)

    @property
    def __func__(self) -> Any:
        """The function of the method, which Dynamo's guards look at where forward calls the method itself."""
        found = getattr(type(self._module), self._method) if self.replaced is MISSING else self.replaced
        return getattr(found, "__func__", found)

    @property
    def __self__(self) -> nn.Module:
        return self._module

    def __getattr__(self, name: str) -> Any:
        """Return what Dynamo's guards read of the function as well, such as its defaults."""
        if name.startswith("__") and name.endswith("__"):
            return getattr(self.__func__, name)
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise copy.Error(
            f"{self._name} is a part of a compiled model and cannot be copied alone: its parameters are shards of the "
            "model's. Copy the whole model, or copy the parameters."
        )


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is a compiled model itself, and not a part of one."""
    return "_graphshard" in module.__dict__


def install_entries(root: nn.Module, run: Callable[..., Any]) -> None:
    """Let every submodule that has parameters be called on its own; `run` gets name, method, module and inputs."""
    for name, module in root.named_modules():
        found = module.__dict__.get("forward")
        implements_forward = type(module).forward is not nn.Module.forward or found is not None
        if name and implements_forward and type(found) is not EntryPoint and any(True for _ in module.parameters()):
            entry = EntryPoint(module, name, run)
            attributes = {key: value for key, value in module.__dict__.items() if key != "forward"}
            module.__dict__.clear()
            # First, so that who copies the module meets it before the shards.
            module.__dict__.update({"forward": entry, **attributes})


def without_entries(module: nn.Module) -> dict[str, Any]:
    """A module's attributes as they were before `install_entries`."""
    found = {name: value.replaced if type(value) is EntryPoint else value for name, value in module.__dict__.items()}
    return {name: value for name, value in found.items() if value is not MISSING and name not in OF_UNITS}
