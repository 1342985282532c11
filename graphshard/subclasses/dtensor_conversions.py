"""Conversions between DTensors and local tensors, whose gradients can be differentiated again.

torch's `DTensor.from_local` redistributes a gradient outside of autograd: gradients of that gradient are silently wrong
(torch 2.11 to 2.14), for example of the input of a `ColwiseParallel` layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.fx import GraphModule, Node

from graphshard.errors import UnsupportedError
from graphshard.ir.graph import place_of
from graphshard.torch_compat.torch_ops import pytree


def from_local(
    local: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    grad_placements: Sequence[Placement] | None = None,
    **settings: Any,
) -> DTensor:
    """Return what `DTensor.from_local` returns."""
    made: DTensor = _FromLocal.apply(local, device_mesh, placements, grad_placements, settings)
    return made


def to_local(whole: Any, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """Return what the method `to_local` of a DTensor returns."""
    local: torch.Tensor = _ToLocal.apply(whole, grad_placements)
    return local


def full_tensor(whole: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """Return what the method `full_tensor` of a DTensor returns."""
    return to_local(
        whole.redistribute(placements=[Replicate()] * whole.device_mesh.ndim), grad_placements=grad_placements
    )


def of_gradients(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements of a gradient: whole where the value is a partial sum."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


_METHODS = {"to_local": to_local, "full_tensor": full_tensor}


def convert_differentiably(graph: GraphModule) -> None:
    """Replace torch's conversions in Dynamo's graph by these, and collectives by ones that look for gradients."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                _replace(node)
            module.recompile()


def _replace(node: Node) -> None:
    if node.op == "call_method" and node.target in _METHODS:
        node.op, node.target = "call_function", _METHODS[node.target]
    elif node.target == DTensor.from_local:
        node.target = from_local
    elif str(node.target).startswith("_c10d_functional."):
        node.target = _without_gradient(node.target, place_of(node))


def _without_gradient(collective: Any, place: str) -> Callable[..., Any]:
    """Return a collective of the model that raises where its result would silently have no gradient.

    Only the function that calls it knows the gradient, as it depends on which ranks hold parts of a sum.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = (each for each in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(each, torch.Tensor))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise UnsupportedError(
                f"create_graph=True: gradients that have a graph flow through {collective}{place}, which has no "
                "gradient. Let DTensors communicate (torch.distributed.tensor.parallel): their gradients can be "
                "differentiated."
            )
        return collective(*args, **kwargs)

    return run


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh | None,
        placements: Sequence[Placement] | None,
        of_gradient: Sequence[Placement] | None,
        settings: dict[str, Any],
    ) -> DTensor:
        made = DTensor.from_local(local, mesh, placements, **settings)
        ctx.placements = tuple(of_gradient or of_gradients(made.placements))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        if grad is not None and grad.placements != ctx.placements:
            grad = grad.redistribute(placements=ctx.placements)
        return None if grad is None else to_local(grad), None, None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: DTensor, of_gradient: Sequence[Placement] | None) -> torch.Tensor:
        ctx.mesh, ctx.shape, ctx.stride = whole.device_mesh, whole.shape, whole.stride()
        ctx.placements = tuple(of_gradient or of_gradients(whole.placements))
        ctx.set_materialize_grads(False)
        local = whole.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[DTensor | None, None]:
        if grad is None:
            return None, None
        settings = {"shape": ctx.shape, "stride": ctx.stride}
        return from_local(grad, ctx.mesh, ctx.placements, run_check=False, **settings), None
