"""What a DTensor says of a parameter: how it lies on the ranks of the mesh's tensor axis.

    colwise: nn.Linear(4, 8).weight     Split("tp", 0, (8, 4))       each of two ranks has 4 rows: a row of the table
                                                                     with shape (4, 4)
    norm: nn.LayerNorm(4).weight        Split("tp", None, (4,))      all ranks have the whole

To the passes a parameter is what one rank of the tensor axis has of it. That is what is sharded over the data ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Split:
    """How a parameter is distributed over the tensor axis.

    Attributes:
        axis: name of the mesh axis.
        dim: what it is cut along; None is not at all.
        shape: of the whole.
        partial: "sum" if the ranks' gradients are yet to be added up, as a program's may be; "" if each has its own.
    """

    axis: str
    dim: int | None
    shape: tuple[int, ...]
    partial: str = ""

    def is_even(self, size: int) -> bool:
        """Whether the pieces for so many ranks have one size."""
        return self.dim is None or self.shape[self.dim] % size == 0

    @property
    def placement(self) -> Placement:
        """On the tensor axis."""
        return Replicate() if self.dim is None else Shard(self.dim)
