"""What happens to values where they enter and leave a unit, as FSDP2's hooks do it: casts, and one node of autograd.

    x ---+------------------ + ---        gradients of x: that of the unit's input is one term,
         |                   |            whatever the unit does with x inside
         +--- cast -- node --+- unit ---

FSDP2 sends all inputs of a unit that require gradients through one autograd function, to learn when the unit's backward
is over. Autograd then adds what the unit contributes to a gradient at once, and at another time. Sums of floating-point
numbers depend on that, so the node is here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from graphshard.ir.params import ParamTable, inverse_of, memory_order
from graphshard.ir.precision import Precision
from graphshard.ir.tracing_internals import cast_tensors, replace_differentiable
from graphshard.ir.units import modules_of


@contextlib.contextmanager
def unit_boundaries(
    module: nn.Module, units: Iterable[str], params: ParamTable, precision: Precision
) -> Iterator[None]:
    """Within the block the root and the units treat their inputs and outputs as FSDP2's hooks would.

    Hooks of the user's on the root run around that.
    """
    sharded = {row.unit for row in params if not row.ignored}
    with contextlib.ExitStack() as stack:
        for unit in ("", *units):
            owners = [module] if not unit else list(map(module.get_submodule, modules_of(unit)))
            boundary = _Boundary(precision.of(unit), has_node=unit in sharded, modules=frozenset(owners))
            for owner in owners:
                enter = owner.register_forward_pre_hook(boundary.enter, with_kwargs=True, prepend=bool(unit))
                leave = owner.register_forward_hook(boundary.leave, always_call=True, prepend=not unit)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
        yield


@dataclass
class _Boundary:
    """Hooks of one unit; of several modules in one unit, those that are still to be called are `left`."""

    policy: MixedPrecisionPolicy
    has_node: bool
    modules: frozenset[nn.Module]
    left: set[nn.Module] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Boundary:
        """Does nothing, in a copy that somebody has made of the module meanwhile."""
        return _Boundary(MixedPrecisionPolicy(), has_node=False, modules=frozenset())

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.policy.param_dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_tensors((args, kwargs), self.policy.param_dtype)
        if not self.left and self.has_node and torch.is_grad_enabled():
            args, kwargs = through_one_node((args, kwargs))
        self.left = self.left or set(self.modules)
        return args, kwargs

    def leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        self.left.discard(module)
        return output if self.policy.output_dtype is None else cast_tensors(output, self.policy.output_dtype)


def through_one_node(inputs: Any) -> Any:
    """The same values, of which those that require gradients have come through one node of autograd."""
    return replace_differentiable(inputs, _Inputs.apply)


def through_leaves(inputs: Any) -> Any:
    """The same, of a region whose gradients eager mode first adds up in leaves: they get the strides of the leaves."""
    return replace_differentiable(inputs, _Leaves.apply)


def as_results(outputs: Any, inputs: list[torch.Tensor]) -> Any:
    """What a reentrant region returns, as results of one autograd function of inputs that require gradients.

    A tensor, or each of a tuple, requires a gradient, even if it does not depend on them. What is in other containers
    is no result of the function, and has no gradient.
    """

    def result(output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        depends = output.requires_grad or not (output.is_floating_point() or output.is_complex())
        return output if depends else _Independent.apply(output, *inputs)

    return tuple(map(result, outputs)) if type(outputs) is tuple else result(outputs)


class _Independent(torch.autograd.Function):
    """A tensor that requires a gradient as if it depended on others."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Inputs(torch.autograd.Function):
    """All inputs of a unit, or of a region, that require gradients, as they are."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


class _Leaves(torch.autograd.Function):
    """All inputs of a region that require gradients, as they are; what autograd does in `AccumulateGrad` follows."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.orders = [memory_order(tensor) or tuple(range(tensor.dim())) for tensor in inputs]
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            None if grad is None else _in_order(grad, order) for grad, order in zip(grads, ctx.orders, strict=True)
        )


def _in_order(grad: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A gradient with its dims in this order in memory: sums over it depend on that."""
    inside = grad.permute(order)
    return grad if inside.is_contiguous() else inside.contiguous().permute(inverse_of(order))
