"""What a DTensor says of a parameter: how it lies on the ranks of the mesh's tensor axes.

    colwise: nn.Linear(4, 8).weight     Split((8, 4), (Cut("tp", 0),))      each of two ranks has 4 rows: a row of the
                                                                            table with shape (4, 4)
    norm: nn.LayerNorm(4).weight        Split((4,), (Cut("tp", None),))     all ranks have the whole

To the passes a parameter is what one rank of the tensor axes has of it. That is what is sharded over the data ranks.

On FSDP2's full SPMD mesh the model finds DTensors that are on the data axes, too, with the same on all ranks of these:

    distribute_tensor(weight, mesh, [Replicate(), Shard(0)])    Split((8, 4), (Cut("tp", 0),), around=("dp",))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Cut:
    """How a parameter, or a piece of it, lies along one axis of the mesh.

    Attributes:
        axis: its name.
        dim: what it is cut along; None is not at all.
    """

    axis: str
    dim: int | None

    @property
    def placement(self) -> Placement:
        """On the axis."""
        return Replicate() if self.dim is None else Shard(self.dim)

    def __str__(self) -> str:
        """ "cut along dim 0 over tp"."""
        return f"{'replicated' if self.dim is None else f'cut along dim {self.dim}'} over {self.axis}"


@dataclass(frozen=True)
class Sum:
    """What ranks of an axis are yet to do about a gradient of which each has a part.

    Attributes:
        axis: its name.
        operation: "sum" or "avg".
        num_pieces: of a gradient that is cut along the axis, too: each rank gets its own of so many, which lie one
            behind another along the first dim. 1 is the same for all.
    """

    axis: str
    operation: str
    num_pieces: int = 1


@dataclass(frozen=True)
class Split:
    """How a parameter is distributed over tensor axes.

    Attributes:
        shape: of the whole.
        cuts: an entry for each axis that it is on, outermost first: a later one cuts the pieces of those before.
        sums: what is left to be done about its gradients, as a program's may be, in this order.
        around: names of the data axes that the model finds it on, too, outside of the others.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    sums: tuple[Sum, ...] = ()
    around: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(cut.axis for cut in self.cuts)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """On the tensor axes."""
        return tuple(cut.placement for cut in self.cuts)

    @property
    def found_on(self) -> tuple[str, ...]:
        """Names of all axes that the model finds it on."""
        return (*self.around, *self.axes)

    @property
    def found_placed(self) -> tuple[Placement, ...]:
        """On these."""
        return (*(Replicate() for _ in self.around), *self.placements)

    def summand(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what `sums` make a gradient of this shape of."""
        return (math.prod(left.num_pieces for left in self.sums) * shape[0], *shape[1:]) if shape else ()

    def num_pieces(self, dim: int, sizes: Mapping[str, int]) -> int:
        """How many pieces a dim is cut into.

        Args:
            sizes: of the axes, by name; a call for a part of a model need not have them.
        """
        found = 1
        for cut in self.cuts:
            found *= sizes.get(cut.axis, 1) if cut.dim == dim else 1
        return found

    def is_even(self, sizes: Mapping[str, int]) -> bool:
        """Whether all pieces have one size."""
        return all(size % self.num_pieces(dim, sizes) == 0 for dim, size in enumerate(self.shape))
