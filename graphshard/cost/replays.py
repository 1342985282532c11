"""Which regions it pays to launch as one graph: the host's time of their kernels, against copies at both ends.

as they are  max(host: a launch for each kernel,   device: the kernels)
replayed     max(host: copies in, graph, copies out,   device: the kernels, and copies of inputs and results)

What a run makes for itself is not copied, and one graph is launched for all of it. So regions that are not worth a
graph of their own may be worth one together, and a large one among small ones may be worth ending a run before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes, work_of
from graphshard.ir.program import Region

# Launches of a replay: copies of its inputs, the graph, and copies of its results, those of a dtype by one launch each.
LAUNCHES = 5
# Regions of a run at most: with more, what a graph costs besides is less than a hundredth of what it saves.
MOST_REGIONS = 128


@dataclass(frozen=True)
class Piece:
    """A region as a part of a run.

    Attributes:
        launches: its kernels.
        busy: seconds that they take.
        given: bytes of what it reads, by name, and 0 for what a graph reads where it lies.
        made: bytes of its results, by name.
    """

    launches: int
    busy: float
    given: Mapping[str, int]
    made: Mapping[str, int]


def piece_of(
    costs: Costs, region: Region, given: Sequence[str], made: Sequence[str], lasting: Collection[str] = ()
) -> Piece:
    """What a region takes, at the sizes that it was captured for.

    Args:
        given, made: names of what it is given and returns, in its order.
        lasting: names of what graphs read where it lies.
    """
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
    """The runs of neighbours that save most time together when they are replayed; [] if none saves any.

    Args:
        pieces: regions in their order, between which nothing is computed.
        kept: names that are read behind the last one.
    """
    last = {name: index for index, piece in enumerate(pieces) for name in piece.given}
    last.update(dict.fromkeys(kept, len(pieces)))
    # What the first regions save at most, and where the run begins that the last of them ends.
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
        if begins[end] == end:  # by itself
            end -= 1
        else:
            runs.append(range(begins[end], end))
            end = begins[end]
    return runs[::-1]


def _savings(costs: Costs, pieces: Sequence[Piece], place: int, last: Mapping[str, int]) -> list[float]:
    """Seconds that a run saves of the first of the pieces, of the first two, and so on.

    Args:
        place: of the first one.
        last: where each name is read last.
    """
    host = costs.profile.host_seconds["compiled" if costs.fused else "eager"]
    launches, busy, given, made = 0, 0.0, dict[str, int](), dict[str, int]()
    copied = 0  # bytes: inputs once, results in the graph and behind it
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
