"""A model under one setting: captured once, planned and lowered for each mesh, and predicted on any machine.

    capture (once per settings) -> passes (once per mesh) -> plan (per machine) -> regions (once per plan) -> prediction

A model that communicates along axes of the mesh itself is captured on each mesh (`_capture_target.py`). Without
`device="cuda"` the graph is captured for the CPU; the planner and the costs see the profile's kind of device.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from graphshard.frontend.signature import CaptureSpec
from graphshard.ir.gpus import USUAL, Capability, capability_of
from graphshard.ir.graph import is_alias, is_part
from graphshard.ir.instantiate_blocks import instantiate_all_blocks, instantiate_blocks, match_blocks
from graphshard.ir.mesh import Axis, Mesh, MeshLike
from graphshard.ir.program import Planner, Program, Region
from graphshard.ir.repeats import BlocksDifferError, captured_params
from graphshard.ir.units import find_units, precision_of
from graphshard.lower.backends import compiler_for
from graphshard.lower.regions import lower
from graphshard.options.options import Options
from graphshard.options.resolve import example_of, pipeline_of, resolve_model
from graphshard.options.simulated_mesh import Parallelize
from graphshard.options.validate import check_examples, check_model
from graphshard.passes import MakePlan, OverlapModelCollectives, Pass
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.memory_policy import decide
from graphshard.pipeline.pipeline import finish_template, run_pass, run_quietly
from graphshard.pipeline.rules import verify
from graphshard.predict._capture_target import (
    CaptureTarget,
    Place,
    at_place,
    device_given,
    place_of,
    sizes_of,
    standing_in,
    with_splits,
    without_pipeline,
)
from graphshard.predict._pipeline_schedule import PipelineStep, RankOrder
from graphshard.predict._pipeline_stages import blocks_of, lists_of
from graphshard.predict._symbolic_cost import formulas_of, spread_ranks
from graphshard.predict.explanation import Explanation
from graphshard.predict.step_prediction import bound_of, count_tokens, explained
from graphshard.predict.training_config import Training
from graphshard.repeats.find_repeats import find_repeats
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.graph_facts import Known, while_unchanged
from graphshard.schedule.timeline import Estimate, estimate
from graphshard.utils.argument_validation import check_bool, check_function, check_seconds, is_int
from graphshard.utils.progress import collector_paused
from graphshard.utils.text import brief

if TYPE_CHECKING:
    from graphshard.cross.compile_for_gpus import FusedKernel

log = logging.getLogger(__name__)

# A report has programs between passes up to this many operators. Printing more takes longer than the passes.
_MOST_PRINTED = 10_000
# No tensor has more dims.
_MOST_DIMS = 64
# Options that a capture depends on, and further ones that programs depend on before and after the plan.
_CAPTURE_OPTIONS = ("units", "mp_policy", "ignored_params", "shard_placement_fn", "dynamic_shapes", "verify")
_PROGRAM_OPTIONS = ("reshard_after_forward", "offload_policy", "activation", "passes", "reduce")

# Kernels by region and GPU; None where Inductor makes no kernels of it.
Kernels = dict[tuple[str, Capability], tuple[Work, ...] | None]


@dataclass
class Study:
    """A model, its inputs and one setting, labeled in tables; captures and programs are kept."""

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
    _targets: dict[Place | None, CaptureTarget] = field(default_factory=dict, init=False)
    _known: Known = field(default_factory=Known, init=False)
    _before_plan: dict[tuple[Place, str], Program] = field(default_factory=dict, init=False)
    _of_stages: dict[tuple[Place, str], Program] = field(default_factory=dict, init=False)
    _scheduled: dict[tuple[Hashable, str, str], Program] = field(default_factory=dict, init=False)
    _kernels: Kernels = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.model, self.options = resolve_model(self.model, self.options)
        if self.example_inputs is None and self.example_kwargs is None:
            self.example_inputs, self.example_kwargs = example_of(self.model)
        check_model(self.model)
        check_examples(self.model, self.example_inputs, self.example_kwargs)
        precision_of(self.options.mp_policy, find_units(self.model, self.options.units))
        if self.example_inputs is None and self.example_kwargs is None:
            raise ArgumentError("explain needs example_inputs or example_kwargs, the inputs of one rank's call.")
        symbols = {} if self.symbols is None else self.symbols
        if not isinstance(symbols, Mapping) or not all(itertools.starmap(_is_symbol, symbols.items())):
            raise ArgumentError(
                f'symbols must name dims of the inputs such as {{"batch": 0, "seq": 1}}, got {brief(symbols)}.'
            )
        check_function("show", self.show, "print")
        check_bool("every_block", self.every_block)
        device_given(self.device)
        if self.parallelize is not None:
            check_function("parallelize", self.parallelize, "a function of (model, mesh)")

    def changed(self, options: Options, training: Training, label: str = "") -> Study:
        """Return a study of the same model and inputs with other options; it shares what they leave as it is."""
        other = replace(self, options=options, training=training, label=label)
        other._kernels = self._kernels
        before = self.options
        if _equal(before, options, _CAPTURE_OPTIONS) and before.is_local == options.is_local:
            other._targets = self._targets
            same_budget = before.memory_limit == options.memory_limit and self.training == training
            if _equal(before, options, _PROGRAM_OPTIONS) and (options.activation != "auto" or same_budget):
                other._before_plan, other._scheduled = self._before_plan, self._scheduled
                other._of_stages, other._known = self._of_stages, self._known
        return other

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

    @collector_paused()
    def capture(self, shape: MeshLike) -> None:
        """Capture the model for a mesh, unless it was; `explain` may succeed where this fails, or says why not."""
        place, device = place_of(without_pipeline(shape)[0], self.parallelize), device_given(self.device)
        with standing_in(device), at_place(self.model, self.options, place, self.parallelize, device) as (model, spec):
            self._target(place, model).capture(model, spec)

    def forget(self, shape: MeshLike) -> None:
        """Free the programs of a mesh; they are made again when needed."""
        place = place_of(without_pipeline(shape)[0], self.parallelize)
        stores: tuple[dict[Any, Program], ...] = (self._before_plan, self._of_stages, self._scheduled)
        for kept in stores:
            for key in [key for key in kept if key[0] == place]:
                del kept[key]

    def _explain(self, shape: MeshLike, profile: Profile, network: str, measured: Mapping[str, float]) -> Explanation:
        of_stage, axis = without_pipeline(shape)
        place = place_of(of_stage, self.parallelize)
        sizes = {**({axis.name: axis.size} if axis else {}), **sizes_of(place)}
        microbatches = self.training.num_microbatches(sizes, (self.example_inputs, self.example_kwargs))
        if axis is not None and axis.size > 1:
            return self._in_stages(place, axis, sizes, microbatches, Costs(profile, network, measured=dict(measured)))
        if self.symbols and microbatches > 1:
            raise ArgumentError(
                "symbols: formulas are of one microbatch. Leave symbols, or accumulate and global_batch, out."
            )
        before_plan = self._prepared(place, Costs(profile, network))
        costs = Costs(profile, network, before_plan.mesh, dict(measured))
        target = self._targets[_key(place)]
        named = None if axis is None and isinstance(place, Mesh) else sizes
        found = self._predicted(place, before_plan, costs, flop=target.flop, mesh=named, microbatches=microbatches)
        _check_measured(measured, found)
        if self.symbols:
            self._showing(found._program.mesh, profile.name)("formulas")
            formulas = formulas_of(found._program, found._costs, target.at, training=self.training)
            found = replace(found, formulas=formulas)
        return found

    def _predicted(
        self,
        key: Hashable,
        before_plan: Program,
        costs: Costs,
        *,
        flop: Mapping[str, float],
        mesh: dict[str, int] | None = None,
        microbatches: int = 1,
    ) -> Explanation:
        """Predict a program; the key identifies it before its plan, and `flop` is of the model, by dtype."""
        planning = replace(costs, measured={})
        program = self._lowered(key, before_plan, planning)
        show = self._showing(program.mesh, costs.profile.name)
        costs = self._fused_costs(program, costs, show)
        show("predict")
        limit, states = self.options.memory_limit, self.training.optimizer_states
        with while_unchanged(self._known):
            bound = bound_of(before_plan, planning, program.plan, limit=limit, states=states)
        return explained(
            program,
            costs,
            flop,
            bound,
            tokens=count_tokens(self.example_inputs, self.example_kwargs),
            training=self.training,
            label=self.label,
            mesh=mesh,
            microbatches=microbatches,
            fsdp2=lambda: self._in_fsdp2_order(key, before_plan, costs),
        )

    def _fused_costs(self, program: Program, costs: Costs, show: Callable[[str], None]) -> Costs:
        """Return the costs of the backend's kernels. Plans, and so programs, are the same for all backends."""
        kernels: dict[str, tuple[Work, ...]] = {}
        # Formulas need rules, which take symbols.
        if device_given(self.device).type != "cpu" and self.options.backend != "eager" and not self.symbols:
            regions = {key: region for key, region in program.regions.items() if key not in costs.measured}
            kernels = schedule_regions(regions, costs.profile, self._kernels, show)
        return replace(costs, scheduled=kernels, fused=self.options.backend != "eager")

    def _in_fsdp2_order(self, key: Hashable, before_plan: Program, costs: Costs) -> Estimate | None:
        """Return the step of the same program in FSDP2's order; None if it cannot be planned so."""
        quiet = copy.copy(self)  # shares what is known
        quiet.show = lambda _: None
        with standing_in(device_given(self.device)):
            try:
                program = quiet._lowered(key, before_plan, replace(costs, measured={}, scheduled={}), PlanByUnit())
            except GraphshardError as error:
                log.info("FSDP2's order: %s", error)
                return None
            return estimate(program, self._fused_costs(program, costs, lambda _: None))

    def _in_stages(
        self, place: Place, axis: Axis, sizes: dict[str, int], microbatches: int, costs: Costs
    ) -> Explanation:
        """Predict a step of a pipeline on a mesh of such sizes, with an axis of stages."""
        order = RankOrder(axis, self.training, microbatches)
        order.check(self.options, self.symbols)
        study = replace(self, options=replace(self.options, reshard_after_forward=False))
        study._targets, study._before_plan = self._targets, self._of_stages
        whole = study._prepared(place, costs)
        whole = whole if whole.few is None else instantiate_all_blocks(whole)
        target = self._targets[_key(place)]
        blocks = blocks_of(target.lists, target.repeats, whole.model)
        flop = {dtype: total / order.num_stages for dtype, total in target.flop.items()}

        def predict(stage: Hashable, program: Program, limit: int | None) -> Explanation:
            at = replace(study, options=replace(study.options, memory_limit=limit))
            at._scheduled, at._known, at._kernels = study._scheduled, study._known, self._kernels
            on_mesh = replace(costs, mesh=program.mesh)
            return at._predicted((place, stage, limit), program, on_mesh, flop=flop, mesh=sizes)

        step = PipelineStep.of(whole, blocks, order, costs, self.options.memory_limit, predict)
        _check_measured(costs.measured, *(part.found for part in step.parts))
        return step.explained(target.flop, sizes)

    def _target(self, place: Place, model: nn.Module) -> CaptureTarget:
        key = _key(place)
        if key not in self._targets:
            self._targets[key] = CaptureTarget(
                inputs=(tuple(self.example_inputs or ()), dict(self.example_kwargs or {})),
                repeats=None if self.every_block or not self.options.is_local else find_repeats(model),
                symbols=self.symbols or {},
                level=self.options.verify or "off",
                show=self._showing(),
                lists=lists_of(model),
            )
        return self._targets[key]

    def _prepared(self, place: Place, costs: Costs) -> Program:
        """Return the program that the planner gets."""
        key = place, self._machine(costs)
        if key not in self._before_plan:
            device = device_given(self.device)
            with at_place(self.model, self.options, place, self.parallelize, device) as (model, spec):
                target = self._target(place, model)
                try:
                    self._before_plan[key] = self._prepare(model, spec, target, costs)
                except (BlocksDifferError, GraphshardError) as error:
                    if target.repeats is None:
                        raise
                    log.info("%s: every block is captured: %s", type(self.model).__name__, error)
                    target.repeats, target.program = None, None
                    self._before_plan[key] = self._prepare(model, spec, target, costs)
        return self._before_plan[key]

    def _prepare(self, model: nn.Module, spec: CaptureSpec, target: CaptureTarget, costs: Costs) -> Program:
        """Capture, and run the passes before the plan."""
        captured = target.capture(model, spec)
        rows, mesh, few = spec.params, spec.mesh, captured.few
        if spec.groups:  # the capture found the communication along the model's axes
            rows, mesh = with_splits(rows, captured), captured.mesh
        program = replace(captured.clone(), params=rows, mesh=mesh, device=torch.device(costs.profile.device))
        if few is not None:
            program.params, program.few = captured_params(rows, few.repeats), replace(few, params=rows)
        observer = self._observer(spec.mesh)
        passes = self._passes(program, Costs(costs.profile, costs.network, program.mesh))
        if self.options.activation == "auto":
            observer.show("decide what is saved")
            passes = decide(passes, program, run_quietly)
        before_plan = list(itertools.takewhile(lambda step: not isinstance(step, MakePlan), passes))
        # Overlapping moves compute from one block into the next, so it needs the whole program.
        of_blocks = list(itertools.takewhile(lambda step: not isinstance(step, OverlapModelCollectives), before_plan))
        rest = before_plan[len(of_blocks) :]
        for step in of_blocks:
            run_pass(step, program, observer)
        if program.few is not None and (self.symbols or spec.groups):  # the model's communication moves among blocks
            observer.show("stamp")
            program = instantiate_blocks(program)
            if observer.level != "off":
                verify(program, "the copies of equal blocks")
        elif program.few is not None:
            match_blocks(program)
        for step in rest:
            run_pass(step, program, observer)
        return program

    def _lowered(self, key: Hashable, before_plan: Program, costs: Costs, planner: Planner | None = None) -> Program:
        """Plan and lower a program; machines with the same schedule share the lowered one."""
        planned, mesh = replace(before_plan, plan=None), before_plan.mesh
        planned.history = list(planned.history)
        passes = self._passes(planned, costs)
        begin = next((i for i, step in enumerate(passes) if isinstance(step, MakePlan)), len(passes))
        if begin < len(passes):
            with while_unchanged(self._known):  # a plan does not change the graphs
                plan = passes[begin] if planner is None else MakePlan(planner)
                run_pass(plan, planned, self._observer(mesh, costs.profile.name))
        schedule = replace(planned.plan, prediction=None).hash if planned.plan else ""
        kept = key, self._machine(costs), schedule
        if kept not in self._scheduled:
            lowered = finish_template(planned, passes[begin + 1 :], self._observer(mesh))
            if self.symbols:
                spread_ranks(lowered)
            self._showing(mesh)("lower")
            lower(lowered, compiler_for("eager"), {})
            self._scheduled[kept] = lowered
        return replace(self._scheduled[kept], plan=planned.plan)

    def _showing(self, mesh: Mesh | None = None, machine: str = "") -> Callable[[str], None]:
        """Return a function that reports a phase, and the program of the study that it is about."""
        ranks = f"{mesh.size} ranks" if mesh else ""
        about = ", ".join(filter(None, (self.label, ranks, machine)))
        return lambda phase: self.show(f"{about}: {phase}" if about else phase)

    def _observer(self, mesh: Mesh, machine: str = "") -> Observer:
        return Observer(
            self.options.verify or "off", show=self._showing(mesh, machine), most=_MOST_PRINTED, summary=False
        )

    def _passes(self, program: Program, costs: Costs) -> tuple[Pass, ...]:
        return pipeline_of(self.options, program.mesh, costs, optimizer_states=self.training.optimizer_states).passes

    def _machine(self, costs: Costs) -> str:
        """Return the part of a machine that programs depend on."""
        device = costs.profile.device
        by_budget = self.options.activation == "auto"  # decides what is saved
        return f"{device} {costs.profile.hash} {costs.network}" if by_budget else device


def _key(place: Place) -> Place | None:
    """Return the key of a capture: all meshes of data axes share one."""
    return None if isinstance(place, Mesh) else place


def _equal(one: Options, other: Options, names: tuple[str, ...]) -> bool:
    return all(is_same(getattr(one, name), getattr(other, name)) for name in names)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of an argument are equal; tensors are compared by identity, as ignored parameters."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def _is_symbol(name: Any, dim: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and is_int(dim) and 0 <= dim < _MOST_DIMS


def _check_measured(measured: Mapping[str, float], *found: Explanation) -> None:
    unknown = sorted(set(measured).difference(*(each._program.regions for each in found)))
    if unknown:
        raise ArgumentError(
            f"measured has {brief(unknown[0])}, which is no region of this program. Measure with the same model, "
            "inputs, mesh and settings."
        )


def schedule_regions(
    regions: Mapping[str, Region], profile: Profile, known: Kernels, show: Callable[[str], None]
) -> dict[str, tuple[Work, ...]]:
    """Return the kernels that Inductor's scheduler makes for a GPU, by region key; `known` ones are not made again.

    The profile's number of multiprocessors identifies the GPU; a common one is taken if no GPU has this number.
    """
    capability = capability_of(int(profile.units)) or USUAL
    new = [region for key, region in regions.items() if (key, capability) not in known]
    if new:
        from graphshard.cross import compile_for_gpus

        for count, region in enumerate(new, start=1):
            show(f"schedule kernels, {count} of {len(new)}")
            kernels = compile_for_gpus.fused_kernels(region, capability)
            known[region.key, capability] = None if kernels is None else tuple(map(_work, kernels))
    return {key: works for key in regions if (works := known[key, capability]) is not None}


def _work(kernel: FusedKernel) -> Work:
    """Return the work of a library's product or attention by rules, of generated code by bytes and operations."""
    products = [node for node in kernel.operators if is_multiplication(node)] if kernel.extern else []
    if products:
        return work_of(products[:1], fused=False)[0]
    computing = [node for node in kernel.operators if not (is_alias(node) or is_part(node))]
    return Work("pointwise", 0, operations_of(computing), kernel.num_bytes, "float32")
