"""The program of one stage of a pipeline, cut out of that of the whole model.

    embed | blocks 0 1 2 3 4 5 6 7 | head   ->   embed 0 1   |   2 3   |   4 5   |   6 7 head

What lies in no block follows what it is made of: a value the last block that has a part in it, and a gradient what was
saved for it, or the gradient that it comes of.
Values of parameters alone, or of inputs alone, belong to no block: casts and gathers, tables of positions, masks. Each
stage makes those that it needs. Other values of earlier stages are sent from each stage to the next one, and gradients
of them come back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn
from torch.fx import Graph, Node

from graphshard.cost.collectives import computing
from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.errors import StageError
from graphshard.ir.graph import is_communication
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.repeats import Repeats
from graphshard.torch_compat.fx_code import uncompiled

# Slots of what is a parameter, whatever form it has.
_OF_PARAMETERS = ("param", "part", "gathered", "piece")


@dataclass(frozen=True)
class Blocks:
    """The list of modules that is cut into stages.

    Attributes:
        path: its name.
        count: how many blocks it has.
        repeats: which of them are known to be equal.
    """

    path: str
    count: int
    repeats: Repeats | None

    def block_of(self, name: str) -> int | None:
        """In which block a module or a parameter is; None for what is in none."""
        found = re.match(rf"{re.escape(self.path)}\.(\d+)(?=\.|@|$)", name)
        return None if found is None else int(found[1])

    def made(self, node: Node) -> int | None:
        """The block whose forward or backward made a node; None for what is in none."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        found = (self.block_of(name) for name, *_ in stack.values())
        return next((block for block in found if block is not None), None)

    def kind(self, block: int) -> object:
        """The same for blocks that are known to be equal."""
        place = None if self.repeats is None else self.repeats.place_of(f"{self.path}.{block}")
        return block if place is None else place[1]


def lists_of(model: nn.Module) -> dict[str, int]:
    """Lists of modules in a model, which may be cut into stages, and how long each is."""
    lists = (nn.ModuleList, nn.Sequential)
    return {name: len(part) for name, part in model.named_modules() if name and isinstance(part, lists)}


def blocks_of(lists: Mapping[str, int], repeats: Repeats | None, model: str) -> Blocks:
    """The list that has equal blocks, or the longest one.

    Args:
        model: class of the module.

    Raises:
        StageError: there is none.
    """
    if not lists:
        raise StageError(
            f"mesh has a pipeline axis, and {model} has no nn.ModuleList or nn.Sequential of blocks to cut into "
            "stages. Put its blocks in one, or leave the axis out."
        )
    path = max(lists, key=lambda name: lists[name]) if repeats is None else repeats.path
    return Blocks(path, lists[path], repeats)


@dataclass
class _Cut:
    """A phase, and to which block each node belongs; None is to none."""

    phase: Phase
    backward: bool
    block: dict[Node, int | None] = field(default_factory=dict)

    @cached_property
    def slots(self) -> dict[Node, Slot]:
        return self.phase.slot_of()

    def results(self) -> Iterable[tuple[Node, Slot]]:
        """What it returns, but for constants."""
        results = zip(self.phase.results, self.phase.outputs, strict=True)
        return ((value, slot) for value, slot in results if isinstance(value, Node))


class BlockCut:
    """A partitioned program with its nodes by block.

    Attributes:
        program: of the whole model, before its plan.
        blocks: which are cut.
        forward, backward: its phases.
    """

    def __init__(self, program: Program, blocks: Blocks) -> None:
        self.program, self.blocks = program, blocks
        self._saved: dict[Slot, int | None] = {}
        self.forward, self.backward = (_Cut(program.phases[name], name == "backward") for name in program.phases)
        self._assign(self.forward)
        self._saved = {slot: self.forward.block[value] for value, slot in self.forward.results()}
        self._assign(self.backward)

    def _assign(self, cut: _Cut) -> None:
        last = self.blocks.count - 1
        of_parameter, of_input, is_gradient = set[Node](), set[Node](), set[Node]()
        for node in cut.phase.module.graph.nodes:
            if node in cut.slots:
                slot = cut.slots[node]
                is_parameter = slot.kind in _OF_PARAMETERS or slot.is_full
                for kind, holds in ((of_parameter, is_parameter), (of_input, slot.kind == "input")):
                    kind.update([node] if holds else [])
                is_gradient.update([node] if slot.kind == "tangent" else [])
                cut.block[node] = last if slot.kind == "tangent" else None if is_parameter else self._saved.get(slot)
                continue
            if node.op == "output":
                break
            sources = node.all_input_nodes
            for kind in (of_parameter, of_input, is_gradient):
                kind.update([node] if not kind.isdisjoint(sources) else [])
            given = [(source in is_gradient, cut.block[source]) for source in sources]
            gradients = [block for gradient, block in given if gradient and block is not None]
            values = [block for gradient, block in given if not gradient and block is not None]
            made = self.blocks.made(node)
            if not gradients and not values and not (node in of_parameter and node in of_input):
                cut.block[node] = None
            elif made is not None:
                cut.block[node] = made
            elif gradients:
                cut.block[node] = min(min(gradients), max(values, default=last))
            else:
                cut.block[node] = max(values, default=0)
        for node in filter(is_gradient.__contains__, reversed(list(cut.block))):
            if node not in cut.slots and self.blocks.made(node) is None:  # gradients go to earlier blocks only
                users = [cut.block.get(user) for user in node.users]
                cut.block[node] = max(block for block in (cut.block[node], *users) if block is not None)

    def seconds(self, costs: Costs) -> list[float]:
        """What each block computes, the first with what is in front of it, the last with what is behind it."""
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


@dataclass
class Stages:
    """A partitioned program as stages, which have so many blocks each.

    Raises:
        StageError: several stages use a parameter.
    """

    cut: BlockCut
    counts: Sequence[int]
    _known: dict[tuple[bool, int], set[Node]] = field(default_factory=dict, init=False)
    _readers: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._stage_of = [stage for stage, count in enumerate(self.counts) for _ in range(count)]
        for cut in (self.cut.forward, self.cut.backward):
            for stage in range(len(self.counts)):
                for slot in (cut.slots[node] for node in self._needed(cut, stage) if node in cut.slots):
                    is_parameter = slot.kind in _OF_PARAMETERS or slot.is_full
                    if is_parameter and self._readers.setdefault(slot.name, stage) != stage:
                        raise StageError(
                            f"parameter {slot.name} is used in stages {self._readers[slot.name]} and {stage} of "
                            f"{len(self.counts)}, and stages have parameters of their own. Give each use a parameter "
                            "of its own (untie them), or leave the pipeline axis out."
                        )

    def kind(self, stage: int) -> object:
        """The same for stages whose programs are equal."""
        first, last = sum(self.counts[:stage]), len(self.counts) - 1
        kinds = map(self.cut.blocks.kind, range(first, first + self.counts[stage]))
        return stage == 0, stage == last, tuple(kinds)

    def sent(self, border: int, *, backward: bool = False) -> int:
        """Bytes that stage `border` sends to the next one, or gets back from it: also for stages further on."""
        cut = self.cut.backward if backward else self.cut.forward
        over = range(border + 1) if backward else range(border + 1, len(self.counts))
        wanted = dict.fromkeys(node for stage in over for node in self._foreign(cut, stage))
        return sum(num_bytes(node) for node in wanted if self._at(cut, node) not in over)

    def program_of(self, stage: int) -> Program:
        """The program of one stage."""
        whole = self.cut.program
        rows = tuple(row for row in whole.params if self._owner(row.name) == stage)
        return replace(
            whole,
            phases={
                "forward": self._phase_of(self.cut.forward, stage),
                "backward": self._phase_of(self.cut.backward, stage),
            },
            params=ParamTable(rows),
            differentiated=whole.differentiated.intersection(row.name for row in rows),
            history=list(whole.history),
            established=set(whole.established),
        )

    def _at(self, cut: _Cut, node: Node) -> int | None:
        """The stage of a node; None for what each stage makes itself that needs it."""
        block = cut.block[node]
        return None if block is None else self._stage_of[block]

    def _owner(self, name: str) -> int:
        """Which stage has a parameter; one that is outside of blocks, and nobody reads, is in the first."""
        block = self.cut.blocks.block_of(name)
        return self._readers.get(name, 0) if block is None else self._stage_of[block]

    def _saved_for(self, stage: int) -> set[Slot]:
        """What the backward of a stage reads of its forward."""
        cut = self.cut.backward
        return {cut.slots[node] for node in self._needed(cut, stage) if node in cut.slots}

    def _needed(self, cut: _Cut, stage: int) -> set[Node]:
        """All that a stage has: its own nodes, what it leaves to its backward, what these need, and what it is sent."""
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

    def _foreign(self, cut: _Cut, stage: int) -> list[Node]:
        """What a stage needs and others make, in order; what forward has saved is there in backward."""
        needed, slots = self._needed(cut, stage), cut.slots
        return [n for n in cut.block if n in needed and n not in slots and self._at(cut, n) not in (None, stage)]

    def _phase_of(self, cut: _Cut, stage: int) -> Phase:
        """What a stage needs, in a graph of its own."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        needed, foreign = self._needed(cut, stage), self._foreign(cut, stage)
        inputs: list[Slot] = []
        for node, slot in cut.slots.items():
            if node in needed or (slot.kind == "param" and self._owner(slot.name) == stage):
                copies[node] = graph.node_copy(node)
                inputs.append(slot)
        for node in foreign:
            copied = copies[node] = graph.placeholder(node.name)
            copied.meta["val"] = node.meta["val"]
            inputs.append(Slot("tangent" if cut.backward else "saved", node.name))
        for node in cut.block:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        results = self._results(cut, stage)
        graph.output(tuple(copies[value] for value in results.values()))
        return Phase(uncompiled(cut.phase.module, graph), tuple(inputs), tuple(results))

    def _results(self, cut: _Cut, stage: int) -> dict[Slot, Node]:
        """What a stage returns: its own results, what it leaves to its backward, and what it sends."""
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
