"""The two halves of `compile`: check the arguments and make a runner; shard the module and let the runner run it.

Between them programs are captured, or loaded. `export` needs the first half only, and no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from graphshard.backends import Backend
from graphshard.capture import CaptureSpec
from graphshard.checks import (
    check_activation_units,
    check_arguments,
    check_debugging,
    check_ignored,
    check_params,
    check_placements,
    with_activation,
)
from graphshard.loading import shard_values
from graphshard.module import Runner
from graphshard.observe import Level
from graphshard.params import build_table
from graphshard.pipeline import Pipeline, with_offload
from graphshard.program import Axis
from graphshard.sharded_module import attach, retie, sharded_class
from graphshard.sharding import Storage, aliases, param_refs, shard_module
from graphshard.units import UnitSpec, find_units


def prepare(
    model: nn.Module,
    axis: Axis,
    device: torch.device,
    mesh: DeviceMesh | None,
    *,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    units: Sequence[UnitSpec] | None = None,
    backend: Backend = "inductor",
    activation: Literal["full"] | Sequence[OpOverload] | float | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    max_captures: int = 8,
    passes: Pipeline | None = None,
    verify: Level | None = None,
    directory: Path | None = None,
) -> Runner:
    """Check the options of `compile` and make the runner of a module; nothing is changed.

    Args:
        axis: the mesh axis to shard over.
        device: this rank's; without a mesh, what the program is for.
        mesh: None if it does not exist; such a runner captures programs and cannot run them.
        directory: where this rank dumps.

    Raises:
        ArgumentError: an option is wrong.
    """
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    check_arguments(reshard_after_forward, policy, offload_policy, backend, max_captures)
    level = check_debugging(passes, verify)
    pipeline = with_activation(passes if passes is not None else Pipeline(), activation)
    ignored = check_ignored(model, ignored_params)
    check_params(model, device.type, ignored)
    dims = check_placements(model, shard_placement_fn, ignored)
    unit_names = find_units(model, units)
    check_activation_units(model, activation, unit_names)
    table = build_table(
        model,
        num_shards=axis.size,
        units=unit_names,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        dims=dims,
        ignored=ignored,
    )
    storage = Storage(device)
    if isinstance(offload_policy, CPUOffloadPolicy):
        storage = Storage(torch.device("cpu"), pinned=offload_policy.pin_memory and device.type != "cpu")
        pipeline = with_offload(pipeline)
    refs = tuple(param_refs(model, table))
    return Runner(
        spec=CaptureSpec(table, unit_names, axis, device, policy, type(model), dynamic_shapes),
        mesh=cast(DeviceMesh, mesh),
        backend=backend,
        pipeline=pipeline,
        verify=level,
        dump=directory,
        max_captures=max_captures,
        params=refs,
        storage=storage,
        aliases=tuple(aliases(model, refs)),
    )


def shard(model: nn.Module, runner: Runner) -> None:
    """Shard a module over the runner's mesh and let the runner run it, in place."""
    shard_module(model, runner.spec.params, runner.mesh, runner.spec.device, runner.storage)
    object.__setattr__(model, "__class__", sharded_class(type(model)))
    model.register_load_state_dict_pre_hook(shard_values)
    attach(model, runner)
    model.register_load_state_dict_post_hook(retie)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
