"""What compute, collectives and copies cost on a machine.

Compute is a roofline: a kernel takes its launch, and then what takes longest of its multiplications, its elementwise
operations and its bytes; on CPUs it computes and then moves its bytes. A collective takes the latency of its steps and
its bytes over the bandwidth, inside a node or between nodes, by the fastest protocol. Sizes and numbers of ranks may be
sympy expressions; so is the result then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import sympy
from torch.fx import Node

from graphshard.cost.kernels import Work, work_of
from graphshard.cost.multiplications import Attention, Gemm, Scalar
from graphshard.cost.profile import Link, Profile, Rate, Tile
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.program import Region

# Heads of this width are what speeds of attention are of; rows and columns of a block of its pairs.
WIDE_HEAD, ATTENTION_BLOCK = 128, 128
# Into how many parts libraries cut an inner dimension.
PARTS = (1, 2, 4, 8)
# Seconds of what is no choice.
_NEVER = 1e9


@dataclass(frozen=True)
class Costs:
    """What the simulator and the planner ask; all results in seconds.

    Attributes:
        profile: which machine, with `.name` and `.hash`.
        network: which of the profile's models of the network between nodes.
        mesh: its order says how far apart ranks along an axis are, and so how many of them share a node. Without one
            they are neighbours.
        measured: seconds of regions by key; they replace the estimate.
        scheduled: kernels of regions by key, as a compiler's scheduler has them; they replace the rules about fusion.
        fused: operators of a region share kernels, as Inductor's do; False runs each by itself.
    """

    profile: Profile
    network: str = "isolated"
    mesh: Mesh | None = None
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    scheduled: Mapping[str, Sequence[Work]] = field(default_factory=dict, hash=False)
    fused: bool = True

    def compute(self, nodes: Sequence[Node]) -> Scalar:
        """These compute nodes, run as one region."""
        return self.kernels(work_of(nodes, fused=self.fused))

    def kernels(self, works: Iterable[Work]) -> Scalar:
        """These kernels, one after the other, on the slowest rank: as the device runs or the host calls them."""
        works = list(works)
        busy = sum(map(self.kernel, works), 0.0)
        host = self.profile.host_seconds["compiled" if self.fused else "eager"]
        if not is_zero(host):
            busy = maximum(busy, len(works) * host)
        return busy * self._slowest

    @property
    def _slowest(self) -> Scalar:
        """By how much the slowest rank is behind one alone: a share for every doubling of the nodes."""
        if self.mesh is None or is_zero(self.profile.straggler):
            return 1.0
        return 1 + self.profile.straggler * doublings(maximum(self.mesh.size / self.profile.ranks_per_node, 1))

    def region(self, region: Region) -> Scalar:
        """One call of a region: as measured, or as its kernels are estimated."""
        if region.key in self.measured:
            return self.measured[region.key]
        if region.key in self.scheduled:
            return self.kernels(self.scheduled[region.key])
        return self.compute(list(region.module.graph.nodes))

    def kernel(self, work: Work) -> Scalar:
        """One kernel."""
        profile, rate = self.profile, self.profile.rate(work.dtype)
        busy = work.operations / profile.vector
        if work.gemms:
            busy = sum((self._gemm(gemm, rate) for gemm in work.gemms), 0.0)
        elif work.attention is not None:
            busy = self._attention(work.attention, rate)
        elif work.kind != "pointwise":  # of a kind whose sizes are not known
            busy = work.flop / (rate.peak * minimum(rate.matmul, profile.sustained))
        moved = work.num_bytes / profile.memory_bandwidth
        # One thread of a CPU computes or waits for memory.
        return profile.kernel_seconds + (busy + moved if profile.device == "cpu" else maximum(busy, moved))

    def _attention(self, attention: Attention, rate: Rate) -> Scalar:
        """Blocks of queries and keys on the diagonal are computed in full; narrow heads leave products short."""
        speed = rate.attention.get(attention.kernel, rate.attention["flash"])
        share = speed.backward if attention.backward else speed.forward
        wide = minimum(attention.dim / WIDE_HEAD, 1) ** self.profile.head_power
        whole = 1 + 1 / ceiling(attention.queries / ATTENTION_BLOCK) if attention.causal and self.profile.units else 1
        return attention.flop * whole / (rate.peak * share * wide)

    def _gemm(self, gemm: Gemm, rate: Rate) -> Scalar:
        """The units compute tiles of the result in waves, if power does not limit them.

        A last wave that is not full takes as long as a full one.
        """
        limited = gemm.flop / (rate.peak * self.profile.sustained)
        speed = rate.peak * rate.matmul
        if not self.profile.units:
            return maximum(gemm.flop / speed, limited)
        tiled = [
            self._tiled(gemm, tile, parts, speed) for tile in self.profile.tiles for parts in self._parts(gemm.inner)
        ]
        return maximum(minimum(*tiled), limited)

    def _parts(self, inner: Scalar) -> list[int]:
        """In how many parts the inner dimension may be summed, so that there are more tiles."""
        if not self.profile.split or isinstance(inner, sympy.Expr):
            return [1]
        return [parts for parts in PARTS if parts == 1 or inner / parts >= self.profile.split]

    def _tiled(self, gemm: Gemm, tile: Tile, parts: int, speed: Scalar) -> Scalar:
        """What a tile does before and after its products is not hidden: a short inner dimension is slow."""
        profile, area = self.profile, tile.rows * tile.columns
        tiles = gemm.batch * ceiling(gemm.rows / tile.rows) * ceiling(gemm.columns / tile.columns) * parts
        begun = profile.tile_seconds * area / (profile.tiles[0].rows * profile.tiles[0].columns)
        wave = 2 * area * (gemm.inner / parts) * profile.units / (speed * tile.fraction) + begun
        return ceiling(tiles / profile.units) * wave + (profile.split_seconds if parts > 1 else 0.0)

    def collective(self, kind: str, num_bytes: Scalar, num_tensors: int, axis: Axis) -> Scalar:
        """One launch over an axis, by the protocol that is fastest for its bytes and ranks.

        Steps and their seconds are those of NCCL's own model, by which it chooses (`src/graph/tuning.cc`).

        Args:
            kind: gather, reduce (reduce-scatter), all_reduce or all_to_all.
            num_bytes: of the full tensors, on each rank: what all_gather returns, what the others are given.
            num_tensors: how many the launch carries; more than one is coalesced.
        """
        if axis.size == 1:
            return 0.0
        link = self.profile.inside[kind]
        fastest = minimum(*self._ways(kind, num_bytes, link, axis))
        return link.latency + (num_tensors - 1) * link.tensor_seconds + fastest

    def _ways(self, kind: str, num_bytes: Scalar, link: Link, axis: Axis) -> Iterator[Scalar]:
        """Seconds by each protocol that there is for a kind of collective."""
        ranks = axis.size
        local, nodes = self._spread(axis)
        # In one node nothing goes beyond it; an expression of the number of ranks must say so, too.
        leaves = minimum(nodes - 1, 1)
        beyond = local * self.profile.outside[self.network].of_rank
        rounds = 2 if kind == "all_reduce" else 1
        sent = rounds * num_bytes * (ranks - 1) / ranks
        between = num_bytes * (nodes - 1) / nodes * local if kind == "all_to_all" else sent
        slowest = maximum(sent / link.bandwidth, between / beyond * leaves)
        for protocol in self.profile.protocols:
            if protocol.algorithm == "ring":
                far = rounds * (nodes - 1)
                near = rounds * (ranks - 1) - far
                step = maximum(protocol.inside, protocol.posted * leaves)
                yield protocol.base + near * step + far * protocol.outside + slowest / protocol.fraction
            elif protocol.algorithm == "tree" and kind == "all_reduce":
                # Up and down: a chain in each node, a tree of nodes.
                steps = (local - 1) * protocol.inside + doublings(nodes) * protocol.outside
                moved = maximum(2 * num_bytes / link.bandwidth, 2 * num_bytes / beyond * leaves)
                yield protocol.base + 2 * steps + moved / protocol.fraction
            elif protocol.algorithm == "nvls" and not is_zero(link.switched):  # the switch of one node
                switched = sent / link.switched / protocol.fraction
                yield maximum(protocol.base + protocol.inside + switched, _NEVER * leaves)

    def slowed(self, seconds: Scalar, busy: Scalar) -> Scalar:
        """So much compute beside collectives that are under way for `busy` seconds from its start."""
        return slowed(seconds, busy, self.profile.contention)

    def link(self, axis: Axis) -> str:
        """What carries an axis, "node" or "network": collectives on the same link queue."""
        return "node" if self._spread(axis)[1] == 1 else "network"

    def exchange(self, num_bytes: Scalar, axis: Axis) -> Scalar:
        """A reduce-scatter among two ranks as all-to-all, and the sum of two halves."""
        return self.collective("all_to_all", num_bytes, 1, axis) + self.addition(num_bytes / 2)

    def copy(self, num_bytes: Scalar) -> Scalar:
        """A copy within device memory, as packed buckets need: read once, written once."""
        return self.profile.kernel_seconds + 2 * num_bytes / self.profile.memory_bandwidth

    def addition(self, num_bytes: Scalar) -> Scalar:
        """Tensors of so many bytes are added to as many: two are read, one is written."""
        return self.profile.kernel_seconds + 3 * num_bytes / self.profile.memory_bandwidth

    def host_copy(self, num_bytes: Scalar) -> Scalar:
        """A copy between host and device."""
        return self.profile.kernel_seconds + num_bytes / self.profile.host_bandwidth

    def optimizer(self, num_bytes: Scalar, states: int, *, foreach: bool = False) -> Scalar:
        """One step over parameters of so many bytes, with `states` tensors like each of them.

        Fused it reads the parameter, its gradient and the states, and writes all but the gradient. With `foreach` every
        operation of it reads and writes by itself: 20 times the parameters for AdamW.
        """
        passes = 4 + 8 * states if foreach else 3 + 2 * states
        return passes * num_bytes / self.profile.memory_bandwidth

    def clipping(self, num_bytes: Scalar) -> Scalar:
        """The norm of gradients of so many bytes, and scaling them: read, read and written."""
        return 3 * num_bytes / self.profile.memory_bandwidth

    def _spread(self, axis: Axis) -> tuple[Scalar, Scalar]:
        """How many ranks of an axis share a node, and how many nodes that makes."""
        apart = self.mesh.distance(axis) if self.mesh is not None else 1
        room = maximum(self.profile.ranks_per_node // apart, 1)
        local = minimum(axis.size, room)
        return local, ceiling(axis.size / local)


def maximum(*values: Scalar) -> Scalar:
    """The largest; an expression or an array if one of them is."""
    # Comparing unevaluated expressions is what makes sympy slow, and is not needed.
    if any(isinstance(v, sympy.Expr) for v in values):
        return sympy.Max(*values, evaluate=False)
    return functools.reduce(np.maximum, values) if any(isinstance(v, np.ndarray) for v in values) else max(values)


def minimum(*values: Scalar) -> Scalar:
    """The smallest; an expression or an array if one of them is."""
    if any(isinstance(v, sympy.Expr) for v in values):
        return sympy.Min(*values, evaluate=False)
    return functools.reduce(np.minimum, values) if any(isinstance(v, np.ndarray) for v in values) else min(values)


def slowed(seconds: Scalar, busy: Scalar, contention: float) -> Scalar:
    """How long compute takes that advances slower, by `contention`, for the first `busy` seconds."""
    if is_zero(contention):
        return seconds
    return seconds + contention * minimum(seconds / (1 - contention), maximum(busy, 0.0))


def ceiling(value: Scalar) -> Scalar:
    """Rounded up; an expression if the value is one."""
    return sympy.ceiling(value) if isinstance(value, sympy.Expr) else math.ceil(value)


def doublings(value: Scalar) -> Scalar:
    """How often one is doubled until it is the value."""
    return sympy.log(value, 2) if isinstance(value, sympy.Expr) else math.log2(value)


def is_zero(value: Scalar) -> bool:
    """Whether a number of a profile is 0 and has no range."""
    return isinstance(value, (int, float)) and not value
