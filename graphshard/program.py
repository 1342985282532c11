"""The program: FX graphs with the meaning of their inputs and outputs, the parameter table, and the history.

A program starts as one joint forward/backward graph (or one forward graph, for inference), is rewritten by
passes, split by `partition`, and lowered. It holds no rank, no process group and no device index.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from graphshard.params import ParamTable
from graphshard.plan import Plan

SlotKind = Literal["param", "buffer", "input", "tangent", "output", "mutation", "grad", "saved"]


@dataclass(frozen=True)
class Slot:
    """What one input or output of a graph means.

    `name` is the parameter or buffer name, the index of a user input or output as text, or for "saved" the
    name of the forward value. A "mutation" or "grad" carries the kind it belongs to in `of`.
    """

    kind: SlotKind
    name: str
    of: SlotKind | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass
class Phase:
    """A graph with one slot per placeholder and one per output, in order."""

    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def clone(self) -> Phase:
        """A copy whose graph can be rewritten without touching this one's."""
        return Phase(GraphModule(self.module, copy.deepcopy(self.module.graph)), self.inputs, self.outputs)

    @property
    def placeholders(self) -> list[Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def results(self) -> list[Any]:
        """The values the graph returns: nodes, or constants such as None."""
        (output,) = self.module.graph.find_nodes(op="output")
        return list(output.args[0])

    def set_results(self, results: list[Any]) -> None:
        """Replace the values the graph returns."""
        (output,) = self.module.graph.find_nodes(op="output")
        output.args = (tuple(results),)

    def slot_of(self) -> dict[Node, Slot]:
        """Slots by placeholder node."""
        return dict(zip(self.placeholders, self.inputs, strict=True))


@dataclass(frozen=True)
class Stage:
    """One entry of the history: the program's text after a pass."""

    name: str
    rewrites: int
    seconds: float
    text: str


@dataclass(frozen=True)
class Axis:
    """A mesh axis by its symbolic name; the process group is bound at installation."""

    name: str
    size: int


@dataclass(frozen=True)
class Region:
    """A maximal run of compute between collectives, in canonical form; equal regions have equal keys."""

    key: str
    text: str
    module: GraphModule


@dataclass
class Program:
    """Everything the compiler knows about one captured signature of a module.

    Attributes:
        phases: {"joint"} until partition, then {"forward", "backward"}; {"forward"} for inference.
        params: the parameter table.
        axis: the mesh axis parameters are sharded over.
        constants: tensors the module holds outside parameters and buffers, by name.
        out_spec: pytree structure of the module's output.
        tangents: names of the outputs that autograd may differentiate through.
        plan: buckets and events; None until planned.
        communication: one line per collective, in order; equal on all ranks.
        peak_gathered: per phase, the units whose gathered parameters are alive at once, where they are most.
        regions: distinct regions by key; empty until lowered.
        region_calls: keys in execution order, one per call in a step.
        lowering_seconds: time it took to compile regions and write the executors.
        history: every earlier stage.
        reason: why this program was captured.
    """

    phases: dict[str, Phase]
    params: ParamTable
    axis: Axis
    constants: dict[str, torch.Tensor]
    out_spec: pytree.TreeSpec
    tangents: tuple[str, ...] = ()
    plan: Plan | None = None
    communication: list[str] = field(default_factory=list)
    peak_gathered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    region_calls: list[str] = field(default_factory=list)
    lowering_seconds: float = 0.0
    history: list[Stage] = field(default_factory=list)
    reason: str = ""

    @property
    def forward(self) -> GraphModule:
        """The forward graph that runs."""
        return self.phases["forward"].module

    @property
    def backward(self) -> GraphModule | None:
        """The backward graph that runs; None for a program without gradients."""
        phase = self.phases.get("backward")
        return phase.module if phase else None

    @property
    def num_regions(self) -> int:
        """Region calls in one step."""
        return len(self.region_calls)

    @property
    def num_distinct_regions(self) -> int:
        """Regions that were compiled."""
        return len(self.regions)
