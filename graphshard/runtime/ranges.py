"""Names for the profiler: with `torch.profiler` on, the trace of a step reads like the plan.

The executor's code is generated a second time with a range around each region, start and wait. It is used while a
profiler runs, so that a step without one pays nothing.
"""

from __future__ import annotations

import copy
import re

from torch.autograd import profiler
from torch.fx import GraphModule, Node

from graphshard.ir.graph import WAIT, is_collective, module_of
from graphshard.runtime.exchange import EXCHANGE
from graphshard.runtime.gloo import LAUNCHES

_ASSIGNMENT = re.compile(r"^(?P<indent>\s*)(?P<statement>(?P<name>\w+)(?: : [^=]*)? = .*)$")


def profiling() -> bool:
    """Whether a profiler runs in this process."""
    return bool(profiler._is_profiler_enabled)


def with_ranges(module: GraphModule) -> GraphModule:
    """The same executor with a profiler range around each region, start and wait of a bucket."""
    graph = copy.deepcopy(module.graph)
    names = {node.name: label for node in graph.nodes if (label := _label(node))}

    def add_ranges(body: list[str]) -> list[str]:
        lines = "".join(body).split("\n")
        return ["\n".join(_in_range(line, names) for line in lines)]

    graph.on_generate_code(lambda current: lambda body: add_ranges(current(body) if current else body))
    return GraphModule(module, graph)


def _label(node: Node) -> str:
    if node.op == "call_module":
        return f"{node.target} {module_of(node)}".strip()
    if is_collective(node) or node.target in (EXCHANGE, *LAUNCHES.values()):
        return f"start {node.meta['bucket']}"
    return f"wait {node.meta['bucket']}" if node.target is WAIT else ""


def _in_range(line: str, names: dict[str, str]) -> str:
    match = _ASSIGNMENT.match(line)
    if match is None or match["name"] not in names:
        return line
    return f"{match['indent']}with torch.profiler.record_function({names[match['name']]!r}): {match['statement']}"
