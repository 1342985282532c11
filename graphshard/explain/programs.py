"""The programs of a model under one setting, on any mesh: captured once, planned and lowered for each.

    capture (once per settings) -> passes (once per mesh) -> plan (per machine) -> regions (once per plan)

A model that communicates along axes of the mesh itself is another one on each, and is captured on each (`subject.py`).

Without `device="cuda"` the graph is captured for the CPU, which takes no package for GPUs. The planner and the costs
see the profile's kind of device.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphshard.cost.costs import Costs
from graphshard.errors import GraphshardError
from graphshard.explain.cut import lists_of
from graphshard.explain.subject import Place, Subject, at_place, device_given, with_found
from graphshard.explain.symbols import spread_ranks
from graphshard.explain.training import Training
from graphshard.frontend.signature import CaptureSpec, check_alike
from graphshard.ir.alike import few_of
from graphshard.ir.mesh import Mesh
from graphshard.ir.printer import number
from graphshard.ir.program import Program
from graphshard.ir.repeats import Few, Uneven, captured_rows
from graphshard.ir.stamp import all_blocks, stamp
from graphshard.lower.backends import compiler_for
from graphshard.lower.regions import lower, outline
from graphshard.options.options import Options
from graphshard.options.resolve import pipeline_of
from graphshard.options.simulated_mesh import Parallelize
from graphshard.passes import MakePlan, OverlapModelCollectives, Pass
from graphshard.pipeline.few import stamped
from graphshard.pipeline.observe import Observer
from graphshard.pipeline.pipeline import decided, run_pass
from graphshard.pipeline.verify import verify
from graphshard.repeats.find_repeats import find_repeats
from graphshard.schedule.build import Settings, build
from graphshard.schedule.few import folded_plan
from graphshard.schedule.known import Known, while_unchanged, within_one_plan

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
            except (Uneven, GraphshardError) as error:
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
        program, params = _copy(captured), rows if repeats is None else captured_rows(rows, repeats)
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
                    return self._few(program, few_of(program, repeats, rows), before_plan[len(of_blocks) :], costs)
                except Uneven as error:
                    log.info("planned for every block: %s", error)
            observer.show("stamp")
            program = stamp(program, repeats, rows)
            if level != "off":
                verify(program, "the copies of equal blocks")
        for step in before_plan[len(of_blocks) :]:
            run_pass(step, program, observer)
        return program

    def _few(self, partitioned: Program, few: Few, passes: Sequence[Pass], costs: Costs) -> Program:
        """A copy of a program of few blocks, behind these passes.

        Raises:
            Uneven: the schedule of all blocks cannot be told of it.
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
        except Uneven as error:
            log.info("passes are of every block: %s", error)
            return self._finished(replace(all_blocks(planned), plan=planned.plan), passes, observer)

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
