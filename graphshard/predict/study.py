"""Kernels of regions as Inductor's scheduler makes them for a GPU, as costs count them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphshard.cost.costs import Costs
from graphshard.cost.flops import is_multiplication
from graphshard.cost.kernels import Work, operations_of, work_of
from graphshard.cost.profile import Profile
from graphshard.errors import ArgumentError, GraphshardError
from graphshard.frontend.inputs import count_tokens
from graphshard.frontend.signature import CaptureSpec, check_alike
from graphshard.ir.gpus import USUAL, Capability, capability_of
from graphshard.ir.graph import is_alias, is_part
from graphshard.ir.instantiate_blocks import instantiate_all_blocks, instantiate_blocks
from graphshard.ir.mesh import Axis, Mesh, MeshLike
from graphshard.ir.printer import number
from graphshard.ir.program import Program, Region
from graphshard.ir.repeated_block_matcher import match_blocks
from graphshard.ir.repeats import BlocksDifferError, RepeatedBlocks, captured_params
from graphshard.ir.units import find_units, precision_of
from graphshard.lower.backends import compiler_for
from graphshard.lower.regions import lower, outline
from graphshard.options.options import Options
from graphshard.options.resolve import example_of, pipeline_of, resolve_model
from graphshard.options.simulated_mesh import Parallelize
from graphshard.options.validate import check_examples, check_model
from graphshard.passes import MakePlan, OverlapModelCollectives, Pass
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import decided, run_pass
from graphshard.pipeline.rules import verify
from graphshard.pipeline.variants import stamped
from graphshard.predict.capture_target import (
    Place,
    Subject,
    at_place,
    device_given,
    place_of,
    sizes_of,
    standing_in,
    with_found,
    without_pipeline,
)
from graphshard.predict.explanation import Explanation
from graphshard.predict.pipeline_schedule import Course, PipelineStep, stages_of
from graphshard.predict.pipeline_stages import blocks_of, lists_of
from graphshard.predict.step_prediction import bound_of, explained
from graphshard.predict.symbolic_cost import formulas_of, spread_ranks
from graphshard.predict.training_config import Training, microbatches_of
from graphshard.repeats.find_repeats import find_repeats
from graphshard.schedule.build import Settings, build
from graphshard.schedule.few import folded_plan
from graphshard.schedule.known import Known, while_unchanged, within_one_plan
from graphshard.torch_compat.operators import pytree
from graphshard.utils.argument_validation import check_bool, check_function, check_seconds, is_int
from graphshard.utils.progress import collector_paused
from graphshard.utils.text import brief

if TYPE_CHECKING:
    from graphshard.lower.scheduler_internals import FusedKernel

# By the region and the GPU it is for; None where Inductor makes no kernels of it.
Scheduled = dict[tuple[str, Capability], tuple[Work, ...] | None]


def schedule_regions(
    regions: Mapping[str, Region], profile: Profile, known: Scheduled, show: Callable[[str], None]
) -> dict[str, tuple[Work, ...]]:
    """Kernels by the keys of regions, of those that Inductor compiles; equal ones are asked about once.

    Args:
        profile: the GPU by its multiprocessors, and any other if there is none with so many.
        known: what was found before; what is new is added.
        show: told what is being done.
    """
    capability = capability_of(int(profile.units)) or USUAL
    new = [region for key, region in regions.items() if (key, capability) not in known]
    if new:
        from graphshard.lower import scheduler_internals  # takes seconds to import

        for number, region in enumerate(new, start=1):
            show(f"schedule kernels, {number} of {len(new)}")
            kernels = scheduler_internals.fused_kernels(region, capability)
            known[region.key, capability] = None if kernels is None else tuple(map(_work, kernels))
    return dict(_found(regions, known, capability))


def _found(
    regions: Mapping[str, Region], known: Scheduled, capability: Capability
) -> Iterator[tuple[str, tuple[Work, ...]]]:
    for key in regions:
        works = known[key, capability]
        if works is not None:
            yield key, works


def _work(kernel: FusedKernel) -> Work:
    """A product or an attention of a library as the rules have it; other code by its bytes and operations."""
    products = [node for node in kernel.operators if is_multiplication(node)] if kernel.extern else []
    if products:
        return work_of(products[:1], fused=False)[0]
    computing = [node for node in kernel.operators if not (is_alias(node) or is_part(node))]
    return Work("pointwise", 0, operations_of(computing), kernel.num_bytes, "float32")


log = logging.getLogger(__name__)

# Operators of a program that are read between passes, in a report. Printing more takes longer than the passes.
_READ = 10_000


@dataclass
class Programs:
    """A model, its inputs and one setting; what has been captured and scheduled is kept.

    Attributes:
        options: of `explain`, without machine and measurements.
        training: how the model is trained: the optimizer, microbatches, tokens.
        symbols: dims of the inputs by the names that they have in formulas.
        label: name of the setting in tables.
        show: told what is being done.
        every_block: every block is captured, also where few stand for many equal ones.
        parallelize: makes the model for a mesh along which it communicates itself.
        device: "cuda" captures the program of a GPU, also where there is none, and has Inductor fuse its regions; None
            captures that of a CPU, with rules about fusion.
    """

    model: nn.Module
    example_inputs: Sequence[Any] | None
    example_kwargs: Mapping[str, Any] | None
    options: Options = field(default_factory=Options)
    training: Training = field(default_factory=Training)
    symbols: Mapping[str, int] | None = None
    label: str = ""
    show: Callable[[str], None] = lambda _: None
    every_block: bool = False
    parallelize: Parallelize | None = None
    device: str | None = None
    _subjects: dict[Place | None, Subject] = field(default_factory=dict, init=False)
    _known: Known = field(default_factory=Known, init=False)
    _before_plan: dict[tuple[Place, str], Program] = field(default_factory=dict, init=False)
    _scheduled: dict[tuple[Hashable, str, str], Program] = field(default_factory=dict, init=False)

    def _prepared(self, place: Place, costs: Costs) -> Program:
        """The program as the planner gets it."""
        key = place, self._machine(costs)
        if key not in self._before_plan:
            device = device_given(self.device)
            with at_place(self.model, self.options, place, self.parallelize, device) as (model, spec):
                self._before_plan[key] = self._prepare_some(model, spec, self._subject(place, model), costs)
        return self._before_plan[key]

    def _subject(self, place: Place, model: nn.Module) -> Subject:
        """What was captured of a model, or is to be."""
        owner = whose(place)
        if owner not in self._subjects:
            repeats = None if self.every_block or not is_local(self.options) else find_repeats(model)
            inputs = tuple(self.example_inputs or ()), dict(self.example_kwargs or {})
            level, show = self.options.verify or "off", self._showing()
            device, lists = device_given(self.device), lists_of(model)
            self._subjects[owner] = Subject(inputs, repeats, self.symbols or {}, level, show, device, lists)
        return self._subjects[owner]

    def _prepare_some(self, model: nn.Module, spec: CaptureSpec, subject: Subject, costs: Costs) -> Program:
        """Of a few blocks that stand for all, if that shows what all do."""
        if subject.repeats is not None:
            try:
                return self._prepare(model, spec, subject, costs)
            except (BlocksDifferError, GraphshardError) as error:
                log.info("%s: every block is captured: %s", type(self.model).__name__, error)
                subject.every_block()
        return self._prepare(model, spec, subject, costs)

    def _prepare(self, model: nn.Module, spec: CaptureSpec, subject: Subject, costs: Costs) -> Program:
        """Capture and the passes before the plan."""
        level, repeats = self.options.verify or "off", subject.repeats
        if repeats is not None:
            check_alike(spec, repeats)
        captured = subject.capture(model, spec)
        rows, mesh = spec.params, spec.mesh
        if spec.groups:  # what is communicated along the axes was found by the capture
            rows, mesh = with_found(rows, captured.params, repeats), captured.mesh
        program, params = _copy(captured), rows if repeats is None else captured_params(rows, repeats)
        program = replace(program, params=params, mesh=mesh, device=torch.device(costs.profile.device))
        observer = self._observer(spec.mesh)
        passes = self._passes(program, Costs(costs.profile, costs.network, program.mesh))
        if self._decides:
            passes = decided(passes, program, observer.show)
        before_plan = list(itertools.takewhile(lambda step: not isinstance(step, MakePlan), passes))
        # Overlapping moves compute from one block into the next, so it is for the whole program.
        of_blocks = list(itertools.takewhile(lambda step: not isinstance(step, OverlapModelCollectives), before_plan))
        for step in of_blocks:
            run_pass(step, program, observer)
        if repeats is not None:
            # Until regions are cut out, if blocks can be scheduled so; what the model communicates moves among blocks.
            if not (self.symbols or spec.groups):
                try:
                    return self._few(
                        program, match_blocks(program, repeats, rows), before_plan[len(of_blocks) :], costs
                    )
                except BlocksDifferError as error:
                    log.info("planned for every block: %s", error)
            observer.show("stamp")
            program = instantiate_blocks(program, repeats, rows)
            if level != "off":
                verify(program, "the copies of equal blocks")
        for step in before_plan[len(of_blocks) :]:
            run_pass(step, program, observer)
        return program

    def _few(self, partitioned: Program, few: RepeatedBlocks, passes: Sequence[Pass], costs: Costs) -> Program:
        """A copy of a program of few blocks, behind these passes.

        Raises:
            BlocksDifferError: the schedule of all blocks cannot be told of it.
        """
        program = _copy(partitioned)
        program.few = few
        for step in passes:
            run_pass(step, program, self._observer(program.mesh))
        with within_one_plan():
            build(program, replace(costs, mesh=program.mesh), Settings())
        return program

    def _program(self, place: Hashable, before_plan: Program, costs: Costs) -> Program:
        """The lowered program."""
        planned, mesh = replace(before_plan, plan=None), before_plan.mesh
        planned.history = list(planned.history)
        passes = self._passes(planned, costs)
        begin = next((i for i, step in enumerate(passes) if isinstance(step, MakePlan)), len(passes))
        for step in passes[begin : begin + 1]:  # which leaves the graphs as they are
            with while_unchanged(self._known):
                run_pass(step, planned, self._observer(mesh, costs.profile.name))
        # Machines that are given the same schedule share what follows.
        schedule = replace(planned.plan, prediction=None).hash if planned.plan else ""
        key = place, self._machine(costs), schedule
        if key not in self._scheduled:
            lowered = self._finished(planned, passes[begin + 1 :], self._observer(mesh))
            if self.symbols:
                spread_ranks(lowered)
            self._showing(mesh)("lower")
            lower(lowered, compiler_for("eager"), {})
            self._scheduled[key] = lowered
        return replace(self._scheduled[key], plan=planned.plan)

    def _finished(self, planned: Program, passes: Sequence[Pass], observer: Observer) -> Program:
        """A copy of a planned program behind the passes that follow; of one of few blocks that of all, outlined."""
        program = _copy(planned)
        if planned.few is None or planned.plan is None:
            for step in passes:
                run_pass(step, program, observer)
            if observer.level != "off":
                verify(program, "the last pass", complete=True)
            return program
        alone = replace(observer)
        try:
            program.plan = folded_plan(planned.plan, planned)
            for step in passes:
                run_pass(step, program, alone)
            if observer.level != "off":
                verify(program, "the last pass", complete=True)
            outline(program)
            program = stamped(program, planned.plan)
            number(program)
            return program
        except BlocksDifferError as error:
            log.info("passes are of every block: %s", error)
            return self._finished(replace(instantiate_all_blocks(planned), plan=planned.plan), passes, observer)

    def _showing(self, mesh: Mesh | None = None, machine: str = "") -> Callable[[str], None]:
        """What is told of a phase, and which program of the study it is about."""
        ranks = f"{mesh.size} ranks" if mesh else ""
        about = ", ".join(filter(None, (self.label, ranks, machine)))
        return lambda phase: self.show(f"{about}: {phase}" if about else phase)

    def _observer(self, mesh: Mesh, machine: str = "") -> Observer:
        return Observer(self.options.verify or "off", show=self._showing(mesh, machine), most=_READ)

    def _passes(self, program: Program, costs: Costs) -> tuple[Pass, ...]:
        """Those that `compile` would run on such a machine."""
        return pipeline_of(self.options, program.mesh, costs, optimizer_states=self.training.optimizer_states).passes

    @property
    def _decides(self) -> bool:
        """Whether what units save depends on the machine."""
        return self.options.activation == "auto"

    def _machine(self, costs: Costs) -> str:
        """What programs depend on of a machine."""
        device = costs.profile.device
        return f"{device} {costs.profile.hash} {costs.network}" if self._decides else device


def whose(place: Place) -> Place | None:
    """What is captured at a place is that of all meshes of data axes, or of the place alone."""
    return None if isinstance(place, Mesh) else place


def is_local(options: Options) -> bool:
    """Whether what passes do to a block depends on its neighbours at most."""
    by_budget = isinstance(options.activation, (int, float)) or options.activation == "auto"
    return options.passes is None and not by_budget and options.dynamic_shapes is None


def _copy(program: Program) -> Program:
    """A copy that passes can rewrite."""
    phases = {name: phase.clone() for name, phase in program.phases.items()}
    return replace(program, phases=phases, history=list(program.history), established=set(program.established))


# No tensor has more dims.
_MOST_DIMS = 64


@dataclass
class Study(Programs):
    """Predicts steps of a model under one setting."""

    _of_stages: dict[tuple[Place, str], Program] = field(default_factory=dict, init=False)
    _kernels: Scheduled = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.model, self.options = resolve_model(self.model, self.options)
        if self.example_inputs is None and self.example_kwargs is None:
            self.example_inputs, self.example_kwargs = example_of(self.model)
        check_model(self.model)
        check_examples(self.model, self.example_inputs, self.example_kwargs)
        precision_of(self.options.mp_policy, find_units(self.model, self.options.units))
        if self.example_inputs is None and self.example_kwargs is None:
            raise ArgumentError("explain needs example_inputs or example_kwargs, the inputs of one rank's call.")
        symbols = self.symbols
        if symbols is not None and not (isinstance(symbols, Mapping) and all(map(_is_symbol, symbols.items()))):
            raise ArgumentError(
                f'symbols must name dims of the inputs such as {{"batch": 0, "seq": 1}}, got {brief(symbols)}.'
            )
        if not callable(self.show):
            check_function("show", self.show, "print")
        check_bool("every_block", self.every_block)
        device_given(self.device)
        if self.parallelize is not None:
            check_function("parallelize", self.parallelize, "a function of (model, mesh)")

    @collector_paused()
    def explain(
        self, shape: MeshLike, profile: Profile, network: str, *, measured: Mapping[str, float] = MappingProxyType({})
    ) -> Explanation:
        """Predict a step on one mesh and machine."""
        if not isinstance(network, str) or network not in profile.outside:
            known = ", ".join(map(repr, profile.outside))
            raise ArgumentError(f"network must be one of {known} for {profile.name}, got {brief(network)}.")
        check_seconds("measured", measured)
        with standing_in(device_given(self.device)):
            return self._explain(shape, profile, network, measured)

    def _explain(self, shape: MeshLike, profile: Profile, network: str, measured: Mapping[str, float]) -> Explanation:
        of_stage, axis = without_pipeline(shape)
        place = place_of(of_stage, self.parallelize)
        sizes = {**({axis.name: axis.size} if axis else {}), **sizes_of(place)}
        microbatches = microbatches_of(sizes, (self.example_inputs, self.example_kwargs), self.training)
        if axis is not None and axis.size > 1:
            return self._in_stages(place, axis, sizes, microbatches, Costs(profile, network, measured=dict(measured)))
        if self.symbols and microbatches > 1:
            raise ArgumentError(
                "symbols: formulas are of one microbatch. Leave symbols, or accumulate and global_batch, out."
            )
        before_plan = self._prepared(place, Costs(profile, network))
        costs = Costs(profile, network, before_plan.mesh, dict(measured))
        subject = self._subjects[whose(place)]
        found = self._predicted(
            place,
            before_plan,
            costs,
            flop=subject.flop,
            mesh=None if axis is None and isinstance(place, Mesh) else sizes,
            microbatches=microbatches,
        )
        _check_measured(measured, found)
        if self.symbols:
            self._showing(found._program.mesh, profile.name)("formulas")
            found = replace(
                found, formulas=formulas_of(found._program, found._costs, subject.at, training=self.training)
            )
        return found

    def _predicted(
        self,
        place: Hashable,
        before_plan: Program,
        costs: Costs,
        *,
        flop: Mapping[str, float],
        mesh: dict[str, int] | None = None,
        microbatches: int = 1,
    ) -> Explanation:
        """The prediction of a program.

        Args:
            place: what the program is the only one of.
            flop: of the model, by dtype.
        """
        planning = replace(costs, measured={})
        program = self._program(place, before_plan, planning)
        show = self._showing(program.mesh, costs.profile.name)
        scheduled = self._schedule(program, costs.profile, costs.measured, show)
        show("predict")
        with while_unchanged(self._known):
            bound = bound_of(
                before_plan,
                planning,
                program.plan,
                limit=self.options.memory_limit,
                states=self.training.optimizer_states,
            )
        return explained(
            program,
            # Plans are the same for all backends, so that the program is.
            replace(costs, scheduled=scheduled, fused=self.options.backend != "eager"),
            flop,
            bound,
            tokens=count_tokens(pytree.tree_leaves((self.example_inputs, self.example_kwargs))),
            training=self.training,
            label=self.label,
            mesh=mesh,
            microbatches=microbatches,
        )

    def _in_stages(
        self, place: Place, axis: Axis, sizes: dict[str, int], microbatches: int, costs: Costs
    ) -> Explanation:
        """Predict a step of a pipeline.

        Args:
            axis: of its stages.
            sizes: of the whole mesh, by axis.
        """
        course = Course(axis, self.training, microbatches)
        course.check(self.options, self.symbols)
        study = replace(self, options=replace(self.options, reshard_after_forward=False))
        study._subjects, study._before_plan = self._subjects, self._of_stages
        whole = study._prepared(place, costs)
        whole = whole if whole.few is None else instantiate_all_blocks(whole)
        subject = self._subjects[whose(place)]
        blocks = blocks_of(subject.lists, subject.repeats, whole.model)
        stages = stages_of(whole, blocks, course, costs)

        def predict(stage: Hashable, program: Program, limit: int | None) -> Explanation:
            at = replace(study, options=replace(study.options, memory_limit=limit))
            at._scheduled, at._known, at._kernels = study._scheduled, study._known, self._kernels
            flop = {dtype: total / course.stages for dtype, total in subject.flop.items()}
            on = replace(costs, mesh=program.mesh)
            return at._predicted((place, stages.counts, stage, limit), program, on, flop=flop, mesh=sizes)

        step = PipelineStep.of(stages, course, costs, self.options.memory_limit, predict)
        _check_measured(costs.measured, *(part.found for part in step.parts))
        return step.explained(subject.flop, sizes)

    def _schedule(
        self, program: Program, profile: Profile, measured: Mapping[str, float], show: Callable[[str], None]
    ) -> dict[str, tuple[Work, ...]]:
        """Kernels of the regions that Inductor compiles for a GPU; with formulas by rules, as those take symbols."""
        if device_given(self.device).type == "cpu" or self.options.backend == "eager" or self.symbols:
            return {}
        regions = {key: region for key, region in program.regions.items() if key not in measured}
        return schedule_regions(regions, profile, self._kernels, show)

    @collector_paused()
    def capture(self, shape: MeshLike) -> None:
        """Capture the model for a mesh, unless it was; of equal blocks a few.

        Raises:
            BlocksDifferError, GraphshardError: it cannot be; `explain` may yet, with every block, or says why not.
        """
        place = place_of(without_pipeline(shape)[0], self.parallelize)
        device = device_given(self.device)
        with standing_in(device), at_place(self.model, self.options, place, self.parallelize, device) as (model, spec):
            subject = self._subject(place, model)
            if subject.repeats is not None:
                check_alike(spec, subject.repeats)
            subject.capture(model, spec)

    def forget(self, shape: MeshLike) -> None:
        """Let go of the programs of a mesh, which are made again if they are asked for."""
        place = place_of(without_pipeline(shape)[0], self.parallelize)
        self._before_plan = {key: kept for key, kept in self._before_plan.items() if key[0] != place}
        self._of_stages = {key: kept for key, kept in self._of_stages.items() if key[0] != place}
        self._scheduled = {key: kept for key, kept in self._scheduled.items() if key[0] != place}


def _check_measured(measured: Mapping[str, float], *found: Explanation) -> None:
    """Raise ArgumentError for a region that no program has."""
    unknown = sorted(set(measured).difference(*(each._program.regions for each in found)))
    if unknown:
        raise ArgumentError(
            f"measured has {brief(unknown[0])}, which is no region of this program. Measure with the same model, "
            "inputs, mesh and settings."
        )


def _is_symbol(item: tuple[Any, Any]) -> bool:
    name, dim = item
    return isinstance(name, str) and name.isidentifier() and is_int(dim) and 0 <= dim < _MOST_DIMS


# Options that a capture depends on, and those that programs do besides, before and after the plan.
_CAPTURED = ("units", "mp_policy", "ignored_params", "shard_placement_fn", "dynamic_shapes", "verify")
_SHAPING = ("reshard_after_forward", "offload_policy", "activation", "passes")


def changed(study: Study, options: Options, training: Training, label: str = "") -> Study:
    """A study of the same model and inputs with other options, which does not repeat what they leave as it is."""
    other = replace(study, options=options, training=training, label=label)
    other._kernels = study._kernels
    before = study.options
    if _equal(before, options, _CAPTURED) and is_local(before) == is_local(options):
        other._subjects = study._subjects
        alike = options.activation != "auto" or (
            before.memory_limit == options.memory_limit and study.training == training
        )
        if alike and _equal(before, options, _SHAPING):
            other._before_plan, other._scheduled = study._before_plan, study._scheduled
            other._of_stages = study._of_stages
            other._known = study._known
    return other


def _equal(one: Options, other: Options, names: tuple[str, ...]) -> bool:
    return all(is_same(getattr(one, name), getattr(other, name)) for name in names)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of an argument are equal; tensors are the very same, as parameters to ignore."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
