"""Parameters that are DTensors on the mesh's tensor axis, while a forward is traced, and what is communicated there.

    a rank's piece, an input of the trace  ->  DTensor, which the model finds  ->  the model's own collectives

DTensor's code runs while the forward is traced, so the graph has what it does on this rank: products of pieces, and
collectives (`collectives.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphshard.frontend.untraceable import Untraceable
from graphshard.ir.distributed_internals import dtensor_of
from graphshard.ir.graph import aten
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import REDUCED, SCATTERED
from graphshard.ir.params import ParamRow, ParamTable
from graphshard.ir.program import Phase, Slot
from graphshard.ir.split import Sum

# Collectives that add up what ranks have of a gradient: of all of it, and of a piece for each.
_SUMS = (REDUCED, SCATTERED)


def distributed(
    used: Mapping[Slot, torch.Tensor], params: ParamTable, meshes: Mapping[tuple[str, ...], DeviceMesh]
) -> dict[Slot, torch.Tensor]:
    """What a module finds in the place of its tensors: DTensors for parameters that are split over an axis.

    Args:
        meshes: that parameters are DTensors on, by the names of their axes.
    """
    found = dict(used)
    for slot, tensor in used.items():
        split = params[slot.name].split if slot.kind == "param" else None
        if split is not None:
            found[slot] = Distributed.apply(tensor, params[slot.name], meshes[split.found_on])
    return found


class OneCast(TorchFunctionMode):
    """Raises Untraceable where autocast would cast a distributed parameter again.

    Eager mode casts a parameter once for all its uses in a block of autocast, and their gradients are added up in the
    low precision. A distributed parameter is made of a piece here, and autocast keeps casts of leaves only.
    """

    def __init__(self, used: Mapping[Slot, torch.Tensor], device: str) -> None:
        super().__init__()
        self._names = {id(tensor): slot.name for slot, tensor in used.items() if isinstance(tensor, DTensor)}
        self._device, self._cast = device, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        once = torch.is_autocast_enabled(self._device) and torch.is_autocast_cache_enabled()
        if once and isinstance(result, torch.Tensor) and result.requires_grad:
            for leaf in pytree.arg_tree_leaves(*args, **kwargs):
                name = self._names.get(id(leaf))
                if name in self._cast:
                    raise Untraceable("cast again", f"parameter {name}, {getattr(func, '__name__', func)}")
                if name is not None:
                    self._cast.add(name)
        return result


class Distributed(torch.autograd.Function):
    """A rank's piece of a parameter as a DTensor; the gradient of it is brought to the parameter's placement.

    FSDP2 does the same when backward has summed a gradient up: what ranks have partial sums of is reduced. Among ranks
    of data axes all gradients are, so nothing is done for these.
    """

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, row: ParamRow, mesh: DeviceMesh) -> DTensor:
        assert row.split is not None
        ctx.name, ctx.placements, ctx.num_data = row.name, row.split.found_placed, len(row.split.around)
        shape = torch.Size(row.split.shape)
        return dtensor_of(piece.detach(), mesh, ctx.placements, shape, row.stride_of(shape))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None, None]:
        assert isinstance(grad, DTensor)
        of_data = grad.placements[: ctx.num_data]
        if any(placement.is_shard() for placement in of_data):
            raise Untraceable("sharded gradient", f"a gradient of {ctx.name} is placed as {of_data} there")
        placements = (*of_data, *ctx.placements[ctx.num_data :])
        if grad.placements != placements:
            grad = grad.redistribute(placements=placements)
        return grad._local_tensor, None, None


def take_off_wrapping(phase: Phase, params: ParamTable) -> None:
    """Let what reads a piece read the input itself: to make a DTensor of it computes nothing."""
    for node, slot in phase.slot_of().items():
        if slot.kind != "param" or params[slot.name].split is None:
            continue
        for user in [user for user in node.users if user.target is aten.detach.default]:
            user.replace_all_uses_with(node)
            phase.module.graph.erase_node(user)


def take_off_last_sums(phase: Phase, params: ParamTable, mesh: Mesh) -> ParamTable:
    """Leave to the reduction over data ranks what ranks of the tensor axis add up of parameters' gradients.

    So it is done once for all microbatches, and, unless gradients are cut along that axis, in the reduce dtype. The
    rows say which gradients are such. Where pieces have different sizes, sums that are cut stay: the program of a rank
    whose piece was padded ends otherwise.
    """
    rows, results = {row.name: row for row in params}, phase.results
    for index, slot in enumerate(phase.outputs):
        row = rows[slot.name] if slot.kind == "grad" and slot.of == "param" else None
        if row is None or row.split is None:
            continue
        sums: list[Sum] = []
        kinds = _SUMS if row.has_even_pieces(mesh) else _SUMS[:1]
        while _is_last_sum(value := results[index], kinds):
            results[index], operation, *pieces, axis = value.args
            sums.insert(0, Sum(str(axis), str(operation), *(size for size in pieces if isinstance(size, int))))
        rows[slot.name] = replace(row, split=replace(row.split, sums=tuple(sums)))
    phase.set_results(results)
    for node in reversed([n for n in phase.module.graph.nodes if n.target in _SUMS]):
        if not node.users:
            phase.module.graph.erase_node(node)
    return ParamTable(tuple(rows.values()))


def _is_last_sum(value: Any, kinds: Sequence[Any]) -> TypeGuard[Node]:
    """Whether a gradient is what ranks have added up, and nothing else reads that."""
    return (
        isinstance(value, Node) and value.target in kinds and len(value.users) == 1 and value.args[1] in ("sum", "avg")
    )
