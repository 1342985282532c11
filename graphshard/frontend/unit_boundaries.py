"""Boundary of a unit: casts of its inputs and results, and one node of autograd, as FSDP2's hooks have them.

    x ---+------------------ + ---        gradient of x: the unit's part is one term, whatever the unit does with x
         |                   |
         +--- cast -- node --+- unit ---

FSDP2 sends all inputs of a unit that require gradients through one autograd function, to learn when its backward ends.
Autograd then adds the unit's part of a gradient at once. Sums of floating-point numbers depend on that, so the node is
here, too. Dynamo leaves it in the graph, and AOTAutograd runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphshard.ir.param_table import ParamTable
from graphshard.ir.repeats import BlocksDifferError
from graphshard.ir.units import Precision, modules_of
from graphshard.repeats.repeated_blocks import Block, end_of_blocks
from graphshard.torch_compat.dtensor import take_checkpoint_hooks

# Attribute of a module that is traced; guards leave it out, because it is there only during the trace.
BOUNDARY = "_graphshard_boundary"


class BoundaryModule(nn.Module):
    """Base of the classes of units and of compiled models: calls go through the boundary while a trace is open."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        boundary = self.__dict__.get(BOUNDARY)
        if boundary is None:
            self._graphshard_begin()
            return super().__call__(*args, **kwargs)
        if boundary.block is not None:
            return boundary.block.call(self._graphshard_call, args, kwargs)
        return self._graphshard_call(*args, **kwargs)

    def _graphshard_begin(self) -> None:
        """Prepare a call outside of a trace."""

    def _graphshard_own(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def _graphshard_call(self, *args: Any, **kwargs: Any) -> Any:
        boundary = self.__dict__[BOUNDARY]
        args, kwargs = boundary.enter(args, kwargs)
        if boundary.checkpointed is not None:
            settings = dict(boundary.checkpointed)
            return boundary.leave(checkpoint(self._graphshard_own, *args, use_reentrant=False, **settings, **kwargs))
        return boundary.leave(super().__call__(*args, **kwargs))


def boundary_class(module: nn.Module) -> type[nn.Module]:
    """Return a subclass of a module's class whose calls go through the boundary, one for each class."""
    cls = type(module)
    if issubclass(cls, BoundaryModule):
        return cls
    known = (each for each in cls.__subclasses__() if each.__bases__ == (BoundaryModule, cls))
    return next(known, None) or type(cls.__name__, (BoundaryModule, cls), {"__module__": cls.__module__})


@dataclass(frozen=True)
class UnitBoundary:
    """Boundary of one module of a unit.

    Attributes:
        unit: name of the unit; "" for the root.
        module: number of the module in its unit, as text: a number that is another in the next trace would be dynamic.
        num_modules: of the unit, as text; with several, the first that is called has the node.
        param_dtype, output_dtype: that floating-point inputs and results are cast to; None casts none.
        has_node: the unit has parameters that are sharded.
        block: the module is one of equal blocks, of which some are left out of the trace.
        num_blocks: how many there are, as text; of the root.
        checkpointed: settings of the composable `checkpoint`, whose hooks the module had.
    """

    unit: str
    module: str = "0"
    num_modules: str = "1"
    param_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    has_node: bool = False
    block: Block | None = None
    num_blocks: str = ""
    checkpointed: tuple[tuple[str, Any], ...] | None = None

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Return the inputs of the module as the module finds them."""
        if not self.unit:
            _begin()
        if self.param_dtype is not None:
            args, kwargs = _cast(self.param_dtype, (args, kwargs))
        first = self.num_modules == "1" or _is_first(self.unit, self.module, self.num_modules)
        if first and self.has_node and torch.is_grad_enabled():
            found = [tensor for tensor in _tensors_in((args, kwargs)) if tensor.requires_grad]
            if found:
                passed = list(one_node(*found))
                args, kwargs = _changed(lambda x: x.requires_grad, lambda _: passed.pop(0), (args, kwargs))
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """Return the results of the module as the caller finds them."""
        if self.num_blocks:
            end_of_blocks(int(self.num_blocks))
        return output if self.output_dtype is None else _cast(self.output_dtype, output)


@contextlib.contextmanager
def unit_boundaries(
    module: nn.Module,
    units: Iterable[str],
    params: ParamTable,
    precision: Precision,
    class_of: Callable[[nn.Module], type],
    blocks: Mapping[str, Block],
) -> Iterator[UnitBoundary]:
    """Give the modules of units their boundaries while the block is open; yield the boundary of the root.

    Args:
        class_of: the class that the root, or a module of a unit, has in a compiled model.
        blocks: equal blocks by name, of which some are left out.
    """
    sharded = {row.unit for row in params if not row.ignored}
    torch.compiler.allow_in_graph(one_node)
    for asked in (_begin, _is_first):
        torch.compiler.assume_constant_result(asked)
    with contextlib.ExitStack() as stack:

        def set_boundary(owner: nn.Module, boundary: UnitBoundary) -> None:
            stack.callback(object.__setattr__, owner, "__class__", type(owner))
            object.__setattr__(owner, "__class__", class_of(owner))
            if owner is not module:
                owner.__dict__[BOUNDARY] = boundary
                stack.callback(owner.__dict__.pop, BOUNDARY, None)

        for unit in ("", *units):
            paths = modules_of(unit) if unit else [""]
            policy = precision.of(unit)
            casts = policy.param_dtype if policy.cast_forward_inputs else None
            for index, path in enumerate(paths):
                boundary = UnitBoundary(
                    *(unit, str(index), str(len(paths)), casts, policy.output_dtype, unit in sharded),
                    block=blocks.get(path),
                    num_blocks=str(len(blocks)) if blocks and not unit else "",
                )
                set_boundary(module.get_submodule(path), boundary)
                if not unit:
                    root = boundary
        for path, block in blocks.items():
            owner = module.get_submodule(path)
            if block.left_out:
                set_boundary(owner, UnitBoundary(path, block=block))
            elif BOUNDARY not in owner.__dict__:
                raise BlocksDifferError(f"{path} is not a unit")
        for path, owner in module.named_modules():
            settings = take_checkpoint_hooks(owner) if path else None
            if settings is not None:
                own = owner.__dict__.get(BOUNDARY, UnitBoundary(path))
                set_boundary(owner, replace(own, checkpointed=settings))
        yield root


class _Node(torch.autograd.Function):
    """Inputs of a unit, as they are. Transforms of torch.func see through it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(tangent if tangent is None else tangent.view_as(tangent) for tangent in tangents)


def one_node(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same tensors, as results of one node of autograd."""
    return _Node.apply(*inputs)


# --- which module of a unit is called first ------------------------------------------------------------------------

_called: dict[str, set[str]] = {}


def _begin() -> bool:
    """Begin a call of the root. Dynamo runs this during the trace, whose result is a constant of it."""
    _called.clear()
    return True


def _is_first(unit: str, module: str, num_modules: str) -> bool:
    """Return whether a module is the first of its unit that is called, since all of them were."""
    called = _called.setdefault(unit, set())
    first = not called
    called.add(module)
    if len(called) == int(num_modules):
        called.clear()
    return first


# --- tensors in containers -----------------------------------------------------------------------------------------


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return _changed(lambda x: x.is_floating_point() and x.dtype != dtype, lambda x: x.to(dtype), value)


def _changed(needs: Callable[[torch.Tensor], bool], change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a container with tensors exchanged where needed: in lists, tuples, dicts and dataclasses.

    A container without such a tensor is itself: forward may append to it.
    """
    if isinstance(value, torch.Tensor):
        return change(value) if needs(value) else value
    if not any(needs(tensor) for tensor in _tensors_in(value)):
        return value
    if isinstance(value, dict):
        items = {key: _changed(needs, change, each) for key, each in value.items()}
        return items if type(value) is dict else type(value)(items)
    if isinstance(value, (list, tuple)):
        parts = [_changed(needs, change, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    fields = {each.name: _changed(needs, change, getattr(value, each.name)) for each in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a container, in the order in which `_changed` meets them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, (bool, int, float, str, np.ndarray)):
        return []  # Dynamo cannot say whether these are dataclasses
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, each.name) for each in dataclasses.fields(value)]
    return [tensor for part in parts for tensor in _tensors_in(part)]
