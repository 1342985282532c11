"""One call of a module into a program for a file; and a forward-only program for one rank as PyTorch's own
`ExportedProgram`, in a `.pt2` that needs no graphshard.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphshard.codec.program_format import encode_lowered, encode_partitioned, graph_digest, own_names
from graphshard.cost.costs import Costs, model_collective
from graphshard.cost.flops import flop_of
from graphshard.cross.driver import package
from graphshard.errors import ArgumentError, GraphBreak, UnsupportedError
from graphshard.exported.exported_program import place_tensor
from graphshard.frontend.graph_breaks import raise_break
from graphshard.frontend.inputs import apart, stand_ins
from graphshard.ir.gpus import CAPABILITIES, Capability, dotted
from graphshard.ir.mesh import Mesh
from graphshard.ir.opaque_calls import OPAQUE, REMEDY
from graphshard.ir.param_table import even_pieces, places_of
from graphshard.ir.program import Phase, Program, Region
from graphshard.lower.eager import runs_as_it_is
from graphshard.lower.region_store import Package
from graphshard.lower.regions import Compiled, Compiler, lower
from graphshard.module.compiled_module import make_tracer
from graphshard.module.tracer import ModuleCall, Tracer
from graphshard.options.mesh_axes import MeshAxes
from graphshard.options.options import Options
from graphshard.options.resolve import request_for
from graphshard.options.validate import ModelContents, check_containers
from graphshard.passes import AccumulateGradients
from graphshard.pipeline.instrumentation import Observer, Recorder
from graphshard.pipeline.pipeline import Partitioned, Pipeline, rerun_backward
from graphshard.predict.step_prediction import Bound, bound_of, count_tokens, explained
from graphshard.predict.training_config import Training
from graphshard.runtime.gradient_accumulation import Accumulation
from graphshard.schedule.rank_consistent_planner import Share, agreed
from graphshard.store.artifact_file import ArtifactWriter, CompiledProgram
from graphshard.store.artifact_manifest import BackwardEntry
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.argument_validation import check_bool, is_int
from graphshard.utils.files import replacing
from graphshard.utils.text import brief

_Backward = tuple[BackwardEntry, dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """A call that an artifact has a program for.

    Attributes:
        inputs, kwargs: of one rank; only shapes, dtypes, non-tensor values, and values by which forward decides matter.
        entry: name of the submodule that is called; "" is the model.
        training: in train() or eval() mode; None leaves every module in the mode it is in.
        grad: with backward; otherwise under `torch.no_grad()`.
        gradients: further sets of outputs, by their index among the output's leaves, that a backward is to be there
            for; one for the likely set, the losses, is there in any case.

    Raises:
        ArgumentError: one of them is wrong by itself.
    """

    inputs: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    entry: str = ""
    training: bool | None = None
    grad: bool = True
    gradients: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        check_containers(self.inputs, self.kwargs, ("inputs", "kwargs"))
        if not isinstance(self.entry, str):
            raise ArgumentError(f"entry must be the name of a submodule, got {brief(self.entry)}.")
        if self.training is not None:
            check_bool("training", self.training)
        check_bool("grad", self.grad)
        listed = isinstance(self.gradients, (list, tuple)) and all(isinstance(e, (list, tuple)) for e in self.gradients)
        if not listed or not all(is_int(index) and index >= 0 for each in self.gradients for index in each):
            raise ArgumentError(f"gradients must be a list of tuples of outputs' indices, got {brief(self.gradients)}.")


@dataclass
class Exporter:
    """Captures the calls of a module for one mesh.

    Attributes:
        costs: of the machine that predictions are for.
        later: whether regions without a package are compiled on the target.
        accumulate: whether to make backwards for steps of several microbatches.
        share: shares plans among places with shards of different sizes; None if there is one place.
    """

    tracer: Tracer
    model: nn.Module
    compiler: Compiler
    costs: Costs
    later: bool
    accumulate: bool
    writer: ArtifactWriter
    show: Callable[[str], None]
    recorder: Callable[[str], Recorder | None]
    share: Share | None = None
    _count: int = field(default=0, init=False)

    def capture(self, call: Call) -> CompiledProgram:
        """Return the program of a call, with its backwards."""
        tracer, module = self.tracer, self.model
        if call.entry:
            try:
                module = self.model.get_submodule(call.entry)
            except AttributeError:
                names = [name for name, _ in self.model.named_modules() if name][:5]
                raise ArgumentError(
                    f"entry={brief(call.entry)} is no submodule of {type(self.model).__name__}; such are "
                    f"{', '.join(map(brief, names))}."
                ) from None
            tracer = tracer.entry(call.entry, "forward", module)
        given, structure = pytree.tree_flatten((tuple(call.inputs), dict(call.kwargs)))
        leaves = tracer.on_device(stand_ins(given), structure)
        with torch.set_grad_enabled(call.grad):
            signature = tracer.signature(module, leaves, structure)
        # A trace knows that a tensor on the meta device has no values.
        leaves = [was if isinstance(was, torch.Tensor) and was.is_meta else leaf for was, leaf in zip(given, leaves)]
        call_args, call_kwargs = pytree.tree_unflatten(leaves, structure)
        module_call = ModuleCall(module, call_args, call_kwargs, call.grad)
        self.show("capture")
        digests: list[str] = []
        recorder = self.recorder(f"{tracer.label}-{self._count}")
        observer = _Watch(tracer.options.level, recorder, tracer.pipeline.passes, self.show, costs=self.costs)
        passes = tracer.pipeline
        if self.share is not None and not even_pieces(tracer.spec.mesh, tracer.spec.params):
            passes = Pipeline(agreed(passes, self.share))
        # Sizes of other calls would be symbols in a trace that comes after theirs.
        try:
            program, partitioned = replace(tracer).trace(
                module_call,
                observer,
                "exported",
                passes=passes,
                find=lambda traced: digests.append(graph_digest(traced)),
            )
        except GraphBreak as error:
            raise_break(error)
        if unnamed := set(program.mesh.tensors) - set(tracer.spec.mesh.tensors):
            raise UnsupportedError(
                f"{tracer.label} communicates in process groups that are not of the mesh ({next(iter(unnamed)).name}), "
                "which a file cannot name. Call compile on the ranks."
            )
        few = tracer.trace_alone(module_call, few=True)
        if few is not None and len(few.taken) == len(program.taken):  # no block has separate inputs
            digests.append(graph_digest(few))
        _reject_opaque_calls(program)
        program.capture = self._count
        self._count += 1
        text = program.history[-1].text
        self._lower(program, observer)
        # The number of ranks after which the first place on all axes of the model's communication comes again.
        collectives = (model_collective(node) for phase in program.phases.values() for node in phase.module.graph.nodes)
        axes = [program.mesh.named(each.axis) for each in collectives if each is not None]
        period = math.lcm(*(axis.size * program.mesh.distance(axis) for axis in axes))
        data = self._encoded(program, module)
        backwards: list[_Backward] = []
        prediction, start = "", None
        wanted = [frozenset(map(str, outputs)) for outputs in call.gradients]
        for used, outputs in zip(wanted, call.gradients):
            if not used <= set(program.tangents):
                raise ArgumentError(
                    f"gradients={brief(list(outputs))}: the program is differentiable through outputs "
                    f"{', '.join(program.tangents) or '(none)'} only."
                )
        if partitioned is not None:
            partitioned = partitioned() if callable(partitioned) else partitioned
            backwards = list(self._backwards(program, partitioned, tracer, module, wanted))
            if observer.bound is not None:  # or the passes make no plan
                tokens, training = count_tokens(call_args, call_kwargs), Training()
                found = explained(program, self.costs, observer.flop, observer.bound, tokens=tokens, training=training)
                prediction = str(found)
            start = encode_partitioned(partitioned, program)
        return CompiledProgram.of(
            data,
            entry=call.entry,
            digests=digests,
            signature=signature,
            partitioned=start,
            backwards=backwards,
            text=text,
            trace=program.history[0].text,
            prediction=prediction,
            period=period,
        )

    def _lower(self, program: Program, observer: Observer) -> None:
        self.show("lower")
        lower(program, self.compiler, self.tracer.compiled, self.show)
        observer.lowered(program, self.tracer.compiled)

    def _encoded(self, program: Program, module: nn.Module) -> dict[str, Any]:
        """Return the program as data, and write its regions."""
        compiled = self.tracer.compiled
        names = own_names(program, compiled, program.capture)
        for key, name in names.items():
            if name not in self.writer.regions:
                code, region = compiled[key].fn, program.regions[key]
                assert isinstance(code, Package)
                later = self.later and not runs_as_it_is(region.module)
                self.writer.add_region(name, region, code, otherwise="later" if later else "operators")
        return encode_lowered(program, module, names)

    def _backwards(
        self,
        program: Program,
        partitioned: Partitioned,
        tracer: Tracer,
        module: nn.Module,
        gradients: Sequence[frozenset[str]],
    ) -> Iterator[_Backward]:
        """Yield backwards for gradients through other outputs, and for all sets backwards of several microbatches."""

        def lowered(
            used: frozenset[str], step: AccumulateGradients | None, microbatch: str = ""
        ) -> tuple[Phase, _Backward]:
            observer = Observer(tracer.options.level, None, tuple(partitioned.passes(used, step)), self.show)
            variant = rerun_backward(partitioned, program, used, step, observer)
            self._lower(variant, observer)
            entry = BackwardEntry(sorted(used), microbatch, step)
            return variant.phases["backward"], (entry, self._encoded(variant, module))

        names = {ref.row.name: ref.name for ref in tracer.params}
        # Until the last microbatch gradients are not reduced at all, or over shards only.
        settings = {"no-sync": "unsynced", "no-all-reduce": "unreplicated"}
        if program.mesh.replicate is None:
            del settings["no-all-reduce"]
        likely = frozenset(slot.name for slot in program.phases["backward"].inputs if slot.kind == "tangent")
        for used in dict.fromkeys((likely, *gradients)):
            if used != likely:
                yield lowered(used, None)[1]
            made = set()
            for setting, attribute in settings.items() if self.accumulate else ():
                state = Accumulation()
                for microbatch in ("first", "middle", "last"):
                    setattr(state, attribute, set(names.values()) if microbatch != "last" else set())
                    step = state.step(names)
                    if step is not None and step not in made:
                        made.add(step)
                        phase, stored = lowered(used, step, f"{setting}-{microbatch}")
                        state.follow(phase, names)
                        yield stored


@dataclass
class _Watch(Observer):
    """Counts the multiplications of the captured graph, before passes, and bounds the step before it is scheduled."""

    costs: Costs = field(kw_only=True)
    flop: Mapping[str, float] = field(default_factory=dict, init=False)
    bound: Bound | None = field(default=None, init=False)

    def after(self, program: Program, name: str, rewrites: int, seconds: float, *, exact: bool = True) -> None:
        if name == "capture":
            (phase,) = program.phases.values()
            self.flop = flop_of(phase.module.graph.nodes)
        if self.bound is None and program.plan is not None and "backward" in program.phases:
            self.bound = bound_of(program, self.costs, program.plan, limit=None, states=2)
        super().after(program, name, rewrites, seconds, exact=exact)


# --- compilers and settings --------------------------------------------------------------------------------------


def compiler_for_file(
    backend: str, device: torch.device, compile_regions: bool | None, targets: list[Capability]
) -> tuple[Compiler, bool]:
    """Return the compiler of regions for these compute capabilities, by default the local GPU's.

    The second value is whether regions without code are compiled on the target.
    """
    if not targets and device.type == "cuda" and torch.cuda.is_available():
        here = torch.cuda.get_device_capability()
        targets = [here] if here in CAPABILITIES else []
    if targets and backend != "eager" and compile_regions is not False:
        package("triton")
        from graphshard.cross import compile_for_gpus

        return compile_for_gpus.compiler_of(targets), False
    on_cpu = device.type == "cpu"
    if compile_regions and not on_cpu and not targets:
        raise ArgumentError(
            f"compile_regions=True needs a GPU of compute capability {', '.join(map(dotted, CAPABILITIES))} to compile "
            "for, and there is none here: say which one, as in capability=(9, 0). Without it the file holds programs, "
            "plans and graphs; `graphshard finish FILE` on the target machine adds the code."
        )
    if backend == "eager":
        return operators_only, False
    if compile_regions is False or not on_cpu:
        return operators_only, True
    from graphshard.lower import inductor  # takes seconds to import

    return inductor.package_all, False


def operators_only(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    """Compile nothing: regions run by their operators, or are compiled on the target."""
    for name in regions:
        yield name, Package()


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Set all modules to train() or eval() mode within the block; None leaves them."""
    modes = {module: module.training for module in model.modules()}
    try:
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Compile for a number of threads; None is this process's."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


def _reject_opaque_calls(program: Program) -> None:
    """Raise ArgumentError if the program calls functions of this process."""
    for phase in program.phases.values():
        for node in phase.module.graph.nodes:
            if node.target in OPAQUE:
                name = str(node.args[0]).rsplit(" ", 2)[0]
                raise ArgumentError(f"model: {name} runs as it is, and a file cannot hold a function. {REMEDY}")


def export_pt2(
    contents: ModelContents, meshes: list[Mesh], calls: list[Call], device: torch.device, path: Path, options: Options
) -> None:
    """Write the program that one rank runs in inference, with the model's weights, for `torch.export.load`.

    Casts of the precision policy are in the graph; parameters and buffers keep their names and dtypes.
    """
    if [tuple(mesh.shape.values()) for mesh in meshes] != [(1,)] or len(calls) != 1 or calls[0].grad or calls[0].entry:
        raise ArgumentError(
            f"{path.name}: a .pt2 file holds one program for one rank, without gradients. Pass mesh=(1,) and "
            'mode="inference", or a path that ends in .gshard.'
        )
    model, args, kwargs = contents.model, calls[0].inputs, calls[0].kwargs
    tracer = make_tracer(request_for(contents, MeshAxes(meshes[0]), options, device))
    meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if meta:
        raise ArgumentError(
            f"{path} is to hold the weights, and {meta[0]} is on the meta device. Load the weights first, or export a "
            ".gshard file."
        )
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    leaves = tracer.on_device(apart(leaves), structure)
    call_args, call_kwargs = pytree.tree_unflatten(leaves, structure)
    with in_mode(model, False), torch.no_grad():
        observer = Observer(tracer.options.level, None, tracer.pipeline.passes)
        try:
            program, _ = tracer.trace(ModuleCall(model, call_args, call_kwargs, False), observer, "exported")
        except GraphBreak as error:
            raise_break(error)
        _reject_opaque_calls(program)
        dynamic = _shapes_for_args(model, args, kwargs, tracer.options.dynamic_shapes)
        module = _InferenceModule(program, model)
        exported = torch.export.export(module, call_args, call_kwargs, dynamic_shapes=dynamic, strict=False)
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.export.save(exported, file)


def _shapes_for_args(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """Return `dynamic_shapes` of the model's forward for `_InferenceModule.forward`."""
    if shapes is None:
        return None
    if not isinstance(shapes, Mapping):
        return {"args": tuple(shapes)}
    names = list(inspect.signature(type(model).forward).parameters)[1 : len(args) + 1]
    positional = {"args": tuple(shapes.get(name) for name in names)} if args else {}
    return {**positional, **{name: shapes.get(name) for name in kwargs}}


class _InferenceModule(nn.Module):
    """Forward of one rank as a module whose parameters and buffers have the model's names."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__()
        program.phases["forward"].module.recompile()  # after what passes did to the graph
        # In lists, so that they are not submodules. Dynamo's bytecode leaves attributes on a copy of the model.
        self._program = [program]
        tensors = (*model.parameters(), *model.buffers())
        self._model = [copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})]
        self._replay = None if program.trace is None else program.trace.replay(self._run_traced)
        for name, tensor in (*places_of(model).items(), *model.named_buffers(remove_duplicate=False)):
            place_tensor(self, name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._replay is not None:
            return self._replay(self._model[0], args, kwargs)
        # Inputs of a graph that Dynamo did not trace are the tensors of the call.
        return self._run([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])

    def _run_traced(self, *inputs: Any) -> Any:
        """Run the graph on the inputs that Dynamo's bytecode reads, which makes the output from the results."""
        taken = [inputs[index] for index in self._program[0].taken]
        return self._run([torch.tensor(value) if isinstance(value, float) else value for value in taken])

    def _run(self, tensors: list[Any]) -> Any:
        (program,) = self._program
        phase: Phase = program.phases["forward"]
        sizes = {size.name: size.source for size in program.sizes}
        inputs: list[Any] = []
        for slot in phase.inputs:
            if slot.kind == "param":
                inputs.append(self.get_parameter(slot.name))
            elif slot.kind == "input":
                inputs.append(tensors[int(slot.name)])
            elif slot.kind == "size":
                given, dim = sizes[slot.name]
                inputs.append(tensors[given] if dim < 0 else tensors[given].shape[dim])
            else:
                constant = program.constants.get(slot.name)
                inputs.append(constant if constant is not None else self.get_buffer(slot.name))
        results = []
        for value, slot in zip(phase.module(*inputs), phase.outputs, strict=True):
            if slot.kind == "output":
                results.append(value)
            elif slot.of == "buffer":
                self.get_buffer(slot.name).copy_(value)
        for check in reversed(program.checks):
            check(results.pop())
        return pytree.tree_unflatten(results, program.out_spec)
