"""Collectives that the user runs: FSDP2's `Comm`s, a hook on reduced gradients, a separate group for reductions.

An executor is changed when it is bound; the program, its plan and its dumps say what travels, not who carries it.

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
from torch.fx import Graph

from graphshard.ir.graph import GATHERS, REDUCES, WAIT, c10d, is_collective, is_reduction, kind_of, launch_of
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Phase
from graphshard.torch_compat.dtensor import process_group, started
from graphshard.torch_compat.torch_ops import OpOverload

Hook = Callable[[torch.Tensor], None]


class Comm(Protocol):
    """FSDP2's interface of collectives that users run."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for the result."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the collective, and return None or what is to be waited for."""


@dataclass(frozen=True, eq=False)
class UserObject:
    """An object of the user, and the number by which the code of executors refers to it while it is in use."""

    value: Any
    number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        _in_use[self.number] = self


_in_use: weakref.WeakValueDictionary[int, UserObject] = weakref.WeakValueDictionary()


@dataclass
class UserCollectives:
    """Choices of the user by units' names, shared by all programs of a model.

    Attributes:
        gathers: what runs all-gathers.
        reductions: what runs reduce-scatters.
        hooks: called with a reduced gradient, before it is divided or cast.
        separate: units whose gradients are reduced in a separate group.
        group: name of that group; "" until it is made.
    """

    gathers: dict[str, UserObject] = field(default_factory=dict)
    reductions: dict[str, UserObject] = field(default_factory=dict)
    hooks: dict[str, UserObject] = field(default_factory=dict)
    separate: set[str] = field(default_factory=set)
    group: str = ""

    def renamed(self, names: Mapping[str, str]) -> UserCollectives:
        """Return the choices for units with other names."""

        def rename(chosen: dict[str, UserObject]) -> dict[str, UserObject]:
            return {names[unit]: value for unit, value in chosen.items()}

        separate = {names[unit] for unit in self.separate}
        return UserCollectives(rename(self.gathers), rename(self.reductions), rename(self.hooks), separate, self.group)

    def update(self, other: UserCollectives) -> None:
        """Add the choices of another model or part."""
        self.gathers.update(other.gathers)
        self.reductions.update(other.reductions)
        self.hooks.update(other.hooks)
        self.separate |= other.separate
        self.group = self.group or other.group

    def copy(self) -> UserCollectives:
        """Return the same choices, to be changed independently."""
        found = UserCollectives()
        found.update(self)
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing was chosen."""
        return not (self.gathers or self.reductions or self.hooks or self.separate)

    def bind(self, phase: Phase, mesh: Mesh) -> None:
        """Change an executor whose collectives have the names of their process groups."""
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
            chosen = self.gathers if node.target in GATHERS else self.reductions if node.target in REDUCES else {}
            if unit in chosen:
                node.target, node.kwargs = _BY_USER[node.target], {"comm": chosen[unit].number}


def remove_user_collectives(graph: Graph) -> None:
    """Undo `UserCollectives.bind`."""
    for node in list(graph.nodes):
        if node.target in _REPLACED:
            node.target, node.kwargs = _REPLACED[node.target], {}
        elif node.target is hooked:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def gather(shard: torch.Tensor, num_ranks: int, group: str, *, comm: int) -> torch.Tensor:
    """Start to gather the shards of all ranks along dim 0."""
    size = [num_ranks * shard.shape[0], *shard.shape[1:]]
    run: Comm = _in_use[comm].value
    full = run.allocate(size, dtype=shard.dtype, device=shard.device)
    return started(full, run(output_tensor=full, input_tensor=shard, group=process_group(group), async_op=True))


def gather_several(shards: Sequence[torch.Tensor], num_ranks: int, group: str, *, comm: int) -> list[torch.Tensor]:
    """Start to gather several, one after the other."""
    return [gather(shard, num_ranks, group, comm=comm) for shard in shards]


def reduce(gradient: torch.Tensor, op: str, num_ranks: int, group: str, *, comm: int) -> torch.Tensor:
    """Start to compute this rank's piece, along dim 0, of the sum or mean over ranks."""
    size = [gradient.shape[0] // num_ranks, *gradient.shape[1:]]
    run: Comm = _in_use[comm].value
    piece = run.allocate(size, dtype=gradient.dtype, device=gradient.device)
    kind = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
    work = run(output_tensor=piece, input_tensor=gradient, group=process_group(group), op=kind, async_op=True)
    return started(piece, work)


def reduce_several(
    gradients: Sequence[torch.Tensor], op: str, num_ranks: int, group: str, *, comm: int
) -> list[torch.Tensor]:
    """Start to reduce several, one after the other."""
    return [reduce(gradient, op, num_ranks, group, comm=comm) for gradient in gradients]


def hooked(gradient: torch.Tensor, *, hook: int) -> torch.Tensor:
    """Return a reduced gradient after the user's hook has seen it."""
    _in_use[hook].value(gradient)
    return gradient


_BY_USER: Mapping[Any, Callable[..., Any]] = {
    c10d.all_gather_into_tensor.default: gather,
    c10d.all_gather_into_tensor_coalesced.default: gather_several,
    c10d.reduce_scatter_tensor.default: reduce,
    c10d.reduce_scatter_tensor_coalesced.default: reduce_several,
}
_REPLACED: Mapping[Any, OpOverload] = {by_user: planned for planned, by_user in _BY_USER.items()}
