"""Models that FSDP2 has sharded, taken over: `compile` keeps their shards, units and settings.

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=8))
    graphshard.compile(model)                           # each rank has read its shards, and keeps them

So a library that calls `fully_shard` and loads into shards needs no change. FSDP2's states decide the arguments of
`compile`, which sees parameters on the meta device. The parameters of before, the same objects, then take the places of
the shards that it has made: an optimizer of them may exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.subclasses import is_subclass
from graphshard.ir.submodule_entry_points import is_compiled
from graphshard.ir.units import exact_units
from graphshard.module.compiled_module import compiled_module
from graphshard.torch_compat import fsdp2
from graphshard.torch_compat.dtensor import ShardPlacementResult
from graphshard.utils.argument_validation import is_int

# Arguments of `compile` that FSDP2 has decided.
_DECIDED = (
    "dp_mesh_dims", "ignored_params", "mp_policy", "offload_policy", "reshard_after_forward", "shard_placement_fn",
    "units",
)  # fmt: skip


def sharded_by_fsdp2(model: object) -> TypeGuard[nn.Module]:
    """Return whether torch's `fully_shard` was called on a module."""
    return isinstance(model, nn.Module) and not is_compiled(model) and fsdp2.state_of(model) is not None


def compile_sharded(model: nn.Module, compile: Callable[..., nn.Module], given: dict[str, Any]) -> None:
    """Call `compile` with `given` and FSDP2's settings for a model, and let the model keep its shards.

    If that fails, the model is FSDP2's as before.
    """
    kind = type(model).__name__.removeprefix("FSDP")
    if known := [name for name in _DECIDED if given.get(name) is not None]:
        raise ArgumentError(
            f"{known[0]}: {kind} is sharded by FSDP2, which decided it. Give it to torch's fully_shard, or leave "
            "fully_shard out and compile the plain module."
        )
    units = _units_of(model, kind)
    shards = dict(nn.Module.named_parameters(model))
    before = [(module, type(module), _attributes(module)) for module in model.modules()]
    try:
        decided = _arguments(model, units, _put_whole(model, units))
        arguments = {**given, **decided, "mesh": given["mesh"] or decided["mesh"]}
        for unit in units:
            fsdp2.remove_state(unit.state)
        compile(model, **arguments)
        setattr(model, fsdp2.MANAGED, True)  # transformers looks for it when it accumulates and generates
        _put_shards(model, shards)
        for unit in units:
            unit.choose(arguments["reshard_after_forward"])
    except BaseException:
        for module, cls, attributes in before:
            _restore(module, cls, attributes)
        for unit in units:
            fsdp2.put_state(unit.state)
        raise


class FSDP2Unit:
    """Modules that one call of FSDP2's `fully_shard` was for, by their names in the model, and its settings."""

    def __init__(self, state: Any) -> None:
        self.state, self.settings = state, fsdp2.settings_of(state)
        self.groups, self.reshard = self.settings.groups, self.settings.reshard_after_forward
        self.paths: list[str] = []

    def choose(self, reshard: bool | int | None) -> None:
        """Make the choices of FSDP2's methods for a unit of the compiled model; `reshard` is the whole model's."""
        module: Any = self.settings.modules[0]
        if self.reshard is not reshard and not is_int(self.reshard):
            module.set_reshard_after_forward(bool(self.reshard), recurse=False)
        for group in self.groups[:1]:
            if group.gradient_divide_factor is not None:
                module.set_gradient_divide_factor(group.gradient_divide_factor)
            if group.force_sum_reduction_for_comms:
                module.set_force_sum_reduction_for_comms(True)
            if not group.reduce_grads:
                module.set_requires_gradient_sync(False, recurse=False)
            elif not group.all_reduce_grads:
                module.set_requires_all_reduce(False, recurse=False)
            if not group.reshard_after_backward:
                module.set_reshard_after_backward(False, recurse=False)
        if self.settings.all_reduce_hook is not None:
            hook, stream = self.settings.all_reduce_hook
            module.set_all_reduce_hook(hook, stream=stream)


def _units_of(model: nn.Module, kind: str) -> list[FSDP2Unit]:
    """Return the units of a model, all of whose parameters are shards then."""
    units: dict[int, FSDP2Unit] = {}
    for path, module in model.named_modules():
        state = fsdp2.state_of(module)
        if state is not None:
            units.setdefault(id(state), FSDP2Unit(state)).paths.append(path)
    cannot = f"model: {kind} is sharded by FSDP2 and cannot be taken over"
    for unit in units.values():
        if not fsdp2.is_idle(unit.state):
            raise ArgumentError(
                f"{cannot}: {unit.paths[0] or 'it'} is within a step, or holds gradients that were not reduced. Call "
                "compile between two steps."
            )
    for unit in units.values():
        for module in unit.settings.modules:
            module.reshard()  # type: ignore[operator]
    for name, param in nn.Module.named_parameters(model):
        if isinstance(param, DTensor) and is_subclass(param._local_tensor):
            raise UnsupportedError(
                f"{cannot}: parameter {name} is a {type(param._local_tensor).__name__}, a tensor subclass. Leave "
                "fully_shard out and compile the plain module."
            )
    return list(units.values())


def _put_whole(model: nn.Module, units: list[FSDP2Unit]) -> list[tuple[nn.Parameter, Any]]:
    """Replace shards by full parameters on the meta device; return these with FSDP2's records of them."""
    records = {
        (id(owner), name): record
        for unit in units
        for group in unit.groups
        for record in group.fsdp_params
        for owner, name in fsdp2.places_of_param(record)
    }
    places = [(owner, name) for owner in model.modules() for name in owner._parameters]
    whole: dict[int, tuple[nn.Parameter, Any]] = {}
    for owner, name in places:
        shard, record = owner._parameters[name], records.get((id(owner), name))
        if shard is not None and record is not None:
            whole.setdefault(id(shard), (fsdp2.unsharded_like(record, shard), record))
    for owner, name in places:  # FSDP2 has no record of a name that was tied later
        found = whole.get(id(owner._parameters[name]))
        if found is not None:
            owner._parameters[name] = found[0]
    return list(whole.values())


def _arguments(model: nn.Module, units: list[FSDP2Unit], whole: list[tuple[nn.Parameter, Any]]) -> dict[str, Any]:
    """Return the arguments of `compile` that do what FSDP2's states say."""
    root = next((unit for unit in units if "" in unit.paths and unit.groups), units[0])
    group = next(group for unit in (root, *units) for group in unit.groups)
    info, named = group.mesh_info, [(unit, unit.paths) for unit in units if unit.groups and "" not in unit.paths]
    dims = getattr(info, "dp_mesh_dims", None)
    chosen = {id(param): _placement(record, info) for param, record in whole}
    sizes = {unit.reshard for unit in units if is_int(unit.reshard)}
    if len(sizes) > 1 or (sizes and any(unit.reshard in (None, True) for unit, _ in named)):
        raise UnsupportedError(
            f"reshard_after_forward={max(sizes)} of one unit, and another gathers again among other ranks. Give all "
            "calls of fully_shard one number, or False."
        )
    patterns, policies = exact_units({tuple(paths): unit.settings.mp_policy for unit, paths in named})
    known = {id(param) for param, _ in whole}
    return {
        "mesh": info.mesh if dims is None else info.spmd_mesh,
        "dp_mesh_dims": dims,
        "units": patterns,
        "mp_policy": {"": root.settings.mp_policy, **policies},
        "reshard_after_forward": next(iter(sizes), None),
        "offload_policy": group.offload_policy if isinstance(group.offload_policy, CPUOffloadPolicy) else None,
        "ignored_params": [param for param in model.parameters() if id(param) not in known],
        "shard_placement_fn": lambda param: chosen[id(param)],
    }


def _placement(record: Any, info: Any) -> Any:
    """Return what `shard_placement_fn` returns for a parameter that FSDP2 has a record of."""
    placement = Shard(record.fsdp_placement.dim)
    if ShardPlacementResult is None or record.mesh_info.mesh == info.mesh:
        return placement
    return ShardPlacementResult(placement=placement, mesh_info=record.mesh_info)


def _put_shards(model: nn.Module, shards: dict[str, nn.Parameter]) -> None:
    """Let a compiled model hold FSDP2's shards; raise ArgumentError if its shards are others."""
    for ref in compiled_module(model)._graphshard.tracer.params:
        ours, theirs = ref.param, shards[ref.row.name]
        if isinstance(ours, DTensor) and not (isinstance(theirs, DTensor) and fsdp2.same_sharding(ours, theirs)):
            where = f"{theirs.placements} on {theirs.device_mesh}" if isinstance(theirs, DTensor) else "a plain tensor"
            raise ArgumentError(
                f"parameter {ref.row.name} is {where} by FSDP2, and would be {ours.placements} on {ours.device_mesh}. "
                "Leave mesh out, which FSDP2 decided, and replace no parameter after fully_shard."
            )
        ref.put(theirs)


def _attributes(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Return a module's attributes, with copies of dicts, such as parameters and hooks."""
    return [(name, value, dict(value) if isinstance(value, dict) else None) for name, value in vars(module).items()]


def _restore(module: nn.Module, cls: type, attributes: list[tuple[str, Any, Any]]) -> None:
    """Give a module the class and the attributes that it had."""
    object.__setattr__(module, "__class__", cls)
    for _, value, entries in attributes:
        if entries is not None:
            value.clear()
            value.update(entries)
    module.__dict__.clear()
    module.__dict__.update((name, value) for name, value, _ in attributes)
