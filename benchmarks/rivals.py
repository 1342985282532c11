"""Alternative schedules of a chain: FSDP2's order, one bucket per parameter, and Inductor's own scheduler.

Each returns a chain whose transfers are the buckets, and their placement, so that one simulator compares all.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import Graph, GraphModule, Node

from benchmarks.shapes import merged
from graphshard.ir.plan import CollectiveKind
from graphshard.schedule import Bucketed, Chain, Link, Occurrence, Placement, Transfer
from graphshard.torch_compat.fake_tensors import FakeTensorMode

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def unit_of(transfer: Transfer) -> str:
    """Return the block of a parameter; "" is the root."""
    return transfer.name.rpartition(".")[0]


def fsdp2(chain: Chain, *, packed: bool = True, whole: bool = True) -> tuple[Chain, Placement]:
    """Schedule in FSDP2's order: gathers start in the previous unit; reductions are waited for at the next unit's.

    FSDP2 packs: a bucket is copied into a buffer and out of it. Without `packed`, tensors are sent without copies, and
    without `whole` each separately.
    """
    gathers, reductions = _by_unit(chain.gathers), _by_unit(chain.reductions)
    end = len(chain.seconds)
    buckets: list[Transfer] = []
    events: list[tuple[int, int, Occurrence]] = []
    start, urgency = 0, 0
    for unit in gathers:
        for bucket in _as_buckets(unit, packed, whole):
            events.append((start, urgency, Occurrence("start", len(buckets), start)))
            events.append((bucket.at, 2, Occurrence("wait", len(buckets), bucket.at)))
            buckets.append(bucket)
        start, urgency = unit[0].at, 3
    num_gathers = len(buckets)
    for unit, following in itertools.zip_longest(reductions, reductions[1:]):
        for bucket in _as_buckets(unit, packed, whole):
            wait = max(t.at for t in following) if following else end
            events.append((bucket.at, 1, Occurrence("start", len(buckets), bucket.at)))
            events.append((wait, 4 if following is None else 0, Occurrence("wait", len(buckets), wait)))
            buckets.append(bucket)
    events.sort(key=lambda event: event[:2])
    return _with(chain, buckets[:num_gathers], buckets[num_gathers:], [event for *_, event in events])


def by_unit(chain: Chain) -> Chain:
    """Return the chain in which each unit is one bucket."""
    gathers = [replace(merged(unit), at=unit[0].at) for unit in _by_unit(chain.gathers)]
    reductions = [replace(merged(unit), at=unit[-1].at) for unit in _by_unit(chain.reductions)]
    return replace(chain, gathers=tuple(gathers), reductions=tuple(reductions))


def _by_unit(transfers: tuple[Transfer, ...]) -> list[list[Transfer]]:
    groups: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        groups.setdefault(unit_of(transfer), []).append(transfer)
    return sorted(groups.values(), key=lambda unit: unit[0].at if unit[0].last >= 0 else unit[-1].at)


def _as_buckets(unit: list[Transfer], packed: bool, whole: bool) -> list[Transfer]:
    if not whole:
        return [replace(t, num_small=0) for t in unit]
    at = unit[0].at if unit[0].last >= 0 else unit[-1].at
    bucket = replace(merged(unit), at=at)
    return [_packed(bucket) if packed else replace(bucket, num_small=0)]


def _packed(transfer: Transfer) -> Transfer:
    return replace(transfer, num_small=transfer.num_tensors, small_bytes=transfer.num_bytes)


def _with(
    chain: Chain, gathers: list[Transfer], reductions: list[Transfer], events: list[Occurrence]
) -> tuple[Chain, Placement]:
    """Return the chain with these buckets as transfers, in order of use, and the events, which number gathers first."""
    order = sorted(range(len(gathers)), key=lambda i: gathers[i].at)
    order += [len(gathers) + i for i in sorted(range(len(reductions)), key=lambda i: reductions[i].at)]
    number = {old: new for new, old in enumerate(order)}
    every = [*gathers, *reductions]
    new = replace(
        chain,
        gathers=tuple(every[i] for i in order[: len(gathers)]),
        reductions=tuple(every[i] for i in order[len(gathers) :]),
    )
    buckets = [Bucketed("gather", i, i + 1, g.num_small > 1) for i, g in enumerate(new.gathers)]
    buckets += [Bucketed("reduce", i, i + 1, r.num_small > 1) for i, r in enumerate(new.reductions)]
    return new, Placement(tuple(buckets), tuple(e._replace(bucket=number[e.bucket]) for e in events))


def inductor(chain: Chain, link: Link, memory_gb: float) -> tuple[Chain, Placement]:
    """Run `torch._inductor`'s schedule_overlap_bucketing on a graph of the chain with the chain's own times.

    An item is a matrix multiplication of one element. The default process group must have the link's ranks.
    """
    module, seconds = _graph(chain, link)

    def estimate(node: Node, size: int | None) -> float | None:
        if size is not None:
            kind: CollectiveKind = "gather" if "gather" in str(node.target) else "reduce"
            return 1e3 * link.seconds(kind, size, 1)
        return 1e3 * seconds[node] if node in seconds else None

    # Both query the machine or other ranks for values that are given here.
    with (
        mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", return_value=0.0),
        mock.patch.object(overlap_scheduling, "align_estimations_across_ranks", lambda found: found),
    ):
        scheduled = overlap_scheduling.schedule_overlap_bucketing(
            module,
            collective_bucketing=True,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            max_memory_increase_gb=memory_gb,
            max_memory_increase_ratio=None,
            pre_bucketing_fsdp_collectives=False,
        )
    return _read(chain, scheduled)


def _graph(chain: Chain, link: Link) -> tuple[GraphModule, dict[Node, float]]:
    graph, mode = Graph(), FakeTensorMode()
    group, ranks = dist.group.WORLD.group_name, link.num_shards
    seconds: dict[Node, float] = {}

    def call(target: Any, *args: Any, takes: float = 0.0) -> Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        seconds[node] = takes
        return node

    def given(name: str, shape: list[int], dtype: torch.dtype) -> Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    value = given("x", [1, 1], torch.bfloat16)
    shards = [given(f"s{i}", [g.num_bytes // 2 // ranks], torch.bfloat16) for i, g in enumerate(chain.gathers)]
    full = []
    for gather, shard in zip(chain.gathers, shards):
        start = call(
            c10d.all_gather_into_tensor.default, shard, ranks, group, takes=link.seconds("gather", gather.num_bytes, 1)
        )
        full.append(call(c10d.wait_tensor.default, start))
    results: list[Node] = []
    upcoming = list(chain.reductions)
    for index, takes in enumerate(chain.seconds):
        for gather, whole in zip(chain.gathers, full):
            if gather.at == index:
                value = call(aten.add.Tensor, value, call(aten.slice.Tensor, whole, 0, 0, 1))
        value = call(aten.mm.default, value, value, takes=takes)
        value.meta["item"] = index
        while upcoming and upcoming[0].at == index + 1:
            reduction = upcoming.pop(0)
            flat = call(aten.view.default, value, [1])
            gradient = call(aten.repeat.default, flat, [reduction.num_bytes // 2 // ranks * ranks])
            gradient.meta["reduction"] = len(results)
            takes = link.seconds("reduce", reduction.num_bytes, 1)
            start = call(c10d.reduce_scatter_tensor.default, gradient, "avg", ranks, group, takes=takes)
            results.append(call(c10d.wait_tensor.default, start))
    graph.output((value, *results))
    return GraphModule({}, graph), seconds


def _read(chain: Chain, module: GraphModule) -> tuple[Chain, Placement]:
    """Return the buckets and events of a scheduled graph."""
    index = {node.name: i for i, node in enumerate(n for n in module.graph.nodes if n.name.startswith("s"))}
    buckets: dict[Node, tuple[CollectiveKind, Transfer]] = {}
    events: list[tuple[str, Node, int]] = []
    position, waited = 0, set()
    for node in module.graph.nodes:
        position += "item" in node.meta and node.target is aten.mm.default
        name = str(node.target)
        if "all_gather_into_tensor" in name or "reduce_scatter_tensor" in name:
            kind: CollectiveKind = "gather" if "all_gather" in name else "reduce"
            origins = [n for n in _origins(node) if kind == "reduce" or n.name in index]
            which = [n.meta["reduction"] if kind == "reduce" else index[n.name] for n in origins]
            group = [chain.transfers(kind)[i] for i in sorted(set(which))]
            whole = _packed(merged(group)) if len(group) > 1 else group[0]
            buckets[node] = kind, replace(whole, name=f"{group[0].name} and {len(group) - 1}")
            events.append(("start", node, position))
        elif node.target is c10d.wait_tensor.default:
            start = node.all_input_nodes[0]
            start = start if start in buckets else start.all_input_nodes[0]
            if start not in waited:
                waited.add(start)
                events.append(("wait", start, position))
    end = len(chain.seconds) - 1
    waits = {node: at for action, node, at in events if action == "wait"}
    of_kind: dict[CollectiveKind, list[Node]] = {"gather": [], "reduce": []}
    for node, (kind, _) in buckets.items():
        of_kind[kind].append(node)
    starts = {node: at for action, node, at in events if action == "start"}
    gathers = sorted(of_kind["gather"], key=lambda n: waits[n])
    reductions = sorted(of_kind["reduce"], key=lambda n: starts[n])
    number = {node: i for i, node in enumerate([*gathers, *reductions])}
    occurrences = [Occurrence(action, number[node], at) for action, node, at in events]
    return _with(
        chain,
        [replace(buckets[n][1], at=min(waits[n], end), last=max(buckets[n][1].last, waits[n])) for n in gathers],
        [replace(buckets[n][1], at=starts[n]) for n in reductions],
        occurrences,
    )


def _origins(node: Node) -> list[Node]:
    """Return the shards or gradients that a collective carries."""
    found, stack, seen = [], list(node.all_input_nodes), set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder" or "reduction" in current.meta:
            found.append(current)
        else:
            stack += current.all_input_nodes
    return found
