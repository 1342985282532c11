"""Parameters as DTensors: conversion of a module's parameters to shards, and the padded shards that the graph reads.

A rank stores its piece without gaps, followed by the padding where that is at the end in memory, so that the graph,
which is the same on every rank, can read the padded shard without a copy. The padding is never used.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphshard.errors import ParameterError
from graphshard.ir.mesh import ExpertMeshes, Mesh, axes_around, axes_of_mesh, seen_axes
from graphshard.ir.param_table import REPLACED, ParamSpec, ParamTable
from graphshard.ir.subclasses import carry_attributes, is_extended, is_subclass, parts_of, piece_of, rebuilt, shard_in
from graphshard.runtime.process_groups import shard_index
from graphshard.torch_compat.dtensor import dtensor_of, joined_mesh, sharded_like

# Attribute of a full parameter that a module shows: its shard.
SHARD_ATTRIBUTE = "_graphshard_shard"
# Attribute of a shard: its identity and that of its storage when it was checked.
_STORAGE = "_graphshard_storage"
# The remedy in errors about a model that has changed.
REBUILD = "Call graphshard.rebuild(model) after such a change: it shards what is new, and keeps the other parameters."


def shard_of(param: nn.Parameter | None) -> nn.Parameter | None:
    """Return the shard of a parameter that is shown gathered, or the parameter itself."""
    return param if param is None else param.__dict__.get(SHARD_ATTRIBUTE, param)


@dataclass(frozen=True)
class Storage:
    """Place of shards: the mesh's device or, offloaded, the host, pinned if they are copied from there."""

    device: torch.device
    pinned: bool = False


def shard_module(
    module: nn.Module,
    table: ParamTable,
    mesh: DeviceMesh,
    device: torch.device,
    storage: Storage,
    tensor: DeviceMesh | None = None,
    experts: ExpertMeshes | None = None,
    known: Container[nn.Parameter] = (),
) -> None:
    """Replace every parameter by its shard, and move the buffers to the device, in place.

    All shards are made before the first parameter is replaced. Meta tensors stay on the meta device. Parameters that
    are `known` are shards already, and stay: what is replicated does not look like one.
    """
    shards = {}
    for row in table:
        param = module.get_parameter(row.name)
        if not (row.ignored or param in known):
            data, axis = (experts.data, experts.axis) if row.expert and experts is not None else (mesh, tensor)
            shards[row.name] = _shard(param, row, data, axis, storage)
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, param in owner._parameters.items():
            if param is not None and table[f"{dot}{name}"].name in shards:
                owner._parameters[name] = shards[table[f"{dot}{name}"].name]
                param.__dict__[REPLACED] = f"{dot}{name}"  # other references to it train it no more
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)


@torch.no_grad()
def _shard(
    param: nn.Parameter, row: ParamSpec, mesh: DeviceMesh, tensor: DeviceMesh | None, storage: Storage
) -> nn.Parameter:
    rank, whole = shard_index(mesh), shard_in(param.detach())
    if is_subclass(whole):
        local = piece_of(whole, row.dim, row.num_shards, rank)
        local = local if param.is_meta else local.to(storage.device)
    elif param.is_meta:
        shape = row.local_shape(rank)
        local = torch.empty_strided(shape, row.stride_of(shape), dtype=row.dtype, device="meta")
    else:
        local = _stored(row.piece(whole, rank), row, storage)
    shard = nn.Parameter(as_dtensor(local, row, mesh, tensor), requires_grad=param.requires_grad)
    shard.__dict__[_STORAGE] = _storage_of(shard)
    return shard


def _storage_of(param: nn.Parameter) -> tuple[int, int]:
    return id(param), param.untyped_storage()._cdata


def _stored(piece: torch.Tensor, row: ParamSpec, storage: Storage) -> torch.Tensor:
    """Copy a rank's piece without gaps, with room for the padding if that is at the end in memory."""
    if row.memory_dim == 0 and row.shape:
        padded = _padded(piece, row, storage.device)
        return (padded.pin_memory() if storage.pinned else padded).narrow(row.dim, 0, piece.shape[row.dim])
    copied = dense(piece, row, storage.device)
    return copied.pin_memory() if storage.pinned else copied


def _padded(piece: torch.Tensor, row: ParamSpec, device: torch.device) -> torch.Tensor:
    """Copy a piece to the beginning of a padded shard; the rest is zero."""
    padded = torch.empty_strided(row.padded_shape, row.padded_stride, dtype=piece.dtype, device=device).zero_()
    padded.narrow(row.dim, 0, piece.shape[row.dim]).copy_(piece)
    return padded


def dense(piece: torch.Tensor, row: ParamSpec, device: torch.device) -> torch.Tensor:
    """Copy without gaps, in the parameter's memory order."""
    strides = row.stride_of(piece.shape)
    return torch.empty_strided(piece.shape, strides, dtype=piece.dtype, device=device).copy_(piece)


def as_dtensor(local: torch.Tensor, row: ParamSpec, mesh: DeviceMesh, tensor: DeviceMesh | None) -> DTensor:
    """Make a shard the DTensor that FSDP2 would make: on the tensor axis, too, if the parameter is split there."""
    shape, stride = torch.Size(row.whole_shape), row.stride_of(row.whole_shape)
    axes, mesh = Mesh.of(mesh), seen_axes(mesh)
    if row.split is not None and row.split.cuts and tensor is not None:
        own = axes_of_mesh(tensor, row.split.axes)
        axes, mesh = axes.with_tensors(own), joined_mesh(mesh, own)
    placements = axes.placements(row.dim if row.shape else None, row.split)
    if axes.only_replicates and row.split is not None and row.split.around:  # it stays where the model finds it
        mesh, placements = axes_around(mesh, row.split.found_on), row.split.found_placed
    # `from_local` would move a shard that is kept on the host to the mesh's GPU, and take a view of a subclass.
    return dtensor_of(local, mesh, placements, shape, stride)


def copy_of(param: nn.Parameter) -> nn.Parameter:
    """Copy a parameter as torch does; of a shard that decides what is gathered of it, all that it holds."""
    if not (is_extended(param) and isinstance(param, DTensor)):
        return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    shard = shard_in(param)
    local = rebuilt(shard, [part.clone() for part in parts_of(shard)])
    carry_attributes(shard, local)
    copied = nn.Parameter(sharded_like(local, param), requires_grad=param.requires_grad)
    assert isinstance(copied, DTensor)
    copied._local_tensor = local  # a Parameter takes a view, without what was set on it
    return copied


def padded_shard(param: torch.Tensor, row: ParamSpec) -> torch.Tensor:
    """Return the padded shard that the graph reads, in the parameter's memory if the padding is at its end.

    If the local tensor was replaced without room for padding (`to_empty`, `load_state_dict(assign=True)`), it gets a
    buffer with room, once. A short shard whose padding is between its elements is copied.
    """
    assert isinstance(param, DTensor)
    local = param._local_tensor
    whole = local.shape == row.padded_shape
    if whole and local.stride() == row.padded_stride:
        return local
    if row.memory_dim > 0 and not whole:
        return _padded(local, row, local.device)
    laid_out = local.numel() == 0 or local.stride() == row.stride_of(local.shape)
    end = (local.storage_offset() + torch.Size(row.padded_shape).numel()) * local.element_size()
    if not laid_out or local.untyped_storage().nbytes() < end:  # no room for the padding
        local = _stored(local, row, Storage(local.device, pinned=local.is_pinned()))
        param._local_tensor = local
    return local.as_strided(row.padded_shape, row.padded_stride)


@dataclass(frozen=True)
class ParamRef:
    """Place of a parameter; the parameter object itself may be replaced at any time.

    Attributes:
        name: in the model; `row` has the name in the module that is called.
        tied: further modules and attributes that hold it, in the order of the row's names.
    """

    row: ParamSpec
    owner: nn.Module
    attribute: str
    name: str
    tied: tuple[tuple[nn.Module, str], ...] = ()

    @property
    def param(self) -> nn.Parameter:
        """The present parameter, or its shard while it is shown gathered."""
        param = shard_of(self.owner._parameters[self.attribute])
        assert param is not None
        return param

    @property
    def places(self) -> tuple[tuple[nn.Module, str], ...]:
        """All modules and attributes that hold it."""
        return ((self.owner, self.attribute), *self.tied)

    def put(self, param: nn.Parameter, instead_of: nn.Parameter | None = None) -> None:
        """Let the modules hold another parameter; only where they hold `instead_of` now, if that is given."""
        for owner, attribute in self.places:
            if instead_of is None or owner._parameters.get(attribute) is instead_of:
                owner._parameters[attribute] = param

    def checked(self) -> nn.Parameter:
        """Return the present parameter, which must still be a shard of the one at `compile`."""
        param = shard_of(self.owner._parameters.get(self.attribute))
        if param is None:
            raise ParameterError(
                f"parameter {self.row.name} was removed, or registered under another name, after graphshard.compile. "
                f"{REBUILD}"
            )
        if param.shape != self.row.whole_shape:
            raise ParameterError(
                f"parameter {self.row.name} has shape {list(param.shape)}, it had {list(self.row.whole_shape)} when "
                f"graphshard.compile was called. {REBUILD}"
            )
        if not isinstance(param, DTensor) and not self.row.ignored:
            raise ParameterError(
                f"parameter {self.row.name} was replaced by a plain tensor. Assign a DTensor: torch.distributed.tensor."
                f"distribute_tensor(value, mesh, [Shard({self.row.dim})]), or copy into the one that is "
                f"there. {REBUILD}"
            )
        if isinstance(param, DTensor) and param.__dict__.get(_STORAGE) != _storage_of(param):
            self._check_data(param)
        if self.tied:
            self.check_tied(self.tied)
        return param

    def _check_data(self, param: nn.Parameter) -> None:
        """Raise ParameterError if a tensor was assigned to the parameter's `.data`; once if it was a DTensor.

        The assignment replaces only the storage of the DTensor itself, which is empty. Its shard stays, so the values
        are ignored.
        """
        # A DTensor has no memory except its shard's, but the offset of a shard that is a part of a larger tensor.
        if not self.row.ignored and param.data_ptr() != param.storage_offset() * param.element_size():
            raise ParameterError(
                f"parameter {self.row.name} is a DTensor, and assigning a plain tensor to its .data has damaged it "
                "without changing its values. Make the model again, and copy instead, within torch.no_grad(): "
                f"param.copy_(torch.distributed.tensor.distribute_tensor(value, mesh, [Shard({self.row.dim})]))."
            )
        found = _storage_of(param)
        last = param.__dict__.setdefault(_STORAGE, found)
        if last == found:
            return
        param.__dict__[_STORAGE] = found
        if last[0] == found[0]:  # else the parameter is a copy, with what another one has remembered
            raise ParameterError(
                f"parameter {self.row.name}: a DTensor was assigned to its .data, which changes nothing: torch keeps "
                "the values of the shard. Copy them instead, within torch.no_grad(): param.copy_(value)."
            )

    def check_tied(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Raise ParameterError if one of the places of the other names has another parameter."""
        for name, (owner, attribute) in zip(self.row.names[1:], places):
            if shard_of(owner._parameters.get(attribute)) is not self.param:
                raise ParameterError(
                    f"{name} was tied to {self.row.name} when graphshard.compile was called, and is not any more. Tie "
                    f"it again. {REBUILD}"
                )


def param_refs(module: nn.Module, table: ParamTable, names: Mapping[str, str] | None = None) -> Iterator[ParamRef]:
    """Yield references to the parameters of a table in its order; `names` are those in the model, if they differ."""
    for row in table:
        (owner, attribute), *tied = (place_of(module, name) for name in row.names)
        yield ParamRef(row, owner, attribute, names[row.name] if names is not None else row.name, tuple(tied))


def place_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module and the attribute of a parameter or buffer."""
    prefix, _, attribute = name.rpartition(".")
    return module.get_submodule(prefix), attribute
