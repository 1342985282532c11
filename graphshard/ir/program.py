"""Programs: graphs with the meaning of their inputs and outputs, and everything else the compiler knows of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from graphshard.torch_compat.torch_ops import assert_async, pytree, uncompiled
from graphshard.utils.text import format_seconds, html_table, new_table, styled


@dataclass(frozen=True)
class LinalgCheck:
    """Check of the status that a linear-algebra operator returned, after each call of forward.

    Attributes:
        operator: name in torch's error, such as "linalg.inv".
        is_matrix: the operator works on one matrix, not on a batch.
    """

    operator: str
    is_matrix: bool

    def __call__(self, status: torch.Tensor) -> None:
        """Raise torch.linalg.LinAlgError if the operator failed."""
        torch.ops.aten._linalg_check_errors(status, self.operator, is_matrix=self.is_matrix)


@dataclass(frozen=True)
class RuntimeAssert:
    """Condition that forward asserts with `torch._check`, checked after each call.

    Attributes:
        line: location of the assertion, as "file.py:3: code".
    """

    line: str

    def __call__(self, status: torch.Tensor) -> None:
        """Raise InputError if the condition is false; on a GPU, an asynchronous assertion fails."""
        if status.device.type != "cpu":
            assert_async(status, f"forward raises an exception at {self.line}")
        elif not bool(status):
            raise InputError(f"forward raises an exception for these inputs at {self.line}")


_InputKind = Literal["param", "part", "gathered", "buffer", "late", "input", "size", "tangent"]
_OutputKind = Literal["output", "mutation", "saved", "shown", "piece", "grad", "accumulated", "partial", "pending"]
SlotKind = Literal[_InputKind, _OutputKind]


@dataclass(frozen=True)
class Slot:
    """Meaning of one input or output of a graph.

    `name` is the name of a parameter or buffer, the index of a user input or output as text, the name of a saved value,
    or the name of a dynamic size. Kinds:

    * "part": one tensor in the shard of a tensor subclass; `index` says which.
    * "gathered": a parameter that the user gathered. "piece": what forward keeps for backward to gather again.
    * "late": a buffer as backward finds it.
    * "accumulated": the full gradient, summed over microbatches. "partial": the gradient shard before its all-reduce.
      "pending": summed over several calls.
    * "mutation" and "grad": `of` is the kind of the input that is mutated or differentiated.
    * "saved" with `of` "gathered": a gathered parameter, under the parameter's name; `index` is the number of epilogue
      steps left to backward. "shown": the same if only modules read it.
    """

    kind: SlotKind
    name: str
    of: SlotKind | None = None
    index: int = 0

    def __hash__(self) -> int:
        return hash(self.name)  # str caches its hash: a step looks up several slots of each parameter

    def __str__(self) -> str:
        end = f"[{self.index}]" if self.kind == "part" else " in backward" if self.of == "late" else ""
        return f"{self.kind}:{self.name}{end}"

    def named(self, name: str) -> Slot:
        """Return the slot under another name."""
        return Slot(self.kind, name, self.of, self.index)  # a third of the time of `dataclasses.replace`

    @property
    def is_saved(self) -> bool:
        """Whether it is a value that forward saves, and not a parameter."""
        return self.kind == "saved" and self.of is None

    @property
    def is_of_backward(self) -> bool:
        """Whether only backward returns it."""
        return self.kind == "grad" or self.of == "late"

    @cached_property
    def is_of_shard(self) -> bool:
        """Whether it is a shard, or what a gather sends of it."""
        return self.kind in ("param", "part", "piece")

    @cached_property
    def is_full(self) -> bool:
        """Whether it is a full parameter, which shards can restore."""
        return "gathered" in (self.kind, self.of)


# Kinds of inputs that live from the start of a phase to its end.
LASTING = ("param", "part", "buffer", "late", "input")


@dataclass
class Phase:
    """Graph with one slot for each placeholder and each output, in order."""

    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def clone(self) -> Phase:
        """Return a copy with a separate graph; only before lowering."""
        return Phase(uncompiled(self.module, copy.deepcopy(self.module.graph)), self.inputs, self.outputs)

    @property
    def placeholders(self) -> list[Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def results(self) -> list[Any]:
        """Values that the graph returns: nodes, or constants such as None."""
        (output,) = self.module.graph.find_nodes(op="output")
        return list(output.args[0])

    def set_results(self, results: list[Any]) -> None:
        """Replace the values that the graph returns."""
        (output,) = self.module.graph.find_nodes(op="output")
        output.args = (tuple(results),)

    def slot_of(self) -> dict[Node, Slot]:
        """Return slots by placeholder node."""
        return dict(zip(self.placeholders, self.inputs, strict=True))

    def add_input(self, name: str, slot: Slot, like: torch.Tensor) -> Node:
        """Append an input with the fake value `like`; return its placeholder."""
        graph, others = self.module.graph, self.placeholders
        with graph.inserting_after(others[-1]) if others else graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(name)
        node.meta["val"] = like
        self.inputs = (*self.inputs, slot)
        return node

    def erase_inputs(self, unused: Callable[[Node, Slot], bool]) -> None:
        """Erase the inputs for which a function of placeholder and slot is true."""
        slots = self.slot_of()
        gone = {node for node, slot in slots.items() if unused(node, slot)}
        self.inputs = tuple(slot for node, slot in slots.items() if node not in gone)
        for node in gone:
            self.module.graph.erase_node(node)

    @property
    def differentiated(self) -> frozenset[str]:
        """Names of the parameters whose gradient is returned and not None."""
        results = zip(self.results, self.outputs)
        return frozenset(s.name for value, s in results if s.of == "param" and s.kind == "grad" and value is not None)


@dataclass(frozen=True)
class Stage:
    """Entry of a program's history: the program after a pass.

    Attributes:
        name: name of the pass.
        rewrites: number of rewrites.
        seconds: duration, without verification.
        text: the program's text, see `graphshard.ir.printer`.
        num_nodes: number of calls in all graphs.
        exact: False if the pass may change numerics.
    """

    name: str
    rewrites: int
    seconds: float
    text: str
    num_nodes: int
    exact: bool = True

    @property
    def folded(self) -> str:
        """The text with repeated blocks collapsed."""
        return fold(self.text)


@dataclass(frozen=True)
class Size:
    """Dynamic size of an input.

    Attributes:
        name: "s0", "s1", in the order of inputs.
        source: index of the input, and the dim with this size; dim -1 if the input is itself the number.
        value: symbolic size in the fake values of the graphs.
    """

    name: str
    source: tuple[int, int]
    value: torch.SymInt

    def __post_init__(self) -> None:
        node = self.value.node
        object.__setattr__(self, "_symbol", node._expr if node.expr.is_number else node.expr)

    @property
    def symbol(self) -> Any:
        """The symbol in expressions of other sizes; stays a symbol when compilation specializes `value`."""
        return vars(self)["_symbol"]


@dataclass(frozen=True)
class Region:
    """Maximal run of compute between collectives, in canonical form; equal regions have equal keys."""

    key: str
    text: str
    module: GraphModule


@dataclass(frozen=True)
class UnitMemory:
    """Activations that one unit saves, and operators that it recomputes; "" is the root.

    Attributes:
        unit: name of the unit.
        saved: number of saved values, by the operator that made them. Inputs of the step, parameters and gathered
            parameters are not activations and not counted.
        saved_bytes: bytes of these; dynamic sizes count as in the example inputs.
        recomputed: number of operators that run again in backward, by name, without views.
    """

    unit: str
    saved: dict[str, int]
    saved_bytes: int
    recomputed: dict[str, int]

    @property
    def cells(self) -> tuple[str, str, str]:
        """Saved values, bytes and recomputed operators, as text."""
        saved, again = (
            ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
            for counts in (self.saved, self.recomputed)
        )
        return saved, str(self.saved_bytes), again


@dataclass(frozen=True)
class EagerForward:
    """The traced forward as eager operators, whose gradients autograd can differentiate again.

    Attributes:
        function: returns the function that is given a function, which returns the value of a slot, and that returns
            the leaves of the results.
        draws: forward draws random numbers.
        overwritten: buffers that forward writes to after it has read values that results depend on.
    """

    function: Callable[[], Callable[[Callable[[Slot], Any]], list[Any]]]
    draws: bool
    overwritten: tuple[str, ...]


@dataclass
class Program:
    """Everything the compiler knows about one captured signature of a module.

    Attributes:
        phases: {"joint"} until partition, then {"forward", "backward"}; {"forward"} for inference.
        params: parameter table.
        mesh: axes that it communicates over, by role; process groups are bound at installation.
        device: type of the device, without an index.
        constants: tensors of the module that are not parameters or buffers, by name.
        out_spec: pytree structure of the module's output.
        tangents: names of the differentiable outputs.
        plan: buckets and events; None until planned.
        communication: one line for each collective, in order; equal on all ranks.
        peak_gathered: units whose gathered parameters are alive at the peak, by phase.
        gathered_bytes: peak bytes of gathered parameters by phase, in the order of the plan.
        saved: saved and recomputed values by unit; see `saved_table`.
        regions: distinct regions by key; empty until lowered.
        region_calls: keys of the region calls of a step, in order.
        lowering_seconds: time to compile regions and write executors.
        region_seconds: by key of a compiled region, seconds of generating its code and waiting for its kernels.
        history: earlier stages.
        established: names of the rules of `graphshard.pipeline.rules` that hold since a pass established them.
        differentiated: names of the parameters whose gradient it computes.
        rewritten: buffers that backward writes, if it passes through any of the given outputs.
        model: name of the captured class.
        sizes: dynamic sizes of the inputs; empty for static shapes.
        capture: number of programs of the module that were captured before.
        reason: why it was captured.
        next_number: number of the next value; values keep their number from stage to stage.
        checks: checks of the outputs of forward that follow the module's outputs.
        offloaded: shards and gradients (hence optimizer state) live on the host; graphs copy them.
        on_host: names of the values that forward saves on the host.
        bound: lower bound of the step in seconds over all choices of saved activations, if these were chosen together
            with the plan; else None.
        trace: guards and bytecode of the traced call; None for a program from a file.
        returned: structure of what the call returns; None if its leaves are not the program's results in order.
        taken: indices of the program's inputs among the trace's graph inputs.
        digest: digest of the traced graph; "" without a trace.
        eager: the traced forward; None without a trace.
        few: all groups of blocks, if the graphs and `params` have only the captured ones; else None.
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
    gathered_bytes: dict[str, int] = field(default_factory=dict)
    saved: tuple[UnitMemory, ...] = ()
    regions: dict[str, Region] = field(default_factory=dict)
    region_calls: list[str] = field(default_factory=list)
    lowering_seconds: float = 0.0
    region_seconds: dict[str, float] = field(default_factory=dict)
    history: list[Stage] = field(default_factory=list)
    established: set[str] = field(default_factory=set)
    differentiated: frozenset[str] = frozenset()
    rewritten: dict[str, tuple[str, ...]] = field(default_factory=dict)
    model: str = ""
    sizes: tuple[Size, ...] = ()
    capture: int = 0
    reason: str = ""
    next_number: int = 0
    checks: tuple[LinalgCheck | RuntimeAssert, ...] = ()
    offloaded: bool = False
    on_host: frozenset[str] = frozenset()
    bound: float | None = None
    few: RepeatedBlocks | None = None
    trace: Any = None
    returned: Any = None
    taken: tuple[int, ...] = ()
    digest: str = ""
    eager: EagerForward | None = None

    def take_trace(self, traced: Program, digest: str) -> None:
        """Take guards, traced forward and structure of outputs of an equal program, which was not loaded."""
        self.trace, self.taken, self.digest, self.eager = traced.trace, traced.taken, digest, traced.eager
        self.out_spec = traced.out_spec

    def keep_captured(self, captured: Callable[[], Any], replanned: Callable[[Any], Program] | None = None) -> None:
        """Set the function that rebuilds the captured program as an `ExportedProgram`, and one that plans it anew."""
        self.__dict__["_captured"] = captured
        self.__dict__["_replanned"] = replanned

    def replanned(self, planner: Any) -> Program | None:
        """Return the program by another planner, lowered and not compiled; None if it comes from a file."""
        make = self.__dict__.get("_replanned")
        return make and make(planner)

    @cached_property
    def exported(self) -> Any:
        """The captured program, before all passes, as a torch `ExportedProgram` with a joint signature.

        Its outputs are BUFFER_MUTATION, USER_OUTPUT, GRADIENT_TO_PARAMETER and GRADIENT_TO_USER_INPUT; tangents are
        user inputs. It has no weights. `torch.export.save` writes it, and `graphshard.compile` takes it.

        A program from the cache, or one that was captured with few blocks, is captured again for this.

        Raises:
            ArgumentError: the program comes from a file of `graphshard.export`, or the model's mode has changed.
            UnsupportedError: torch has no signature for an input or output.
        """
        if "_captured" not in self.__dict__:
            raise ArgumentError(
                f"exported: the program {self.title} was read from a file of graphshard.export, which does not hold "
                "the captured program. Compile the model, without artifact=, to capture it."
            )
        return self.__dict__["_captured"]()

    def clone(self) -> Program:
        """Return a copy with separate graphs, which passes can rewrite; only before lowering."""
        phases = {name: phase.clone() for name, phase in self.phases.items()}
        return replace(self, phases=phases, history=list(self.history), established=set(self.established))

    @property
    def all_params(self) -> ParamTable:
        """Parameter table of all blocks."""
        return self.params if self.few is None else self.few.params

    @property
    def title(self) -> str:
        """Name of the program among its module's, such as "Llama-0"."""
        return f"{self.model}-{self.capture}"

    @property
    def forward(self) -> GraphModule:
        """The forward graph."""
        return self.phases["forward"].module

    @property
    def backward(self) -> GraphModule | None:
        """The backward graph; None for a program without gradients."""
        phase = self.phases.get("backward")
        return phase.module if phase else None

    def _repr_html_(self) -> str:
        """Return the passes as a table, for notebooks; `plan` shows the buckets."""
        table = new_table(("stage", "pass"), ("rewrites", "nodes", "time"))
        for index, stage in enumerate(self.history):
            numbers = str(stage.rewrites), f"{stage.num_nodes:,}", format_seconds(stage.seconds)
            table.add_row(str(index), styled(stage.name), *numbers)
        lines = [f"mesh: {self.mesh}", f"{self.num_regions} calls of {self.num_distinct_regions} regions"]
        if self.plan is not None:
            lines.append(f"{len(self.plan.buckets)} buckets")
        return html_table(": ".join(filter(None, (self.title, self.reason))), table, lines)

    def saved_table(self) -> str:
        """Return saved and recomputed values as a table with a line for each unit."""
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
        """Keys of the regions by their names in executors."""
        return {f"region_{i}": key for i, key in enumerate(self.regions)}

    @property
    def num_regions(self) -> int:
        """Number of region calls in a step."""
        return len(self.region_calls)

    @property
    def num_distinct_regions(self) -> int:
        """Number of compiled regions."""
        return len(self.regions)


# Decides the buckets, and when each starts and is waited for.
Planner = Callable[[Program], Plan]
