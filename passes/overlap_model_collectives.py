"""Let the model's own collectives overlap compute that does not need them.

      %a = mm(%w, %g)                           %b = mm(%g, %v)
      %b = mm(%g, %v)                         > %s = start_all_reduce(%b, sum, tp)
      %r = all_reduce(%b, sum, tp)              %a = mm(%w, %g)
      %c = mul(%r, 2)                         > %r = wait(%s)
                                                %c = mul(%r, 2)

Between two collectives lies a segment. Its nodes that need the first collective, but not the second, overlap the
second; so do nodes that need neither. No value moves farther than one segment, so hardly anything lives longer. A
collective that would overlap no multiplication stays synchronous.

Gathers and reductions of parameters keep their order; the plan, which is made on the new order, places them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.cost.flops import is_multiplication
from graphshard.ir.collective_regions import CollectiveRegions, with_inputs
from graphshard.ir.graph import arrange, emit, is_random, writes
from graphshard.ir.operators import MODEL_WAIT, STARTS
from graphshard.ir.program import Phase, Program
from graphshard.passes.base import Pass
from graphshard.torch_compat.torch_ops import OpOverload


@dataclass(frozen=True)
class OverlapModelCollectives(Pass):
    """Requires: a partitioned program.  Preserves: every value; random operators keep their order."""

    name: ClassVar[str] = "overlap-model-collectives"
    runs: ClassVar = "partitioned"

    def rewrite_phase(self, phase: Phase, program: Program) -> int:
        nodes = [node for node in phase.module.graph.nodes if node.op == "call_function"]
        launches = [node for node in nodes if node.target in STARTS]
        if not launches or any(map(writes, nodes)):
            return 0
        compute = CollectiveRegions.of(phase).index
        launches = [node for node in launches if node in compute]
        order = with_inputs(_reordered(nodes, launches, compute), nodes)
        place = {node: index for index, node in enumerate(order)}
        hidden = {}  # collectives that overlap multiplications, with the position of their first user
        for launch in launches:
            needed = min((place[user] for user in launch.users if user in place), default=len(order))
            if any(map(is_multiplication, order[place[launch] + 1 : needed])):
                hidden[launch] = needed
        if hidden:
            arrange(phase, order)
        for launch, needed in hidden.items():
            _split(launch, [*order, phase.module.graph.output_node()][needed])
        return len(hidden)


def _reordered(nodes: Sequence[Node], launches: Sequence[Node], compute: Iterable[Node]) -> Iterator[Node]:
    """Yield compute in its new order, each collective as soon as its input is computed."""
    counted, ends = set(compute), set(launches)
    late: list[Node] = []  # nodes of the segment before that the next collective overlaps
    before: Node | None = None
    segment: list[Node] = []
    for launch in (*nodes, None):
        if launch is not None and launch not in ends:
            segment.append(launch)
            continue
        needs = _descendants(before, segment)
        wanted = _ancestors(launch, segment) if launch is not None else set(segment)
        free = [node for node in segment if node not in needs]
        if before is None:  # nothing to overlap yet
            free, needs = [], set(segment)
        early = [node for node in segment if node in needs and node in wanted]
        yield from (node for node in (*late, *free, *early) if node in counted)
        if launch is not None:
            yield launch
        late = [node for node in segment if node in needs and node not in wanted]
        before, segment = launch, []


def _descendants(source: Node | None, segment: Sequence[Node]) -> set[Node]:
    """Return the nodes of a segment that need the collective before it; random operators keep their order."""
    draws = [node for node in segment if is_random(node)]
    earlier = dict(zip(draws[1:], draws))
    found = {source} if source is not None else set()
    for node in segment:
        if any(each in found for each in (*node.all_input_nodes, earlier.get(node))):
            found.add(node)
    return found


def _ancestors(launch: Node, segment: Sequence[Node]) -> set[Node]:
    """Return the nodes of a segment that the collective after it needs, and random operators, to keep their order."""
    found = set(launch.all_input_nodes)
    for node in reversed(segment):
        if node in found or is_random(node):
            found.update((node, *node.all_input_nodes))
    return found


def _split(launch: Node, needed: Node) -> None:
    """Split a collective into a start and a wait before the first node that needs its result."""
    graph = launch.graph
    assert isinstance(launch.target, OpOverload)
    with graph.inserting_before(launch):
        begun = emit(graph, STARTS[launch.target], *launch.args, like=launch)
    with graph.inserting_before(needed):
        settled = emit(graph, MODEL_WAIT, begun, like=launch)
    for node in (begun, settled):
        node.meta = {**launch.meta, **node.meta}
    launch.replace_all_uses_with(settled)
    graph.erase_node(launch)
