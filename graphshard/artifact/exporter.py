"""One call of a module into a program for a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphshard.artifact.members import Captured, StoredBackward, StoredRegion, stored_region
from graphshard.artifact.places import period_of
from graphshard.codec.graph_digest import graph_digest
from graphshard.codec.lowered import encode_lowered
from graphshard.codec.partitioned import encode_partitioned
from graphshard.codec.passes import encode_pass
from graphshard.cost.costs import Costs
from graphshard.cost.flops import flop_of
from graphshard.errors import ArgumentError
from graphshard.frontend.graph_breaks import raise_break
from graphshard.frontend.inputs import count_tokens, stand_ins
from graphshard.ir.graph_break import GraphBreak
from graphshard.ir.param_table import even_pieces
from graphshard.ir.program import Phase, Program, Region
from graphshard.lower.aoti_package import Package
from graphshard.lower.eager import runs_as_it_is
from graphshard.lower.regions import Compiled, Compiler, lower
from graphshard.module.tracer import Tracer
from graphshard.passes import AccumulateGradients
from graphshard.pipeline.instrumentation import Observer, Recorder
from graphshard.pipeline.pipeline import Partitioned, Pipeline
from graphshard.pipeline.variants import rerun_backward
from graphshard.predict.step_prediction import Bound, bound_of, explained
from graphshard.predict.training_config import Training
from graphshard.runtime.gradient_accumulation import Accumulation
from graphshard.schedule.agreed import Share, agreed
from graphshard.torch_compat.operators import pytree
from graphshard.utils.text import brief


@dataclass
class Exporter:
    """Captures the calls of a module for one mesh.

    Attributes:
        tracer: of the module.
        model: the module.
        compiler: of regions.
        costs: of the machine that predictions are for.
        later: whether regions without a package are to be compiled on the target.
        accumulate: whether there are to be backwards for steps of several microbatches.
        regions: those captured so far, of all meshes, by their names in the file.
        show: told what is being done.
        recorder: what records a program, by its name.
        share: what places with pieces of different sizes share of plans; None if there is one place.
    """

    tracer: Tracer
    model: nn.Module
    compiler: Compiler
    costs: Costs
    later: bool
    accumulate: bool
    regions: dict[str, StoredRegion]
    show: Callable[[str], None]
    recorder: Callable[[str], Recorder | None]
    share: Share | None = None
    _count: int = field(default=0, init=False)

    def capture(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        entry: str,
        grad: bool,
        gradients: Sequence[Sequence[int]],
    ) -> Captured:
        """The program of one call, and its backwards for gradients through other outputs than the likely ones.

        Raises:
            ArgumentError: `entry` is no submodule, or `gradients` are no outputs.
            GraphBreak: forward cannot be traced whole.
        """
        tracer, module = self.tracer, self.model
        if entry:
            module = self._submodule(entry)
            tracer = tracer.entry(entry, "forward", module)
        given, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        leaves = tracer.on_device(stand_ins(given, meta_only=True), structure)
        with torch.set_grad_enabled(grad):
            signature = tracer.signature(module, leaves, structure)
        # A trace knows that a tensor on the meta device has no values.
        leaves = [was if isinstance(was, torch.Tensor) and was.is_meta else leaf for was, leaf in zip(given, leaves)]
        call_args, call_kwargs = pytree.tree_unflatten(leaves, structure)
        self.show("capture")
        digests: list[str] = []

        def digest(program: Program) -> None:
            digests.append(graph_digest(program))

        recorder = self.recorder(f"{tracer.label}-{self._count}")
        observer = _Watch(tracer.options.level, recorder, tracer.pipeline.passes, self.show, costs=self.costs)
        passes = tracer.pipeline
        if self.share is not None and not even_pieces(tracer.spec.mesh, tracer.spec.params):
            passes = Pipeline(agreed(passes, self.share))
        # Sizes of other calls would be symbols in a trace that comes after theirs.
        try:
            program, partitioned = replace(tracer).trace(
                module, call_args, call_kwargs, observer, "exported", grad=grad, passes=passes, find=digest
            )
        except GraphBreak as error:
            raise_break(error)
        few = tracer.trace_alone(module, call_args, call_kwargs, grad=grad, few=True)
        if few is not None and len(few.taken) == len(program.taken):  # no block has inputs of its own
            digest(few)
        program.capture = self._count
        self._count += 1
        text = program.history[-1].text
        self.lower(program, observer)
        plan = program.plan.to_json() if program.plan else "null"
        data = self.encoded(program, module)
        wanted = [_outputs(program, outputs) for outputs in gradients]
        backwards: list[StoredBackward] = []
        prediction, start = "", None
        if partitioned is not None:
            partitioned = partitioned() if callable(partitioned) else partitioned
            further = _Backwards(self, program, partitioned, tracer, module)
            backwards = list(further.all(wanted))
            prediction = self._prediction(program, observer, leaves)
            start = encode_partitioned(partitioned, program)
        trace, period = program.history[0].text, period_of(program)
        return Captured(entry, digests, signature, data, backwards, text, trace, plan, start, prediction, period)

    def lower(self, program: Program, observer: Observer) -> None:
        """Compile its regions and write its executors."""
        self.show("lower")
        lower(program, self.compiler, self.tracer.compiled, self.show)
        observer.lowered(program, self.tracer.compiled)

    def encoded(self, program: Program, module: nn.Module) -> dict[str, Any]:
        """The program as data; its regions are kept. One compiled under conditions on dynamic sizes is its own."""
        compiled = self.tracer.compiled
        names = {key: key if compiled[key].within is None else f"{key}-{program.capture}" for key in program.regions}
        for key, name in names.items():
            if name not in self.regions:
                package = compiled[key].fn
                assert isinstance(package, Package)
                self.regions[name] = stored_region(
                    program.regions[key], package, later=self.later and not runs_as_it_is(program.regions[key].module)
                )
        data = encode_lowered(program, module)
        return {
            **data,
            "regions": [names[key] for key in data["regions"]],
            "region_calls": [names[key] for key in data["region_calls"]],
        }

    def _prediction(self, program: Program, seen: _Watch, leaves: Sequence[Any]) -> str:
        if seen.bound is None:  # the passes make no plan
            return ""
        tokens, training = count_tokens(leaves), Training()
        return str(explained(program, self.costs, seen.flop, seen.bound, tokens=tokens, training=training))

    def _submodule(self, entry: str) -> nn.Module:
        try:
            return self.model.get_submodule(entry)
        except AttributeError:
            names = [name for name, _ in self.model.named_modules() if name][:5]
            raise ArgumentError(
                f"entry={brief(entry)} is no submodule of {type(self.model).__name__}; such are "
                f"{', '.join(map(brief, names))}."
            ) from None


@dataclass(frozen=True)
class _Backwards:
    """Makes a program's other backwards."""

    exporter: Exporter
    program: Program
    partitioned: Partitioned
    tracer: Tracer
    module: nn.Module

    def all(self, gradients: Sequence[frozenset[str]]) -> Iterator[StoredBackward]:
        """Those for gradients through other outputs, and for all of them those for steps of several microbatches."""
        likely = frozenset(slot.name for slot in self.program.phases["backward"].inputs if slot.kind == "tangent")
        for used in dict.fromkeys((likely, *gradients)):
            if used != likely:
                yield self._backward(used, None)[1]
            if self.exporter.accumulate:
                yield from self._microbatches(used)

    def _microbatches(self, used: frozenset[str]) -> Iterator[StoredBackward]:
        """Those that a step of three microbatches needs, and so one of any number.

        Until the last one gradients are not reduced at all, or over shards only.
        """
        names = self.tracer.model_names
        settings = {"no-sync": "unsynced", "no-all-reduce": "unreplicated"}
        if self.program.mesh.replicate is None:
            del settings["no-all-reduce"]
        made = set()
        for setting, attribute in settings.items():
            state = Accumulation()
            for microbatch in ("first", "middle", "last"):
                setattr(state, attribute, set(names.values()) if microbatch != "last" else set())
                step = state.step(names)
                if step is not None and step not in made:
                    made.add(step)
                    phase, stored = self._backward(used, step, f"{setting}-{microbatch}")
                    state.follow(phase, names)
                    yield stored

    def _backward(
        self, used: frozenset[str], step: AccumulateGradients | None, microbatch: str = ""
    ) -> tuple[Phase, StoredBackward]:
        steps = tuple(self.partitioned.passes(used, step))
        observer = Observer(self.tracer.options.level, None, steps, self.exporter.show)
        variant = rerun_backward(self.partitioned, self.program, used, step, observer)
        self.exporter.lower(variant, observer)
        data = self.exporter.encoded(variant, self.module)
        accumulate = encode_pass(step) if step is not None else None
        return variant.phases["backward"], StoredBackward(used, microbatch, {**data, "accumulate": accumulate})


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


def _outputs(program: Program, outputs: Sequence[int]) -> frozenset[str]:
    """Outputs by name that gradients are to come through.

    Raises:
        ArgumentError: the program is not differentiable through one.
    """
    used = frozenset(map(str, outputs))
    if not used <= set(program.tangents):
        raise ArgumentError(
            f"gradients={brief(list(outputs))}: the program is differentiable through outputs "
            f"{', '.join(program.tangents) or '(none)'} only."
        )
    return used


def operators_only(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    """Compiles nothing: regions run as their operators, or are compiled on the target."""
    for name in regions:
        yield name, Package()


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool | None) -> Iterator[None]:
    """All modules in train() or eval() mode within the block; None leaves them."""
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
