"""What compute, collectives and copies cost on a machine.

Compute is a roofline: a kernel takes its launch, and then what takes longest of its multiplications, its elementwise
operations and its bytes; on CPUs it computes and then moves its bytes. A collective takes the latency of its steps and
its bytes over the bandwidth, inside a node or between nodes, by the fastest protocol. Sizes and numbers of ranks may be
sympy expressions; so is the result then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy
from torch.fx import Node

from graphshard.cost.kernels import Work, work_of
from graphshard.cost.multiplications import Gemm, Scalar
from graphshard.cost.profile import Profile, Tile
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.program import Region


@dataclass(frozen=True)
class Costs:
    """What the simulator and the planner ask; all results in seconds.

    Attributes:
        profile: which machine, with `.name` and `.hash`.
        network: which of the profile's models of the network between nodes.
        mesh: its order says how far apart ranks along an axis are, and so how many of them share a node. Without one
            they are neighbours.
        measured: seconds of regions by key; they replace the estimate.
        fused: operators of a region share kernels, as Inductor's do; False runs each by itself.
    """

    profile: Profile
    network: str = "isolated"
    mesh: Mesh | None = None
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    fused: bool = True

    def compute(self, nodes: Sequence[Node]) -> Scalar:
        """These compute nodes, run as one region."""
        return sum((self.kernel(work) for work in work_of(nodes, fused=self.fused)), 0.0)

    def region(self, region: Region) -> Scalar:
        """One call of a region: as measured, or as its operators are estimated."""
        if region.key in self.measured:
            return self.measured[region.key]
        return self.compute(list(region.module.graph.nodes))

    def kernel(self, work: Work) -> Scalar:
        """One kernel."""
        profile, rate = self.profile, self.profile.rate(work.dtype)
        busy = work.operations / profile.vector
        if work.kind == "attention":
            busy = work.flop / (rate.peak * rate.attention)
        elif work.kind == "matmul":
            busy = sum((self._gemm(gemm, rate.peak * rate.matmul) for gemm in work.gemms), 0.0)
        moved = work.num_bytes / profile.memory_bandwidth
        # One thread of a CPU computes or waits for memory.
        return profile.kernel_seconds + (busy + moved if profile.device == "cpu" else maximum(busy, moved))

    def _gemm(self, gemm: Gemm, speed: float) -> Scalar:
        """The units compute tiles of the result in waves; a last wave that is not full takes as long as a full one."""
        if not self.profile.units:
            return gemm.flop / speed
        return minimum(
            *(self._waves(gemm, tile) * self._wave_seconds(gemm, tile, speed) for tile in self.profile.tiles)
        )

    def _waves(self, gemm: Gemm, tile: Tile) -> Scalar:
        tiles = gemm.batch * ceiling(gemm.rows / tile.rows) * ceiling(gemm.columns / tile.columns)
        return ceiling(tiles * ceiling(gemm.inner / self.profile.split) / self.profile.units)

    def _wave_seconds(self, gemm: Gemm, tile: Tile, speed: float) -> Scalar:
        inner = gemm.inner / ceiling(gemm.inner / self.profile.split)
        return 2 * tile.rows * tile.columns * inner * self.profile.units / (speed * tile.fraction)

    def collective(self, kind: str, num_bytes: Scalar, num_tensors: int, axis: Axis) -> Scalar:
        """One launch over an axis; a ring, except for all-to-all.

        Args:
            kind: gather, reduce (reduce-scatter), all_reduce or all_to_all.
            num_bytes: of the full tensors, on each rank: what all_gather returns, what the others are given.
            num_tensors: how many the launch carries; more than one is coalesced.
        """
        ranks = axis.size
        if ranks == 1:
            return 0.0
        local, nodes = self._spread(axis)
        link = self.profile.inside[kind]
        rounds = 2 if kind == "all_reduce" else 1
        far = rounds * (nodes - 1)
        near = rounds * (ranks - 1) - far
        moved = rounds * num_bytes * (ranks - 1) / ranks / link.bandwidth
        beyond = local * self.profile.outside[self.network]
        if kind == "all_to_all":
            between = num_bytes * (nodes - 1) / nodes * local / beyond
        else:
            between = rounds * num_bytes * (ranks - 1) / ranks / beyond
        # In one node nothing goes beyond it; an expression of the number of ranks must say so, too.
        slowest = maximum(moved, between * minimum(nodes - 1, 1))
        return (
            link.latency
            + (num_tensors - 1) * link.tensor_seconds
            + minimum(
                *(
                    protocol.base + near * protocol.inside + far * protocol.outside + slowest / protocol.fraction
                    for protocol in self.profile.protocols
                )
            )
        )

    def slowed(self, seconds: Scalar, busy: Scalar) -> Scalar:
        """So much compute beside collectives that are under way for `busy` seconds from its start."""
        return slowed(seconds, busy, self.profile.contention)

    def link(self, axis: Axis) -> str:
        """What carries an axis, "node" or "network": collectives on the same link queue."""
        return "node" if self._spread(axis)[1] == 1 else "network"

    def exchange(self, num_bytes: Scalar, axis: Axis) -> Scalar:
        """A reduce-scatter as all-to-all and a local sum, which reads everything and writes this rank's part."""
        return self.collective("all_to_all", num_bytes, 1, axis) + self.copy(num_bytes)

    def copy(self, num_bytes: Scalar) -> Scalar:
        """A copy within device memory, as packed buckets need: read once, written once."""
        return self.profile.kernel_seconds + 2 * num_bytes / self.profile.memory_bandwidth

    def host_copy(self, num_bytes: Scalar) -> Scalar:
        """A copy between host and device."""
        return self.profile.kernel_seconds + num_bytes / self.profile.host_bandwidth

    def optimizer(self, num_bytes: Scalar, states: int) -> Scalar:
        """One step over parameters of so many bytes, with `states` tensors like each of them.

        It reads the parameter, its gradient and the states, and writes all but the gradient.
        """
        return (3 + 2 * states) * num_bytes / self.profile.memory_bandwidth

    def _spread(self, axis: Axis) -> tuple[Scalar, Scalar]:
        """How many ranks of an axis share a node, and how many nodes that makes."""
        apart = self.mesh.distance(axis) if self.mesh is not None else 1
        room = maximum(self.profile.ranks_per_node // apart, 1)
        local = minimum(axis.size, room)
        return local, ceiling(axis.size / local)


def maximum(*values: Scalar) -> Scalar:
    """The largest; an expression if one of them is."""
    # Comparing unevaluated expressions is what makes sympy slow, and is not needed.
    return sympy.Max(*values, evaluate=False) if any(isinstance(v, sympy.Expr) for v in values) else max(values)


def minimum(*values: Scalar) -> Scalar:
    """The smallest; an expression if one of them is."""
    return sympy.Min(*values, evaluate=False) if any(isinstance(v, sympy.Expr) for v in values) else min(values)


def slowed(seconds: Scalar, busy: Scalar, contention: float) -> Scalar:
    """How long compute takes that advances slower, by `contention`, for the first `busy` seconds."""
    if not contention:
        return seconds
    return seconds + contention * minimum(seconds / (1 - contention), maximum(busy, 0.0))


def ceiling(value: Scalar) -> Scalar:
    """Rounded up; an expression if the value is one."""
    return sympy.ceiling(value) if isinstance(value, sympy.Expr) else math.ceil(value)
