"""The compiled module: the user's class with another forward.

Everything else of the module, names and `isinstance` included, stays as it was.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from graphshard.checkpoint.initialize import shard_values
from graphshard.cost.costs import Costs
from graphshard.errors import ArgumentError
from graphshard.ir.entry import OF_UNITS, Entry, install_entries
from graphshard.ir.mesh import ExpertMeshes, Mesh
from graphshard.ir.param_table import ParamSpec, even_pieces
from graphshard.module.agreement import Agreement
from graphshard.module.fsdp_module import GraphshardFSDPModule, become_units, unit_class
from graphshard.module.program_compiler import Cache
from graphshard.module.runner import Runner
from graphshard.module.tracer import Tracer
from graphshard.options.options import Options
from graphshard.options.resolve import capture_spec, pipeline_of, profile_here
from graphshard.pipeline.observe import Recorder
from graphshard.runtime.device_graphs import CudaGraphs, DeviceGraphs
from graphshard.runtime.groups import make_groups, whole_mesh
from graphshard.runtime.peers import peers_of
from graphshard.runtime.replays import Arena, Replaying
from graphshard.runtime.shards import Storage, aliases, copy_of, param_refs, shard_module
from graphshard.utils.plain_values import MISSING
from graphshard.utils.text import brief


class CompiledModule(GraphshardFSDPModule):
    """Mixed into the user's class by `compile`; `forward` runs the captured program."""

    _graphshard: Runner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A compiled module of its own: shards are copied, programs are captured again, compiled regions are shared."""
        self._graphshard.unsharded.shown.hide()
        for param in self.parameters():
            if id(param) not in memo:
                memo[id(param)] = copy_of(param)
        twin = object.__new__(self.__class__)
        memo[id(self)] = twin
        for module in self.modules():
            memo.update((id(value), None) for value in module.__dict__.values() if isinstance(value, Entry))
        attributes = {name: value for name, value in self.__dict__.items() if name not in OF_UNITS}
        twin.__dict__.update(copy.deepcopy(attributes, memo))
        for module, copied in zip(self.modules(), twin.modules()):
            for name, value in module.__dict__.items():
                if isinstance(value, Entry):
                    copied.__dict__.pop(name, None)  # a class of the user's may copy something else
                    if value.replaced is not MISSING:
                        copied.__dict__[name] = copy.deepcopy(value.replaced, memo)
        attach(twin, self._graphshard.for_copy(twin))
        return twin


def compiled_module(model: object) -> CompiledModule:
    """The argument `model` of functions for compiled modules; raise ArgumentError if it is none."""
    if not isinstance(model, CompiledModule):
        raise ArgumentError(f"model: {brief(model)} is not compiled. Call graphshard.compile(model, mesh) first.")
    return model


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a compiled module: a subclass of the user's, whose forward has the signature of the user's."""

    @functools.wraps(cls.forward)
    def forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        if "_graphshard" not in self.__dict__:  # of a model that is uncompiled for now, called by what wraps this
            return cls.forward(self, *args, **kwargs)
        return self._graphshard.call(self, args, kwargs)

    # torch.compile of what calls the model compiles the rest of it.
    return unit_class(cls, CompiledModule, forward=torch.compiler.disable(forward))


def attach(module: nn.Module, runner: Runner) -> None:
    """Let a runner run the module, and each of its submodules that is called on its own."""
    module.__dict__["_graphshard"] = runner
    become_units(module, runner)
    install_entries(module, runner.call_entry)
    for path in runner.methods:
        install_method(module, path)


def install_method(module: nn.Module, path: str) -> None:
    """Let a method of a compiled module, or of a submodule of it, run by a program of its own."""
    assert isinstance(module, CompiledModule)
    prefix, _, method = path.rpartition(".")
    owner = module.get_submodule(prefix)
    owner.__dict__[method] = Entry(owner, prefix, module._graphshard.call_entry, method)


def retie(module: nn.Module, _keys: Any) -> None:
    """Tie parameters again that `load_state_dict(assign=True)` replaced one by one."""
    if isinstance(module, CompiledModule):  # it may have become a part of another model
        for alias in module._graphshard.aliases:
            alias.tie()


def class_of(root: nn.Module, is_model: bool, module: nn.Module) -> type:
    """Return the class that a module has in a compiled model.

    Args:
        root: of the trace.
        is_model: the root is the model, and not a submodule that is called on its own.
        module: the root, or a module of a unit.
    """
    if isinstance(module, GraphshardFSDPModule) or (module is root and not is_model):
        return type(module)
    return sharded_class(type(module)) if module is root else unit_class(type(module), GraphshardFSDPModule)


CudaGraphsChoice = bool | Literal["auto"]


def replaying(cuda_graphs: Any, options: Options, mesh: Mesh, device: torch.device) -> Replaying | None:
    """What replays runs of a model's regions; None if nothing does.

    Args:
        cuda_graphs: as given to `compile`.
        device: this rank's.

    Raises:
        ArgumentError: `cuda_graphs` is wrong, or does not fit the device.
    """
    if not (isinstance(cuda_graphs, bool) or (isinstance(cuda_graphs, str) and cuda_graphs == "auto")):
        raise ArgumentError(f"cuda_graphs must be True, False or 'auto', got {brief(cuda_graphs)}.")
    if cuda_graphs is False:
        return None
    graphs = graphs_of(device, cuda_graphs)
    if cuda_graphs is True:
        return Replaying(Arena(graphs, device), None)
    profile = profile_here(device, options.hardware)
    if profile is None:
        raise ArgumentError(
            "cuda_graphs='auto': no hardware profile of this GPU says what launches cost. Pass one as hardware=, or "
            "True or False."
        )
    return Replaying(Arena(graphs, device), Costs(profile, mesh=mesh, fused=options.backend != "eager"))


def graphs_of(device: torch.device, cuda_graphs: bool | str) -> DeviceGraphs:
    """How launches are captured on a device.

    Raises:
        ArgumentError: they cannot be.
    """
    if device.type != "cuda":
        raise ArgumentError(
            f"cuda_graphs={cuda_graphs!r}: there are none on {device.type}. Leave it out, or use a CUDA mesh."
        )
    return CudaGraphs(device)


def prepare(
    model: nn.Module,
    options: Options,
    mesh: Mesh,
    device: torch.device,
    known: Mapping[nn.Parameter, ParamSpec] = MappingProxyType({}),
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
