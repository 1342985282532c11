"""Collectives whose launch differs from the graph. An executor is changed when it is bound.

The program, its plan and its dumps say what travels, not who carries it. FSDP2's `Comm`s and hooks of the user:

    %g = all_gather_into_tensor(%s, n, shard)          %g = gather(%s, n, shard, comm=0)
    %r = reduce_scatter_tensor(%g, avg, n, shard)      %r = reduce(%g, avg, n, shard, comm=1)
    %w = wait_tensor(%r)                               %w = wait_tensor(%r)
                                                       %h = hooked(%w, hook=2)

All-reduces write over their input where nothing reads it any more; the functional ones copy it first:

    %a = all_reduce(%w, avg, replicate)                %a = all_reduce_(%w, avg, replicate)

All-gathers: the functional ones of torch 2.11 to 2.13 corrupt the heap on gloo now and then while several are under way
(`benchmarks/gloo_gathers.py`), and coalesced ones need tensors in the host's memory. The gathers of
`torch.distributed`, which FSDP2 calls, take another way through gloo, and have not been seen to:

    %g = all_gather_into_tensor(%s, n, shard)          %g = all_gather(%s, n, shard)

Several tensors of a bucket have one wait. Functional collectives register their work with each result; these, with the
first one:

    %g = all_gather_into_tensor_coalesced([%a, %b], n, shard)    %g = gather_together([%a, %b], n, shard)
    %w1 = wait_tensor(getitem(%g, 0))                            w1, w2 = wait_tensor(g1), g2
    %w2 = wait_tensor(getitem(%g, 1))

Reductions in the order of ranks, and reduce-scatters where the plan says that this is cheaper: gloo runs one as an
all-reduce for each rank, and a sum of two has the same bits in either order.

    %r = reduce_scatter_tensor(%g, avg, 4, shard)      %r = exchange(%g, avg, 4, shard)
    %w = wait_tensor(%r)                               %w = wait_tensor(%r)
                                                       %s = add_up(%w, %g, avg, 4, shard)
"""

from __future__ import annotations

import copy
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.fx import Node

from graphshard.ir.graph import (
    ALL_REDUCES,
    GATHERS,
    REDUCES,
    WAIT,
    base_of,
    c10d,
    fake,
    is_collective,
    is_exchanged,
    is_in_order,
    is_reduction,
    is_view,
    kind_of,
    launch_of,
)
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import DOWNLOAD, add_exchanged, start_exchange
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Phase, Program
from graphshard.runtime.communication_memory import REGISTERED
from graphshard.runtime.communication_memory import MemoryKind as MemoryKind
from graphshard.torch_compat.dtensor import all_gather_into, process_group, started

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


# "hook" is called with a reduced gradient, before it is divided or cast.
UserChoice = Literal["gather", "reduce", "hook"]


@dataclass
class UserCollectives:
    """Choices of the user by kind and unit's name, shared by all programs of a model.

    Attributes:
        separate: units whose gradients are reduced in `group`, "" until it is made.
        memory: of the results of gathers, by unit. A bucket of several units takes it if one of them does.
    """

    chosen: dict[tuple[UserChoice, str], UserObject] = field(default_factory=dict)
    separate: set[str] = field(default_factory=set)
    group: str = ""
    memory: dict[str, MemoryKind] = field(default_factory=dict)

    def update(self, other: UserCollectives, names: Mapping[str, str] | None = None) -> None:
        """Add the choices of another model or part for units that `names` renames, or for all of them."""
        chosen = {key: of for key, of in other.chosen.items() if names is None or key[1] in names}
        self.chosen.update({(kind, names[unit] if names else unit): of for (kind, unit), of in chosen.items()})
        self.separate |= {names[unit] if names else unit for unit in other.separate if names is None or unit in names}
        self.memory.update((names[u] if names else u, m) for u, m in other.memory.items() if not names or u in names)
        self.group = self.group or other.group

    def place(self, units: Collection[str], kind: MemoryKind | None) -> None:
        """Let units' gathers write to registered memory, or to torch's."""
        self.memory = {unit: known for unit, known in self.memory.items() if unit not in units}
        self.memory.update(dict.fromkeys(units, kind) if kind is not None else {})

    def bind(self, phase: Phase, mesh: Mesh) -> None:
        """Change an executor whose collectives have the names of their process groups."""
        graph = phase.module.graph
        last = "all_reduce" if mesh.replicate is not None else "reduce"
        launches = [(node, node.meta["unit"]) for node in graph.nodes if is_collective(node) and "unit" in node.meta]
        for wait in [node for node in graph.nodes if node.target is WAIT]:
            launch = launch_of(wait)
            hook = self.chosen.get(("hook", launch.meta.get("unit", "(several)"))) if is_reduction(launch) else None
            if hook is not None and kind_of(launch) in (last, "all_reduce"):
                with graph.inserting_after(wait):
                    seen = graph.call_function(hooked, kwargs={"hook": hook.number})
                seen.meta.update(wait.meta)
                wait.replace_all_uses_with(seen)
                seen.args = (wait,)
        for node, unit in launches:
            if node.target in REDUCES and unit in self.separate:
                node.args = (*node.args[:-1], self.group)
            kind: UserChoice = "gather" if node.target in GATHERS else "reduce"
            if node.target in _BY_USER and (kind, unit) in self.chosen:
                launch_by(node, _BY_USER[node.target], comm=self.chosen[kind, unit].number)
            elif node.target in REGISTERED and (memory := self._memory_of(unit)):
                launch_by(node, REGISTERED[node.target], memory=memory)

    def _memory_of(self, unit: str) -> MemoryKind | None:
        joined = next(iter(self.memory.values()), None) if unit == "(several)" else None
        return self.memory.get(unit, joined)


def launch_by(node: Node, target: Any, **kwargs: Any) -> None:
    """Let another function with the same arguments launch a collective, and remember the one that was planned."""
    node.meta.setdefault("planned", node.target)
    node.target, node.kwargs = target, kwargs


def gather(shard: torch.Tensor, num_ranks: int, group: str, *, comm: int) -> torch.Tensor:
    """Start to gather the shards of all ranks along dim 0."""
    return gather_several([shard], num_ranks, group, comm=comm)[0]


def gather_several(shards: Sequence[torch.Tensor], num_ranks: int, group: str, *, comm: int) -> list[torch.Tensor]:
    """Start to gather several, one after the other."""
    run: Comm = _in_use[comm].value
    fulls = []
    for shard in shards:
        full = run.allocate(_gathered(shard, num_ranks), dtype=shard.dtype, device=shard.device)
        fulls.append(full)
        started(fulls[0], run(output_tensor=full, input_tensor=shard, group=process_group(group), async_op=True))
    return fulls


def reduce(gradient: torch.Tensor, op: str, num_ranks: int, group: str, *, comm: int) -> torch.Tensor:
    """Start to compute this rank's piece, along dim 0, of the sum or mean over ranks."""
    return reduce_several([gradient], op, num_ranks, group, comm=comm)[0]


def reduce_several(
    gradients: Sequence[torch.Tensor], op: str, num_ranks: int, group: str, *, comm: int
) -> list[torch.Tensor]:
    """Start to reduce several, one after the other."""
    run: Comm = _in_use[comm].value
    pieces, kind = [], _reduce_op(op)
    for gradient in gradients:
        piece = run.allocate(_scattered(gradient, num_ranks), dtype=gradient.dtype, device=gradient.device)
        pieces.append(piece)
        work = run(output_tensor=piece, input_tensor=gradient, group=process_group(group), op=kind, async_op=True)
        started(pieces[0], work)
    return pieces


def _gathered(shard: torch.Tensor, num_ranks: int) -> list[int]:
    return [num_ranks * shard.shape[0], *shard.shape[1:]]


def _scattered(gradient: torch.Tensor, num_ranks: int) -> list[int]:
    return [gradient.shape[0] // num_ranks, *gradient.shape[1:]]


def _reduce_op(op: str) -> Any:
    return getattr(dist.ReduceOp, op.upper())


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


IN_PLACE = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce_coalesced_.default,
}


def group_downloads(phase: Phase, params: ParamTable) -> None:
    """Mark the first download of each group, the gradients of a unit or the values that are saved at the same place.

    Compute waits there for the group before, which has had a unit's compute to travel.
    """
    units: dict[object, object] = {
        node: params[slot.name].unit
        for node, slot in zip(phase.results, phase.outputs)
        if slot.kind == "grad" and slot.of == "param"
    }
    before = place = None
    for node in phase.module.graph.nodes:
        if node.target is not DOWNLOAD:
            place = node
            continue
        group = units.get(node, place)
        if group != before:
            node.args = (node.args[0], True)
        before = group


def reduce_in_place(phase: Phase) -> None:
    """Let all-reduces write over their inputs where these have no later readers."""
    for node in phase.module.graph.nodes:
        if node.target in IN_PLACE:
            given = node.all_input_nodes
            bases = {base_of(value) for value in given}
            fit = len(bases) == len(given) and all(fake(value).is_contiguous() for value in given)
            if fit and all(_is_last_reader(node, base) for base in bases):
                launch_by(node, IN_PLACE[node.target])


def _is_last_reader(launch: Node, base: Node) -> bool:
    """Return whether a value's memory is owned by the step, and a launch is the last that reads it."""
    source = base.args[0] if base.target is operator.getitem else None
    if base.target is not WAIT and not (isinstance(source, Node) and source.op == "call_module"):
        return False
    stack = [base]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function" and is_view(user):
                stack.append(user)
            elif user.op == "output" or launch < user:
                return False
    return True


def gather_into_buffers(phase: Phase) -> None:
    """Launch all gathers by `all_gather`; their group is the last argument."""
    for node in phase.module.graph.nodes:
        if node.target in _LAUNCHES:
            launch_by(node, _LAUNCHES[node.target])


def all_gather(shard: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Start to gather the shards of all ranks along dim 0."""
    return all_gather_coalesced([shard], num_ranks, group)[0]


def all_gather_coalesced(shards: Sequence[torch.Tensor], num_ranks: int, group: str) -> list[torch.Tensor]:
    """Start to gather several, one after the other: gloo has no launch for all that is any faster."""
    fulls = [shard.new_empty(_gathered(shard, num_ranks)) for shard in shards]
    for full, shard in zip(fulls, shards):
        started(fulls[0], all_gather_into(full, shard, group))
    return fulls


_LAUNCHES = {
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.all_gather_into_tensor_coalesced.default: all_gather_coalesced,
}


def launch_together(phase: Phase) -> None:
    """Launch coalesced collectives by functions whose results have one wait; their group is the last argument."""
    for node in phase.module.graph.nodes:
        if node.target in _TOGETHER and not any(fake(value).is_complex() for value in node.all_input_nodes):
            launch_by(node, _TOGETHER[node.target])


def gather_together(shards: list[torch.Tensor], num_ranks: int, group: str) -> list[torch.Tensor]:
    """Start to gather several as one."""
    fulls = [shard.new_empty(_gathered(shard, num_ranks)) for shard in shards]
    started(fulls[0], process_group(group).allgather_into_tensor_coalesced(fulls, shards))
    return fulls


def reduce_together(gradients: list[torch.Tensor], op: str, num_ranks: int, group: str) -> list[torch.Tensor]:
    """Start to reduce several as one, and to scatter the results."""
    pieces = [gradient.new_empty(_scattered(gradient, num_ranks)) for gradient in gradients]
    options = dist.ReduceScatterOptions()
    options.reduceOp = _reduce_op(op)
    started(pieces[0], process_group(group).reduce_scatter_tensor_coalesced(pieces, gradients, options))
    return pieces


def all_reduce_together(shards: list[torch.Tensor], op: str, group: str) -> list[torch.Tensor]:
    """Start to reduce copies of several as one."""
    return all_reduce_together_([shard.clone() for shard in shards], op, group)


def all_reduce_together_(shards: list[torch.Tensor], op: str, group: str) -> list[torch.Tensor]:
    """Start to reduce several as one, in place."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = _reduce_op(op)
    started(shards[0], process_group(group).allreduce_coalesced(shards, options))
    return shards


_TOGETHER = {
    c10d.all_gather_into_tensor_coalesced.default: gather_together,
    c10d.reduce_scatter_tensor_coalesced.default: reduce_together,
    c10d.all_reduce_coalesced.default: all_reduce_together,
    c10d.all_reduce_coalesced_.default: all_reduce_together_,
}


def exchange_reductions(phase: Phase) -> None:
    """Rewrite the reductions in the order of ranks, or marked `exchanged`; their group is the last argument."""
    graph = phase.module.graph
    for node in list(graph.nodes):
        if not is_exchanged(node):
            continue
        waits = [wait for user in node.users for wait in ([user] if user.target is WAIT else user.users)]
        gradients = sorted(waits, key=lambda wait: wait.args[0].args[1]) if len(node.all_input_nodes) > 1 else waits
        for gradient, wait in zip(node.all_input_nodes, gradients, strict=True):
            with graph.inserting_after(wait):
                total = graph.call_function(add_up)
            total.meta.update(wait.meta)
            wait.replace_all_uses_with(total)
            total.args = (wait, gradient, *node.args[1:])
            total.kwargs = {"copies": node.target in ALL_REDUCES}
            if not is_in_order(node):
                total.kwargs = {**total.kwargs, "dtype": fake(wait).dtype}
        launch = exchange_several if isinstance(node.args[0], (list, tuple)) else exchange
        launch_by(node, launch, copies=node.target in ALL_REDUCES)


def exchange(gradient: torch.Tensor, op: str, num_ranks: int, group: str, *, copies: bool) -> torch.Tensor:
    """Start to receive what `add_up` adds."""
    received, work = start_exchange(gradient, num_ranks, group, copies=copies)
    return received if work is None else started(received, work)


def exchange_several(
    gradients: Sequence[torch.Tensor], op: str, num_ranks: int, group: str, *, copies: bool
) -> list[torch.Tensor]:
    """Start to receive what `add_up` adds for each of several; the first has the work of all."""
    received: list[torch.Tensor] = []
    for gradient in gradients:
        buffer, work = start_exchange(gradient, num_ranks, group, copies=copies, alone=False)
        received.append(buffer)
        started(received[0], work)
    return received


def add_up(
    received: torch.Tensor,
    gradient: torch.Tensor,
    op: str,
    num_ranks: int,
    group: str,
    *,
    copies: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the sum or mean of a gradient over ranks, in the dtype of sums or another."""
    total = add_exchanged(received, gradient, op, num_ranks, group, copies=copies)
    return total if dtype is None or total.dtype is dtype else total.to(dtype)


def as_planned(program: Program) -> Program:
    """Copy an installed program, with graphs as they were before it was bound, for predictions."""
    copied = copy.copy(program)
    copied.phases = {name: phase.clone() for name, phase in program.phases.items()}
    for phase in copied.phases.values():
        graph = phase.module.graph
        for node in list(graph.nodes):
            if "planned" in node.meta:
                node.target, node.kwargs = node.meta["planned"], {}
            elif node.target in (hooked, add_up):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
    return copied
