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
from graphshard.capture.inputs import count_tokens
from graphshard.cost.costs import Costs
from graphshard.cost.multiplications import flop_of
from graphshard.cost.profile import Profile
from graphshard.explain.explanation import Explanation
from graphshard.explain.formulas import formulas_of
from graphshard.explain.predict import bound_of, explained
from graphshard.explain.symbols import Inputs, spread_ranks, symbolize
from graphshard.ir.errors import ArgumentError
from graphshard.ir.mesh import Mesh, MeshLike
from graphshard.ir.precision import precision_of
from graphshard.ir.program import Program
from graphshard.ir.units import find_units
from graphshard.lower.backends import compiler_for
from graphshard.lower.regions import lower
from graphshard.options.checks import (
    check_examples,
    check_memory_limit,
    check_model,
)
from graphshard.options.passes import with_planner
from graphshard.options.table import checked_table
from graphshard.passes import MakePlan
from graphshard.pipeline.observe import Observer
from graphshard.pipeline.pipeline import Pipeline, run_pass


@dataclass
class Study:
    """A model, its inputs and one setting; what has been captured and scheduled is kept.

    Attributes:
        options: of `explain`, without mesh, machine and measurements.
        label: name of the setting in tables.
        show: told what is being done.
    """

    model: nn.Module
    example_inputs: Sequence[Any] | None
    example_kwargs: Mapping[str, Any] | None
    options: Mapping[str, Any]
    label: str = ""
    show: Callable[[str], None] = lambda _: None
    _captured: Program | None = field(default=None, init=False)
    _flop: dict[str, float] = field(default_factory=dict, init=False)
    _at: dict[str, int] = field(default_factory=dict, init=False)
    _before_plan: dict[tuple[Mesh, str], Program] = field(default_factory=dict, init=False)
    _scheduled: dict[tuple[Mesh, str, str], Program] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_model(self.model)
        reshard = self.options.get("reshard_after_forward")
        if not (reshard is None or isinstance(reshard, bool)):
            raise ArgumentError(f"reshard_after_forward must be True, False or None, got {reshard!r}.")
        check_examples(self.options.get("units"), self.example_inputs, self.example_kwargs)
        precision_of(self.options.get("mp_policy"), find_units(self.model, self.options.get("units")))
        if self.example_inputs is None and self.example_kwargs is None:
            raise ArgumentError("explain needs example_inputs or example_kwargs, the inputs of one rank's call.")
        symbols = self.options.get("symbols")
        if symbols and not (
            isinstance(symbols, Mapping) and all(isinstance(d, int) and d >= 0 for d in symbols.values())
        ):
            raise ArgumentError(
                f'symbols must name dims of the inputs such as {{"batch": 0, "seq": 1}}, got {symbols!r}.'
            )
        passes, states = self.options.get("passes"), self.states
        if not (passes is None or isinstance(passes, Pipeline)):
            raise ArgumentError(f"passes must be a graphshard.Pipeline, got {type(passes).__name__}.")
        check_memory_limit(self.options.get("memory_limit"))
        if not isinstance(states, int) or states < 0:
            raise ArgumentError(f"optimizer_states must be a number of tensors such as 2 for Adam, got {states!r}.")

    @property
    def states(self) -> int:
        """Tensors that the optimizer keeps for each parameter."""
        return self.options.get("optimizer_states", 2)

    def explain(
        self, shape: MeshLike, profile: Profile, network: str, *, measured: Mapping[str, float] = MappingProxyType({})
    ) -> Explanation:
        """Predict a step on one mesh and machine."""
        if network not in profile.outside:
            raise ArgumentError(
                f"network must be one of {', '.join(map(repr, profile.outside))} for {profile.name}, got {network!r}."
            )
        mesh = Mesh.of_shape(shape)
        planning = Costs(profile, network, mesh)
        program = self._program(mesh, planning)
        unknown = sorted(set(measured) - set(program.regions))
        if unknown:
            raise ArgumentError(
                f"measured has {unknown[0]!r}, which is no region of this program. Measure with the same model, "
                "inputs, mesh and settings."
            )
        costs = Costs(profile, network, mesh, dict(measured))
        limit = self.options.get("memory_limit")
        bound = bound_of(self._prepared(mesh, profile.device), planning, program.plan, limit=limit, states=self.states)
        tokens = count_tokens(pytree.tree_leaves((self.example_inputs, self.example_kwargs)))
        found = explained(
            program,
            costs,
            self._flop,
            bound,
            tokens=tokens,
            states=self.states,
            label=self.label,
        )
        if self.options.get("symbols"):
            found = replace(found, formulas=formulas_of(program, costs, self._at, states=self.states))
        return found

    def _program(self, mesh: Mesh, costs: Costs) -> Program:
        """The lowered program; its history is without text."""
        planned = _copy(self._prepared(mesh, costs.profile.device))
        passes = self._pipeline(costs).passes
        begin = next((i for i, step in enumerate(passes) if isinstance(step, MakePlan)), len(passes))
        for step in passes[begin : begin + 1]:
            run_pass(step, planned, Observer("off"))
        # Machines that are given the same schedule share what follows.
        schedule = replace(planned.plan, prediction=None).hash if planned.plan else ""
        key = mesh, costs.profile.device, schedule
        if key not in self._scheduled:
            self.show(f"schedule for {mesh.size} ranks")
            for step in passes[begin + 1 :]:
                run_pass(step, planned, Observer("off"))
            if self.options.get("symbols"):
                spread_ranks(planned)
            lower(planned, compiler_for("eager"), {})
            self._scheduled[key] = planned
        return replace(self._scheduled[key], plan=planned.plan)

    def _pipeline(self, costs: Costs) -> Pipeline:
        """The passes that `compile` would run on such a machine."""
        return with_planner(
            self.options.get("passes") or Pipeline(),
            costs,
            memory_limit=self.options.get("memory_limit"),
            units_given=self.options.get("units") is not None,
            optimizer_states=self.states,
        )

    def _prepared(self, mesh: Mesh, device: str) -> Program:
        """The program as the planner gets it."""
        key = mesh, device
        if key not in self._before_plan:
            captured = self._capture(mesh)
            self.show(f"passes for {mesh.size} ranks")
            program = replace(
                _copy(captured),
                params=captured.params.over(mesh),
                mesh=mesh,
                device=torch.device(device),
            )
            for step in self.options.get("passes") or Pipeline():
                if isinstance(step, MakePlan):
                    break
                run_pass(step, program, Observer("off"))
            self._before_plan[key] = program
        return self._before_plan[key]

    def _capture(self, mesh: Mesh) -> Program:
        if self._captured is None:
            self.show("capture")
            given = tuple(self.example_inputs or ()), dict(self.example_kwargs or {})
            inputs = pytree.tree_map_only(torch.Tensor, _on_cpu, given)
            units = find_units(self.model, self.options.get("units"))
            options = {
                name: self.options.get(name)
                for name in ("reshard_after_forward", "shard_placement_fn", "ignored_params")
            }
            precision = precision_of(self.options.get("mp_policy"), units)
            table = checked_table(self.model, units, device_type="cpu", mesh=mesh, precision=precision, **options)
            spec = CaptureSpec(table, units, mesh, torch.device("cpu"), precision, type(self.model))

            def trace(inputs: Inputs) -> Program:
                return capture(self.model, *inputs, spec, grad=True)

            self._captured = trace(inputs)
            if symbols := self.options.get("symbols"):
                self.show("capture at other sizes")
                self._at = symbolize(self._captured, inputs, symbols, trace)
            (phase,) = self._captured.phases.values()
            self._flop = flop_of(phase.module.graph.nodes)
        return self._captured


def _copy(program: Program) -> Program:
    """A copy that passes can rewrite."""
    phases = {name: phase.clone() for name, phase in program.phases.items()}
    return replace(program, phases=phases, history=list(program.history), established=set(program.established))


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Only shapes are looked at: capture wants tensors of the CPU."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad)
