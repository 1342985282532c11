"""The two halves of `compile`: check the arguments and make a tracer; shard the module and let a runner run it.

Between them programs are captured, or loaded. `export` needs the first half only, and no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from graphshard.capture.capture import CaptureSpec
from graphshard.cost.costs import Costs
from graphshard.cost.profile import Hardware
from graphshard.ir.mesh import Mesh
from graphshard.ir.precision import PolicySpec, precision_of
from graphshard.ir.units import UnitSpec, find_units
from graphshard.lower.backends import Backend
from graphshard.module.agreement import Agreement
from graphshard.module.runner import Runner
from graphshard.module.sharded_module import attach, retie, sharded_class
from graphshard.module.tracer import Tracer
from graphshard.options.checks import (
    check_activation_units,
    check_arguments,
    check_debugging,
    check_memory_limit,
)
from graphshard.options.passes import profile_here, with_activation, with_offload, with_planner, with_regather
from graphshard.options.table import checked_table
from graphshard.pipeline.observe import Level, Recorder
from graphshard.pipeline.pipeline import Pipeline
from graphshard.runtime.groups import make_groups
from graphshard.runtime.shards import Storage, aliases, param_refs, shard_module
from graphshard.state.load_hook import shard_values


def prepare(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: PolicySpec = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    units: Sequence[UnitSpec] | None = None,
    backend: Backend = "inductor",
    activation: Literal["full"] | Sequence[OpOverload] | float | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    max_captures: int = 8,
    passes: Pipeline | None = None,
    hardware: Hardware | None = None,
    memory_limit: int | None = None,
    verify: Level | None = None,
) -> Tracer:
    """Check the options of `compile` and make the tracer of a module; nothing is changed.

    Args:
        mesh: the axes to shard and to replicate over.
        device: this rank's; where it is not here, what the program is for.

    Raises:
        ArgumentError: an option is wrong.
    """
    check_arguments(reshard_after_forward, mesh.shard.size, offload_policy, backend, max_captures)
    level = check_debugging(passes, verify)
    pipeline = with_activation(passes if passes is not None else Pipeline(), activation)
    unit_names = find_units(model, units)
    precision = precision_of(mp_policy, unit_names)
    check_activation_units(model, activation, unit_names)
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        if 1 < reshard_after_forward < mesh.shard.size:
            mesh = mesh.with_regather(reshard_after_forward)
            pipeline = with_regather(pipeline)
        reshard_after_forward = reshard_after_forward > 1
    profile = profile_here(device, hardware)
    only_axis = len(mesh.axes) == 1
    costs = Costs(profile, mesh=mesh) if profile is not None and only_axis else None
    check_memory_limit(memory_limit, only_axis=only_axis)
    pipeline = with_planner(pipeline, costs, memory_limit=memory_limit, units_given=units is not None)
    table = checked_table(
        model,
        unit_names,
        device_type=device.type,
        mesh=mesh,
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
    )
    storage = Storage(device)
    if isinstance(offload_policy, CPUOffloadPolicy):
        storage = Storage(torch.device("cpu"), pinned=offload_policy.pin_memory and device.type != "cpu")
        pipeline = with_offload(pipeline)
    return Tracer(
        spec=CaptureSpec(table, unit_names, mesh, device, precision, type(model), dynamic_shapes),
        params=tuple(param_refs(model, table)),
        backend=backend,
        pipeline=pipeline,
        verify=level,
        storage=storage,
        max_captures=max_captures,
    )


def make_runner(
    model: nn.Module,
    tracer: Tracer,
    mesh: DeviceMesh,
    recorder: Callable[[str], Recorder | None] = lambda name: None,
) -> Runner:
    """The runner of a module on a mesh; all ranks must call this together.

    Args:
        recorder: what records a program, by its name.
    """
    return Runner(
        tracer,
        mesh,
        groups=make_groups(tracer.spec.mesh, mesh),
        agreement=Agreement(mesh),
        recorder=recorder,
        aliases=tuple(aliases(model, tracer.params)),
    )


def shard(model: nn.Module, runner: Runner) -> None:
    """Shard a module over the runner's mesh and let the runner run it, in place."""
    spec = runner.tracer.spec
    shard_module(model, spec.params, runner.mesh, spec.device, runner.tracer.storage)
    object.__setattr__(model, "__class__", sharded_class(type(model)))
    model.register_load_state_dict_pre_hook(shard_values)
    attach(model, runner)
    model.register_load_state_dict_post_hook(retie)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
