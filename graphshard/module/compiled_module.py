"""The compiled module: the user's class with another forward, sharded parameters, and a runner.

`compile` has two halves: `make_tracer` changes nothing, `shard` changes the module. Between them programs are captured,
or read from a file. `export` needs the first half only, and no mesh.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.param_table import even_pieces, places_of
from graphshard.ir.submodule_entry_points import (
    OF_UNITS,
    EntryPoint,
    explained_attributes,
    install_entries,
    is_traced,
    present,
    replaced_by_entries,
)
from graphshard.module._agreement import Agreement
from graphshard.module._fsdp_module import GraphshardFSDPModule, become_units, unit_class
from graphshard.module.program_compiler import Cache
from graphshard.module.runner import Runner
from graphshard.module.tracer import Tracer
from graphshard.options.resolve import CompileRequest
from graphshard.pipeline.instrumentation import Recorder
from graphshard.runtime.cuda_graphs import CudaGraphs, ModelGraphs
from graphshard.runtime.parameter_writes import watch_optimizers
from graphshard.runtime.peers import peers_of
from graphshard.runtime.process_groups import log_priorities, make_groups, whole_mesh
from graphshard.runtime.shards import copy_of, param_refs, shard_module
from graphshard.utils.source_lines import MISSING
from graphshard.utils.text import brief, users_class

CudaGraphsChoice = bool | Literal["auto"]


class CompiledModule(GraphshardFSDPModule):
    """A compiled model: an instance of the model's class and of this one, with FSDP2's methods.

    Annotate variables with it: attributes of the model's class have type Any.
    """

    _graphshard: Runner

    if TYPE_CHECKING:

        def no_sync(self) -> AbstractContextManager[None]:
            """Accumulate gradients without communication within the block."""

        def __getattr__(self, name: str) -> Any:
            """An attribute of the model's class."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Refuse DistributedDataParallel, which reads this first."""
        if sys._getframe(1).f_code is nn.parallel.DistributedDataParallel.__init__.__code__:
            raise UnsupportedError(
                f"DistributedDataParallel around a compiled {users_class(self).__name__}: graphshard reduces gradients "
                "itself. Leave DistributedDataParallel out, and train the compiled model."
            )
        raise AttributeError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another compiled module: shards are copied, programs captured again, compiled regions shared."""
        self._graphshard.unsharded.shown.hide()
        for param in self.parameters():
            if id(param) not in memo:
                memo[id(param)] = copy_of(param)
        twin = object.__new__(self.__class__)
        memo[id(self)] = twin
        for module in self.modules():
            memo.update((id(value), None) for value in module.__dict__.values() if isinstance(value, EntryPoint))
        attributes = {name: value for name, value in self.__dict__.items() if name not in OF_UNITS}
        twin.__dict__.update(copy.deepcopy(attributes, memo))
        for module, copied in zip(self.modules(), twin.modules()):
            for name, value in replaced_by_entries(module):
                copied.__dict__.pop(name, None)  # the user's class may copy something else
                if value is not MISSING:
                    copied.__dict__[name] = copy.deepcopy(value, memo)
        attach(twin, self._graphshard.for_copy(twin))
        return twin


_RETURNED = "graphshard.compile returns the model itself, not a wrapper with the model in {}. Use the model."
# Attributes that wrappers of models have, and the remedy.
_WRAPPER_ATTRIBUTES = {
    **{name: _RETURNED.format(name) for name in ("module", "_orig_mod", "_fsdp_wrapped_module")},
    "summon_full_params": "Read full parameters with param.full_tensor(), or within graphshard.unsharded(model).",
}


def _missing_attribute(self: CompiledModule, name: str) -> Any:
    """Look an attribute up as the user's class does; if there is none, add the remedy to the error."""
    try:
        return super(CompiledModule, self).__getattr__(name)
    except AttributeError as error:
        if name in _WRAPPER_ATTRIBUTES and error.args:
            error.args = (f"{error.args[0]}. {_WRAPPER_ATTRIBUTES[name]}",)
        raise


if not TYPE_CHECKING:
    CompiledModule.__getattr__ = explained_attributes[CompiledModule] = _missing_attribute


def compiled_module(model: object) -> CompiledModule:
    """Return a model that is compiled; raise ArgumentError if it is not."""
    if not isinstance(model, CompiledModule):
        raise ArgumentError(f"model: {brief(model)} is not compiled. Call graphshard.compile(model, mesh) first.")
    return model


def compiled_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a compiled module: a subclass of the user class, whose forward has the same signature."""

    @functools.wraps(cls.forward)
    def forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or "_graphshard" not in self.__dict__:  # called by what replaces it; of a model in `uncompiled`
            return cls.forward(self, *args, **kwargs)
        return call(self, args, kwargs)

    # torch.compile of what calls the model compiles the rest of it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(self: CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "forward" in self.__dict__ and self._graphshard.split_state.is_open(self):
            return cls.forward(self, *args, **kwargs)  # what replaces it runs in Python
        with present(self, "forward", MISSING):
            return self._graphshard.call(self, args, kwargs)

    return unit_class(cls, CompiledModule, forward=forward)


def class_of(root: nn.Module, is_model: bool, module: nn.Module) -> type:
    """Return the class that a trace gives its root, or a module of a unit, before the model is compiled."""
    if isinstance(module, GraphshardFSDPModule) or (module is root and not is_model):
        return type(module)
    return compiled_class(type(module)) if module is root else unit_class(type(module), GraphshardFSDPModule)


def make_tracer(request: CompileRequest) -> Tracer:
    """Return the tracer of a module; nothing is changed."""
    return Tracer(
        spec=request.spec,
        params=tuple(param_refs(request.model, request.spec.params)),
        options=request.options,
        pipeline=request.pipeline,
        storage=request.storage,
        costs=request.costs,
        class_of=class_of,
    )


def make_runner(
    tracer: Tracer,
    mesh: DeviceMesh,
    recorder: Callable[[str], Recorder | None] = lambda name: None,
    cache: Cache | None = None,
    replaying: ModelGraphs | None = None,
) -> Runner:
    """Return the runner of a module on a mesh of data axes; all ranks must call this together."""
    spec = tracer.spec
    whole = whole_mesh(mesh, spec.tensor)
    groups = make_groups(spec.mesh, whole, spec.experts)
    log_priorities(mesh.device_type, *dict.fromkeys(groups.values()))
    # Pieces of different sizes make programs of different sizes: only ranks with the same pieces are compared.
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
        cache=cache,
        replaying=replaying,
    )


def shard(model: nn.Module, runner: Runner, known: Container[nn.Parameter] = (), *, again: bool = False) -> None:
    """Shard a module over the runner's mesh and let the runner run it, in place; `again`, if another one ran it."""
    spec = runner.tracer.spec
    watch_optimizers()
    shard_module(model, spec.params, runner.mesh, spec.device, runner.tracer.storage, spec.tensor, spec.experts, known)
    object.__setattr__(model, "__class__", compiled_class(type(model)))
    attach(model, runner)
    # Hooks of modules run after their parents', and after the user's, who may rename and join values in them.
    for module in model.modules():
        known_hooks = (getattr(each, "hook", None) for each in module._load_state_dict_pre_hooks.values())
        if (module is model or module._parameters) and _shard_values not in known_hooks:
            module.register_load_state_dict_pre_hook(_shard_values)
    if _retie not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(_retie)


def attach(module: nn.Module, runner: Runner) -> None:
    """Let a runner run the module, and each of its submodules that is called directly."""
    module.__dict__["_graphshard"] = runner
    become_units(module, runner)
    install_entries(module, runner.call_entry)
    for path in runner.methods:
        install_method(module, path)


def install_method(module: nn.Module, path: str) -> None:
    """Let a method of a compiled module, or of a submodule, run by a separate program."""
    assert isinstance(module, CompiledModule)
    prefix, _, method = path.rpartition(".")
    owner = module.get_submodule(prefix)
    owner.__dict__[method] = EntryPoint(owner, prefix, module._graphshard.call_entry, method)


# Prefixes of names that wrappers add, and the wrappers.
_OF_WRAPPERS = {
    "module.": "DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module.": "checkpoint_wrapper",
}


def _check_prefixes(module: nn.Module, state_dict: dict[str, Any]) -> None:
    """Raise ArgumentError if names of a state dict are the model's but for the prefix of a wrapper.

    With `strict=False` torch would load nothing, and say so in a result that few look at.
    """
    missing = [name for name in places_of(module) if name not in state_dict]
    for prefix, wrapper in _OF_WRAPPERS.items():
        added = re.compile(rf"(?:^|(?<=\.)){re.escape(prefix)}")
        known = {added.sub("", name): name for name in state_dict if prefix in name} if missing else {}
        found = next((name for name in missing if name in known), None)
        if found is not None:
            raise ArgumentError(
                f"state_dict has {known[found]!r} and not {found!r}: it is of a model within {wrapper}, which adds "
                f"{prefix!r} to names. Nothing was loaded. Remove it: model.load_state_dict({{name.replace({prefix!r}, "
                "''): value for name, value in state_dict.items()})."
            )


@torch.no_grad()
def _shard_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace values for sharded parameters by shards of them, before `load_state_dict` copies any.

    FSDP2 takes only DTensors with the parameter's placements: a full tensor is an error of DTensor's `copy_`, and with
    `assign=True` it breaks the model. Here a full tensor, the same on every rank, is cut without communication; the
    piece is a copy, so that an assigned parameter does not keep the full tensor alive. Other placements are
    redistributed, a collective. A value of another shape is left to torch, which reports all of them.
    """
    if not prefix:  # before any module has loaded
        _check_prefixes(module, state_dict)
    for name, param in places_of(module).items():
        key, value = f"{prefix}{name}", state_dict.get(f"{prefix}{name}")
        if not (isinstance(param, DTensor) and isinstance(value, torch.Tensor) and value.shape == param.shape):
            continue
        if not isinstance(value, DTensor):
            value = value.detach()
            state_dict[key] = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        elif value.device_mesh != param.device_mesh:
            raise ArgumentError(
                f"state_dict[{key!r}] is a DTensor on {value.device_mesh}, but the parameter is on "
                f"{param.device_mesh}. Pass its full_tensor(), or load through torch.distributed.checkpoint, which "
                "reshards."
            )
        elif value.placements != param.placements:
            state_dict[key] = value.redistribute(placements=param.placements)


def _retie(module: nn.Module, _keys: Any) -> None:
    """Tie parameters again that `load_state_dict(assign=True)` replaced one by one."""
    if isinstance(module, CompiledModule):  # it may have become a part of another model
        for ref in module._graphshard.tracer.params:
            ref.put(ref.param)


def replaying_of(cuda_graphs: Any, request: CompileRequest) -> ModelGraphs | None:
    """Return what replays regions as CUDA graphs; None if nothing does."""
    if not (isinstance(cuda_graphs, bool) or (isinstance(cuda_graphs, str) and cuda_graphs == "auto")):
        raise ArgumentError(f"cuda_graphs must be True, False or 'auto', got {brief(cuda_graphs)}.")
    if cuda_graphs is False:
        return None
    device = request.spec.device
    graphs = graphs_of(device, cuda_graphs)
    if cuda_graphs is True:
        return ModelGraphs(graphs, device, None)
    if request.costs is None:
        raise ArgumentError(
            "cuda_graphs='auto': no hardware profile of this GPU says what launches cost. Pass one as hardware=, or "
            "True or False."
        )
    return ModelGraphs(graphs, device, replace(request.costs, fused=request.options.backend != "eager"))


def graphs_of(device: torch.device, cuda_graphs: bool | str) -> CudaGraphs:
    """Return what captures launches on a device."""
    if device.type != "cuda":
        raise ArgumentError(
            f"cuda_graphs={cuda_graphs!r}: there are none on {device.type}. Leave it out, or use a CUDA mesh."
        )
    return CudaGraphs(device)
