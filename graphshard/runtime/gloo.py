"""Collectives whose launch differs from the graph, and connections of gloo. An executor is changed when it is bound.

All-reduces write over their input where nothing reads it any more; the functional ones copy it first:

    %a = all_reduce(%w, avg, replicate)                %a = all_reduce_(%w, avg, replicate)

All-gathers: the functional ones of torch 2.11 to 2.13 corrupt the heap on gloo now and then while several are under way
(`benchmarks/gloo_gathers.py`), and coalesced ones need tensors in the host's memory. Those of `torch.distributed`,
which FSDP2 calls, take another way through gloo, and have not been seen to:

    %g = all_gather_into_tensor(%s, n, shard)          %g = all_gather(%s, n, shard)

Reduce-scatters, where the plan says that it is cheaper: gloo runs one as an all-reduce for each rank. On two ranks each
sends the half that is the other's, and adds its own to what it receives; no buffer but the result. The sum of two has
the same bits in either order. On more ranks it would have to be in gloo's order, so it is not done there.

    %r = reduce_scatter_tensor(%g, avg, 2, shard)      %r = swap_halves(%g, shard)
    %w = wait_tensor(%r)                               %w = wait_tensor(%r)
                                                       %s = add_own_half(%w, %g, avg, shard)
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.fx import Node

from graphshard.ir.graph import ALL_REDUCES, REDUCES, WAIT, base_of, c10d, fake, is_view, launch_of
from graphshard.ir.plan import EXCHANGE_RANKS
from graphshard.ir.program import Phase, Program
from graphshard.runtime.user_collectives import remove_user_collectives
from graphshard.torch_compat.dtensor import all_gather_into, rank_in_group

# Nothing is ever sent under this tag.
_TAG = 0x6753

_IN_PLACE = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce_coalesced_.default,
}
# Functional collectives by what is launched instead.
FUNCTIONAL = {launched: planned for planned, launched in _IN_PLACE.items()}


def reduce_in_place(phase: Phase) -> None:
    """Let all-reduces write over their inputs where these have no later readers."""
    for node in phase.module.graph.nodes:
        if node.target in ALL_REDUCES:
            given = node.all_input_nodes
            bases = {base_of(value) for value in given}
            fit = len(bases) == len(given) and all(fake(value).is_contiguous() for value in given)
            if fit and all(_is_last_reader(node, base) for base in bases):
                node.target = _IN_PLACE[node.target]


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
        node.target = _LAUNCHES.get(node.target, node.target)


def all_gather(shard: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Start to gather the shards of all ranks along dim 0."""
    full = shard.new_empty([num_ranks * shard.shape[0], *shard.shape[1:]])
    all_gather_into(full, shard, group)
    return full


def all_gather_coalesced(shards: Sequence[torch.Tensor], num_ranks: int, group: str) -> list[torch.Tensor]:
    """Start to gather several, one after the other: gloo has no launch for all that is any faster."""
    return [all_gather(shard, num_ranks, group) for shard in shards]


_LAUNCHES = {
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.all_gather_into_tensor_coalesced.default: all_gather_coalesced,
}
_PLANNED = {launched: planned for planned, launched in _LAUNCHES.items()} | FUNCTIONAL


def exchange_reductions(phase: Phase) -> None:
    """Rewrite the reductions that are marked `exchanged`; their group is the last argument."""
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
    """Start to receive this rank's half, along dim 0, of the other rank's gradient."""
    other, sizes = 1 - rank_in_group(group), [0, 0]
    theirs = gradient.chunk(EXCHANGE_RANKS)[other]
    sizes[other] = len(theirs)
    return c10d.all_to_all_single(theirs, sizes, sizes, group)


def add_own_half(received: torch.Tensor, gradient: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Add this rank's half to `received`, in place; with "avg", return the mean."""
    total = received.add_(gradient.chunk(EXCHANGE_RANKS)[rank_in_group(group)])
    return total.mul_(1 / EXCHANGE_RANKS) if op == "avg" else total  # exact, and faster than a division


def as_planned(program: Program) -> Program:
    """Copy an installed program, with graphs as they were before it was bound, for predictions."""
    copied = copy.copy(program)
    copied.phases = {name: phase.clone() for name, phase in program.phases.items()}
    for phase in copied.phases.values():
        graph = phase.module.graph
        remove_user_collectives(graph)
        for node in graph.nodes:
            node.target = _PLANNED.get(node.target, node.target)
        for total in graph.find_nodes(op="call_function", target=add_own_half):
            wait, gradient, op, group = total.args
            launch = launch_of(wait)
            launch.target, launch.args = c10d.reduce_scatter_tensor.default, (gradient, op, EXCHANGE_RANKS, group)
            total.replace_all_uses_with(wait)
            graph.erase_node(total)
    return copied


# Gloo has no call to ask for or close connections, but receiving does both: gloo refuses to receive from a rank that
# has closed its connection, and when a receive times out, gloo closes all connections of the group. A rank that waits
# for a collective on them, here or elsewhere, gets an error at once, and so does the destructor of the group, which
# waits for what is under way.


def has_closed_connection(rank: int) -> bool:
    """Return whether a rank of the default group has closed its connection to this one, as a process that ends does."""
    group = dist.group.WORLD
    assert group is not None
    try:
        group.recv([torch.zeros(1)], rank, _TAG)
    except RuntimeError as error:
        return any(word in str(error) for word in ("onnection closed", "onnection reset", "roken pipe"))
    return False


def close_connections(group: dist.ProcessGroup) -> None:
    """End what is under way in a group of gloo's; it cannot be used any more."""
    if "gloo" not in str(dist.get_backend(group)):
        return
    for rank in range(group.size()):
        if rank != group.rank():
            try:
                work = group.recv([torch.zeros(1)], rank, _TAG)
            except RuntimeError:  # closed by that rank; gloo asks only this one, and the others may be open
                continue
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
            return
