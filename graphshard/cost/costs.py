"""Seconds of compute, collectives, copies and CUDA graph replays on a machine.

Compute is a roofline: a kernel takes its launch, and then the longest of its multiplications, its elementwise
operations and its bytes; on CPUs it computes and then moves its bytes. A collective takes the latency of its steps and
its bytes over the bandwidth, inside a node or between nodes, by the fastest protocol. Sizes and numbers of ranks may be
sympy expressions; the result then is one, too.

A replay launches several regions as one graph, between copies of inputs and results:

    as they are  max(host: a launch for each kernel,   device: the kernels)
    replayed     max(host: copies in, graph, copies out,   device: the kernels, and copies of inputs and results)

Values that a run of regions makes for itself are not copied. So regions that are not worth a graph alone may be worth
one together, and it may pay to end a run before a large region.

The model's own collectives, as costs see them:

    %w = all_reduce(%y, sum, tp)                    at once, along an axis
    %w = all_reduce_coalesced([%y, %z], sum, tp)    several by one launch
    %s = start_all_reduce(%y, sum, tp)              overlaps the compute in between
    %w = wait(%s)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import sympy
from torch.fx import Node

from graphshard.cost.flops import Attention, Gemm
from graphshard.cost.kernels import Work, num_bytes, work_of
from graphshard.cost.profile import GemmTile, MatmulRate, NodeLink, Profile
from graphshard.cost.scalars import Scalar, ceiling, is_zero, log2, maximum, minimum
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.operators import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COALESCED_FORMS,
    COPIES,
    MODEL_WAIT,
    REDUCE_SCATTER,
    STARTS,
)
from graphshard.ir.program import Region

# Head width for which profiles have speeds of attention; rows and columns of a block of its pairs.
_WIDE_HEAD, _ATTENTION_BLOCK = 128, 128
# Numbers of parts into which libraries cut an inner dimension.
_PARTS = (1, 2, 4, 8)
# Seconds of a protocol that cannot be used.
_NEVER = 1e9
# Launches of a replay: copies of its inputs, the graph, and copies of its results, one launch for each dtype.
LAUNCHES = 5
# Most regions of a run: with more, the overhead of a graph is less than a hundredth of what it saves.
MOST_REGIONS = 128


@dataclass(frozen=True)
class Costs:
    """Costs on a machine, in seconds.

    Attributes:
        network: which of the profile's models of the network between nodes.
        mesh: its order says how many ranks along an axis share a node. Without a mesh they are neighbors.
        measured: seconds of regions by key; they replace the estimate.
        scheduled: kernels of regions by key, from a compiler's scheduler; they replace the rules about fusion.
        fused: operators of a region share kernels, as in Inductor; False runs each alone.
    """

    profile: Profile
    network: str = "isolated"
    mesh: Mesh | None = None
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    scheduled: Mapping[str, Sequence[Work]] = field(default_factory=dict, hash=False)
    fused: bool = True

    @property
    def host_seconds(self) -> float:
        """Return the seconds of the host to call a kernel."""
        return self.profile.host_seconds["compiled" if self.fused else "eager"]

    def compute(self, nodes: Sequence[Node]) -> Scalar:
        """Return the cost of compute nodes that run as one region."""
        return self.kernels(work_of(nodes, fused=self.fused))

    def kernels(self, works: Iterable[Work]) -> Scalar:
        """Return the cost of kernels in sequence on the slowest rank: the device's time, or the host's to call them."""
        works = list(works)
        busy = sum(map(self.kernel, works), 0.0)
        if not is_zero(self.host_seconds):
            busy = maximum(busy, len(works) * self.host_seconds)
        if self.mesh is None or is_zero(self.profile.straggler):
            return busy
        doublings = log2(maximum(self.mesh.size / self.profile.ranks_per_node, 1))  # of the nodes
        return busy * (1 + self.profile.straggler * doublings)

    def region(self, region: Region) -> Scalar:
        """Return the cost of one call of a region, measured or estimated."""
        if region.key in self.measured:
            return self.measured[region.key]
        if region.key in self.scheduled:
            return self.kernels(self.scheduled[region.key])
        return self.compute(list(region.module.graph.nodes))

    def kernel(self, work: Work) -> Scalar:
        """Return the cost of one kernel."""
        profile, rate = self.profile, self.profile.rate(work.dtype)
        if work.measured is not None and work.measured[0] == profile.device:
            return work.measured[1]
        busy = work.operations / profile.vector
        if work.gemms:
            busy = sum((self._gemm(gemm, rate) for gemm in work.gemms), 0.0)
        elif work.attention is not None:
            busy = self._attention(work.attention, rate)
        elif work.kind != "pointwise":  # of unknown sizes
            busy = work.flop / (rate.peak * minimum(rate.matmul, profile.sustained))
        moved = work.num_bytes / profile.memory_bandwidth
        # One thread of a CPU computes or waits for memory.
        return profile.kernel_seconds + (busy + moved if profile.device == "cpu" else maximum(busy, moved))

    def _attention(self, attention: Attention, rate: MatmulRate) -> Scalar:
        """Blocks of queries and keys on the diagonal are computed in full; narrow heads have a short inner dim."""
        speed = rate.attention.get(attention.kernel, rate.attention["flash"])
        reached = speed.backward if attention.backward else speed.forward
        wide = minimum(attention.dim / _WIDE_HEAD, 1) ** self.profile.head_power
        whole = 1 + 1 / ceiling(attention.queries / _ATTENTION_BLOCK) if attention.causal and self.profile.units else 1
        return attention.flop * whole / (rate.peak * reached * wide)

    def _gemm(self, gemm: Gemm, rate: MatmulRate) -> Scalar:
        """Units compute tiles of the result in waves, unless power limits them; a last partial wave takes as long."""
        limited = gemm.flop / (rate.peak * self.profile.sustained)
        speed = rate.peak * rate.matmul
        if not self.profile.units:
            return maximum(gemm.flop / speed, limited)
        tiled = [
            self._tiled(gemm, tile, parts, speed) for tile in self.profile.tiles for parts in self._parts(gemm.inner)
        ]
        return maximum(minimum(*tiled), limited)

    def _parts(self, inner: Scalar) -> list[int]:
        """Return the numbers of parts into which the inner dimension may be cut for more tiles."""
        if not self.profile.split or isinstance(inner, sympy.Expr):
            return [1]
        return [parts for parts in _PARTS if parts == 1 or inner / parts >= self.profile.split]

    def _tiled(self, gemm: Gemm, tile: GemmTile, parts: int, speed: Scalar) -> Scalar:
        """Tile prologue and epilogue are not overlapped, so a small inner dimension is slow."""
        profile, area = self.profile, tile.rows * tile.columns
        tiles = gemm.batch * ceiling(gemm.rows / tile.rows) * ceiling(gemm.columns / tile.columns) * parts
        begun = profile.tile_seconds * area / (profile.tiles[0].rows * profile.tiles[0].columns)
        wave = 2 * area * (gemm.inner / parts) * profile.units / (speed * tile.fraction) + begun
        return ceiling(tiles / profile.units) * wave + (profile.split_seconds if parts > 1 else 0.0)

    def collective(
        self, kind: str, num_bytes: Scalar, num_tensors: int, axis: Axis, *, averages: bool = False
    ) -> Scalar:
        """Return the cost of one launch over an axis, by the protocol that is fastest for its bytes and ranks.

        Steps and their seconds follow NCCL's model, by which it chooses (`src/graph/tuning.cc`).

        Args:
            kind: gather, reduce (reduce-scatter), all_reduce or all_to_all.
            num_bytes: of the full tensors, on each rank: the output of all_gather, the input of the others.
            averages: a reduction of means, which a node's switch cannot compute: it only adds.
        """
        if axis.size == 1:
            return 0.0
        link = self.profile.inside[kind]
        if averages:
            link = replace(link, switched=0.0)
        fastest = minimum(*self._by_protocol(kind, num_bytes, link, axis))
        return link.latency + (num_tensors - 1) * link.tensor_seconds + fastest

    def _by_protocol(self, kind: str, num_bytes: Scalar, link: NodeLink, axis: Axis) -> Iterator[Scalar]:
        ranks = axis.size
        local, nodes = self._local_and_nodes(axis)
        # Nothing leaves a single node; an expression of the number of ranks must say so, too.
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
                steps = (local - 1) * protocol.inside + log2(nodes) * protocol.outside
                moved = maximum(2 * num_bytes / link.bandwidth, 2 * num_bytes / beyond * leaves)
                yield protocol.base + 2 * steps + moved / protocol.fraction
            elif protocol.algorithm == "nvls" and not is_zero(link.switched):  # the switch of one node
                switched = sent / link.switched / protocol.fraction
                yield maximum(protocol.base + protocol.inside + switched, _NEVER * leaves)

    def _local_and_nodes(self, axis: Axis) -> tuple[Scalar, Scalar]:
        """Return how many ranks of an axis share a node, and how many nodes that makes."""
        apart = self.mesh.distance(axis) if self.mesh is not None else 1
        local = minimum(axis.size, maximum(self.profile.ranks_per_node // apart, 1))
        return local, ceiling(axis.size / local)

    def link(self, axis: Axis) -> str:
        """Return the link of an axis, "node" or "network": collectives on the same link queue."""
        return "node" if self._local_and_nodes(axis)[1] == 1 else "network"

    def exchange(self, num_bytes: Scalar, axis: Axis, num_tensors: int = 1, kind: str = "reduce") -> Scalar:
        """Return the cost of a reduction as an exchange and a sum in the order of ranks; arguments as `collective`.

        A reduce-scatter is an all-to-all, an all-reduce gathers the copies of all ranks.
        """
        received = num_bytes if kind == "reduce" else num_bytes * axis.size
        sent = self.collective("all_to_all" if kind == "reduce" else "gather", received, num_tensors, axis)
        # One kernel reads all chunks and writes their sum; a CPU adds one chunk after the other.
        moved = 3 * (axis.size - 1) if self.profile.device == "cpu" else axis.size + 1
        added = moved * received / axis.size / self.profile.memory_bandwidth
        return sent + num_tensors * self.profile.kernel_seconds + added

    def copy(self, num_bytes: Scalar) -> Scalar:
        """Return the cost of a copy within device memory, for packed buckets: read once, written once."""
        return self.profile.kernel_seconds + 2 * num_bytes / self.profile.memory_bandwidth

    def addition(self, num_bytes: Scalar) -> Scalar:
        """Return the cost of adding two tensors of this size: two reads, one write."""
        return self.profile.kernel_seconds + 3 * num_bytes / self.profile.memory_bandwidth

    def host_copy(self, num_bytes: Scalar) -> Scalar:
        """Return the cost of a copy between host and device."""
        return self.profile.kernel_seconds + num_bytes / self.profile.host_bandwidth

    def optimizer(self, num_bytes: Scalar, states: int, *, foreach: bool = False) -> Scalar:
        """Return the cost of one step over parameters of this size, with `states` tensors like each of them.

        A fused step reads the parameter, its gradient and the states, and writes all but the gradient. With `foreach`
        each of its operations reads and writes: 20 times the parameters for AdamW.
        """
        passes = 4 + 8 * states if foreach else 3 + 2 * states
        return passes * num_bytes / self.profile.memory_bandwidth

    def clipping(self, num_bytes: Scalar) -> Scalar:
        """Return the cost of the norm of gradients of this size, and of scaling them: two reads, one write."""
        return 3 * num_bytes / self.profile.memory_bandwidth


# Calls of operators that take the host as long as an optimizer's call by itself, and for each tensor: AdamW took 17 ms
# for 33 buckets of 9 tensors, and 8.7 ms for all of them at once, where an operator takes 8 us.
_CALLS, _CALLS_OF_TENSOR = 30, 3.6
# Share of a call's seconds that is not worth another bucket's wait.
_LITTLE = 0.1


def joined_updates(costs: Costs, groups: Sequence[tuple[int, int]], states: int = 2) -> list[int]:
    """Return how many neighboring buckets' updates to call at a time, so that the host is not slower than the device.

    `groups` has the number and bytes of the gradients of each bucket, in order. A bucket waits for the next one while
    the host takes longer to call the update than the device to run it, and the call by itself is a part of that.
    """
    call = costs.profile.host_seconds["eager"]
    counts = [0]
    tensors = moved = 0
    for index, (number, size) in enumerate(groups):
        tensors, moved, counts[-1] = tensors + number, moved + size, counts[-1] + 1
        host = (_CALLS + _CALLS_OF_TENSOR * tensors) * call
        device = costs.optimizer(moved, states, foreach=True)
        if (device >= host or _CALLS * call <= _LITTLE * host) and index < len(groups) - 1:
            tensors, moved = 0, 0
            counts.append(0)
    return [count for count in counts if count]


@dataclass(frozen=True)
class Piece:
    """A region as a part of a run that is replayed: its kernels, and their seconds.

    `given` and `made` are bytes of inputs and results by name; 0 for inputs that a graph reads in place.
    """

    launches: int
    busy: float
    given: Mapping[str, int]
    made: Mapping[str, int]


def piece_of(
    costs: Costs, region: Region, given: Sequence[str], made: Sequence[str], lasting: Collection[str] = ()
) -> Piece:
    """Return the costs of a region with these inputs and results; a graph reads `lasting` inputs in place."""
    graph = region.module.graph
    works = work_of(list(graph.nodes), fused=costs.fused)
    (output,) = graph.find_nodes(op="output")
    read = zip(given, graph.find_nodes(op="placeholder"), strict=True)
    return Piece(
        len(works),
        sum(map(costs.kernel, works), 0.0),
        {name: 0 if name in lasting else num_bytes(node) for name, node in read},
        dict(zip(made, map(num_bytes, output.args[0]), strict=True)),
    )


def runs_that_pay(costs: Costs, pieces: Sequence[Piece], kept: Collection[str]) -> list[range]:
    """Return the runs of adjacent pieces that save most time when replayed; names `kept` are read after the last."""
    last = {name: index for index, piece in enumerate(pieces) for name in piece.given}
    last.update(dict.fromkeys(kept, len(pieces)))
    # By number of first regions: the most they save, and where the run begins that the last of them ends.
    saved, begins = [0.0] * (len(pieces) + 1), list(range(len(pieces) + 1))
    for begin in range(len(pieces)):
        savings = _savings(costs, pieces[begin : begin + MOST_REGIONS], begin, last)
        for end, saving in enumerate([0.0, *savings], start=begin):
            if saved[begin] + saving > saved[end]:
                saved[end], begins[end] = saved[begin] + saving, begin
        if saved[begin] >= saved[begin + 1]:
            saved[begin + 1], begins[begin + 1] = saved[begin], begin + 1
    runs, end = [], len(pieces)
    while end > 0:
        if begins[end] == end:  # not replayed
            end -= 1
        else:
            runs.append(range(begins[end], end))
            end = begins[end]
    return runs[::-1]


def _savings(costs: Costs, pieces: Sequence[Piece], place: int, last: Mapping[str, int]) -> list[float]:
    """Return the seconds that a replay saves of the first piece, of the first two, and so on, from a place."""
    host = costs.host_seconds
    launches, busy, given, made = 0, 0.0, dict[str, int](), dict[str, int]()
    copied = 0  # bytes: inputs once, results in the graph and after it
    found = []
    for index, piece in enumerate(pieces, start=place):
        launches, busy = launches + piece.launches, busy + piece.busy
        for name, size in piece.given.items():
            if name not in made:
                copied += size - given.setdefault(name, 0)
                given[name] = size
            elif last[name] == index:
                copied -= 2 * made[name]
        made |= piece.made
        copied += sum(2 * size for name, size in piece.made.items() if last.get(name, index) > index)
        # Each byte that is copied is read and written.
        replayed = max(LAUNCHES * host, busy + 2 * copied / costs.profile.memory_bandwidth)
        found.append(max(launches * host, busy) - replayed)
    return found


ModelKind = Literal["reduced", "joined", "scattered", "exchanged"]
MODEL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)

# The kind of each for `Costs.collective`.
_KINDS: dict[object, tuple[ModelKind, str]] = {
    ALL_REDUCE: ("reduced", "all_reduce"),
    ALL_GATHER: ("joined", "gather"),
    REDUCE_SCATTER: ("scattered", "reduce"),
    ALL_TO_ALL: ("exchanged", "all_to_all"),
}
# The operator that runs at once by the one that starts it, or carries several tensors.
_AT_ONCE: dict[object, object] = {
    other: at_once for others in (STARTS, COALESCED_FORMS) for at_once, other in others.items()
}


@dataclass(frozen=True)
class ModelCollective:
    """A collective of the model.

    Attributes:
        costs_as: the kind for `Costs.collective`.
        num_bytes: of the full tensors; of an all-to-all the larger of what this rank sends and receives.
        at_once: compute waits until it has ended; otherwise until it is settled.
    """

    kind: ModelKind
    costs_as: str
    num_bytes: Scalar
    axis: str
    num_tensors: int = 1
    at_once: bool = True

    @property
    def name(self) -> str:
        """Return a name for reports, such as "reduced over tp"."""
        return f"{self.kind} over {self.axis}"

    def seconds(self, costs: Costs, axis: Axis) -> Scalar:
        """Return its cost."""
        return costs.collective(self.costs_as, self.num_bytes, self.num_tensors, axis)


def model_collective(node: Node, size_of: Callable[[Node], Scalar] = num_bytes) -> ModelCollective | None:
    """Return the collective of a node; None if it is not a collective of the model."""
    target: object = _AT_ONCE.get(node.target, node.target)
    if target not in _KINDS:
        return None
    kind, costs_as = _KINDS[target]
    values = node.args[0] if node.target in COALESCED_FORMS.values() else [node.all_input_nodes[0]]
    assert isinstance(values, (list, tuple))
    given, made = sum(size_of(value) for value in values if isinstance(value, Node)), size_of(node)
    size = made if kind == "joined" else given
    if kind == "exchanged" and given != made:
        size = maximum(given, made)
    at_once = node.target not in STARTS.values()
    return ModelCollective(kind, costs_as, size, str(node.args[-1]), len(values), at_once)


def computing(nodes: Iterable[Node]) -> list[Node]:
    """Return the operators that compute, without collectives of the model and copies from or to the host."""
    apart = {MODEL_WAIT, *COPIES}
    return [node for node in nodes if node.target not in apart and model_collective(node) is None]
