"""Owners of matrices: one rank for each, and the all-to-alls between the shards of all ranks and the owners."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from graphshard.ir.param_table import chunk_range
from graphshard.torch_compat.dtensor import cuts_of, flattened_mesh

# Part of a tensor: start and length along each dim.
Box = tuple[tuple[int, int], ...]


@functools.lru_cache(1024)
def boxes_of(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> tuple[Box, ...]:
    """Return which part of a tensor of `shape` each rank of a mesh holds, in the order of the mesh."""
    cuts = cuts_of(placements)
    found = []
    for place in itertools.product(*(range(size) for size in mesh)):
        box = [(0, size) for size in shape]
        for axis, dim in cuts:
            start, length = box[dim]
            offset, length = chunk_range(length, mesh[axis], place[axis])
            box[dim] = start + offset, length
        found.append(tuple(box))
    return tuple(found)


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of a part of a tensor."""
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@dataclass(frozen=True, eq=False)
class Owned:
    """A tensor with an owner, or some of the matrices of a batch.

    Attributes:
        shape: of the whole tensor.
        mesh: sizes of the axes of the mesh that it is placed on.
        owner: rank in the order of the mesh.
        start: the first matrix; 0 if the tensor is not a batch.
        length: the number of matrices, or of rows if the tensor is not a batch.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    owner: int
    start: int
    length: int

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Return the shape of what the owner has."""
        return (self.length, *self.shape[1:]) if self.shape else ()

    @property
    def rows(self) -> slice:
        """Return the owner's matrices of the batch."""
        return slice(self.start, self.start + self.length)

    def sends(self, rank: int) -> bool:
        """Return whether a rank sends the owner its part: it is in the owner's replica."""
        return all(rank // inner % size == self.owner // inner % size for inner, size in self._copies)

    @functools.cached_property
    def _copies(self) -> list[tuple[int, int]]:
        """Return the axes whose ranks hold the same: the ranks between two neighbors, and the size."""
        cut = {axis for axis, _ in cuts_of(self.placements)}
        return [(math.prod(self.mesh[axis + 1 :]), size) for axis, size in enumerate(self.mesh) if axis not in cut]

    def holder(self) -> int | None:
        """Return the first rank that holds all of it; None if its parts are on several."""
        boxes = boxes_of(self.shape, self.mesh, self.placements)
        return next((rank for rank, box in enumerate(boxes) if self._covers(box)), None)

    def _covers(self, box: Box) -> bool:
        """Return whether a part of the whole tensor includes the owner's."""
        rest = [(0, size) for size in self.shape[1:]]
        return list(box[1:]) == rest and self._rows(box) == (self.start, self.start + self.length)

    def place(self, rank: int) -> Box:
        """Return which part of the owner's tensor a rank holds."""
        box = boxes_of(self.shape, self.mesh, self.placements)[rank]
        if not box:
            return ()
        first, last = self._rows(box)
        return (first - self.start if last > first else 0, last - first), *box[1:]

    def of_shard(self, shard: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a rank's shard that belongs to the owner's tensor."""
        box = boxes_of(self.shape, self.mesh, self.placements)[rank]
        if not box:
            return shard
        first, last = self._rows(box)
        return shard.narrow(0, first - box[0][0], last - first)

    def _rows(self, box: Box) -> tuple[int, int]:
        """Return the first matrix that is in a box and in the owner's tensor, and the one after the last."""
        start, length = box[0]
        first = min(max(start, self.start), start + length)
        return first, max(first, min(start + length, self.start + self.length))


def longest_first(costs: Sequence[float], holders: Sequence[int | None], loads: list[float]) -> list[int]:
    """Return an owner for each tensor: its holder, or the longest first, to the rank with the least work.

    The makespan is at most 4/3 of the shortest one (Graham, Bounds on Multiprocessing Timing Anomalies, 1969). All
    ranks find the same owners, as they see the same costs.

    Args:
        loads: work of each rank, to which the tensors' is added.
    """
    owners = [0 if holder is None else holder for holder in holders]
    for cost, holder in zip(costs, holders):
        if holder is not None:
            loads[holder] += cost
    ranks = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(ranks)
    free = [index for index, holder in enumerate(holders) if holder is None]
    for index in sorted(free, key=lambda index: -costs[index]):
        _, rank = ranks[0]
        owners[index] = rank
        loads[rank] += costs[index]
        heapq.heapreplace(ranks, (loads[rank], rank))
    return owners


class OwnerGroup:
    """Ranks of a mesh that own tensors and exchange them with each other.

    Attributes:
        loads: work of each rank by now, in the unit of the caller.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.sizes = tuple(mesh.shape)
        self.group = mesh.get_group() if mesh.ndim == 1 else flattened_mesh(mesh).get_group()
        self.rank, self.size = self.group.rank(), self.group.size()
        self.device = torch.device(mesh.device_type)
        self.loads = [0.0] * self.size

    def collect(self, tensors: Sequence[Owned], shards: Sequence[torch.Tensor]) -> OwnerTransfer:
        """Start to send shards of one dtype to the owners of their tensors."""
        sent: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for each, shard in zip(tensors, shards):
            if each.sends(self.rank):
                sent[each.owner].append(each.of_shard(shard, self.rank))
        mine = [each for each in tensors if each.owner == self.rank]
        wholes = [torch.empty(each.own_shape, dtype=shards[0].dtype, device=self.device) for each in mine]
        places = [
            [part(whole, each.place(rank)) for each, whole in zip(mine, wholes) if each.sends(rank)]
            for rank in range(self.size)
        ]
        return self._exchange(sent, places, wholes, shards[0].dtype)

    def distribute(
        self, tensors: Sequence[Owned], wholes: Iterable[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> OwnerTransfer:
        """Start to send each rank its parts of the tensors that this rank owns, in their order; fill the shards."""
        mine = list(zip((each for each in tensors if each.owner == self.rank), wholes, strict=True))
        sent = [[part(whole, each.place(rank)) for each, whole in mine] for rank in range(self.size)]
        places: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for each, shard in zip(tensors, shards):
            places[each.owner].append(each.of_shard(shard, self.rank))
        return self._exchange(sent, places, shards, shards[0].dtype)

    def _exchange(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        places: Sequence[Sequence[torch.Tensor]],
        filled: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> OwnerTransfer:
        """Start an all-to-all, given the tensors to each rank and the places of those from each rank."""
        sizes, arriving = ([sum(one.numel() for one in each) for each in side] for side in (sent, places))
        packed = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        _copy(packed, itertools.chain.from_iterable(sent), pack=True)
        received = packed.new_empty(sum(arriving))
        work = dist.all_to_all_single(received, packed, arriving, sizes, group=self.group, async_op=True)
        return OwnerTransfer(received, list(itertools.chain.from_iterable(places)), filled, work)


@dataclass(frozen=True)
class OwnerTransfer:
    """Tensors under way.

    Attributes:
        received: the pieces that arrive, one after the other.
        places: where they go, in their order.
        filled: the tensors that they fill.
    """

    received: torch.Tensor
    places: Sequence[torch.Tensor]
    filled: Sequence[torch.Tensor]
    work: dist.Work

    def wait(self) -> Sequence[torch.Tensor]:
        """Return the tensors that have arrived."""
        self.work.wait()
        _copy(self.received, self.places, pack=False)
        return self.filled


def _copy(flat: torch.Tensor, pieces: Iterable[torch.Tensor], *, pack: bool) -> None:
    """Copy pieces into a flat tensor one after the other, or out of it."""
    start = 0
    for piece in pieces:
        if piece.numel():
            segment = flat[start : start + piece.numel()].view(piece.shape)
            (segment if pack else piece).copy_(piece if pack else segment)
            start += piece.numel()
