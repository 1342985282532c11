"""Classes of modules in a compiled model, which a trace gives them before they are compiled."""

from __future__ import annotations

from torch import nn

from graphshard.module.sharded_module import sharded_class
from graphshard.module.unit_module import UnitModule, unit_class


def class_of(root: nn.Module, is_model: bool, module: nn.Module) -> type:
    """Return the class that a module has in a compiled model.

    Args:
        root: of the trace.
        is_model: the root is the model, and not a submodule that is called on its own.
        module: the root, or a module of a unit.
    """
    if isinstance(module, UnitModule) or (module is root and not is_model):
        return type(module)
    return sharded_class(type(module)) if module is root else unit_class(type(module), UnitModule)
