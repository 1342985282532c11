"""Parameters as DTensors: how a module's parameters become shards, and how a shard meets the graph.

A rank stores its rows in a buffer of the padded shard's size, so that the graph, which is the same on every rank,
can read the padded shard without a copy. What lies in the padding is never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from graphshard.params import ParamRow, ParamTable


def shard_module(module: nn.Module, table: ParamTable, mesh: DeviceMesh, device: torch.device) -> None:
    """Replace every parameter by its shard, and move the buffers to the device, in place.

    All shards are made before the first parameter is replaced. Meta tensors stay on the meta device.
    """
    rank = mesh.get_local_rank()
    shards = {row.name: _shard(module.get_parameter(row.name), row, mesh, rank, device) for row in table}
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, param in owner._parameters.items():
            if param is not None:
                owner._parameters[name] = shards[table[f"{dot}{name}"].name]
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)


@torch.no_grad()
def _shard(param: nn.Parameter, row: ParamRow, mesh: DeviceMesh, rank: int, device: torch.device) -> nn.Parameter:
    start, length = row.local_rows(rank)
    if param.is_meta:
        local = torch.empty(row.local_shape(rank), dtype=row.dtype, device="meta")
    else:
        local = _padded(param.detach()[start : start + length], row, device)
    return nn.Parameter(as_dtensor(local, row, mesh), requires_grad=param.requires_grad)


def _padded(rows: torch.Tensor, row: ParamRow, device: torch.device) -> torch.Tensor:
    """A copy of some rows in a buffer that has room for the padded shard."""
    buffer = torch.zeros(row.padded_shape, dtype=rows.dtype, device=device)
    local = buffer[: rows.shape[0]]
    local.copy_(rows)
    return local


def as_dtensor(local: torch.Tensor, row: ParamRow, mesh: DeviceMesh) -> DTensor:
    """A shard (of a parameter or its gradient) as the DTensor that FSDP2 would make."""
    return DTensor.from_local(local, mesh, (Shard(0),), run_check=False, shape=torch.Size(row.shape), stride=row.stride)


@torch.no_grad()
def padded_shard(param: nn.Parameter, row: ParamRow) -> torch.Tensor:
    """The padded shard that the graph reads, sharing memory with the parameter.

    Whoever replaced the local tensor (`to_empty`, `load_state_dict(assign=True)`) may have left no room behind
    it; it then gets a buffer with room, once.
    """
    assert isinstance(param, DTensor)
    local = param.to_local()
    if tuple(local.shape) == row.padded_shape and local.is_contiguous():
        return local
    if not (local.is_contiguous() and _has_room(local, row)):
        local = _padded(local, row, local.device)
        param._local_tensor = local
    return local.as_strided(row.padded_shape, row.stride)


def _has_room(local: torch.Tensor, row: ParamRow) -> bool:
    numel = torch.Size(row.padded_shape).numel()
    return local.untyped_storage().nbytes() >= (local.storage_offset() + numel) * local.element_size()


@dataclass(frozen=True)
class ParamRef:
    """Where a parameter lives; the parameter object itself may be replaced at any time."""

    row: ParamRow
    owner: nn.Module
    attribute: str

    @property
    def param(self) -> nn.Parameter:
        """The parameter as it is now."""
        param = self.owner._parameters[self.attribute]
        assert param is not None
        return param


def param_refs(module: nn.Module, table: ParamTable) -> Iterator[ParamRef]:
    """References to the parameters of a table in its order."""
    for row in table:
        prefix, _, attribute = row.name.rpartition(".")
        yield ParamRef(row, module.get_submodule(prefix), attribute)
