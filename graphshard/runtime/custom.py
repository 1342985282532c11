"""Collectives as the user wants them run: FSDP2's `Comm`s, a hook on what was reduced, a group for reductions alone.

An executor is changed so when it is bound; the program, its plan and its dumps say what travels, not who carries it.

    %g = all_gather_into_tensor(%s, n, shard)          %g = gather(%s, n, shard, comm=0)
    %r = reduce_scatter_tensor(%g, avg, n, shard)      %r = reduce(%g, avg, n, shard, comm=1)
    %w = wait_tensor(%r)                               %w = wait_tensor(%r)
                                                       %h = hooked(%w, hook=2)
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from graphshard.ir.graph import GATHERS, REDUCES, WAIT, c10d, is_collective, is_reduction, kind_of, launch_of
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Phase
from graphshard.torch_compat.dtensor import process_group, started
from graphshard.torch_compat.operators import OpOverload

Hook = Callable[[torch.Tensor], None]


class Comm(Protocol):
    """FSDP2's interface of collectives that users run."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what arrives."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the collective; what it returns is waited for, if it is not None."""


@dataclass(frozen=True, eq=False)
class Used:
    """Something of the user's, and the number by which the code of executors names it while it is in use."""

    value: Any
    number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        _used[self.number] = self


_used: weakref.WeakValueDictionary[int, Used] = weakref.WeakValueDictionary()


@dataclass
class Custom:
    """What was chosen, by units' names; all programs of a model share it.

    Attributes:
        gathers: what runs all-gathers.
        reductions: what runs reduce-scatters.
        hooks: what is called with a reduced gradient, before it is divided or cast.
        separate: units whose gradients are reduced in a group of their own.
        group: name of that group; "" until it is made.
    """

    gathers: dict[str, Used] = field(default_factory=dict)
    reductions: dict[str, Used] = field(default_factory=dict)
    hooks: dict[str, Used] = field(default_factory=dict)
    separate: set[str] = field(default_factory=set)
    group: str = ""

    def renamed(self, names: Mapping[str, str]) -> Custom:
        """For units with other names."""

        def those(chosen: dict[str, Used]) -> dict[str, Used]:
            return {names[unit]: value for unit, value in chosen.items()}

        separate = {names[unit] for unit in self.separate}
        return Custom(those(self.gathers), those(self.reductions), those(self.hooks), separate, self.group)

    def update(self, other: Custom) -> None:
        """Take over what was chosen elsewhere."""
        self.gathers.update(other.gathers)
        self.reductions.update(other.reductions)
        self.hooks.update(other.hooks)
        self.separate |= other.separate
        self.group = self.group or other.group

    def copy(self) -> Custom:
        """The same choices, to be changed apart."""
        found = Custom()
        found.update(self)
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing was chosen."""
        return not (self.gathers or self.reductions or self.hooks or self.separate)

    def bind(self, phase: Phase, mesh: Mesh) -> None:
        """Change an executor whose collectives know their process groups already, in place."""
        graph = phase.module.graph
        last = "all_reduce" if mesh.replicate is not None else "reduce"
        launches = [(node, node.meta["unit"]) for node in graph.nodes if is_collective(node) and "unit" in node.meta]
        for wait in [node for node in graph.nodes if node.target is WAIT]:
            launch = launch_of(wait)
            hook = self.hooks.get(launch.meta.get("unit", "(several)")) if is_reduction(launch) else None
            if hook is not None and kind_of(launch) in (last, "all_reduce"):
                with graph.inserting_after(wait):
                    seen = graph.call_function(hooked, kwargs={"hook": hook.number})
                seen.meta.update(wait.meta)
                wait.replace_all_uses_with(seen)
                seen.args = (wait,)
        for node, unit in launches:
            if node.target in REDUCES and unit in self.separate:
                node.args = (*node.args[:-1], self.group)
            if node.target in GATHERS and unit in self.gathers:
                _run(node, gather, gather_several, self.gathers[unit])
            elif node.target in REDUCES and unit in self.reductions:
                _run(node, reduce, reduce_several, self.reductions[unit])


def undo(graph: Graph) -> None:
    """Let a graph that was bound say again what the program says, in place."""
    for node in list(graph.nodes):
        if node.target in _REPLACED:
            node.target, node.kwargs = _REPLACED[node.target], {}
        elif node.target is hooked:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _run(node: Node, one: Callable[..., Any], several: Callable[..., Any], comm: Used) -> None:
    """Let the user run a collective, which may be a coalesced one."""
    node.target = one if isinstance(node.args[0], Node) else several
    node.kwargs = {"comm": comm.number}


def gather(shard: torch.Tensor, num_ranks: int, group: str, *, comm: int) -> torch.Tensor:
    """The shards of all ranks along dim 0, to be waited for."""
    size = [num_ranks * shard.shape[0], *shard.shape[1:]]
    run: Comm = _used[comm].value
    full = run.allocate(size, dtype=shard.dtype, device=shard.device)
    return started(full, run(output_tensor=full, input_tensor=shard, group=process_group(group), async_op=True))


def gather_several(shards: Sequence[torch.Tensor], num_ranks: int, group: str, *, comm: int) -> list[torch.Tensor]:
    """Several, one after the other."""
    return [gather(shard, num_ranks, group, comm=comm) for shard in shards]


def reduce(gradient: torch.Tensor, op: str, num_ranks: int, group: str, *, comm: int) -> torch.Tensor:
    """This rank's piece along dim 0 of the sum or mean over ranks, to be waited for."""
    size = [gradient.shape[0] // num_ranks, *gradient.shape[1:]]
    run: Comm = _used[comm].value
    piece = run.allocate(size, dtype=gradient.dtype, device=gradient.device)
    kind = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
    work = run(output_tensor=piece, input_tensor=gradient, group=process_group(group), op=kind, async_op=True)
    return started(piece, work)


def reduce_several(
    gradients: Sequence[torch.Tensor], op: str, num_ranks: int, group: str, *, comm: int
) -> list[torch.Tensor]:
    """Several, one after the other."""
    return [reduce(gradient, op, num_ranks, group, comm=comm) for gradient in gradients]


def hooked(gradient: torch.Tensor, *, hook: int) -> torch.Tensor:
    """The reduced gradient when the user's hook has seen it."""
    _used[hook].value(gradient)
    return gradient


_REPLACED: Mapping[Any, OpOverload] = {
    gather: c10d.all_gather_into_tensor.default,
    gather_several: c10d.all_gather_into_tensor_coalesced.default,
    reduce: c10d.reduce_scatter_tensor.default,
    reduce_several: c10d.reduce_scatter_tensor_coalesced.default,
}
