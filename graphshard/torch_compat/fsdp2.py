"""State of FSDP2's `fully_shard`: what it has sharded, how, and how to take it off again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from graphshard.torch_compat.dtensor import dtensor_of

# Attributes by which Dynamo recognizes modules that FSDP2 manages; transformers goes by the model's first one, too.
MANAGED, _MARKS = "_is_fsdp_managed_module", ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def state_of(module: nn.Module) -> FSDPState | None:
    """Return FSDP2's state of a module on which `fully_shard` was called; None of other modules."""
    found = _module_state_mapping.get(module)
    state = None if found is None else found()
    return state if isinstance(state, FSDPState) else None


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """Return the groups of parameters that a state gathers together; torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


@dataclass(frozen=True)
class UnitSettings:
    """Settings of modules that `fully_shard` was called on together; those of a group if there are parameters."""

    modules: tuple[nn.Module, ...]
    mp_policy: Any
    groups: list[FSDPParamGroup]
    reshard_after_forward: bool | int | None = None
    all_reduce_hook: tuple[Any, Any] | None = None  # with its stream


def settings_of(state: FSDPState) -> UnitSettings:
    """Return the settings of a state; `reshard_after_forward` is None if FSDP2 decides."""
    modules, groups, again = state._modules, groups_of(state), None
    if not groups:
        return UnitSettings(modules, state._mp_policy, groups)
    group = groups[0]
    if not state._auto_reshard_after_forward:
        mesh, size = group.post_forward_mesh_info, getattr(group.mesh_info, "shard_mesh_size", 1)
        again = False if mesh is None else True if mesh.shard_mesh_size == size else int(mesh.shard_mesh_size)
    hook = None if group._all_reduce_hook is None else (group._all_reduce_hook, group._all_reduce_hook_stream)
    return UnitSettings(modules, state._mp_policy, groups, again, hook)


def is_idle(state: FSDPState) -> bool:
    """Return whether a module is neither in forward nor in backward, and has no gradients left to reduce."""
    groups = groups_of(state)
    left: list[torch.Tensor | None] = [group._partial_reduce_output for group in groups]
    for param in (param for group in groups for param in group.fsdp_params):
        whole = getattr(param, "_unsharded_param", None)  # from the first gather on
        left += [param.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return state._training_state == TrainingState.IDLE and all(gradient is None for gradient in left)


def places_of_param(param: FSDPParam) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules and attributes that hold a parameter."""
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names)


def has_spmd_types(param: FSDPParam) -> bool:
    """Return whether a parameter was a plain tensor with annotations of spmd_types; torch has them from 2.14 on."""
    return bool(getattr(param, "is_spmd_types", False))


def unsharded_like(param: FSDPParam, shard: nn.Parameter) -> nn.Parameter:
    """Return a parameter on the meta device like the one that `fully_shard` was given, as trainable as the shard.

    It has that one's annotations of spmd_types.
    """
    size, dtype = param._orig_size, shard.dtype
    local = torch.empty(size, dtype=dtype, device="meta")
    spec: Any = getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)
    whole: torch.Tensor = local
    if spec is not None and param.is_dtensor and not has_spmd_types(param):
        whole = dtensor_of(local, spec.mesh, spec.placements, spec.shape, spec.tensor_meta.stride)
    found = nn.Parameter(whole, requires_grad=shard.requires_grad)
    if has_spmd_types(param):
        record: Any = param
        sys.modules["spmd_types"].assert_type(found, record._spmd_init_local_type, record._spmd_partition_spec)
    return found


def same_sharding(first: DTensor, second: DTensor) -> bool:
    """Return whether two DTensors are cut in the same way over the same mesh."""
    return bool(first.device_mesh == second.device_mesh and first.placements == second.placements)


def remove_state(state: FSDPState) -> None:
    """Undo `fully_shard`: remove its hooks, class and marks. Parameters stay the shards that they are."""
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()
    for group in groups_of(state):
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
        for param in group.fsdp_params:
            param._post_load_hook_handle.remove()
    for module in state._modules:
        module.__class__ = type(module).__bases__[1]  # after FSDPModule, or the subclass of it that verl makes
        _module_state_mapping.pop(module, None)
        for key, entry in ((STATE_KEY, fully_shard.__wrapped__), (REGISTRY_KEY, fully_shard.__name__)):  # type: ignore[attr-defined]
            module.__dict__.get(key, {}).pop(entry, None)
        for inner in module.modules():
            for mark in _MARKS:
                inner.__dict__.pop(mark, None)


def put_state(state: FSDPState) -> None:
    """Let torch find the state of its modules again, whose attributes the caller has restored."""
    for module in state._modules:
        _module_state_mapping[module] = weakref.ref(state)
