"""Meshes: axes with roles, device meshes of experts, tensor axes and replicas, and layouts over tensor axes.

A `DTensorLayout` is the layout of a parameter over the tensor axes, as its DTensor states it:

    colwise: nn.Linear(4, 8).weight     DTensorLayout((8, 4), (AxisPlacement("tp", 0),))
    norm: nn.LayerNorm(4).weight        DTensorLayout((4,), (AxisPlacement("tp", None),))

The passes see the piece of one tensor rank: with two ranks, the parameter table has shape (4, 4) for `colwise`. That
piece is sharded over the data ranks.

On FSDP2's full SPMD mesh the model's DTensors also name the data axes, along which they are replicated:

    distribute_tensor(weight, mesh, [Replicate(), Shard(0)])
        DTensorLayout((8, 4), (AxisPlacement("tp", 0),), around=("dp",))
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.torch_compat.dtensor import cut_of_pieces, joined_mesh, root_of, split_mesh
from graphshard.utils.argument_validation import is_int
from graphshard.utils.text import brief


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
        local: forward finds this rank's piece as a plain tensor.
    """

    shape: tuple[int, ...]
    cuts: tuple[AxisPlacement, ...]
    sums: tuple[PendingReduction, ...] = ()
    around: tuple[str, ...] = ()
    local: bool = False

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
        """Return the number of pieces of a dim; axes without a size (in a call of a submodule) count as 1."""
        return math.prod(sizes.get(cut.axis, 1) for cut in self.cuts if cut.dim == dim)

    def is_even(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all pieces have the same size."""
        return all(size % self.num_pieces(dim, sizes) == 0 for dim, size in enumerate(self.shape))


class ExpertMeshes(NamedTuple):
    """Device meshes of the expert parameters, which use another mesh of the same ranks.

    Attributes:
        data: axes that they are sharded and replicated over.
        axis: axes along which the model communicates, on which they are DTensors before sharding; None if they are
            plain tensors.
        params: first names of the parameters that are not in a part compiled earlier.
    """

    data: DeviceMesh
    axis: DeviceMesh | None
    params: frozenset[str] = frozenset()

    @property
    def whole(self) -> DeviceMesh:
        """Mesh of all axes."""
        return self.data if self.axis is None else joined_mesh(self.data, self.axis)

    @property
    def mesh(self) -> Mesh:
        """Axes by name and role."""
        own = Mesh.of(self.data)
        return own if self.axis is None else own.with_tensors(self.axis)


def only_replicating(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of one replicating axis with a sharding axis of size 1 added; a collective call of all ranks."""
    (name,) = mesh.mesh_dim_names or ("replicate",)
    one = by_itself(name)
    return split_mesh(mesh, (name, one.name), one.size)


def seen_axes(data: DeviceMesh) -> DeviceMesh:
    """Return the data axes that the user passed, without a sharding axis of size 1 that `only_replicating` added."""
    return data[(data.mesh_dim_names or ())[:-1]] if Mesh.of(data).only_replicates else data


def axes_of_mesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the submesh of some axes, or the mesh itself for all."""
    return mesh if len(names) == mesh.ndim else mesh[tuple(names)]


def axes_around(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the submesh of some axes of a mesh or of its root mesh; raise UnsupportedError if neither has them."""
    if set(names) <= set(mesh.mesh_dim_names or ()):
        return axes_of_mesh(mesh, names)
    root = root_of(mesh)
    if not set(names) <= set(root.mesh_dim_names or ()):
        raise UnsupportedError(
            f"parameters of {mesh} are shown gathered as DTensors on {', '.join(names)}, and {root} has other axes. "
            "Make all axes by one init_device_mesh, or do not call unshard()."
        )
    return axes_of_mesh(root, names)


Role = Literal["replicate", "shard", "regather", "inner", "tensor", "pipeline"]

# A DeviceMesh, or a shape: 8, (8,), (2, 4), {"replicate": 2, "shard": 4}.
MeshLike = DeviceMesh | int | Sequence[int] | Mapping[str, int]

# More than any cluster has; sizes of padded parameters would overflow beyond.
MOST_RANKS = 1 << 20

# Roles of the axes of a DeviceMesh, outermost first; with one axis, the last. They name axes without names.
_OF_DEVICES: tuple[Role, ...] = ("replicate", "shard")

# Common axis names by kind of parallelism. Data axes replicate and shard; the model handles the others.
REPLICATING = ("replicate", "dp_replicate", "ddp")
SHARDING = ("shard", "dp_shard", "fsdp")
DATA = ("dp", "data", "data_parallel", *REPLICATING, *SHARDING)
TENSOR = ("tp", "tensor", "tensor_parallel")
CONTEXT = ("cp", "context", "context_parallel")
EXPERT = ("ep", "expert", "expert_parallel")
PIPELINE = ("pp", "pipeline", "pipeline_parallel")
OTHERS = (*PIPELINE, "sp", "sequence", *CONTEXT, *EXPERT)

# Roles of axes of neighboring ranks on another axis, by the role of that axis.
_NEIGHBOURS_ON: dict[Role, Role] = {"regather": "shard", "inner": "shard"}

# Roles that several axes may have.
_SEVERAL: tuple[Role, ...] = ("inner", "tensor")


@dataclass(frozen=True)
class Axis:
    """Axis of a mesh: name, number of ranks along it, and role."""

    name: str
    size: int
    role: Role


@dataclass(frozen=True)
class Mesh:
    """Axes that a program is compiled for.

    Attributes:
        axes: the axes of the DeviceMesh, outermost first, followed by axes of neighboring ranks on one of these.
        of_experts: axes of another mesh of the same ranks, for the expert parameters.

    Raises:
        ArgumentError: two axes have the same name or role, a role is unknown, or there is no axis to shard over.
    """

    axes: tuple[Axis, ...]
    of_experts: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        roles = [axis.role for axis in self.axes if axis.role not in _SEVERAL]
        for what, values in (("name", [a.name for a in self.axes]), ("role", roles)):
            for value, count in Counter(values).most_common(1):
                if count > 1:
                    advice = f"Give each a different {what}."
                    raise ArgumentError(f"mesh has {count} axes with the {what} {value!r}. {advice}")
        known = get_args(Role)
        for axis in self.axes:
            if axis.role not in known:
                advice = f"Use one of {', '.join(map(repr, known))}."
                raise ArgumentError(f"mesh has an axis {axis.name!r} with the role {axis.role!r}. {advice}")
        if self._of("shard") is None:
            raise ArgumentError("mesh has no axis with the role 'shard'. Add one; of size 1 it cuts nothing.")
        for name, count in Counter(axis.name for axis in self.every_axis).items():
            if count > 1:
                raise ArgumentError(
                    f"mesh has an axis {name!r}, and the mesh of expert parameters has another axis of this "
                    "name. Give each axis a different name, with mesh_dim_names."
                )

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Mesh:
        """Return the axes of a DeviceMesh.

        Raises:
            ArgumentError: it has more than two axes, or two without names.
        """
        names = mesh.mesh_dim_names
        if mesh.ndim > len(_OF_DEVICES):
            advice = f"such as mesh[{names[-2]!r}, {names[-1]!r}]" if names else "after naming them with mesh_dim_names"
            raise ArgumentError(
                f"mesh must have one axis (to shard over) or two (to replicate and to shard over), got {mesh.ndim} "
                f"({names or 'no axis names'}). Pass those axes of it, {advice}."
            )
        if mesh.ndim > 1 and not names:
            raise ArgumentError(
                "mesh has two axes without names. Name them, as in init_device_mesh('cuda', (2, 4), mesh_dim_names=("
                "'replicate', 'shard')): parameters are replicated over the first and sharded over the second."
            )
        return cls.of_shape(mesh)

    @classmethod
    def of_shape(cls, shape: MeshLike) -> Mesh:
        """Return the axes of a shape: the last axis shards, the first of two replicates.

        Raises:
            ArgumentError: it is not a shape, or has more than two axes.
        """
        names, sizes = _named(shape)
        if not sizes or not all(is_int(size) and size > 0 for size in sizes):
            raise ArgumentError(f"mesh must have positive sizes, got {brief(shape)}.")
        if math.prod(sizes) > MOST_RANKS:
            raise ArgumentError(f"mesh must have at most {MOST_RANKS} ranks, got {brief(shape)}.")
        if names is not None and not all(isinstance(name, str) and name.isprintable() and name for name in names):
            raise ArgumentError(f"mesh must have axes with names such as 'shard', got {brief(shape)}.")
        if len(sizes) > len(_OF_DEVICES):
            raise ArgumentError(
                "mesh must have one axis (to shard over) or two (to replicate and to shard over), got "
                f"{len(sizes)}: {brief(shape)}."
            )
        foreign = [name for name in names or () if name in (*TENSOR, *OTHERS)]
        if foreign and len(sizes) > 1:
            raise ArgumentError(
                f"mesh must have data axes only, got {tuple(names or ())}: {foreign[0]!r} is none. A model that "
                "communicates along it is made for it: give parallelize=, a function of (model, mesh) such as one that "
                "calls parallelize_module(model, mesh['tp'], plan)."
            )
        roles = _OF_DEVICES[-len(sizes) :]
        return cls(tuple(map(Axis, names or roles, sizes, roles)))

    def with_regather(self, size: int) -> Mesh:
        """Add an axis of `size` neighbors on the sharding axis, to gather again in backward."""
        return replace(self, axes=(*self.axes, Axis(f"{self.shard.name}/{size}", size, "regather")))

    def with_inner(self, size: int) -> Mesh:
        """Add an axis of `size` neighbors on the sharding axis, for the model's collectives."""
        return replace(self, axes=(*self.axes, Axis(f"{self.shard.name}/{size}", size, "inner")))

    def with_tensor(self, name: str, size: int) -> Mesh:
        """Add an innermost tensor axis, as FSDP2 has it."""
        return replace(self, axes=(*self.grid, Axis(name, size, "tensor"), *self.axes[len(self.grid) :]))

    def with_tensors(self, mesh: DeviceMesh) -> Mesh:
        """Add all axes of a mesh as tensor axes; an unnamed axis is named "tensor"."""
        axes = zip(mesh.mesh_dim_names or ("tensor",), mesh.shape, strict=True)
        return functools.reduce(lambda found, axis: found.with_tensor(*axis), axes, self)

    def with_pipeline(self, name: str, size: int) -> Mesh:
        """Add an outermost axis of pipeline stages; the other axes are one stage's."""
        axis = Axis(name, size, "pipeline")
        return replace(self, axes=(axis, *self.axes), of_experts=(axis, *self.of_experts) if self.of_experts else ())

    def with_experts(self, experts: Mesh) -> Mesh:
        """Add the mesh of the expert parameters, which has the same ranks."""
        return replace(self, of_experts=experts.axes)

    def resized(self, role: Role, size: Any) -> Mesh:
        """Return the mesh with another size, which may be symbolic, of the axis with a role."""
        return replace(self, axes=tuple(replace(axis, size=size) if axis.role == role else axis for axis in self.axes))

    @property
    def shard(self) -> Axis:
        """Axis that parameters are sharded over; its size is the number of shards."""
        axis = self._of("shard")
        assert axis is not None
        return axis

    @property
    def replicate(self) -> Axis | None:
        """Axis that parameters are replicated over; gradients are reduced over both."""
        return self._of("replicate")

    @property
    def only_replicates(self) -> bool:
        """Whether the sharding axis was only added because one is required; users see parameters without it."""
        return self.replicate is not None and self.shard == by_itself(self.replicate.name)

    @property
    def regather(self) -> Axis | None:
        """Axis of neighbors among which backward gathers again; None for the whole sharding axis."""
        return self._of("regather")

    @property
    def pipeline(self) -> Axis | None:
        """Axis of pipeline stages."""
        return self._of("pipeline")

    @property
    def tensors(self) -> tuple[Axis, ...]:
        """Axes along which the model communicates, on which parameters are DTensors before sharding."""
        return tuple(axis for axis in self.axes if axis.role == "tensor")

    def _of(self, role: Role) -> Axis | None:
        return next((axis for axis in self.axes if axis.role == role), None)

    @cached_property
    def experts(self) -> Mesh | None:
        """Mesh of the expert parameters; None without any."""
        return Mesh(self.of_experts) if self.of_experts else None

    @property
    def every_axis(self) -> tuple[Axis, ...]:
        """Axes of this mesh and the experts' mesh, without duplicates."""
        return tuple(dict.fromkeys((*self.axes, *self.of_experts)))

    def named(self, name: str) -> Axis:
        """Return the axis with a name, as graphs and plans have it."""
        return {axis.name: axis for axis in self.every_axis}[name]

    @property
    def grid(self) -> tuple[Axis, ...]:
        """Axes that lay out the ranks, as in the DeviceMesh, outermost first."""
        return tuple(axis for axis in self.axes if axis.role not in _NEIGHBOURS_ON)

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of the grid by name, outermost first, as `of_shape` takes them."""
        return {axis.name: axis.size for axis in self.grid}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(axis.size for axis in self.grid)

    def place(self, axis: Axis) -> int:
        """Return the index in the grid of an axis, or of the axis that its neighbors are on."""
        names = [other.name for other in self.grid]
        if axis.name in names:  # also a pair of stages, which has the name of the pipeline axis
            return names.index(axis.name)
        return [other.role for other in self.grid].index(_NEIGHBOURS_ON[axis.role])

    def distance(self, axis: Axis) -> int:
        """Return the difference in rank between neighbors along an axis."""
        if self.experts is not None and axis not in self.axes:
            inside = max(self.size // self.experts.size, 1)  # a tensor axis that both have is inside of both
            return self.experts.distance(axis) * inside
        return math.prod(other.size for other in self.grid[self.place(axis) + 1 :])

    def placements(self, dim: int | None, split: DTensorLayout | None = None) -> tuple[Placement, ...]:
        """Return FSDP2's placements of a parameter sharded along `dim` (None for a scalar).

        On the data axes, followed by the tensor axes if it is split over these; data axes cut the pieces.
        """
        cut: Placement = Replicate() if dim is None else Shard(dim)
        if split is not None and dim is not None:
            cut = cut_of_pieces(dim, split.num_pieces(dim, {axis.name: axis.size for axis in self.tensors}))
        seen = (axis for axis in self.grid if not (self.only_replicates and axis == self.shard))
        of_data = (cut if axis.role == "shard" else Replicate() for axis in seen if axis.role != "tensor")
        return (*of_data, *(split.placements if split else ()))

    def __str__(self) -> str:
        """ "replicate 2, shard 4"."""
        return ", ".join(f"{name} {size}" for name, size in self.shape.items())


def by_itself(name: str) -> Axis:
    """Return the sharding axis of size 1 that is added to a mesh with only a replicating axis."""
    return Axis(f"{name}/1", 1, "shard")


def seen_shape(shape: Mapping[str, int]) -> tuple[dict[str, int], str | None]:
    """Return a shape without an added sharding axis of size 1, and the name of its replicating axis.

    The name is None for any other shape.
    """
    replicating = next((name for name in shape if shape.get(by_itself(name).name) == 1), None)
    ours = by_itself(replicating).name if replicating is not None else None
    return {name: size for name, size in shape.items() if name != ours}, replicating


def _named(shape: Any) -> tuple[Sequence[str] | None, Sequence[int]]:
    """Return names (None if unnamed) and sizes of axes."""
    if isinstance(shape, DeviceMesh):
        return shape.mesh_dim_names, tuple(shape.shape)
    if isinstance(shape, Mapping):
        return tuple(shape), tuple(shape.values())
    if isinstance(shape, int) and not isinstance(shape, bool):
        return None, (shape,)
    if isinstance(shape, Sequence) and not isinstance(shape, (str, bytes)):
        return None, tuple(shape)
    raise ArgumentError(
        f"mesh must be a DeviceMesh or a shape such as (8,), (2, 4) or {{'replicate': 2, 'shard': 4}}, got "
        f"{brief(shape)}."
    )
