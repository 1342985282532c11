"""Checks of results of forward after each call, as a trace does not know values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from graphshard.errors import ArgumentError, InputError
from graphshard.ir.collapse_repeats import fold
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamTable
from graphshard.ir.plan import Plan
from graphshard.ir.repeats import RepeatedBlocks
from graphshard.torch_compat.fx_code import uncompiled
from graphshard.torch_compat.operators import assert_async, pytree


@dataclass(frozen=True)
class LinalgCheck:
    """A status that a linear-algebra operator of forward returned.

    Attributes:
        operator: as torch's error calls it: "linalg.inv".
        is_matrix: the operator works on single matrices, not on batches.
    """

    operator: str
    is_matrix: bool

    def __call__(self, status: torch.Tensor) -> None:
        """Raise torch.linalg.LinAlgError if the operator failed."""
        torch.ops.aten._linalg_check_errors(status, self.operator, is_matrix=self.is_matrix)


@dataclass(frozen=True)
class RuntimeAssert:
    """A condition that forward takes for granted with `torch._check`.

    Attributes:
        line: that says so, as "file.py:3: code".
    """

    line: str

    def __call__(self, status: torch.Tensor) -> None:
        """Raise InputError where the condition is false; on GPUs an assertion, at a later time."""
        if status.device.type != "cpu":
            assert_async(status, f"forward raises an exception at {self.line}")
        elif not bool(status):
            raise InputError(f"forward raises an exception for these inputs at {self.line}")


class Captured:
    """Base of `Program`: makes the captured program again when it is asked for."""

    def keep_captured(self, captured: Callable[[], Any]) -> None:
        """Remember how to make the program again that was captured, as an `ExportedProgram`."""
        self.__dict__["_captured"] = captured

    @property
    def exported(self) -> Any:
        """The captured program, before all passes, as an `ExportedProgram` of torch with a joint signature.

        Its outputs are BUFFER_MUTATION, USER_OUTPUT, GRADIENT_TO_PARAMETER and GRADIENT_TO_USER_INPUT; tangents are
        user inputs. It holds no weights. `torch.export.save` writes it, and `graphshard.compile` takes it.

        A program of the cache, and one of a few equal blocks that stand for all, is captured once more for this.

        Raises:
            ArgumentError: the program is of a file of `graphshard.export`, or the model is in another mode now.
            UnsupportedError: the program takes or returns what torch has no signature for.
        """
        if "_captured" not in self.__dict__:
            title = getattr(self, "title", "")
            raise ArgumentError(
                f"exported: the program {title} was read from a file of graphshard.export, and what was captured is "
                "not in it. Compile the model, without artifact=, to capture it."
            )
        if "_exported" not in self.__dict__:
            self.__dict__["_exported"] = self.__dict__["_captured"]()
        return self.__dict__["_exported"]


Extent = int | torch.SymInt  # a size or a stride
SlotKind = Literal[
    "param",
    "part",
    "gathered",
    "buffer",
    "late",
    "input",
    "size",
    "tangent",
    "output",
    "mutation",
    "saved",
    "shown",
    "piece",
    "grad",
    "accumulated",
    "partial",
    "pending",
]


@dataclass(frozen=True)
class Slot:
    """What one input or output of a graph means.

    `name` is the parameter or buffer name, the index of a user input or output as text, or for "saved" the name of the
    forward value, for "size" that of a dynamic size. Of a parameter, "part" is one of the tensors that the shard of a
    tensor subclass holds, "gathered" what was gathered by hand, "piece" what forward keeps for backward to gather
    again; "late" is a buffer as backward finds it; "accumulated" and "partial" are what backward adds up over several
    microbatches: its full gradient, or that of the shard before it is all-reduced; "pending" over several calls.
    A "mutation" or "grad" carries the kind it belongs to in `of`, a "part" which of the tensors it is in `index`. What
    is "saved" of a parameter that forward has gathered goes by the parameter's name and is `of` "gathered"; in `index`
    are the steps of its landing that backward takes itself. It is "shown" if only modules read it.
    """

    kind: SlotKind
    name: str
    of: SlotKind | None = None
    index: int = 0

    def __hash__(self) -> int:
        return hash(self.name)  # text remembers its hash: a step looks up several slots of each parameter

    def __str__(self) -> str:
        end = f"[{self.index}]" if self.kind == "part" else " in backward" if self.of == "late" else ""
        return f"{self.kind}:{self.name}{end}"

    def named(self, name: str) -> Slot:
        """The same of another name."""
        return Slot(self.kind, name, self.of, self.index)  # a third of the time of `dataclasses.replace`

    @property
    def is_of_backward(self) -> bool:
        """Whether backward returns it."""
        return self.kind == "grad" or self.of == "late"

    @cached_property
    def is_full(self) -> bool:
        """Whether it is a full parameter, which can be gathered again from shards."""
        return "gathered" in (self.kind, self.of)


# Inputs that are there from the beginning of a phase to its end, whatever it does.
LASTING = ("param", "part", "buffer", "late", "input")


@dataclass
class Phase:
    """A graph with one slot per placeholder and one per output, in order."""

    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def clone(self) -> Phase:
        """A copy of a phase before lowering, whose graph can be rewritten without touching this one's."""
        return Phase(uncompiled(self.module, copy.deepcopy(self.module.graph)), self.inputs, self.outputs)

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

    def add_input(self, name: str, slot: Slot, like: torch.Tensor) -> Node:
        """A new last input; `like` is its fake value."""
        graph, others = self.module.graph, self.placeholders
        with graph.inserting_after(others[-1]) if others else graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(name)
        node.meta["val"] = like
        self.inputs = (*self.inputs, slot)
        return node

    @property
    def differentiated(self) -> frozenset[str]:
        """Names of the parameters whose gradient is returned and not None."""
        results = zip(self.results, self.outputs)
        return frozenset(s.name for value, s in results if s.of == "param" and s.kind == "grad" and value is not None)


@dataclass(frozen=True)
class Stage:
    """One entry of the history: the program after a pass.

    Attributes:
        name: the pass.
        rewrites: how often it rewrote something.
        seconds: time it took, without verification.
        text: the whole program, see `graphshard.ir.printer`.
        num_nodes: calls in all graphs.
        exact: False if the pass says that it may change the numbers.
    """

    name: str
    rewrites: int
    seconds: float
    text: str
    num_nodes: int
    exact: bool = True

    @property
    def folded(self) -> str:
        """The text with repeated blocks given once."""
        return fold(self.text)


@dataclass(frozen=True)
class Size:
    """A dynamic size.

    Attributes:
        name: "s0", "s1" in the order in which inputs show them.
        source: the index of an input of the step and the dimension whose size it is; -1 if the input is the number.
        value: what stands for it in the fake values of the graphs.
    """

    name: str
    source: tuple[int, int]
    value: torch.SymInt

    def __post_init__(self) -> None:
        node = self.value.node
        object.__setattr__(self, "_symbol", node._expr if node.expr.is_number else node.expr)

    @property
    def symbol(self) -> Any:
        """The symbol in the expressions of other sizes; compilation may find out that `value` is one number."""
        return vars(self)["_symbol"]


@dataclass(frozen=True)
class Region:
    """A maximal run of compute between collectives, in canonical form; equal regions have equal keys."""

    key: str
    text: str
    module: GraphModule


@dataclass(frozen=True)
class UnitMemory:
    """What one unit saves for backward and computes again; "" is the root.

    Attributes:
        unit: its name.
        saved: how many values are saved, by the operator that made them. Inputs of the step, parameters and gathered
            parameters that stay until backward are not activations and not counted.
        saved_bytes: their size; at the sizes of the example inputs, if some are dynamic.
        recomputed: how many operators run again in backward, by name; views are not counted.
    """

    unit: str
    saved: dict[str, int]
    saved_bytes: int
    recomputed: dict[str, int]

    @property
    def cells(self) -> tuple[str, str, str]:
        """As text: what is saved, how many bytes, what runs again."""
        saved, again = (
            ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
            for counts in (self.saved, self.recomputed)
        )
        return saved, str(self.saved_bytes), again


@dataclass
class Program(Captured):
    """Everything the compiler knows about one captured signature of a module.

    Attributes:
        phases: {"joint"} until partition, then {"forward", "backward"}; {"forward"} for inference.
        params: the parameter table.
        mesh: the axes it communicates over, by their roles; process groups are bound at installation.
        device: the kind of device it runs on, without an index.
        constants: tensors the module holds outside parameters and buffers, by name.
        out_spec: pytree structure of the module's output.
        tangents: names of the outputs that autograd may differentiate through.
        plan: buckets and events; None until planned.
        communication: one line per collective, in order; equal on all ranks.
        peak_gathered: per phase, the units whose gathered parameters are alive at once, where they are most.
        saved: what is saved for backward and computed again, by unit; see `saved_table`.
        regions: distinct regions by key; empty until lowered.
        region_calls: keys in execution order, one per call in a step.
        lowering_seconds: time it took to compile regions and write the executors.
        history: every earlier stage.
        established: names of the rules of `graphshard.pipeline.rules` that passes have made to hold.
        differentiated: parameters whose gradient the program computes.
        rewritten: buffers that backward writes, each with the outputs through any of which it must go to do so.
        model: name of the class that was captured.
        sizes: dynamic sizes of the inputs; empty for a program of one shape.
        shapes: shape and strides of every input of a program with dynamic sizes.
        capture: how many programs of the module were captured before.
        reason: why this program was captured.
        next_number: number of the next value to be printed; numbers are kept from stage to stage.
        checks: of the outputs of forward that follow those of the module.
        offloaded: shards, gradients and so optimizer state live on the host; graphs copy them to and from the device.
        on_host: names of what forward saves on the host until backward.
        bound: seconds that a step takes at least, whatever else units save for backward, where that was decided
            together with the plan; None where it was given.
        trace: guards, and bytecode around the program, of the call that was traced; None if it comes from a file.
        taken: which of the trace's graph inputs are the program's inputs, in order.
        digest: of what was traced; "" if nothing was.
        few: of many equal groups of blocks the graphs, and `params`, have few, and this says what all are; else None.
    """

    phases: dict[str, Phase]
    params: ParamTable
    mesh: Mesh
    device: torch.device
    constants: dict[str, torch.Tensor]
    out_spec: pytree.TreeSpec
    tangents: tuple[str, ...] = ()
    plan: Plan | None = None
    communication: list[str] = field(default_factory=list)
    peak_gathered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    saved: tuple[UnitMemory, ...] = ()
    regions: dict[str, Region] = field(default_factory=dict)
    region_calls: list[str] = field(default_factory=list)
    lowering_seconds: float = 0.0
    history: list[Stage] = field(default_factory=list)
    established: set[str] = field(default_factory=set)
    differentiated: frozenset[str] = frozenset()
    rewritten: dict[str, tuple[str, ...]] = field(default_factory=dict)
    model: str = ""
    sizes: tuple[Size, ...] = ()
    shapes: tuple[tuple[tuple[Extent, ...], tuple[Extent, ...]], ...] = ()
    capture: int = 0
    reason: str = ""
    next_number: int = 0
    checks: tuple[LinalgCheck | RuntimeAssert, ...] = ()
    offloaded: bool = False
    on_host: frozenset[str] = frozenset()
    bound: float | None = None
    few: RepeatedBlocks | None = None
    trace: Any = None
    taken: tuple[int, ...] = ()
    digest: str = ""

    @property
    def all_params(self) -> ParamTable:
        """The parameters of all blocks."""
        return self.params if self.few is None else self.few.params

    @property
    def title(self) -> str:
        """Name of the program among those of its module: "Llama-0"."""
        return f"{self.model}-{self.capture}"

    @property
    def forward(self) -> GraphModule:
        """The forward graph that runs."""
        return self.phases["forward"].module

    @property
    def backward(self) -> GraphModule | None:
        """The backward graph that runs; None for a program without gradients."""
        phase = self.phases.get("backward")
        return phase.module if phase else None

    def saved_table(self) -> str:
        """What forward saves for backward and what backward computes again, as a table with a line per unit."""
        lines = [("unit", "saved", "bytes", "computed again in backward")]
        lines += [(row.unit or "(root)", *row.cells) for row in self.saved]
        lines.append(("total", "", str(sum(row.saved_bytes for row in self.saved)), ""))
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        return "\n".join(
            f"{unit:<{widths[0]}}  {saved:<{widths[1]}}  {size:>{widths[2]}}  {again}".rstrip()
            for unit, saved, size, again in lines
        )

    @property
    def region_names(self) -> dict[str, str]:
        """Keys of the regions by the names the executors call them."""
        return {f"region_{i}": key for i, key in enumerate(self.regions)}

    @property
    def num_regions(self) -> int:
        """Region calls in one step."""
        return len(self.region_calls)

    @property
    def num_distinct_regions(self) -> int:
        """Regions that were compiled."""
        return len(self.regions)


# What decides when collectives start and which travel together.
Planner = Callable[[Program], Plan]
