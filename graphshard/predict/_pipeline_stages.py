"""The program of one stage of a pipeline, cut out of the whole model's program.

    embed | blocks 0 1 2 3 4 5 6 7 | head   ->   embed 0 1   |   2 3   |   4 5   |   6 7 head

A node outside of all blocks follows its sources: a value the last block among them, and a gradient the block of the
tensor saved for it, or of the gradient it is made from. Values of parameters alone, or of inputs alone (casts, gathers,
masks) belong to no block: each stage computes the ones it needs. Other values of earlier stages are sent from each
stage to the next one, and their gradients come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn
from torch.fx import Graph, Node

from graphshard.cost.costs import Costs, computing
from graphshard.cost.kernels import num_bytes
from graphshard.errors import StageError
from graphshard.ir.graph import is_communication
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.repeat_windows import group_of
from graphshard.ir.repeats import Repeats
from graphshard.torch_compat.torch_ops import uncompiled


def _is_parameter(slot: Slot) -> bool:
    return slot.is_of_shard or slot.is_full


@dataclass(frozen=True)
class Blocks:
    """The list of modules that is cut into stages; `repeats` says which are known to be equal."""

    path: str
    count: int
    repeats: Repeats | None

    @cached_property
    def every(self) -> Repeats:
        """Each block as a group by itself."""
        return Repeats(self.path, first=0, period=1, groups=self.count)

    def kind(self, block: int) -> object:
        """Return a key that blocks share if they are known to be equal."""
        place = self.repeats and self.repeats.place_of(f"{self.path}.{block}")
        return place[1] if place else block


def lists_of(model: nn.Module) -> dict[str, int]:
    """Return the length of each list of modules in a model, which may be cut into stages."""
    lists = (nn.ModuleList, nn.Sequential)
    return {name: len(part) for name, part in model.named_modules() if name and isinstance(part, lists)}


def blocks_of(lists: Mapping[str, int], repeats: Repeats | None, model: str) -> Blocks:
    """Choose the list that has equal blocks, or the longest one; `model` is named in the error."""
    if not lists:
        raise StageError(
            f"mesh has a pipeline axis, and {model} has no nn.ModuleList or nn.Sequential of blocks to cut into "
            "stages. Put its blocks in one, or leave the axis out."
        )
    path = max(lists, key=lambda name: lists[name]) if repeats is None else repeats.path
    return Blocks(path, lists[path], repeats)


@dataclass
class _PhaseCut:
    """A phase, and the block of each node; None if it belongs to no block."""

    phase: Phase
    backward: bool
    block: dict[Node, int | None] = field(default_factory=dict)

    @cached_property
    def slots(self) -> dict[Node, Slot]:
        return self.phase.slot_of()

    def results(self) -> Iterable[tuple[Node, Slot]]:
        results = zip(self.phase.results, self.phase.outputs, strict=True)
        return ((value, slot) for value, slot in results if isinstance(value, Node))


class Stages:
    """A partitioned program of the whole model, before its plan, cut into stages of `counts` blocks each."""

    def __init__(self, program: Program, blocks: Blocks, counts: Callable[[Stages], Sequence[int]]) -> None:
        self.program, self.blocks = program, blocks
        self._saved: dict[Slot, int | None] = {}
        self.forward, self.backward = (_PhaseCut(program.phases[name], name == "backward") for name in program.phases)
        self._assign(self.forward)
        self._saved = {slot: self.forward.block[value] for value, slot in self.forward.results()}
        self._assign(self.backward)
        self.counts = counts(self)
        self._known: dict[tuple[bool, int], set[Node]] = {}
        self._readers: dict[str, int] = {}
        self._stage_of = [stage for stage, count in enumerate(self.counts) for _ in range(count)]
        for cut in (self.forward, self.backward):
            for stage in range(len(self.counts)):
                for slot in (cut.slots[node] for node in self._needed(cut, stage) if node in cut.slots):
                    if _is_parameter(slot) and self._readers.setdefault(slot.name, stage) != stage:
                        raise StageError(
                            f"parameter {slot.name} is used in stages {self._readers[slot.name]} and {stage} of "
                            f"{len(self.counts)}, and stages have parameters of their own. Give each use a parameter "
                            "of its own (untie them), or leave the pipeline axis out."
                        )

    def _assign(self, cut: _PhaseCut) -> None:
        last = self.blocks.count - 1
        of_parameter, of_input, gradients = set[Node](), set[Node](), set[Node]()
        for node in cut.phase.module.graph.nodes:
            if node.op == "output":
                break
            if node in cut.slots:
                slot = cut.slots[node]
                cut.block[node] = last if slot.kind == "tangent" else self._saved.get(slot)
                if _is_parameter(slot):
                    of_parameter.add(node)
                    cut.block[node] = None
                elif slot.kind in ("input", "tangent"):
                    (of_input if slot.kind == "input" else gradients).add(node)
                continue
            sources = node.all_input_nodes
            for kind in (of_parameter, of_input, gradients):
                if not kind.isdisjoint(sources):
                    kind.add(node)
            placed = [(source, block) for source in sources if (block := cut.block[source]) is not None]
            from_gradients = [block for source, block in placed if source in gradients]
            from_values = [block for source, block in placed if source not in gradients]
            made = group_of(node, self.blocks.every)
            if not placed and not (node in of_parameter and node in of_input):
                cut.block[node] = None
            elif made is not None:
                cut.block[node] = made
            elif from_gradients:
                cut.block[node] = min(min(from_gradients), max(from_values, default=last))
            else:
                cut.block[node] = max(from_values, default=0)
        for node in filter(gradients.__contains__, reversed(list(cut.block))):  # gradients go to earlier blocks only
            if node not in cut.slots and group_of(node, self.blocks.every) is None:
                users = [cut.block.get(user) for user in node.users]
                cut.block[node] = max(block for block in (cut.block[node], *users) if block is not None)

    def seconds(self, costs: Costs) -> list[float]:
        """Return the compute of each block; the first includes all before it, the last all after it."""
        nodes: list[list[list[Node]]] = [[[], []] for _ in range(self.blocks.count)]
        for cut in (self.forward, self.backward):
            for node, block in cut.block.items():
                if block is not None and node.op == "call_function" and not is_communication(node):
                    nodes[block][cut.backward].append(node)
        known: dict[object, float] = {}
        found = []
        for block, parts in enumerate(nodes):
            key = self.blocks.kind(block), block in (0, self.blocks.count - 1) and block
            if key not in known:
                known[key] = sum(float(costs.compute(computing(part))) for part in parts)
            found.append(known[key])
        return found

    def kind(self, stage: int) -> object:
        """Return a key that stages share if their programs are equal."""
        first, last = sum(self.counts[:stage]), len(self.counts) - 1
        kinds = map(self.blocks.kind, range(first, first + self.counts[stage]))
        return stage == 0, stage == last, tuple(kinds)

    def sent(self, border: int, *, backward: bool = False) -> int:
        """Return the bytes that stage `border` sends to the next one or gets back, also for stages further on."""
        cut = self.backward if backward else self.forward
        over = range(border + 1) if backward else range(border + 1, len(self.counts))
        wanted = dict.fromkeys(node for stage in over for node in self._foreign(cut, stage))
        return sum(num_bytes(node) for node in wanted if self._at(cut, node) not in over)

    def program_of(self, stage: int) -> Program:
        """Build the program of one stage."""
        whole = self.program
        rows = tuple(row for row in whole.params if self._owner(row.name) == stage)
        return replace(
            whole,
            phases={
                "forward": self._phase_of(self.forward, stage),
                "backward": self._phase_of(self.backward, stage),
            },
            params=ParamTable(rows),
            differentiated=whole.differentiated.intersection(row.name for row in rows),
            history=list(whole.history),
            established=set(whole.established),
        )

    def _at(self, cut: _PhaseCut, node: Node) -> int | None:
        """Return the stage of a node; None if each stage makes it that needs it."""
        block = cut.block[node]
        return None if block is None else self._stage_of[block]

    def _owner(self, name: str) -> int:
        """Return the stage of a parameter; the first for an unused one outside of blocks."""
        block = self.blocks.every.group_of(name)
        return self._readers.get(name, 0) if block is None else self._stage_of[block]

    def _saved_for(self, stage: int) -> set[Slot]:
        """Return the slots that the backward of a stage reads from its forward."""
        cut = self.backward
        return {cut.slots[node] for node in self._needed(cut, stage) if node in cut.slots}

    def _needed(self, cut: _PhaseCut, stage: int) -> set[Node]:
        """Return a stage's own nodes, the tensors it saves, all that these need, and values it receives."""
        key = cut.backward, stage
        if key not in self._known:
            pending = [node for node in cut.block if self._at(cut, node) == stage and node not in cut.slots]
            if not cut.backward:
                wanted = self._saved_for(stage)
                pending += [value for value, slot in cut.results() if slot in wanted]
            found = set(pending)
            while pending:
                node = pending.pop()
                if self._at(cut, node) in (None, stage):
                    new = [source for source in node.all_input_nodes if source not in found]
                    found.update(new)
                    pending += new
            self._known[key] = found
        return self._known[key]

    def _foreign(self, cut: _PhaseCut, stage: int) -> list[Node]:
        """Return the nodes that a stage needs and others make, in order; saved tensors are there in backward."""
        needed, slots = self._needed(cut, stage), cut.slots
        return [n for n in cut.block if n in needed and n not in slots and self._at(cut, n) not in (None, stage)]

    def _phase_of(self, cut: _PhaseCut, stage: int) -> Phase:
        """Copy the nodes that a stage needs into a new graph."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        needed = self._needed(cut, stage)
        inputs: list[Slot] = []
        for node, slot in cut.slots.items():
            if node in needed or (slot.kind == "param" and self._owner(slot.name) == stage):
                copies[node] = graph.node_copy(node)
                inputs.append(slot)
        for node in self._foreign(cut, stage):
            copied = copies[node] = graph.placeholder(node.name)
            copied.meta["val"] = node.meta["val"]
            inputs.append(Slot("tangent" if cut.backward else "saved", node.name))
        for node in cut.block:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        results = self._results(cut, stage)
        graph.output(tuple(copies[value] for value in results.values()))
        return Phase(uncompiled(cut.phase.module, graph), tuple(inputs), tuple(results))

    def _results(self, cut: _PhaseCut, stage: int) -> dict[Slot, Node]:
        """Return a stage's own results, the tensors it saves, and the values it sends."""
        needed = self._needed(cut, stage)
        kept = set() if cut.backward else self._saved_for(stage)
        found: dict[Slot, Node] = {}
        for value, slot in cut.results():
            own = slot in kept if slot.kind in ("saved", "input") else self._at(cut, value) in (None, stage)
            if own and value in needed:
                found[slot] = value
        others = (other for other in range(len(self.counts)) if other != stage)
        for value in dict.fromkeys(node for other in others for node in self._foreign(cut, other)):
            if self._at(cut, value) == stage:
                found[Slot("grad", value.name, "input") if cut.backward else Slot("output", value.name)] = value
        return found
