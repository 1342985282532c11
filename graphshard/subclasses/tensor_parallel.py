"""Tensor parallelism in a trace: parameters that are DTensors, and the collectives of the model itself.

    a rank's piece, an input of the trace  ->  DTensor, which the model finds  ->  the model's own collectives

DTensor's code runs while the forward is traced, so the graph has what it does on this rank: products of pieces, and
functional collectives. These become operators that run at once and name an axis of the mesh, not a process group:

    %a = all_reduce(%y, sum, 7)                   %w = all_reduce(%y, sum, tp)
    %w = wait_tensor(%a)

To plans they are compute: what gathers and reduces parameters is moved around them, and they stay where they are.

A group that is not an axis of the mesh becomes an axis of the program's mesh, which is bound to the group: neighbors on
the sharding axis, or the ranks among which code with plain tensors, as Megatron's, calls collectives itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from graphshard.errors import CaptureError, GraphBreak
from graphshard.ir.graph import WAIT, aten, c10d, emit, error_here, place_of
from graphshard.ir.mesh import Mesh, PendingReduction
from graphshard.ir.operators import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from graphshard.ir.param_table import ParamSpec, ParamTable
from graphshard.ir.program import Phase, Slot
from graphshard.torch_compat.dtensor import dtensor_of, process_group
from graphshard.torch_compat.torch_ops import pytree

# Collectives that add up what ranks have of a gradient: of all of it, and of a piece for each.
_SUMS = (ALL_REDUCE, REDUCE_SCATTER)

_AT_ONCE = {
    c10d.all_reduce.default: ALL_REDUCE,
    c10d.all_gather_into_tensor.default: ALL_GATHER,
    c10d.reduce_scatter_tensor.default: REDUCE_SCATTER,
    c10d.all_to_all_single.default: ALL_TO_ALL,
}


def distributed(
    used: Mapping[Slot, torch.Tensor], params: ParamTable, meshes: Mapping[tuple[str, ...], DeviceMesh]
) -> dict[Slot, torch.Tensor]:
    """Return what a module finds instead of its tensors: DTensors, by the names of their axes, for split parameters."""
    found = dict(used)
    for slot, tensor in used.items():
        split = params[slot.name].split if slot.kind == "param" else None
        if split is not None and not split.local:
            found[slot] = Distributed.apply(tensor, params[slot.name], meshes[split.found_on])
    return found


class OneCast(TorchFunctionMode):
    """Mode that raises CaptureError where autocast would cast a distributed parameter again.

    Eager mode casts it once for all uses, and adds their gradients in the low precision. Here the parameter is made of
    a piece, and autocast keeps casts of leaves only.
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
                    raise error_here(
                        f"uses parameter {name} again ({getattr(func, '__name__', func)}). Autocast casts a parameter "
                        "that is a DTensor once for all its uses, which a program cannot yet. Use it once in the "
                        "block, cast it yourself, or use param_dtype of mp_policy instead of autocast"
                    )
                if name is not None:
                    self._cast.add(name)
        return result


class Distributed(torch.autograd.Function):
    """A rank's piece of a parameter as a DTensor; the gradient of it is brought to the parameter's placement.

    FSDP2 does the same when backward has summed a gradient up: what ranks have partial sums of is reduced. Among ranks
    of data axes all gradients are, so nothing is done for these.
    """

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, row: ParamSpec, mesh: DeviceMesh) -> DTensor:
        assert row.split is not None
        ctx.name, ctx.placements, ctx.num_data = row.name, row.split.found_placed, len(row.split.around)
        shape = torch.Size(row.split.shape)
        return dtensor_of(piece.detach(), mesh, ctx.placements, shape, row.stride_of(shape))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None, None]:
        assert isinstance(grad, DTensor)
        of_data = grad.placements[: ctx.num_data]
        if any(placement.is_shard() for placement in of_data):
            raise error_here(
                f"makes a gradient of {ctx.name} that is placed as {of_data} along data axes, over which it is to be "
                "reduced. Use the parameter with activations that are cut there by their batch, or whole"
            )
        placements = (*of_data, *ctx.placements[ctx.num_data :])
        if grad.placements != placements:
            grad = grad.redistribute(placements=placements)
        return grad._local_tensor, None, None


def take_off_wrapping(phase: Phase, params: ParamTable) -> None:
    """Let readers of a piece read the input itself: making a DTensor of it computes nothing."""
    for node, slot in phase.slot_of().items():
        if slot.kind != "param" or not params[slot.name].is_dtensor:
            continue
        for user in [user for user in node.users if user.target is aten.detach.default]:
            user.replace_all_uses_with(node)
            phase.module.graph.erase_node(user)


def take_off_last_sums(phase: Phase, params: ParamTable, mesh: Mesh) -> ParamTable:
    """Leave sums of parameters' gradients over the tensor axis to the reduction over data ranks; specs name them.

    So they are taken once for all microbatches, and, unless gradients are cut along that axis, in the reduce dtype.
    Where pieces have different sizes, sums that are cut stay: the program of a rank whose piece was padded ends
    otherwise.
    """
    rows, results = {row.name: row for row in params}, phase.results
    for index, slot in enumerate(phase.outputs):
        row = rows[slot.name] if slot.kind == "grad" and slot.of == "param" else None
        if row is None or row.split is None or row.split.local:  # where it is local, they are the model's
            continue
        sums: list[PendingReduction] = []
        kinds = _SUMS if row.has_even_pieces(mesh) else _SUMS[:1]
        while _is_last_sum(value := results[index], kinds):
            results[index], operation, *pieces, axis = value.args
            num_pieces = next((size for size in pieces if isinstance(size, int)), 1)
            sums.append(PendingReduction(str(axis), str(operation), num_pieces))
        rows[slot.name] = replace(row, split=replace(row.split, sums=tuple(reversed(sums))))
    phase.set_results(results)
    for node in reversed([n for n in phase.module.graph.nodes if n.target in _SUMS]):
        if not node.users:
            phase.module.graph.erase_node(node)
    return ParamTable(tuple(rows.values()))


def _is_last_sum(value: Any, kinds: Sequence[Any]) -> TypeGuard[Node]:
    """Return whether a gradient is a sum over ranks that nothing else reads."""
    is_sum = isinstance(value, Node) and value.target in kinds and value.args[1] in ("sum", "avg")
    return is_sum and len(value.users) == 1


# --- collectives of the model -------------------------------------------------------------------------------------


def settle_collectives(graph: Graph, mesh: Mesh, groups: dict[str, str], model: str) -> Mesh:
    """Let the model's collectives run at once, and name an axis; return the mesh with the axes that were found.

    `groups` are the names of this rank's process groups by axis; new ones are added.
    """
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", "") in ("_c10d_functional", "_dtensor") and node.target is not WAIT:
            if node.target not in _AT_ONCE:
                raise _break_at(node)
            if not groups:
                raise CaptureError(
                    f"graphshard cannot capture {model}.forward, because it communicates by {node.target}"
                    f"{place_of(node)}, and there are no process groups. Compile it in a process of a job."
                )
            mesh, name = _with_axis(mesh, str(node.args[-1]), groups)
            with graph.inserting_before(node):
                value = emit(graph, _AT_ONCE[node.target], *node.args[:-1], name, like=node)
            value.meta.update({key: node.meta[key] for key in node.meta if key != "val"})
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        wait.replace_all_uses_with(wait.all_input_nodes[0])
        graph.erase_node(wait)
    return mesh


def _with_axis(mesh: Mesh, group: str, groups: dict[str, str]) -> tuple[Mesh, str]:
    """Return the mesh with an axis along which this rank has the ranks of a group, and its name.

    A group is known by its ranks: DTensor keeps plans for meshes that are equal, of whichever was there first.
    """
    ranks, known = _ranks(group), {name: _ranks(of) for name, of in groups.items()}
    present = [axis.name for axis in mesh.every_axis]
    # Axes of one rank are all alike.
    for name in sorted(known, key=lambda name: (name == mesh.shard.name, name not in present)):
        if known[name] == ranks:
            return (mesh if name in present else _with_new(mesh, name, len(ranks))), name
    around, size = known[mesh.shard.name], len(ranks)
    if len(around) % size == 0 and ranks in [around[i : i + size] for i in range(0, len(around), size)]:
        name = mesh.with_inner(size).axes[-1].name
    else:
        name = process_group(group).group_desc.removeprefix("mesh_")  # that of an axis of another mesh
        if name in groups or name == process_group(group).group_desc:
            name = f"model {len(groups)}"
    groups[name] = group
    return _with_new(mesh, name, size), name


def _with_new(mesh: Mesh, name: str, size: int) -> Mesh:
    """Return the mesh with an axis that a capture has found: of neighbors, or of other ranks."""
    inner = mesh.with_inner(size)
    return inner if inner.axes[-1].name == name else mesh.with_tensor(name, size)


def _ranks(group: str) -> list[int]:
    return dist.get_process_group_ranks(process_group(group))


def _break_at(node: Node) -> GraphBreak:
    reason = f"It communicates by {node.target}{place_of(node)}."
    return GraphBreak("forward", reason, "Use an all-reduce, an all-gather, a reduce-scatter or an all-to-all.")
