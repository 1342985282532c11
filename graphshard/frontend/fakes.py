"""Fake parameters and buffers that a forward is traced with, where the program will run."""

from __future__ import annotations

import torch

from graphshard.ir.params import ParamTable
from graphshard.ir.program import Slot
from graphshard.ir.torch_internals import FakeTensorMode


def fake_state(
    slot: Slot, originals: dict[str, torch.Tensor], params: ParamTable, device: torch.device, fake_mode: FakeTensorMode
) -> torch.Tensor:
    """A full parameter in the compute dtype, or a buffer."""
    with fake_mode:
        if slot.kind == "param":
            row = params[slot.name]
            stride = row.stride_of(row.shape)
            full = torch.empty_strided(row.shape, stride, dtype=row.compute_dtype, device=device)
            full.requires_grad_(row.trainable)
            if row.trainable and row.grad_dtype != row.compute_dtype:
                full.grad_dtype = row.grad_dtype
            return full
        tensor = originals[slot.name]
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
