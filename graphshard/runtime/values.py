"""What the names in an installed program stand for: tensors of a module and of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import Node

from graphshard.ir.graph import base_of
from graphshard.ir.mesh import ExpertMeshes
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.sizes import given_sizes
from graphshard.ir.strides import strides_without_gaps
from graphshard.ir.subclasses import shard_in
from graphshard.runtime.groups import shard_index
from graphshard.runtime.shards import ParamRef, dense, padded_shard, shard_parts
from graphshard.runtime.unsharded import Unsharded
from graphshard.torch_compat.dtensor import sharded_like


class Values:
    """Of the slots of a program.

    Args:
        program: lowered and bound.
        module: the module that owns the buffers.
        params: where the parameters live.
        mesh: the mesh the parameters are sharded over.
        names: names of the parameters in the model by their names in the program.
        unsharded: parameters that were gathered by hand.
        experts: where parameters are that lie otherwise on the ranks.

    Attributes:
        params: by their names in the program.
    """

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        params: Sequence[ParamRef],
        mesh: DeviceMesh,
        names: Mapping[str, str],
        unsharded: Unsharded,
        experts: ExpertMeshes | None,
    ) -> None:
        self.params = {ref.row.name: ref for ref in params}
        self._program = program
        self._module = module
        self._names = names
        self._unsharded = unsharded
        self._rank = shard_index(mesh)
        self._expert_rank = shard_index(experts.data) if experts is not None else 0
        # Where buffers are, by name.
        self._owners: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {}
        forward = program.phases["forward"]
        self._updated = _updated_but_saved(forward)
        # What forward is given, each with the parameter whose padded shard it is.
        self._inputs = [(slot, self._sharded(slot)) for slot in forward.inputs]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """What forward is given in a call with these tensors."""
        return [
            padded_shard(ref.param, ref.row) if ref is not None else self._given(slot, tensors)
            for slot, ref in self._inputs
        ]

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[Slot, int]:
        """The dynamic sizes of a call."""
        return {Slot("size", name): size for name, size in given_sizes(self._program.sizes, tensors).items()}

    def _given(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> Any:
        """What forward is given: a copy of what is written to behind it, if backward must see what forward saw."""
        value = self.read(slot, tensors)
        if slot.kind == "input" and self._program.sizes and value.stride() != (strides := strides_without_gaps(value)):
            return value.new_empty_strided(value.shape, strides).copy_(value)
        return value.new_empty_strided(value.shape, value.stride()).copy_(value) if slot in self._updated else value

    def read(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> Any:
        """What a slot stands for in a call with these tensors."""
        if slot.kind == "param":
            ref = self.params[slot.name]
            return shard_in(ref.param.detach()) if ref.row.ignored else padded_shard(ref.param, ref.row)
        if slot.kind == "part":
            ref = self.params[slot.name]
            return shard_parts(ref.param, ref.row)[slot.index]
        if slot.kind == "gathered":
            return self._unsharded.read(self._names[slot.name])
        if slot.kind == "input":
            return tensors[int(slot.name)].detach()
        if slot.kind == "size":
            return self.sizes(tensors)[slot]
        return self.buffer(slot.name)

    def buffer(self, name: str) -> torch.Tensor:
        """A buffer of the module, or a constant of the program."""
        constant = self._program.constants.get(name)
        if constant is not None:
            return constant
        if name not in self._owners:  # modules are those that were captured, or the guard finds that they are not
            owner, _, key = name.rpartition(".")
            self._owners[name] = self._module.get_submodule(owner)._buffers, key
        buffers, key = self._owners[name]
        buffer = buffers[key]
        assert buffer is not None
        return buffer

    def _sharded(self, slot: Slot) -> ParamRef | None:
        """The parameter whose padded shard an input of forward is, if it is one, and not what is copied before."""
        plain = slot.kind == "param" and slot not in self._updated and not self.params[slot.name].row.ignored
        return self.params[slot.name] if plain else None

    def as_gradient(self, value: torch.Tensor, slot: Slot, ref: ParamRef | None) -> torch.Tensor:
        """What autograd is given of a value that backward has made; `ref` is the parameter that it is a gradient of."""
        if ref is None:
            return value
        param = ref.param
        return sharded_like(self.local_gradient(value, slot, param), param) if isinstance(param, DTensor) else value

    def local_gradient(self, value: torch.Tensor, slot: Slot, param: nn.Parameter) -> torch.Tensor:
        """A parameter's gradient without padding, of what backward has made."""
        row = self.params[slot.name].row
        if row.ignored or not isinstance(param, DTensor):
            return value
        if value.shape == param._local_tensor.shape:  # a view of all of it would cost as much as the rest
            return value
        local = row.without_padding(value, self._expert_rank if row.expert else self._rank)
        if row.memory_dim > 0 and local.shape != value.shape:
            local = dense(local, row, local.device)
        return local


def _updated_but_saved(forward: Phase) -> frozenset[Slot]:
    """Buffers and inputs that a step updates in place, and of which it saves the old value, or a view of it."""
    slots = forward.slot_of()
    results = list(zip(forward.results, forward.outputs, strict=True))
    updated = {Slot(slot.of, slot.name) for _, slot in results if slot.kind == "mutation" and slot.of}
    kept = [value for value, slot in results if slot.kind not in ("output", "mutation") and isinstance(value, Node)]
    return frozenset(updated.intersection(slots.get(base_of(value)) for value in kept))
