"""Options resolved against one model and one mesh: `resolve(model, mesh, options) -> CompileRequest`.

Unless the user's passes name a planner, costs of the machine decide when collectives start. FSDP2's order, one unit
ahead, stays unless another order is predicted to gain what it costs: it may split blocks, where equal blocks would
share their compiled regions, and no cost model sees that compilation. `activation="auto"` takes the shortest step: of
candidates that are partly held to FSDP2's order, another one could be shorter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from graphshard.cost.costs import Costs
from graphshard.cost.profile import Hardware, Profile, load_profile, profile_of_gpu
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.exported.exported_program import facts_of, joint_of, module_of
from graphshard.exported.program_module import ProgramModule
from graphshard.frontend.signature import CaptureSpec
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamSpec, ParamTable, build_table
from graphshard.ir.units import MODULE_SEPARATOR, find_units, precision_of
from graphshard.options.annotations import with_annotations
from graphshard.options.mesh_axes import (
    MeshAxes,
    data_and_tensor,
    experts_by_name,
    find_experts,
    tensor_axis,
)
from graphshard.options.options import Activation, Options
from graphshard.options.validate import (
    ModelContents,
    check_ignored,
    check_mesh,
    check_model,
    check_params,
    default_mesh,
    placements_of,
    shard_dims,
)
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
from graphshard.runtime.shards import Storage
from graphshard.schedule.build_problem import Constraints
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from graphshard.utils.argument_validation import is_int
from graphshard.utils.text import brief, format_bytes

log = logging.getLogger(__name__)
# The memory that a device reports, compared with its data sheet's; 80 GB are 79 GiB, or 85 GB.
_LEAST_OF_MEMORY, _MOST_OF_MEMORY = 0.9, 1.2
# GPUs that NVLink connects within one node; an NVL72 has 18 nodes.
_MOST_ON_A_BOARD = 16

# Share of a step, and seconds for each unit, that must be gained to depart from FSDP2's order: a millisecond pays for
# the ten seconds in which one more unit is compiled after 10000 steps.
WORTH = 0.02
WORTH_SECONDS = 1e-3

VARIABLE = "GRAPHSHARD_HARDWARE"

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, eq=False)
class CompileRequest:
    """Arguments of `compile`, resolved against one model and one mesh.

    Attributes:
        model: the module; of an exported program the module that was made of it.
        options: as given, with what an exported program decides.
        mesh: as given to `compile`; None for a mesh that need not exist.
        spec: what a capture depends on: parameter table, units, precision, mesh, device.
        costs: of the machine; None for an unknown GPU.
        storage: where shards are kept between steps.
    """

    model: nn.Module
    options: Options
    mesh: DeviceMesh | None
    axes: MeshAxes
    spec: CaptureSpec
    costs: Costs | None
    pipeline: Pipeline
    storage: Storage


def resolve(model: Any, mesh: DeviceMesh | None, options: Options, *, dp_mesh_dims: Any = None) -> CompileRequest:
    """Resolve options against a module, an exported program, or the path of one, and a mesh; None is all ranks.

    Without FSDP2's `DataParallelMeshDims` axes go by their names.
    """
    model, options = resolve_model(model, options)
    contents = check_model(model)
    mesh = default_mesh(contents.params.values()) if mesh is None else mesh
    contents, axes = find_axes(contents, mesh, options, dp_mesh_dims)
    assert axes.data is not None
    return replace(request_for(contents, axes, options, device_of(axes.data)), mesh=mesh)


def find_axes(
    contents: ModelContents, mesh: DeviceMesh, options: Options, dp_mesh_dims: Any = None
) -> tuple[ModelContents, MeshAxes]:
    """Return the contents of a model with DTensors for annotated parameters, and the axes of a mesh by their roles.

    `dp_mesh_dims` is as for `resolve`.
    """
    by_name = experts_by_name(mesh, dp_mesh_dims)
    data, tensor = data_and_tensor(mesh, dp_mesh_dims)
    axes, ignored = check_mesh(data), check_ignored(contents, options.ignored_params)
    placements = placements_of(contents, options.shard_placement_fn, ignored)
    contents = with_annotations(contents, data, tensor, ignored)
    experts = find_experts(contents, data, by_name, placements, ignored)
    return contents, MeshAxes(axes, data, tensor_axis(contents, data, tensor, experts), experts, placements)


def request_for(
    contents: ModelContents,
    axes: MeshAxes,
    options: Options,
    device: torch.device,
    known: Mapping[nn.Parameter, ParamSpec] = MappingProxyType({}),
    whole: DeviceMesh | None = None,
) -> CompileRequest:
    """Resolve options where the axes of the mesh are known.

    `device` is this rank's, or the kind that the program is for. Parts of the model may be sharded already: `known` are
    their parameters, and `whole` is the mesh of all axes if they have DTensors on it.
    """
    spec = capture_spec(contents, axes, options, device, known, whole)
    profile = profile_here(device, options.hardware)
    costs = Costs(profile, mesh=spec.mesh) if profile is not None else None
    storage = Storage(device)
    if isinstance(options.offload_policy, CPUOffloadPolicy):
        storage = Storage(torch.device("cpu"), pinned=options.offload_policy.pin_memory and device.type != "cpu")
    pipeline = pipeline_of(options, spec.mesh, costs)
    return CompileRequest(contents.model, options, axes.data, axes, spec, costs, pipeline, storage)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# --- exported programs -------------------------------------------------------------------------------------------


def resolve_model(model: Any, options: Options) -> tuple[Any, Options]:
    """Return the module of an exported program or a `.pt2` file, and options with what the program decides."""
    module = module_of(model)
    if isinstance(model, nn.Module):
        return module, options
    if isinstance(module, ProgramModule):
        if options.dynamic_shapes is None:
            options = replace(options, dynamic_shapes=module.program_inputs.dynamic_shapes())
        _check_casts(module, options.mp_policy)
    joint = joint_of(module)
    facts = None if joint is None else facts_of(joint)
    if facts is not None and options.units is None and facts["units"]:
        units = [tuple(unit.split(MODULE_SEPARATOR)) if MODULE_SEPARATOR in unit else unit for unit in facts["units"]]
        options = replace(options, units=units)
    return module, options


def example_of(model: Any) -> tuple[Any, Any]:
    """Return the example inputs and keyword inputs that an exported program holds; None and None for a module."""
    examples = model.program_examples if isinstance(model, ProgramModule) else None
    return (None, None) if examples is None else examples


def _check_casts(module: ProgramModule, mp_policy: Any) -> None:
    """Raise UnsupportedError for a cast that may have been to the dtype of a parameter.

    `x.to(weight.dtype)` and `x.float()` are the same in a program. With a policy they are not.
    """
    policies = list(mp_policy.values()) if isinstance(mp_policy, Mapping) else [mp_policy]
    wanted = {policy.param_dtype for policy in policies if policy is not None} - {None}
    stored = {param.dtype for param in module.parameters() if param.is_floating_point()}
    for dtype, place in module.program_casts:
        if dtype in stored and wanted - {dtype}:
            others = ", ".join(sorted(str(other) for other in wanted - {dtype}))
            raise UnsupportedError(
                f"mp_policy: the program names {dtype} in {place}. At export that may have been the dtype of a "
                f"parameter, which mp_policy changes to {others}, or a constant. Export a copy of the module with "
                f"parameters in {others}, compile that program, and call .to({dtype}) on what compile returns "
                f"to store parameters in {dtype}; or compile the module itself."
            )


# --- parameters --------------------------------------------------------------------------------------------------


def capture_spec(
    contents: ModelContents,
    axes: MeshAxes,
    options: Options,
    device: torch.device,
    known: Mapping[nn.Parameter, ParamSpec] = MappingProxyType({}),
    whole: DeviceMesh | None = None,
) -> CaptureSpec:
    """Return what a capture depends on: parameter table, units, precision, mesh. Arguments are as in `request_for`."""
    model, mesh, reshard = contents.model, axes.mesh, options.reshard_after_forward
    units = find_units(model, options.units)
    precision = precision_of(options.mp_policy, units)
    if is_int(reshard) and 1 < reshard < mesh.shard.size:
        mesh = mesh.with_regather(reshard)
    if axes.tensor is not None:
        mesh = mesh.with_tensors(axes.tensor)
    if axes.experts is not None:
        if mesh.regather is not None:
            raise UnsupportedError(
                f"reshard_after_forward={reshard} with parameters on another mesh, as experts are, is not supported. "
                "Give True or False."
            )
        mesh = mesh.with_experts(axes.experts.mesh)
    check_fit(options, model, units, mesh)
    ignored = check_ignored(contents, options.ignored_params)
    distributed = axes.tensor is not None or axes.experts is not None
    check_params(contents, device.type, ignored, known, distributed=distributed, num_ranks=mesh.size)
    placements = axes.placements
    if placements is None:
        placements = placements_of(contents, options.shard_placement_fn, {*ignored, *known})
    reshards = None if reshard is None else reshard is True or reshard > 1
    if reshard is None and options.activation == "auto":  # the plan decides what stays gathered
        reshards = True
    table = build_table(
        model,
        mesh=mesh,
        units=units,
        precision=precision,
        reshard_after_forward=reshards,
        exchanged=options.reduce == "exchange",
        dims=shard_dims(contents, placements),
        ignored=ignored,
        known=known,
        experts=axes.experts.params if axes.experts is not None else (),
        params=contents.params,
    )
    _check_exchange(table, mesh)
    for row in table:
        param = contents.named[row.name]
        if row.split is not None and row.split.around and not row.expert and param not in known:
            assert isinstance(param, DTensor)
            whole = param.device_mesh
            break
    return CaptureSpec(
        table,
        units,
        mesh,
        device,
        precision,
        type(model),
        options.dynamic_shapes,
        tensor=axes.tensor,
        experts=axes.experts,
        whole=whole,
    )


def _check_exchange(table: ParamTable, mesh: Mesh) -> None:
    """Raise ArgumentError if gradients are to be exchanged over an axis of one rank."""
    row = next((row for row in table if row.exchanged and not row.ignored), None)
    if row is not None and mesh.shard.size == 1:
        raise ArgumentError(
            f'reduce="exchange": the gradient of {row.name} has nothing to be exchanged with, as the axis '
            f"{mesh.shard.name!r} that it is sharded over has one rank. Leave reduce out, or give a mesh on which that "
            "axis has several."
        )


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


def check_activation(options: Options, model: str, units: Container[str]) -> None:
    """Raise ArgumentError if units are to save something else, and a model has none."""
    if options.activation is not None and not units:
        raise ArgumentError(
            f"activation={brief(options.activation)} is about the units of {model}, and none were found. Name them "
            "with units=, such as units=['layers.*'], or call graphshard.fully_shard on them."
        )


# --- passes ------------------------------------------------------------------------------------------------------


def pipeline_of(options: Options, mesh: Mesh, costs: Costs | None, *, optimizer_states: int = 2) -> Pipeline:
    """Return the passes that make a program; without costs of a machine it is planned unit by unit."""
    pipeline = with_activation(options.passes or Pipeline(), options.activation)
    if mesh.regather is not None:
        pipeline = with_regather(pipeline)
    pipeline = with_planner(pipeline, costs, options, optimizer_states=optimizer_states)
    if options.activation == "auto" and KeepGathered.name not in [step.name for step in pipeline]:
        pipeline = pipeline.insert(KeepGathered(), after=MakePlan.name)
    return with_offload(pipeline) if isinstance(options.offload_policy, CPUOffloadPolicy) else pipeline


def profile_here(device: torch.device, hardware: Hardware | None) -> Profile | None:
    """Return the profile to plan with: as given, by GRAPHSHARD_HARDWARE, or of the device; None for an unknown GPU.

    A profile found by the device's name gets the ranks of a node that the launcher tells in LOCAL_WORLD_SIZE, unless
    its NVLink connects several nodes. Other memory than the device's is logged.
    """
    named = hardware if hardware is not None else os.environ.get(VARIABLE) or None
    if device.type == "cpu":
        return load_profile(named if named is not None else "cpu-gloo")
    if named is not None and not torch.cuda.is_available():
        return load_profile(named)
    there = torch.cuda.get_device_properties(device)
    profile = load_profile(named) if named is not None else profile_of_gpu(there.name, there.total_memory)
    if profile is None:
        log.warning(
            "no hardware profile of %s: collectives are planned unit by unit. `torchrun ... -m graphshard calibrate "
            "--out FILE` measures one; pass it as hardware= or in %s.",
            there.name,
            VARIABLE,
        )
        return None
    if not _LEAST_OF_MEMORY < there.total_memory / profile.memory_capacity < _MOST_OF_MEMORY:
        log.warning(
            "the profile %s is of GPUs with %s of memory, and %s has %s: steps may be planned for another machine. "
            "`torchrun ... -m graphshard calibrate --out FILE` measures this one; pass it as hardware= or in %s.",
            profile.name,
            format_bytes(profile.memory_capacity),
            there.name,
            format_bytes(there.total_memory),
            VARIABLE,
        )
    if named is not None:
        return profile
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    alone = local.isdecimal() and int(local) > 0 and profile.ranks_per_node <= _MOST_ON_A_BOARD
    ranks = int(local) if alone else profile.ranks_per_node
    return replace(profile, ranks_per_node=ranks)


def with_planner(pipeline: Pipeline, costs: Costs | None, options: Options, *, optimizer_states: int = 2) -> Pipeline:
    """Return the pipeline with a planner by cost, unless it has a planner or there are no costs.

    With `activation="auto"` parameters may stay gathered between forward and backward, and the shortest step is
    taken. A memory limit that cannot be kept is an ArgumentError.
    """
    if any(isinstance(step, Float8AllGather) for step in pipeline):  # costs do not know the sizes of its gathers
        costs = None
    plan = next((step for step in pipeline if type(step) is MakePlan and step.planner is None), None)
    if plan is None or costs is None:
        if options.memory_limit is not None:
            why = (
                "no hardware profile of this device is known: measure one with `graphshard calibrate` and pass it as "
                "hardware="
                if costs is None
                else "passes has a planner: give it the limit"
            )
            raise ArgumentError(f"memory_limit={options.memory_limit} cannot be kept, as {why}.")
        return pipeline
    keep = options.activation == "auto"
    planner = PlanByCost(
        costs,
        options.memory_limit,
        Constraints(units=options.units is not None, keep=keep),
        optimizer_states=optimizer_states,
        worth=0.0 if keep else WORTH,
        worth_seconds=0.0 if keep else WORTH_SECONDS,
        any_order=options.reduce == "auto",
    )
    return pipeline.replace(plan.name, replace(plan, planner=planner))


def with_prefetch(pipeline: Pipeline, direction: Direction, unit: str, following: tuple[str, ...]) -> Pipeline:
    """Return the pipeline with a plan unit by unit that gathers `following` when `unit` has arrived, not the next."""
    lists = dict(getattr(_planner_by_unit(pipeline), f"{direction}_prefetch"), **{unit: following})
    return planned_by_unit(pipeline, f"set_modules_to_{direction}_prefetch", **{f"{direction}_prefetch": lists})


def planned_by_unit(pipeline: Pipeline, setter: str, **choices: Any) -> Pipeline:
    """Return the pipeline with a plan unit by unit, and these fields of the planner."""
    plan = next((step for step in pipeline if isinstance(step, MakePlan)), None)
    given = plan.planner if plan is not None else None
    free = given is None or isinstance(given, PlanByUnit) or (isinstance(given, PlanByCost) and not given.memory_limit)
    if plan is None or not free:
        who = "memory_limit" if isinstance(given, PlanByCost) else "a planner in passes="
        raise UnsupportedError(f"{setter}: {who} decides when collectives start and what they hold. Leave it out.")
    return pipeline.replace(plan.name, replace(plan, planner=replace(_planner_by_unit(pipeline), **choices)))


def _planner_by_unit(pipeline: Pipeline) -> PlanByUnit:
    planners = [step.planner for step in pipeline if isinstance(step, MakePlan)]
    return next((planner for planner in planners if isinstance(planner, PlanByUnit)), PlanByUnit())


def with_offload(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with `offload` before the plan, unless it has it; backward copies what it needs again."""
    default, offloaded = ReshardAfterForward(), ReshardAfterForward(offloaded=True)
    pipeline = pipeline.replace(default.name, offloaded) if default in tuple(pipeline) else pipeline
    return _before_plan(pipeline, OffloadParameters())


def with_regather(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with `regather-in-subgroup` before the plan, unless it has it."""
    return _before_plan(pipeline, RegatherInSubgroup())


def _before_plan(pipeline: Pipeline, new: Pass) -> Pipeline:
    names = [step.name for step in pipeline]
    return pipeline if new.name in names or "plan" not in names else pipeline.insert(new, before="plan")


def with_activation(pipeline: Pipeline, activation: Activation | None) -> Pipeline:
    """Return the pipeline that starts with this policy of activation checkpointing."""
    if activation is None:
        return pipeline
    if isinstance(activation, (int, float)):
        policy: Any = float(activation)
    else:
        policy = activation if isinstance(activation, str) else tuple(sorted(activation, key=str))
    return Pipeline((ActivationCheckpointing(policy), *pipeline))
