"""Layout of a parameter over the tensor axes of the mesh, as its DTensor states it.

    colwise: nn.Linear(4, 8).weight     DTensorLayout((8, 4), (AxisPlacement("tp", 0),))
    norm: nn.LayerNorm(4).weight        DTensorLayout((4,), (AxisPlacement("tp", None),))

The passes see the piece of one tensor rank: with two ranks, the parameter table has shape (4, 4) for `colwise`. That
piece is sharded over the data ranks.

On FSDP2's full SPMD mesh the model's DTensors also name the data axes, along which they are replicated:

    distribute_tensor(weight, mesh, [Replicate(), Shard(0)])
        DTensorLayout((8, 4), (AxisPlacement("tp", 0),), around=("dp",))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class AxisPlacement:
    """Placement along one mesh axis: sharded along `dim`, or replicated if `dim` is None."""

    axis: str
    dim: int | None

    @property
    def placement(self) -> Placement:
        """The placement as DTensor has it."""
        return Replicate() if self.dim is None else Shard(self.dim)

    def __str__(self) -> str:
        """Return text such as "cut along dim 0 over tp"."""
        return f"{'replicated' if self.dim is None else f'cut along dim {self.dim}'} over {self.axis}"


@dataclass(frozen=True)
class PendingReduction:
    """Reduction along an axis that a gradient still needs, because each rank has a partial one.

    Attributes:
        axis: name of the axis.
        operation: "sum" or "avg".
        num_pieces: 1 for an all-reduce. For a reduce-scatter, the number of pieces along dim 0, one for each rank.
    """

    axis: str
    operation: str
    num_pieces: int = 1


@dataclass(frozen=True)
class DTensorLayout:
    """Distribution of a parameter over the tensor axes.

    Attributes:
        shape: of the whole parameter.
        cuts: a placement for each tensor axis, outermost first; a later one cuts the pieces of an earlier one.
        sums: reductions that the program leaves pending on its gradient, in order.
        around: names of the data axes that the model's DTensor also has, outside of the tensor axes.
    """

    shape: tuple[int, ...]
    cuts: tuple[AxisPlacement, ...]
    sums: tuple[PendingReduction, ...] = ()
    around: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the tensor axes."""
        return tuple(cut.axis for cut in self.cuts)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements on the tensor axes."""
        return tuple(cut.placement for cut in self.cuts)

    @property
    def found_on(self) -> tuple[str, ...]:
        """Names of all axes of the model's DTensor."""
        return (*self.around, *self.axes)

    @property
    def found_placed(self) -> tuple[Placement, ...]:
        """Placements on all axes of the model's DTensor."""
        return (*(Replicate() for _ in self.around), *self.placements)

    def summand(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a partial gradient that the pending reductions turn into one of `shape`."""
        return (math.prod(left.num_pieces for left in self.sums) * shape[0], *shape[1:]) if shape else ()

    def num_pieces(self, dim: int, sizes: Mapping[str, int]) -> int:
        """Return the number of pieces that a dim is cut into.

        Args:
            sizes: axis sizes by name. Axes that are missing (in a call of a submodule) count as 1.
        """
        return math.prod(sizes.get(cut.axis, 1) for cut in self.cuts if cut.dim == dim)

    def is_even(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all pieces have the same size."""
        return all(size % self.num_pieces(dim, sizes) == 0 for dim, size in enumerate(self.shape))
