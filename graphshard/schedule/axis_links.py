"""Axes that a phase's collectives run over, and the link that they make: its costs and its channels.

    forward     gathers over the sharding axis
    backward    gathers over it, or among neighbours on it; reduce-scatters over it, then all-reduces over the replicas

Collectives share a channel if their axes share a link: within a node, or beyond it. The model's own collectives are
among the compute of a phase, and have the channel of their axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from graphshard.cost.costs import Costs, ModelCollective, model_collective
from graphshard.ir.collective_regions import Collective, CollectiveRegions, is_scalar
from graphshard.ir.graph import is_average, is_in_order, with_parts
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.operators import MODEL_WAIT
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.plan import CollectiveKind
from graphshard.ir.program import Phase, Program
from graphshard.schedule.graph_facts import collectives_of
from graphshard.schedule.problem import Link

# Bytes of a reduction that takes longer than its latency.
_LARGE = 1 << 28


@dataclass(frozen=True)
class PhaseAxes:
    """The axes of a phase."""

    gather: Axis  # the axes that parameters are gathered over, and gradients reduced
    reduce: Axis
    replicas: Axis | None = None  # the axis of the all-reduce that follows a reduction; None if none does
    reduction: CollectiveKind = "reduce"  # kind of a reduction: an all-reduce if parameters are replicated only
    averages: bool = False  # whether a reduction is of means
    in_order: bool = False  # whether a reduction is an exchange and a sum in the order of ranks
    experts: PhaseAxes | None = None  # the axes of parameters on the experts' mesh, if there are such

    def of(self, row: ParamSpec) -> PhaseAxes:
        """Return the axes of a parameter."""
        return self.experts if row.expert and self.experts is not None else self

    def axis(self, kind: CollectiveKind) -> Axis:
        """Return the axis of the plan's buckets of a kind."""
        if kind == "gather":
            return self.gather
        return self.replicas if kind == "all_reduce" and self.replicas is not None else self.reduce


def axes_of(program: Program, phase: Phase) -> PhaseAxes:
    """Return the axes of a phase."""
    found: tuple[dict[CollectiveKind, Collective], dict[CollectiveKind, Collective]] = {}, {}
    for each in collectives_of(phase):
        if not is_scalar(program, each):
            found[program.params[each.params[0]].expert].setdefault(each.kind, each)
    axes = _axes(program.mesh, found[False])
    if program.mesh.experts is None or not found[True]:
        return axes
    return replace(axes, experts=_axes(program.mesh.experts, found[True]))


def _axes(mesh: Mesh, found: Mapping[CollectiveKind, Collective]) -> PhaseAxes:
    one = {kind: mesh.named(each.axis) for kind, each in found.items()}
    gather, replicas = one.get("gather", mesh.shard), one.get("all_reduce")
    averages = any(is_average(each.node) for each in found.values())
    in_order = any(is_in_order(each.node) for each in found.values())
    if "reduce" in one or replicas is None:
        return PhaseAxes(gather, one.get("reduce", mesh.shard), replicas, averages=averages, in_order=in_order)
    return PhaseAxes(gather, replicas, reduction="all_reduce", averages=averages, in_order=in_order)


def on_one_link(costs: Costs, axes: PhaseAxes) -> bool:
    """Return whether experts' collectives have the legs and channels of others, so that they are planned with them."""
    if axes.experts is None:
        return True
    one, other = (_link(costs, each, exchange=False) for each in (axes, axes.experts))
    channels = [(link.separate, link.all_reduce is None, link.all_reduce_on) for link in (one, other)]
    links = [costs.link(each.gather) for each in (axes, axes.experts)]
    return channels[0] == channels[1] and links[0] == links[1] and axes.reduction == axes.experts.reduction


def link_of(costs: Costs, axes: PhaseAxes, *, exchange: bool = False) -> Link:
    """Return the costs of collectives over these axes; collectives of experts, if `on_one_link`, have the index 1."""
    link = _link(costs, axes, exchange=exchange)
    if axes.experts is None or not on_one_link(costs, axes):
        return link
    return replace(link, others=(_link(costs, axes.experts, exchange=False),))


def _link(costs: Costs, axes: PhaseAxes, *, exchange: bool) -> Link:
    how = {"averages": axes.averages, "in_order": axes.in_order}
    link = make_link(costs, axes.reduce, exchange=exchange, **how)
    gathers, reduces = costs.link(axes.gather), costs.link(axes.reduce)
    if axes.reduction == "all_reduce":
        link = replace(link, reduce=_rate(costs, "all_reduce", axes.reduce, **how), num_shards=1)
    if axes.gather != axes.reduce:
        gather = _rate(costs, "gather", axes.gather)
        link = replace(link, gather=gather, separate=gathers != reduces, num_pieces=axes.gather.size)
    if axes.replicas is not None:
        whole, num_shards = _rate(costs, "all_reduce", axes.replicas, **how), link.num_shards
        second = functools.cache(lambda num_bytes, num_tensors: whole(num_bytes // num_shards, num_tensors))
        on = 0 if costs.link(axes.replicas) == gathers else 1
        copies = axes.replicas.size if axes.in_order else 0
        link = replace(link, all_reduce=second, all_reduce_on=on, copies=copies)
    return link


@dataclass(frozen=True)
class Sent:
    """A collective of the model's own, and the compute positions at which it is launched and waited for."""

    collective: ModelCollective
    at: int
    until: int


def model_collectives(layout: CollectiveRegions) -> Iterator[Sent]:
    """Yield the model's own collectives among the compute of a phase, in order."""
    for at, node in enumerate(layout.compute):
        for part in with_parts(node):
            sent = model_collective(part)
            if sent is None:
                continue
            settled = [at] if sent.at_once else [layout.index[user] for user in part.users if user.target is MODEL_WAIT]
            yield Sent(sent, at, min(settled, default=len(layout.compute) - 1))


def make_link(
    costs: Costs, axis: Axis, *, exchange: bool = False, averages: bool = False, in_order: bool = False
) -> Link:
    """Return the costs of gathers and reductions over one axis; `exchange` allows it where that is cheaper."""
    reduced = _rate(costs, "reduce", axis, averages, in_order)

    @functools.cache
    def reduce(num_bytes: int, num_tensors: int) -> float:
        seconds = reduced(num_bytes, num_tensors)
        return min(seconds, float(costs.exchange(num_bytes, axis, num_tensors))) if exchange else seconds

    pair = axis.size == 2 and costs.profile.device == "cpu"  # it receives a shard, and adds its own to that
    return Link(
        _rate(costs, "gather", axis),
        reduce,
        functools.cache(lambda n: float(costs.copy(n))),
        axis.size,
        contention=costs.profile.contention,
        receives=not pair and (in_order or reduce(_LARGE, 1) < reduced(_LARGE, 1)),
    )


def _rate(
    costs: Costs, kind: str, axis: Axis, averages: bool = False, in_order: bool = False
) -> Callable[[int, int], float]:
    def seconds(num_bytes: int, num_tensors: int) -> float:
        if in_order and kind != "gather":
            return float(costs.exchange(num_bytes, axis, num_tensors, kind))
        return float(costs.collective(kind, num_bytes, num_tensors, axis, averages=averages))

    return functools.cache(seconds)
