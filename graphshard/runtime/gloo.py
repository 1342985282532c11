"""Collectives that gloo runs in another way than the graph says; an executor is changed so when it is bound.

All-gathers: the functional ones of torch 2.11 to 2.13 corrupt the heap on gloo now and then while several are under way
(`benchmarks/gloo_gathers.py`), and several tensors at once may lie in the host's memory only. Those of
`torch.distributed`, which FSDP2 calls, take another way through gloo, and have not been seen to.

    %g = all_gather_into_tensor(%s, n, shard)          %g = all_gather(%s, n, shard)

Reduce-scatters, where the plan says that it is cheaper: gloo runs one as an all-reduce for each rank. On two ranks the
sum of two has the same bits in either order; on more it would have to be in gloo's order, so there it is not done.

    %r = reduce_scatter_tensor(%g, avg, 2, shard)      %r = swap_halves(%g, shard)
    %w = wait_tensor(%r)                               %w = wait_tensor(%r)
                                                       %s = add_own_half(%w, %g, avg, shard)

Each rank sends the half that is the other's, and adds its own to what it receives: no buffer but the result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.fx import Node

from graphshard.ir.graph import REDUCES, WAIT, c10d, launch_of
from graphshard.ir.plan import EXCHANGE_RANKS
from graphshard.ir.program import Phase, Program
from graphshard.runtime.custom import undo
from graphshard.runtime.in_place import FUNCTIONAL
from graphshard.torch_compat.dtensor import all_gather_into, rank_in_group


def gather_into_buffers(phase: Phase) -> None:
    """Launch all gathers as below, in place; their group is the last argument."""
    for node in phase.module.graph.nodes:
        node.target = _LAUNCHES.get(node.target, node.target)


def all_gather(shard: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """The shards of all ranks along dim 0, to be waited for."""
    full = shard.new_empty([num_ranks * shard.shape[0], *shard.shape[1:]])
    all_gather_into(full, shard, group)
    return full


def all_gather_coalesced(shards: Sequence[torch.Tensor], num_ranks: int, group: str) -> list[torch.Tensor]:
    """Several, one after the other: gloo has no launch for all that is any faster."""
    return [all_gather(shard, num_ranks, group) for shard in shards]


_LAUNCHES = {
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.all_gather_into_tensor_coalesced.default: all_gather_coalesced,
}

_PLANNED = {launched: planned for planned, launched in _LAUNCHES.items()} | FUNCTIONAL


def exchange_reductions(phase: Phase) -> None:
    """Rewrite the reductions that are marked `exchanged`, in place; their group is the last argument."""
    graph = phase.module.graph
    for node in list(graph.nodes):
        if node.target not in REDUCES or not node.meta.get("exchanged"):
            continue
        gradient, op, size, group = node.args
        assert isinstance(gradient, Node)
        assert size == EXCHANGE_RANKS
        (wait,) = (user for user in node.users if user.target is WAIT)
        node.target, node.args = swap_halves, (gradient, group)
        with graph.inserting_after(wait):
            total = graph.call_function(add_own_half)
        total.meta.update(wait.meta)
        wait.replace_all_uses_with(total)
        total.args = (wait, gradient, op, group)


def swap_halves(gradient: torch.Tensor, group: str) -> torch.Tensor:
    """This rank's half along dim 0 of what the other of two ranks has, to be waited for."""
    other, sizes = 1 - rank_in_group(group), [0, 0]
    theirs = gradient.chunk(EXCHANGE_RANKS)[other]
    sizes[other] = len(theirs)
    return c10d.all_to_all_single(theirs, sizes, sizes, group)


def add_own_half(received: torch.Tensor, gradient: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """The sum, or with "avg" the mean, of what was received and this rank's half, in the place of the former."""
    total = received.add_(gradient.chunk(EXCHANGE_RANKS)[rank_in_group(group)])
    return total.mul_(1 / EXCHANGE_RANKS) if op == "avg" else total  # exact, and faster than a division


def as_planned(program: Program) -> Program:
    """A copy of an installed program, with graphs as they were before it was bound: what predictions are made of."""
    copied = copy.copy(program)
    copied.phases = {name: phase.clone() for name, phase in program.phases.items()}
    for phase in copied.phases.values():
        graph = phase.module.graph
        undo(graph)
        for node in graph.nodes:
            node.target = _PLANNED.get(node.target, node.target)
        for total in graph.find_nodes(op="call_function", target=add_own_half):
            wait, gradient, op, group = total.args
            launch = launch_of(wait)
            launch.target, launch.args = c10d.reduce_scatter_tensor.default, (gradient, op, EXCHANGE_RANKS, group)
            total.replace_all_uses_with(wait)
            graph.erase_node(total)
    return copied
