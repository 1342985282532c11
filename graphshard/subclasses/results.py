"""Results of a forward that are tensor subclasses: a program returns their parts, and the caller gets the whole.

traced      result -> parts, which are outputs of the program; gradients of the parts make the result's
called      parts -> result, as the node of a pytree; a gradient of the result makes the parts'

A DTensor, as a model with tensor parallelism returns for logits, say, is its local tensor. Its gradient is placed as it
is, and whole where it is a partial sum: the program is made for that, and another gradient is redistributed.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from graphshard.errors import GraphBreak, UnsupportedError
from graphshard.ir.subclasses import is_subclass, parts_of, rebuilt
from graphshard.subclasses.dtensor_conversions import from_local, of_gradients, to_local
from graphshard.torch_compat.autograd_state import without_dispatch_modes
from graphshard.torch_compat.torch_ops import pytree


def in_parts(leaf: torch.Tensor, data: Collection[str] = ()) -> torch.Tensor | SubclassResult | DTensorParts:
    """Take a result apart if it is a tensor subclass; `data` names the data axes that parameters are DTensors on."""
    if not is_subclass(leaf):
        return leaf
    if any(isinstance(size, torch.SymInt) for size in leaf.shape):
        reason = f"It returns a {type(leaf).__name__}, a tensor subclass, of a dynamic size."
        raise GraphBreak("forward", reason, "Return plain tensors, or leave dynamic_shapes out.")
    if isinstance(leaf, DTensor):
        of_gradient = of_gradients(leaf.placements)
        local = to_local(leaf, grad_placements=of_gradient)
        names = leaf.device_mesh.mesh_dim_names or ()
        fixed = tuple((place, of_gradient[place]) for place, name in enumerate(names) if name in data)
        return DTensorParts(local, Layout(leaf.device_mesh, leaf.placements, leaf.shape, leaf.stride(), fixed))
    parts = _Parts.apply(leaf)
    with without_dispatch_modes():
        held = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in parts]
        like = rebuilt(leaf, held)
    return SubclassResult(parts, like)


class SubclassResult:
    """The parts of a result, and a tensor without values that is like the result."""

    def __init__(self, parts: tuple[Any, ...], like: torch.Tensor) -> None:
        self.parts, self.like = parts, like


@dataclass(frozen=True)
class Layout:
    """All of a DTensor but its local tensor.

    `fixed` says how its gradient is placed along data axes, by the place of the axis: gradients of parameters are the
    mean over these ranks, of whole ones or of parts, so that another placement would change them.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    fixed: tuple[tuple[int, Placement], ...] = ()

    def around(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor with a local tensor."""
        settings: dict[str, Any] = {"run_check": False, "shape": self.shape, "stride": self.stride}
        return from_local(local, self.mesh, self.placements, **settings)


class DTensorParts:
    """The local tensor of an input or result that is a DTensor, and how it lies on its mesh."""

    def __init__(self, local: Any, layout: Layout) -> None:
        self.local, self.layout = local, layout


def _as_dtensor(local: Any, layout: Layout) -> Any:
    (local,) = local
    if not isinstance(local, torch.Tensor):
        return DTensorParts(local, layout)
    made = layout.around(local)
    if layout.fixed and made.requires_grad:
        made.register_hook(functools.partial(_check_gradient, layout.fixed))
    return made


def _check_gradient(fixed: tuple[tuple[int, Placement], ...], grad: DTensor) -> None:
    for place, placement in fixed:
        if grad.placements[place] != placement:
            names = grad.device_mesh.mesh_dim_names or ()
            raise UnsupportedError(
                f"the gradient of a result is placed as {grad.placements} on {names}, and along {names[place]!r} the "
                f"program is for {placement}: FSDP2's gradients depend on that. Compute the loss in forward, or from "
                "the result's to_local()."
            )


def _put_together(parts: Any, like: torch.Tensor) -> Any:
    parts = tuple(parts)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return SubclassResult(parts, like)
    return _Whole.apply(like, *parts)


pytree.register_pytree_node(
    DTensorParts,
    lambda parts: ([parts.local], parts.layout),
    _as_dtensor,
    flatten_with_keys_fn=lambda parts: ([(pytree.GetAttrKey("local"), parts.local)], parts.layout),
)
pytree.register_pytree_node(SubclassResult, lambda result: (list(result.parts), result.like), _put_together)


class _Parts(torch.autograd.Function):
    """A tensor subclass taken apart."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.like = whole.detach()
        return tuple(part.view_as(part) for part in parts_of(whole))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return rebuilt(ctx.like, grads)


class _Whole(torch.autograd.Function):
    """A tensor subclass put together."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        return rebuilt(like, [part.view_as(part) for part in parts])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *parts_of(grad)
