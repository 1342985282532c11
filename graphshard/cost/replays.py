"""Whether it pays to launch a region as one graph: the host's time of its kernels, against copies at both ends.

as it is     max(host: a launch for each kernel,   device: the kernels)
replayed     max(host: copies in, graph, copies out,   device: the kernels, and copies of inputs and results)
"""

from __future__ import annotations

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes, work_of
from graphshard.ir.program import Region

# Launches of a replay: copies of its inputs, the graph, and copies of its results, those of a dtype by one launch each.
LAUNCHES = 5


def replay_pays(costs: Costs, region: Region) -> bool:
    """Whether a region takes less time replayed than by itself, at the sizes that it was captured for."""
    graph = region.module.graph
    works = work_of(list(graph.nodes), fused=costs.fused)
    host = costs.profile.host_seconds["compiled" if costs.fused else "eager"]
    busy = sum(map(costs.kernel, works), 0.0)
    (output,) = graph.find_nodes(op="output")
    given = sum(map(num_bytes, graph.find_nodes(op="placeholder")))
    made = sum(map(num_bytes, output.args[0]))
    # Inputs are copied once, results in the graph and behind it; each byte is read and written.
    copied = 2 * (given + 2 * made) / costs.profile.memory_bandwidth
    return bool(max(LAUNCHES * host, busy + copied) < max(len(works) * host, busy))
