"""Python values that programs may depend on."""

from __future__ import annotations

import enum

import torch

# Immutable, and equal where they are the same.
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, enum.Enum, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
