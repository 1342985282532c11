"""Decide which results of a unit's forward are saved for backward, and which backward recomputes.

      %1 = mm(%x, %w)                %1 = mm(%x, %w)      (recompute)
      %2 = relu(%1)                  %2 = relu(%1)        (recompute)
      %3 = mm(%2, %v)   # block 1    %3 = mm(%2, %v)      (save)       block 2 begins with it

Only torch's marks change: `ac_graph_id` names the region of a node, `recompute` holds a `CheckpointPolicy` for the
partitioner. Regions of `torch.utils.checkpoint` in the model are marked by the capture and stay as they are; `policy`
is about the other nodes of units. `compile(activation=...)` puts this pass first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.cost.profile import load_profile
from graphshard.errors import PassError
from graphshard.ir.graph import fake, is_backward, is_communication, is_random, with_parts
from graphshard.ir.program import Phase, Program
from graphshard.ir.recompute import RECOMPUTE, SAVE, leaving, maker_of, save_leaving
from graphshard.ir.units import unit_of
from graphshard.passes.base import Pass, ancestors
from graphshard.torch_compat.aot_autograd import min_cut_partition
from graphshard.torch_compat.torch_ops import OpOverload

# "full": units save their inputs. Operators: units save their inputs and the results of these operators; of an operator
# in the graph that is named, its result, as ranks whose pieces differ in size must save the same. A number from 0 to 1:
# that share of the bytes that the partitioner saves by default beyond "full". "auto": the best share under the
# planner's memory limit, see `graphshard/pipeline/memory_policy.py`.
Activation: TypeAlias = Literal["full", "auto"] | tuple[OpOverload | str, ...] | float


@dataclass(frozen=True)
class ActivationCheckpointing(Pass):
    """Requires: a joint graph without collectives.
    Preserves: the graph; only marks for the partitioner change.

    Attributes:
        policy: see `Activation`.
    """

    name: ClassVar[str] = "activation-checkpointing"
    runs: ClassVar = "joint"
    policy: Activation

    def requires(self, program: Program) -> None:
        super().requires(program)
        if any(is_communication(n) for phase in program.phases.values() for n in phase.module.graph.nodes):
            raise PassError(f"{self.name}: the graph already has collectives; run this pass before they are inserted")
        if self.policy == "auto":
            raise PassError(f'{self.name}: "auto" is decided together with the passes that follow; run the pipeline')

    def rewrite(self, program: Program) -> int:
        joint = program.phases.get("joint")
        if joint is None:
            return 0
        before = _marks(joint)
        kept: set[str] = set()
        if self.policy == 1:
            save_leaving(joint.module.graph)
            return sum(a != b for a, b in zip(before, _marks(joint)))
        if isinstance(self.policy, tuple):
            nodes = _unit_regions(joint, program.params.units)
            kept = {node.name for node in nodes if node.target in self.policy or node.name in self.policy}
        elif isinstance(self.policy, (int, float)):
            kept = within_share(ranked(program), self.policy)
        mark(program, kept)
        return sum(a != b for a, b in zip(before, _marks(joint)))


def _marks(joint: Phase) -> list[tuple[object, object]]:
    return [(n.meta.get("ac_graph_id"), n.meta.get("recompute")) for n in joint.module.graph.nodes]


def mark(program: Program, kept: Collection[str]) -> None:
    """Mark, in a joint graph without marks of this pass, the operators whose results units save."""
    joint = program.phases["joint"]
    for node, region in _unit_regions(joint, program.params.units).items():
        node.meta["ac_graph_id"] = region
        node.meta["recompute"] = SAVE if maker_of(node).name in kept else RECOMPUTE
    save_leaving(joint.module.graph)


def _unit_regions(joint: Phase, units: Sequence[str]) -> dict[Node, int]:
    """Return the region of every forward node of a unit; each call of a unit is a region."""
    nodes = [n for n in joint.module.graph.nodes if n.op == "call_function" and not is_backward(n)]
    first = max((n.meta["ac_graph_id"] for n in nodes if "ac_graph_id" in n.meta), default=-1) + 1
    calls: dict[str, int] = {}
    regions = {}
    for node in nodes:
        call = _unit_call(node, units)
        if call and "ac_graph_id" not in node.meta:
            regions[node] = calls.setdefault(call, first + len(calls))
    return regions


def _unit_call(node: Node, units: Sequence[str]) -> str:
    """Return torch's key of the call of a unit that a node belongs to, "" for the root."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    unit = unit_of(next(reversed(stack.values()))[0], units) if stack else ""
    return next((key for key, (name, _) in stack.items() if unit and name == unit), "")


def within_share(sizes: Mapping[str, int], share: float) -> set[str]:
    """Return the first values that fit in a share of the bytes of all."""
    room = int(share * sum(sizes.values()) + 0.01)  # a share that is a number of bytes may have been rounded down
    kept: set[str] = set()
    for name, size in sizes.items():
        if size <= room:
            room -= size
            kept.add(name)
    return kept


def ranked(program: Program) -> dict[str, int]:
    """Return the bytes of the values of units that the partitioner would save, by operator, the best to save first.

    The best takes longest per byte to recompute: the cost of a value is the time of the operators between it and other
    saved values, on an H100; only ratios matter. Of equal values the last is first, as backward needs it first: saving
    the values of the last unit takes no more memory than recomputing them at once.
    """
    joint = program.phases["joint"]
    regions = _unit_regions(joint, program.params.units)
    if not regions:
        return {}
    num_outputs = sum(not slot.is_of_backward for slot in joint.outputs)
    forward, _ = min_cut_partition(joint.clone().module, num_outputs)
    names = {node.name for node in forward.graph.output_node().all_input_nodes}
    outer = leaving(joint.module.graph, regions)
    saved: dict[Node, int] = {}
    for node in joint.module.graph.nodes:
        maker = maker_of(node)
        if node.name in names and maker in regions and maker not in outer:
            saved[maker] = saved.get(maker, 0) + num_bytes(node)
    stop = {*saved, *outer}

    def chain_of(maker: Node) -> dict[Node, None]:
        return ancestors(maker, within=lambda n: n is maker or (n in regions and maker_of(n) not in stop))

    chains = {maker: chain_of(maker) for maker in saved}
    costs = Costs(load_profile("h100"))
    seconds = {maker: costs.compute(sorted(chain)) for maker, chain in chains.items()}
    sizes = {maker: max(0, size - sum(map(_state_bytes, chains[maker]))) for maker, size in saved.items()}
    place = {maker: index for index, maker in enumerate(saved)}
    order = sorted(saved, key=lambda maker: (-seconds[maker] / max(1, sizes[maker]), -place[maker]))
    return {maker.name: sizes[maker] for maker in order}


def _state_bytes(node: Node) -> int:
    """Return the size of the generator state that must be saved to draw the same numbers again."""
    if not is_random(node):
        return 0
    return 5056 if fake(with_parts(node)[-1]).device.type == "cpu" else 16
