"""What the options of `compile` do to the passes: activation checkpointing, offloading, regathering, and the planner.

Where the user's passes name no planner, costs of the machine decide. FSDP2's order, one unit ahead, stays unless
another one is predicted to gain what it is worth: others split blocks where equal blocks would share their compiled
regions, which costs compilation and fusion that no cost model sees. `activation="auto"` takes the shortest step: where
candidates were held to FSDP2's order, some to it and some not, a single policy could be shorter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from graphshard.cost.builtin import builtin_profiles
from graphshard.cost.costs import Costs
from graphshard.cost.profile import Hardware, Profile, load_profile
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.exported.exported_program import facts_of, joint_of, module_of
from graphshard.exported.program_module import ProgramModule
from graphshard.frontend.signature import CaptureSpec
from graphshard.ir.mesh import ExpertMeshes, Mesh
from graphshard.ir.param_table import ParamSpec, ParamTable, build_table
from graphshard.ir.precision import precision_of
from graphshard.ir.units import MODULE_SEPARATOR, find_units
from graphshard.options.options import Activation, Options
from graphshard.options.validate import check_ignored, check_params, check_placements, placements_of
from graphshard.passes import (
    ActivationCheckpointing,
    Float8AllGather,
    KeepGathered,
    MakePlan,
    OffloadParameters,
    Pass,
    RegatherInSubgroup,
    ReshardAfterForward,
)
from graphshard.pipeline.pipeline import Pipeline
from graphshard.schedule.build import Constraints
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import PlanByUnit
from graphshard.utils.argument_validation import is_int
from graphshard.utils.text import brief

log = logging.getLogger(__name__)

# Share of a step, and seconds for each unit, that must be gained to depart from FSDP2's order: a millisecond pays for
# the ten seconds in which a unit of its own is compiled after 10000 steps.
WORTH = 0.02
WORTH_SECONDS = 1e-3

VARIABLE = "GRAPHSHARD_HARDWARE"

Direction = Literal["forward", "backward"]


def pipeline_of(options: Options, mesh: Mesh, costs: Costs | None, *, optimizer_states: int = 2) -> Pipeline:
    """The passes that make a program with these options.

    Args:
        mesh: what the program is for.
        costs: of the machine that plans are made for; None plans unit by unit.
        optimizer_states: tensors that the optimizer keeps for each parameter.

    Raises:
        ArgumentError: there is a memory limit, and the passes' own planner or no costs to keep it with.
    """
    pipeline = with_activation(options.passes or Pipeline(), options.activation)
    if mesh.regather is not None:
        pipeline = with_regather(pipeline)
    auto = options.activation == "auto"
    pipeline = with_planner(
        pipeline,
        costs,
        memory_limit=options.memory_limit,
        units_given=options.units is not None,
        keep=auto,
        optimizer_states=optimizer_states,
    )
    if auto and KeepGathered.name not in [step.name for step in pipeline]:
        pipeline = pipeline.insert(KeepGathered(), after=MakePlan.name)
    return with_offload(pipeline) if isinstance(options.offload_policy, CPUOffloadPolicy) else pipeline


def profile_here(device: torch.device, hardware: Hardware | None) -> Profile | None:
    """The profile to plan with: as given, by GRAPHSHARD_HARDWARE, or of a known device; None for an unknown GPU.

    Raises:
        ArgumentError: there is no such profile.
    """
    named = hardware if hardware is not None else os.environ.get(VARIABLE) or None
    if named is not None:
        return load_profile(named)
    if device.type == "cpu":
        return load_profile("cpu-gloo")
    title = torch.cuda.get_device_name(device).lower()
    known = next((name for name in builtin_profiles() if name in title), None)
    if known is None:
        log.warning(
            "no hardware profile of %s: collectives are planned unit by unit. `torchrun ... -m graphshard calibrate "
            "--out FILE` measures one; pass it as hardware= or in %s.",
            title,
            VARIABLE,
        )
    return None if known is None else load_profile(known)


def with_planner(
    pipeline: Pipeline,
    costs: Costs | None,
    *,
    memory_limit: int | None,
    units_given: bool,
    keep: bool = False,
    optimizer_states: int = 2,
) -> Pipeline:
    """The pipeline with a planner, unless it has one.

    Args:
        costs: None plans unit by unit, without costs.
        memory_limit: bytes; see `PlanByCost`.
        units_given: the user has named the units, so that nothing is split or joined.
        keep: parameters may stay gathered between forward and backward, and the shortest step is looked for.
        optimizer_states: tensors that the optimizer keeps for each parameter.

    Raises:
        ArgumentError: there is a memory limit, and the passes' own planner or no costs to keep it with.
    """
    if any(isinstance(step, Float8AllGather) for step in pipeline):  # its gathers are not of the sizes that costs know
        costs = None
    index = next((i for i, step in enumerate(pipeline) if type(step) is MakePlan and step.planner is None), None)
    if index is None or costs is None:
        if memory_limit is not None:
            why = (
                "no hardware profile of this device is known: measure one with `graphshard calibrate` and pass it as "
                "hardware="
                if costs is None
                else "passes has a planner of its own: give the limit to that"
            )
            raise ArgumentError(f"memory_limit={memory_limit} cannot be kept, as {why}.")
        return pipeline
    planner = PlanByCost(
        costs,
        memory_limit,
        Constraints(units=units_given, keep=keep),
        optimizer_states=optimizer_states,
        worth=0.0 if keep else WORTH,
        worth_seconds=0.0 if keep else WORTH_SECONDS,
    )
    passes = list(pipeline)
    passes[index] = replace(passes[index], planner=planner)  # type: ignore[call-arg]
    return Pipeline(tuple(passes))


def with_prefetch(pipeline: Pipeline, direction: Direction, unit: str, following: tuple[str, ...]) -> Pipeline:
    """The pipeline with a plan unit by unit in which these units are gathered when one has arrived, and not the next.

    Raises:
        UnsupportedError: a planner of the user's decides that, or a limit of memory.
    """
    lists = dict(getattr(_planner_by_unit(pipeline), f"{direction}_prefetch"), **{unit: following})
    return planned_by_unit(pipeline, f"set_modules_to_{direction}_prefetch", **{f"{direction}_prefetch": lists})


def planned_by_unit(pipeline: Pipeline, setter: str, **choices: Any) -> Pipeline:
    """The pipeline with a plan unit by unit, and these fields of the planner.

    Args:
        setter: the method that was called, for the error.

    Raises:
        UnsupportedError: a planner of the user's makes the plan, or one that keeps a limit of memory.
    """
    index, plan = next(((i, p) for i, p in enumerate(pipeline) if isinstance(p, MakePlan)), (0, None))
    given, planner = plan.planner if plan is not None else None, _planner_by_unit(pipeline)
    free = given is None or isinstance(given, PlanByUnit) or (isinstance(given, PlanByCost) and not given.memory_limit)
    if plan is None or not free:
        who = "memory_limit" if isinstance(given, PlanByCost) else "a planner in passes="
        raise UnsupportedError(f"{setter}: {who} decides when collectives start and what they hold. Leave it out.")
    passes = list(pipeline)
    passes[index] = replace(plan, planner=replace(planner, **choices))
    return Pipeline(tuple(passes))


def _planner_by_unit(pipeline: Pipeline) -> PlanByUnit:
    """The planner of a pipeline, if it plans unit by unit, or a new one."""
    planners = [step.planner for step in pipeline if isinstance(step, MakePlan)]
    return next((planner for planner in planners if isinstance(planner, PlanByUnit)), PlanByUnit())


def with_offload(pipeline: Pipeline) -> Pipeline:
    """With `offload` before the plan is made, unless the user put it somewhere; backward copies what it needs again."""
    default, offloaded = ReshardAfterForward(), ReshardAfterForward(offloaded=True)
    pipeline = pipeline.replace(default.name, offloaded) if default in tuple(pipeline) else pipeline
    return _before_plan(pipeline, OffloadParameters())


def with_regather(pipeline: Pipeline) -> Pipeline:
    """With `regather-in-subgroup` before the plan is made, unless the user put it somewhere."""
    return _before_plan(pipeline, RegatherInSubgroup())


def _before_plan(pipeline: Pipeline, new: Pass) -> Pipeline:
    names = [step.name for step in pipeline]
    return pipeline if new.name in names or "plan" not in names else pipeline.insert(new, before="plan")


def with_activation(pipeline: Pipeline, activation: Activation | None) -> Pipeline:
    """The pipeline with this policy of activation checkpointing in front."""
    if activation is None:
        return pipeline
    if isinstance(activation, (int, float)):
        return Pipeline((ActivationCheckpointing(float(activation)), *pipeline))
    if activation == "full" or activation == "auto":
        return Pipeline((ActivationCheckpointing(activation), *pipeline))
    return Pipeline((ActivationCheckpointing(tuple(sorted(activation, key=str))), *pipeline))


def capture_spec(
    model: nn.Module,
    options: Options,
    mesh: Mesh,
    device: torch.device,
    known: Mapping[nn.Parameter, ParamSpec] = MappingProxyType({}),
    tensor: DeviceMesh | None = None,
    experts: ExpertMeshes | None = None,
    answers: Mapping[str, Any] | None = None,
    whole: DeviceMesh | None = None,
) -> CaptureSpec:
    """What a capture of a model that is to be sharded depends on.

    Args:
        mesh: the axes to shard and to replicate over.
        device: what programs are captured for.
        known: parameters of parts of the model that are sharded already.
        tensor: the tensor axis, inside of those of `mesh`, if there is one.
        experts: where parameters are that lie otherwise on the ranks, if there are such.
        answers: of `shard_placement_fn`, if it was asked already.
        whole: the mesh of all axes, if parts of the model have DTensors on it.

    Raises:
        ArgumentError: an option does not fit the model or the mesh, or a parameter cannot be sharded.
        UnsupportedError: parameters are to be gathered again among neighbours, and there are experts.
    """
    units = find_units(model, options.units)
    precision = precision_of(options.mp_policy, units)
    mesh = _with_regather(mesh, options.reshard_after_forward)
    if tensor is not None:
        mesh = mesh.with_tensors(tensor)
    if experts is not None:
        if mesh.regather is not None:
            raise UnsupportedError(
                f"reshard_after_forward={options.reshard_after_forward} with parameters on another mesh, as experts "
                "are, is not supported. Give True or False."
            )
        mesh = mesh.with_experts(experts.mesh)
    check_fit(options, model, units, mesh)
    ignored = check_ignored(model, options.ignored_params)
    distributed = tensor is not None or experts is not None
    check_params(model, device.type, ignored, known, distributed=distributed, num_ranks=mesh.size)
    if answers is None:
        answers = placements_of(model, options.shard_placement_fn, {*ignored, *known})
    table = build_table(
        model,
        mesh=mesh,
        units=units,
        precision=precision,
        reshard_after_forward=_gathers_again(options),
        dims=check_placements(model, answers),
        ignored=ignored,
        known=known,
        experts=experts.params if experts is not None else (),
    )
    return CaptureSpec(
        table,
        units,
        mesh,
        device,
        precision,
        type(model),
        options.dynamic_shapes,
        tensor=tensor,
        experts=experts,
        whole=_whole_mesh(model, table, known) or whole,
    )


def _whole_mesh(model: nn.Module, params: ParamTable, known: Container[nn.Parameter]) -> DeviceMesh | None:
    """The mesh of all axes, if parameters are DTensors on it before they are sharded."""
    rows = (row for row in params if row.split is not None and row.split.around and not row.expert)
    found = (model.get_parameter(row.name) for row in rows)
    return next((param.device_mesh for param in found if param not in known and isinstance(param, DTensor)), None)


def _gathers_again(options: Options) -> bool | None:
    """Whether backward gathers parameters again, among however many ranks; None leaves it to each unit.

    Where the plan decides what stays gathered, that may be any.
    """
    given = options.reshard_after_forward
    if given is None:
        return True if options.activation == "auto" else None
    return given is True or given > 1


def _with_regather(mesh: Mesh, reshard_after_forward: bool | int | None) -> Mesh:
    """With the neighbours among which backward gathers again, where that is a smaller group than the axis."""
    if is_int(reshard_after_forward) and 1 < reshard_after_forward < mesh.shard.size:
        return mesh.with_regather(reshard_after_forward)
    return mesh


def check_fit(options: Options, model: nn.Module, units: Sequence[str], mesh: Mesh) -> None:
    """Raise ArgumentError for the first option that does not fit a model with these units, or a mesh."""
    reshard, num_shards = options.reshard_after_forward, mesh.shard.size
    if is_int(reshard) and (reshard < 1 or num_shards % reshard):
        divisors = ", ".join(str(n) for n in range(1, num_shards + 1) if num_shards % n == 0)
        raise ArgumentError(
            f"reshard_after_forward={brief(reshard)} must divide the number of ranks that parameters are sharded over, "
            f"{num_shards}. Give one of {divisors}; 1 is False, {num_shards} is True."
        )
    check_activation(options, type(model).__name__, units)


def check_activation(options: Options, model: str, units: Sequence[str]) -> None:
    """Raise ArgumentError if units are to save something else, and a model has none."""
    if options.activation is not None and not units:
        raise ArgumentError(
            f"activation={brief(options.activation)} is about the units of {model}, and none were found. Name them "
            "with units=, such as units=['layers.*'], or call graphshard.fully_shard on them."
        )


def resolve_model(model: Any, options: Options) -> tuple[Any, Options]:
    """Return the module of a program or a `.pt2` file, and options with its dynamic shapes; a module as it is.

    Raises:
        ArgumentError: the program cannot be compiled.
        UnsupportedError: the program has something that cannot be called from a module, or casts that do not fit the
            mixed-precision policy.
    """
    module = module_of(model)
    if not isinstance(model, torch.nn.Module) and isinstance(module, ProgramModule):
        if options.dynamic_shapes is None:
            options = replace(options, dynamic_shapes=module.program_inputs().dynamic_shapes())
        _check_precision(module, options.mp_policy)
    joint = joint_of(module) if not isinstance(model, torch.nn.Module) else None
    facts = None if joint is None else facts_of(joint)
    if facts is not None and options.units is None and facts["units"]:
        units = [tuple(unit.split(MODULE_SEPARATOR)) if MODULE_SEPARATOR in unit else unit for unit in facts["units"]]
        options = replace(options, units=units)
    return module, options


def example_of(model: Any) -> tuple[Any, Any]:
    """Return the example inputs and keyword inputs that a program holds; two times None for others."""
    examples = model.program_examples() if isinstance(model, ProgramModule) else None
    return (None, None) if examples is None else examples


def _check_precision(module: ProgramModule, spec: Any) -> None:
    """Raise UnsupportedError for a cast of which nobody knows whether it was to the dtype of a parameter.

    `x.to(weight.dtype)` and `x.float()` are the same in a program. With a policy they are not.
    """
    policies = list(spec.values()) if isinstance(spec, Mapping) else [spec]
    wanted = {policy.param_dtype for policy in policies if policy is not None} - {None}
    own = {param.dtype for param in module.parameters() if param.is_floating_point()}
    for dtype, place in module.program_casts():
        if dtype in own and wanted - {dtype}:
            others = ", ".join(sorted(str(other) for other in wanted - {dtype}))
            raise UnsupportedError(
                f"mp_policy: the program names {dtype} in {place}. At export that may have been the dtype of a "
                f"parameter, which mp_policy changes to {others}, or a constant. Export a copy of the module with "
                f"parameters in {others}, compile that program, and call .to({dtype}) on what compile returns "
                f"to store parameters in {dtype}; or compile the module itself."
            )
