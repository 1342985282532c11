"""What is gathered of a parameter that decides it itself: see `graphshard.ir.subclasses`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Shape and dtype of a tensor.
Layout = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Extension:
    """A parameter that decides itself what is gathered of it: by FSDP2's protocol.

    Attributes:
        sent: of each tensor that is gathered, what one rank sends.
        stored_bytes: of all tensors that a padded shard holds.
    """

    sent: tuple[Layout, ...]
    stored_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """What travels: the tensors' dtype if it is one, bytes otherwise."""
        dtypes = {dtype for _, dtype in self.sent}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def num_bytes(self) -> int:
        """Bytes that one rank sends."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.sent)
