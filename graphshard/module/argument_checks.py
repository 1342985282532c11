"""Whether each submodule is in training, asked at every call: the tree is walked again only if it has changed."""

from __future__ import annotations

import itertools
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


class Modes:
    """The modes of a module and its submodules, in the order of `modules()`."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._look()

    def now(self) -> tuple[bool, ...]:
        """The modes as they are now."""
        # Each of these dicts is that of a module which is still there: if it was exchanged, that is seen above it.
        if any(self._empty) or any(tuple(now.values()) != children for now, children in self._children):
            self._look()
        return tuple(map(_training, self._attributes))

    def _look(self) -> None:
        modules = list(self.root.modules())
        self._empty = [m._modules for m in modules if not m._modules]
        self._children = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        # A class may have the mode itself, for all its objects.
        self._attributes = [vars(m) if "training" in vars(m) else _OfClass(m) for m in modules]


class _OfClass(dict[str, Any]):
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)


class SubmoduleCheck:
    """Check of a module in each call: its submodules are those that were there before; it takes microseconds.

    Args:
        module: that is called.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._look()

    def check(self, params: Sequence[ParamRef], table: ParamTable) -> None:
        """Raise ParameterError if a module that has parameters was exchanged, added or removed."""
        if self._now() != self._held:
            check_same_modules(self.module, params)
            check_no_new_parameters(self.module, table)
            self._look()

    def _look(self) -> None:
        self._children = [part._modules for part in self.module.modules() if part._modules]
        self._held = self._now()

    def _now(self) -> list[nn.Module | None]:
        return list(itertools.chain.from_iterable(map(dict.values, self._children)))


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


def check_still_trained(added_up: Collection[str], params: Sequence[ParamRef], names: Mapping[str, str]) -> None:
    """Raise ParameterError if a parameter was frozen of which microbatches have added gradients up.

    Args:
        added_up: names in the model of those parameters.
        names: in the model, by those here.
    """
    for ref in params:
        if names[ref.row.name] in added_up and not ref.param.requires_grad:
            raise ParameterError(
                f"parameter {names[ref.row.name]} was frozen between microbatches, and what they have added up of its "
                "gradient would be left out. Freeze it between steps; reset_iter_state() forgets what was added up."
            )


def check_no_new_parameters(module: nn.Module, table: ParamTable) -> None:
    """Raise ParameterError if the module has a parameter that was not there when it was compiled."""
    known = {name for row in table for name in row.names}
    for name in places_of(module):
        if name not in known:
            raise ParameterError(
                f"parameter {name} was added after graphshard.compile, which would leave it out of sharding and "
                "reduction. Add parameters first, then compile the model."
            )


def check_materialized(
    module: nn.Module, params: Sequence[ParamRef], device: torch.device, storage: torch.device
) -> None:
    """Raise MaterializationError if a parameter or buffer is on the meta device, or an ignored parameter elsewhere."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta:
        listed = ", ".join(meta[:5]) + (f" and {len(meta) - 5} more" if len(meta) > 5 else "")
        raise MaterializationError(
            f"{len(meta)} parameters or buffers of {users_class(module).__name__} are on the meta device: {listed}. "
            "Allocate them with model.to_empty(device=...) and initialise or load them before the first call."
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
