"""The two halves of `compile`: check the options and make a tracer; shard the module and let a runner run it.

Between them programs are captured, or read from a file. `export` needs the first half only, and no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from graphshard.cost.costs import Costs
from graphshard.ir.device_meshes import ExpertMeshes
from graphshard.ir.mesh import Mesh
from graphshard.ir.params import ParamRow, even_pieces
from graphshard.module.agreement import Agreement
from graphshard.module.compiled_classes import class_of
from graphshard.module.kept_program import Cache
from graphshard.module.runner import Runner
from graphshard.module.sharded_module import attach, retie, sharded_class
from graphshard.module.tracer import Tracer
from graphshard.options.options import Options
from graphshard.options.passes import pipeline_of, profile_here
from graphshard.options.table import capture_spec
from graphshard.pipeline.observe import Recorder
from graphshard.runtime.groups import make_groups, whole_mesh
from graphshard.runtime.peers import peers_of
from graphshard.runtime.replays import Replaying
from graphshard.runtime.shards import Storage, aliases, param_refs, shard_module
from graphshard.state.load_hook import shard_values


def prepare(
    model: nn.Module,
    options: Options,
    mesh: Mesh,
    device: torch.device,
    known: Mapping[nn.Parameter, ParamRow] = MappingProxyType({}),
    tensor: DeviceMesh | None = None,
    experts: ExpertMeshes | None = None,
    answers: Mapping[str, Any] | None = None,
    whole: DeviceMesh | None = None,
) -> Tracer:
    """Make the tracer of a module; nothing is changed.

    Args:
        mesh: the data axes, to shard and to replicate over.
        device: this rank's; where it is not here, what the program is for.
        known: parameters of parts of the module that are sharded already.
        tensor: the tensor axis, if there is one.
        experts: where parameters are that lie otherwise on the ranks.
        answers: of `shard_placement_fn`, if it was asked already.
        whole: the mesh of all axes, if parts of the module have DTensors on it.

    Raises:
        ArgumentError: an option does not fit the model or the mesh.
    """
    spec = capture_spec(model, options, mesh, device, known, tensor, experts, answers, whole)
    profile = profile_here(device, options.hardware)
    costs = Costs(profile, mesh=spec.mesh) if profile is not None else None
    return Tracer(
        spec=spec,
        params=tuple(param_refs(model, spec.params)),
        options=options,
        pipeline=pipeline_of(options, spec.mesh, costs),
        storage=_storage(options, device),
        class_of=class_of,
    )


def _storage(options: Options, device: torch.device) -> Storage:
    """Where shards are kept between steps."""
    if isinstance(options.offload_policy, CPUOffloadPolicy):
        return Storage(torch.device("cpu"), pinned=options.offload_policy.pin_memory and device.type != "cpu")
    return Storage(device)


def make_runner(
    model: nn.Module,
    tracer: Tracer,
    mesh: DeviceMesh,
    recorder: Callable[[str], Recorder | None] = lambda name: None,
    cache: Cache | None = None,
    replaying: Replaying | None = None,
) -> Runner:
    """The runner of a module on a mesh; all ranks must call this together.

    Args:
        mesh: the data axes.
        recorder: what records a program, by its name.
        cache: programs of earlier launches.
        replaying: what launches runs of regions by one launch each.
    """
    spec = tracer.spec
    whole = whole_mesh(mesh, spec.tensor)
    groups = make_groups(spec.mesh, whole, spec.experts)
    # Pieces of different sizes make programs of different sizes: those of ranks with the same pieces are compared.
    alike = whole if even_pieces(spec.mesh, [row for row in spec.params if not row.expert]) else mesh
    if spec.experts is not None and not even_pieces(spec.mesh, [row for row in spec.params if row.expert]):
        alike = spec.experts.data
    peers = peers_of(alike, groups.values())
    everyone = peers_of(whole, groups.values()) if alike is not whole else None
    return Runner(
        tracer=replace(tracer, mesh=mesh, spec=replace(spec, groups=groups)),
        mesh=mesh,
        groups=groups,
        agreement=Agreement(peers, everyone),
        recorder=recorder,
        aliases=tuple(aliases(model, tracer.params)),
        cache=cache,
        replaying=replaying,
    )


def shard(model: nn.Module, runner: Runner, known: Container[nn.Parameter] = ()) -> None:
    """Shard a module over the runner's mesh and let the runner run it, in place.

    Args:
        known: parameters of parts of the module that are sharded already.
    """
    spec = runner.tracer.spec
    shard_module(model, spec.params, runner.mesh, spec.device, runner.tracer.storage, spec.tensor, spec.experts, known)
    object.__setattr__(model, "__class__", sharded_class(type(model)))
    model.register_load_state_dict_pre_hook(shard_values)
    attach(model, runner)
    model.register_load_state_dict_post_hook(retie)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
