"""A model under study: captured once, scheduled once per mesh, predicted for any machine.

    capture (once per settings) -> passes (once per mesh) -> plan (per machine) -> regions (once per plan) -> timeline

The graph is captured for the CPU, because autograd of fake CUDA tensors needs CUDA; the planner and the costs see the
profile's kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphshard.capture.capture import CaptureSpec, capture
from graphshard.capture.inputs import count_tokens, moved_to, stand_in
from graphshard.cost.costs import Costs
from graphshard.cost.multiplications import flop_of
from graphshard.cost.profile import Profile
from graphshard.explain.explanation import Explanation
from graphshard.explain.formulas import formulas_of
from graphshard.explain.predict import bound_of, explained
from graphshard.explain.symbols import Inputs, spread_ranks, symbolize
from graphshard.ir.errors import ArgumentError
from graphshard.ir.given import check_count, check_function, check_seconds, is_int
from graphshard.ir.mesh import Mesh, MeshLike
from graphshard.ir.precision import precision_of
from graphshard.ir.program import Program
from graphshard.ir.text import brief
from graphshard.ir.units import find_units
from graphshard.lower.backends import compiler_for
from graphshard.lower.regions import lower
from graphshard.options.checks import check_examples, check_model
from graphshard.options.options import Options
from graphshard.options.passes import pipeline_of
from graphshard.options.table import capture_spec
from graphshard.passes import MakePlan, Pass
from graphshard.pipeline.observe import Observer
from graphshard.pipeline.pipeline import run_pass
from graphshard.pipeline.verify import verify

# No optimizer keeps more tensors like a parameter, and no tensor has more dims.
_MOST_STATES, _MOST_DIMS = 1000, 64


@dataclass
class Study:
    """A model, its inputs and one setting; what has been captured and scheduled is kept.

    Attributes:
        options: of `explain`, without machine and measurements.
        optimizer_states: tensors like a parameter that the optimizer keeps.
        symbols: dims of the inputs by the names that they have in formulas.
        label: name of the setting in tables.
        show: told what is being done.
    """

    model: nn.Module
    example_inputs: Sequence[Any] | None
    example_kwargs: Mapping[str, Any] | None
    options: Options = field(default_factory=Options)
    optimizer_states: int = 2
    symbols: Mapping[str, int] | None = None
    label: str = ""
    show: Callable[[str], None] = lambda _: None
    _captured: Program | None = field(default=None, init=False)
    _flop: dict[str, float] = field(default_factory=dict, init=False)
    _at: dict[str, int] = field(default_factory=dict, init=False)
    _before_plan: dict[tuple[Mesh, str], Program] = field(default_factory=dict, init=False)
    _scheduled: dict[tuple[Mesh, str, str], Program] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_model(self.model)
        check_examples(self.model, self.example_inputs, self.example_kwargs)
        precision_of(self.options.mp_policy, find_units(self.model, self.options.units))
        if self.example_inputs is None and self.example_kwargs is None:
            raise ArgumentError("explain needs example_inputs or example_kwargs, the inputs of one rank's call.")
        symbols, states = self.symbols, self.optimizer_states
        if symbols is not None and not (isinstance(symbols, Mapping) and all(map(_is_symbol, symbols.items()))):
            raise ArgumentError(
                f'symbols must name dims of the inputs such as {{"batch": 0, "seq": 1}}, got {brief(symbols)}.'
            )
        check_count("optimizer_states", states, least=0, most=_MOST_STATES, what="number of tensors such as 2 for Adam")
        if not callable(self.show):
            check_function("show", self.show, "print")

    def explain(
        self, shape: MeshLike, profile: Profile, network: str, *, measured: Mapping[str, float] = MappingProxyType({})
    ) -> Explanation:
        """Predict a step on one mesh and machine."""
        if not isinstance(network, str) or network not in profile.outside:
            known = ", ".join(map(repr, profile.outside))
            raise ArgumentError(f"network must be one of {known} for {profile.name}, got {brief(network)}.")
        check_seconds("measured", measured)
        mesh = Mesh.of_shape(shape)
        planning = Costs(profile, network, mesh)
        program = self._program(mesh, planning)
        unknown = sorted(set(measured) - set(program.regions))
        if unknown:
            raise ArgumentError(
                f"measured has {brief(unknown[0])}, which is no region of this program. Measure with the same model, "
                "inputs, mesh and settings."
            )
        show = self._showing(mesh, profile.name)
        show("predict")
        # Plans are the same for all backends, so that the program is.
        costs = replace(planning, measured=dict(measured), fused=self.options.backend != "eager")
        bound = bound_of(
            self._prepared(mesh, planning),
            replace(costs, measured={}),
            program.plan,
            limit=self.options.memory_limit,
            states=self.optimizer_states,
        )
        tokens = count_tokens(pytree.tree_leaves((self.example_inputs, self.example_kwargs)))
        found = explained(
            program,
            costs,
            self._flop,
            bound,
            tokens=tokens,
            states=self.optimizer_states,
            label=self.label,
        )
        if self.symbols:
            show("formulas")
            found = replace(found, formulas=formulas_of(program, costs, self._at, states=self.optimizer_states))
        return found

    def _program(self, mesh: Mesh, costs: Costs) -> Program:
        """The lowered program; its history is without text."""
        planned = _copy(self._prepared(mesh, costs))
        passes, level = self._passes(planned, costs), self.options.verify or "off"
        begin = next((i for i, step in enumerate(passes) if isinstance(step, MakePlan)), len(passes))
        for step in passes[begin : begin + 1]:
            run_pass(step, planned, Observer(level, show=self._showing(mesh, costs.profile.name)))
        # Machines that are given the same schedule share what follows.
        schedule = replace(planned.plan, prediction=None).hash if planned.plan else ""
        key = mesh, costs.profile.device, schedule
        if key not in self._scheduled:
            observer = Observer(level, show=self._showing(mesh))
            for step in passes[begin + 1 :]:
                run_pass(step, planned, observer)
            if level != "off":
                verify(planned, "the last pass", complete=True)
            if self.symbols:
                spread_ranks(planned)
            observer.show("lower")
            lower(planned, compiler_for("eager"), {})
            self._scheduled[key] = planned
        return replace(self._scheduled[key], plan=planned.plan)

    def _showing(self, mesh: Mesh | None = None, machine: str = "") -> Callable[[str], None]:
        """What is told of a phase, and which program of the study it is about."""
        ranks = f"{mesh.size} ranks" if mesh else ""
        about = ", ".join(filter(None, (self.label, ranks, machine)))
        return lambda phase: self.show(f"{about}: {phase}" if about else phase)

    def _passes(self, program: Program, costs: Costs) -> tuple[Pass, ...]:
        """Those that `compile` would run on such a machine."""
        return pipeline_of(self.options, program.mesh, costs, optimizer_states=self.optimizer_states).passes

    def _prepared(self, mesh: Mesh, costs: Costs) -> Program:
        """The program as the planner gets it."""
        key = mesh, costs.profile.device
        if key not in self._before_plan:
            spec = capture_spec(self.model, self.options, mesh, torch.device("cpu"))
            captured = self._capture(spec)
            program = replace(
                _copy(captured), params=spec.params, mesh=spec.mesh, device=torch.device(costs.profile.device)
            )
            observer = Observer(self.options.verify or "off", show=self._showing(mesh))
            for step in self._passes(program, costs):
                if isinstance(step, MakePlan):
                    break
                run_pass(step, program, observer)
            self._before_plan[key] = program
        return self._before_plan[key]

    def _capture(self, spec: CaptureSpec) -> Program:
        """The program of the first mesh; the graph is the same on all."""
        if self._captured is None:
            show = self._showing()
            show("capture")
            given = tuple(self.example_inputs or ()), dict(self.example_kwargs or {})
            leaves, structure = pytree.tree_flatten(pytree.tree_map_only(torch.Tensor, stand_in, given))
            inputs = pytree.tree_unflatten(moved_to(torch.device("cpu"), leaves, structure), structure)

            def trace(inputs: Inputs) -> Program:
                return capture(self.model, *inputs, spec, grad=True)

            self._captured = trace(inputs)
            if self.options.verify in ("ends", "each"):
                verify(self._captured, "capture")
            if self.symbols:
                show("capture at other sizes")
                self._at = symbolize(self._captured, inputs, self.symbols, trace)
            (phase,) = self._captured.phases.values()
            self._flop = flop_of(phase.module.graph.nodes)
        return self._captured


def _is_symbol(item: tuple[Any, Any]) -> bool:
    name, dim = item
    return isinstance(name, str) and name.isidentifier() and is_int(dim) and 0 <= dim < _MOST_DIMS


def _copy(program: Program) -> Program:
    """A copy that passes can rewrite."""
    phases = {name: phase.clone() for name, phase in program.phases.items()}
    return replace(program, phases=phases, history=list(program.history), established=set(program.established))
