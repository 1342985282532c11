"""Plain Python values: types that programs may depend on, and a sentinel for missing attributes."""

from __future__ import annotations

import enum

import torch


class Sentinel(enum.Enum):
    """Type of `MISSING`, which stands for a missing attribute where None is a value."""

    MISSING = "missing"


MISSING = Sentinel.MISSING

# Immutable types whose values compare by content.
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, enum.Enum, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
