"""Collectives that gloo runs in another way than the graph says; an executor is changed so when it is bound.

All-gathers: the functional ones of torch 2.11 to 2.13 corrupt the heap on gloo now and then while several are under way
(`benchmarks/gloo_gathers.py`), and several tensors at once may lie in the host's memory only. Those of
`torch.distributed`, which FSDP2 calls, take another way through gloo, and have not been seen to.

    %g = all_gather_into_tensor(%s, n, shard)          %g = all_gather(%s, n, shard)

Reduce-scatters, where the plan says that it is cheaper: gloo runs one as an all-reduce for each rank. On two ranks the
sum of two has the same bits in either order; on more it would have to be in gloo's order, so there it is not done.

    %r = reduce_scatter_tensor(%g, avg, 2, shard)      %r = all_to_all_single(%g, [n, n], [n, n], shard)
    %w = wait_tensor(%r)                               %w = wait_tensor(%r)
                                                       %s = pair_sum(%w, avg)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.fx import Node

from graphshard.ir.distributed_internals import all_gather_into
from graphshard.ir.graph import REDUCES, WAIT, c10d, fake, launch_of
from graphshard.ir.plan import EXCHANGE_RANKS
from graphshard.ir.program import Phase, Program
from graphshard.runtime.custom import undo
from graphshard.runtime.in_place import FUNCTIONAL


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

EXCHANGE = c10d.all_to_all_single.default


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
        rows = fake(node).shape[0]
        node.target, node.args = EXCHANGE, (gradient, [rows] * EXCHANGE_RANKS, [rows] * EXCHANGE_RANKS, group)
        node.meta["val"] = fake(gradient)
        with graph.inserting_after(wait):
            total = graph.call_function(pair_sum)
        total.meta.update(wait.meta)
        wait.replace_all_uses_with(total)
        total.args = (wait, op)
        wait.meta["val"] = fake(gradient)


def as_planned(program: Program) -> Program:
    """A copy of an installed program, with graphs as they were before it was bound: what predictions are made of."""
    copied = copy.copy(program)
    copied.phases = {name: phase.clone() for name, phase in program.phases.items()}
    for phase in copied.phases.values():
        graph = phase.module.graph
        undo(graph)
        for node in graph.nodes:
            node.target = _PLANNED.get(node.target, node.target)
        for total in graph.find_nodes(op="call_function", target=pair_sum):
            wait, op = total.args
            launch = launch_of(wait)
            launch.target = c10d.reduce_scatter_tensor.default
            launch.args = (launch.args[0], op, EXCHANGE_RANKS, launch.args[-1])
            launch.meta["val"] = wait.meta["val"] = fake(total)
            total.replace_all_uses_with(wait)
            graph.erase_node(total)
    return copied


def pair_sum(parts: torch.Tensor, op: str) -> torch.Tensor:
    """The sum, or with "avg" the mean, of the two halves along dim 0."""
    first, second = parts.chunk(EXCHANGE_RANKS)
    total = first + second
    return total.div_(EXCHANGE_RANKS) if op == "avg" else total
