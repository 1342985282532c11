"""Checks of each call of a compiled module: its parameters, submodules, modes and inputs. They take microseconds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphshard.errors import MaterializationError, ParameterError, UnsupportedError
from graphshard.ir.param_table import ParamTable, places_of
from graphshard.runtime.shards import ParamRef, aliases
from graphshard.torch_compat.autograd_state import transform_of
from graphshard.utils.text import users_class

_training: Callable[[dict[str, Any]], bool] = operator.itemgetter("training")


class ModuleTree:
    """Submodules of a module and their training modes, walked again only if the tree has changed."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._walk()

    def changed(self) -> bool:
        """Return whether a submodule was exchanged, added or removed since the last walk."""
        # Each of these dicts belongs to a module that is still there: an exchanged one is noticed at its parent.
        return any(self._empty) or any(tuple(now.values()) != children for now, children in self._children)

    def modes(self) -> tuple[bool, ...]:
        """Return the training modes as they are now, in the order of `modules()`."""
        if self.changed():
            self._walk()
        return tuple(map(_training, self._attributes))

    def _walk(self) -> None:
        modules = list(self.root.modules())
        self._empty = [m._modules for m in modules if not m._modules]
        self._children = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        self._attributes = [vars(m) if "training" in vars(m) else _ClassAttributes(m) for m in modules]


class _ClassAttributes(dict[str, Any]):
    """Attributes of a module whose class has the mode, for all its objects."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)


def check_same_modules(module: nn.Module, params: Sequence[ParamRef]) -> None:
    """Raise ParameterError if a module that has parameters is another one than when the model was compiled."""
    modules = dict(module.named_modules(remove_duplicate=False))
    for ref in params:
        for name in ref.row.names:
            path = name.rpartition(".")[0]
            if path not in modules or (name == ref.row.name and modules[path] is not ref.owner):
                moved = next((other for other, now in modules.items() if now is ref.owner), None)
                what = "was exchanged for another" if path in modules else "was removed"
                where = f", and is {moved} now" if moved is not None and name == ref.row.name else ""
                raise ParameterError(
                    f"module {path}, which has the parameter {name}, {what} after graphshard.compile{where}. Change "
                    "the model first, then compile it. To give a module other values, load or copy them into it."
                )
    for alias in aliases(module, params):
        alias.check()


def check_no_new_parameters(module: nn.Module, table: ParamTable) -> None:
    """Raise ParameterError if the module has a parameter that was not there when it was compiled."""
    known = {name for row in table for name in row.names}
    for name in places_of(module):
        if name not in known:
            raise ParameterError(
                f"parameter {name} was added after graphshard.compile, which would leave it out of sharding and "
                "reduction. Add parameters first, then compile the model."
            )


def check_still_trained(accumulated: Collection[str], params: Sequence[ParamRef], names: Mapping[str, str]) -> None:
    """Raise ParameterError if a parameter was frozen whose gradients microbatches have accumulated.

    Args:
        accumulated: names of those parameters in the model.
        names: names in the model, by those here.
    """
    for ref in params:
        name = names[ref.row.name]
        if name in accumulated and not ref.param.requires_grad:
            raise ParameterError(
                f"parameter {name} was frozen between microbatches, and what they have added up of its gradient would "
                "be left out. Freeze it between steps; reset_iter_state() forgets what was added up."
            )


def check_materialized(
    module: nn.Module, params: Sequence[ParamRef], device: torch.device, storage: torch.device
) -> None:
    """Raise MaterializationError for a tensor on the meta device, or a parameter on another device than it must be."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta:
        listed = ", ".join(meta[:5]) + (f" and {len(meta) - 5} more" if len(meta) > 5 else "")
        raise MaterializationError(
            f"{len(meta)} parameters or buffers of {users_class(module).__name__} are on the meta device: {listed}. "
            "Allocate them with model.to_empty(device=...) and initialize or load them before the first call."
        )
    for ref in params:
        wanted = device if ref.row.ignored else storage
        if ref.param.device != wanted:
            why = "it was moved after graphshard.compile"
            if ref.row.ignored:
                why = "ignored_params are not moved"
            elif storage != device:
                why = "with offload_policy=CPUOffloadPolicy() parameters are materialized on the CPU"
            raise MaterializationError(
                f"parameter {ref.row.name} is on {ref.param.device} and must be on {wanted}: {why}. Move it there."
            )


def check_not_transformed(leaves: Sequence[object]) -> None:
    """Raise UnsupportedError for a call inside a transform of torch.func, or with dual numbers."""
    what = transform_of(leaves)
    if what:
        raise UnsupportedError(
            f"a compiled model was called inside {what}, which cannot see through its programs. Call autograd "
            "(torch.autograd.grad, backward), put the transform into the model's forward, or use the model before "
            "graphshard.compile."
        )
