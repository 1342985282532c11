"""Meshes of devices beside the one that a program is compiled for."""

from __future__ import annotations

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
from graphshard.ir.dtensor_layout import DTensorLayout
from graphshard.torch_compat.dtensor import cut_of_pieces, joined_mesh, root_of, split_mesh
from graphshard.utils.argument_validation import is_int
from graphshard.utils.text import brief


class ExpertMeshes(NamedTuple):
    """Where parameters are that lie otherwise than the others on the ranks.

    Attributes:
        data: the axes that they are sharded and replicated over.
        axis: along which the model itself communicates, and they are DTensors before they are sharded; it may be
            several; None if they are plain tensors.
        params: first names of those that are no part's.
    """

    data: DeviceMesh
    axis: DeviceMesh | None
    params: frozenset[str] = frozenset()

    @property
    def whole(self) -> DeviceMesh:
        """All of its axes."""
        return self.data if self.axis is None else joined_mesh(self.data, self.axis)

    @property
    def axis_name(self) -> str:
        """The name of the outermost axis along which the model communicates."""
        (name, *_) = (self.axis.mesh_dim_names if self.axis is not None else None) or ("expert",)
        return name

    @property
    def mesh(self) -> Mesh:
        """Its axes by name and role."""
        own = Mesh.of(self.data)
        return own if self.axis is None else own.with_tensors(self.axis)


def only_replicating(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of one axis that replicates, with one that shards inside of it; all ranks must call this together."""
    (name,) = mesh.mesh_dim_names or ("replicate",)
    one = by_itself(name)
    return split_mesh(mesh, (name, one.name), one.size)


def seen_axes(data: DeviceMesh) -> DeviceMesh:
    """The data axes that the user knows: those without the one that is there because there must be one that shards."""
    return data[(data.mesh_dim_names or ())[:-1]] if Mesh.of(data).only_replicates else data


def axes_of_mesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Some axes of a mesh, or all."""
    return mesh if len(names) == mesh.ndim else mesh[tuple(names)]


def axes_around(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Some axes of a mesh, or of the one that it was made of.

    Raises:
        UnsupportedError: it was made of another one.
    """
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

# A DeviceMesh, or the shape of one that need not exist: 8, (8,), (2, 4), {"replicate": 2, "shard": 4}.
MeshLike = DeviceMesh | int | Sequence[int] | Mapping[str, int]

# More than any machine has; beyond, sizes of padded parameters are no numbers of a machine any more.
MOST_RANKS = 1 << 20

# Roles of the axes of a DeviceMesh, outermost first; one with fewer axes lacks the first. Axes without names are called
# after their roles.
_OF_DEVICES: tuple[Role, ...] = ("replicate", "shard")

# Names of axes of a DeviceMesh by what happens along them: data axes replicate and shard. What is to happen along those
# of other kinds of parallelism is not known here.
REPLICATING = ("replicate", "dp_replicate", "ddp")
SHARDING = ("shard", "dp_shard", "fsdp")
DATA = ("dp", "data", "data_parallel", *REPLICATING, *SHARDING)
TENSOR = ("tp", "tensor", "tensor_parallel")
CONTEXT = ("cp", "context", "context_parallel")
EXPERT = ("ep", "expert", "expert_parallel")
PIPELINE = ("pp", "pipeline", "pipeline_parallel")
OTHERS = (*PIPELINE, "sp", "sequence", *CONTEXT, *EXPERT)

# Roles of the others: each is one of neighbours on the axis with this role.
_NEIGHBOURS_ON: dict[Role, Role] = {"regather": "shard", "inner": "shard"}

# The model may communicate along several.
_SEVERAL: tuple[Role, ...] = ("inner", "tensor")


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh: its symbolic name, the number of ranks along it, and what it is for."""

    name: str
    size: int
    role: Role


@dataclass(frozen=True)
class Mesh:
    """What a program is compiled for.

    Attributes:
        axes: everything that something is communicated over: the axes of the DeviceMesh, outermost first, and behind
            them those of neighbours on one of these.
        of_experts: those of another mesh of the same ranks, for parameters that lie otherwise on them.

    Raises:
        ArgumentError: two axes have the same name or role, a role is unknown, or there is no axis to shard over.
    """

    axes: tuple[Axis, ...]
    of_experts: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        roles = [axis.role for axis in self.axes if axis.role not in _SEVERAL]
        for what, values in (("name", [a.name for a in self.axes]), ("role", roles)):
            ((value, count),) = Counter(values).most_common(1) or [("", 0)]
            if count > 1:
                raise ArgumentError(f"mesh has {count} axes with the {what} {value!r}. Give each a {what} of its own.")
        for axis in self.axes:
            if axis.role not in get_args(Role):
                raise ArgumentError(
                    f"mesh has an axis {axis.name!r} with the role {axis.role!r}. Use one of "
                    f"{', '.join(map(repr, get_args(Role)))}."
                )
        if self._of("shard") is None:
            raise ArgumentError("mesh has no axis with the role 'shard'. Add one; of size 1 it cuts nothing.")
        names = [axis.name for axis in self.every_axis]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(
                    f"mesh has an axis {name!r}, and the mesh that some parameters lie on has another one of this "
                    "name. Give each axis a name of its own, with mesh_dim_names."
                )

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Mesh:
        """The axes of a mesh that exists.

        Raises:
            ArgumentError: it has more axes than there are roles for, or two without names.
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
        """The axes of a shape, whose mesh need not exist: the last shards, a first of two replicates.

        Raises:
            ArgumentError: it is no shape, or has more than two axes.
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
        """With an axis of `size` neighbours on the sharding one, which it divides, to gather again in backward."""
        return replace(self, axes=(*self.axes, Axis(f"{self.shard.name}/{size}", size, "regather")))

    def with_inner(self, size: int) -> Mesh:
        """With an axis of `size` neighbours on the sharding one, which it divides, for the model's own collectives."""
        return replace(self, axes=(*self.axes, Axis(f"{self.shard.name}/{size}", size, "inner")))

    def with_tensor(self, name: str, size: int) -> Mesh:
        """With a tensor axis inside of all others, as FSDP2 lays them out."""
        return replace(self, axes=(*self.grid, Axis(name, size, "tensor"), *self.axes[len(self.grid) :]))

    def with_tensors(self, mesh: DeviceMesh) -> Mesh:
        """With all axes of a mesh as tensor axes; one without a name is called "tensor"."""
        found = self
        for name, size in zip(mesh.mesh_dim_names or ("tensor",), mesh.shape, strict=True):
            found = found.with_tensor(name, size)
        return found

    def with_pipeline(self, name: str, size: int) -> Mesh:
        """With an axis of the stages of a pipeline outside of all others, which are those of one stage."""
        axis = Axis(name, size, "pipeline")
        return replace(self, axes=(axis, *self.axes), of_experts=(axis, *self.of_experts) if self.of_experts else ())

    def with_experts(self, experts: Mesh) -> Mesh:
        """With another mesh of the same ranks, for parameters that lie otherwise on them."""
        return replace(self, of_experts=experts.axes)

    def resized(self, role: Role, size: Any) -> Mesh:
        """With another size of the axis with a role; it may be a symbol."""
        return replace(self, axes=tuple(replace(axis, size=size) if axis.role == role else axis for axis in self.axes))

    @property
    def shard(self) -> Axis:
        """The axis that parameters are sharded over; its size is the number of shards."""
        axis = self._of("shard")
        assert axis is not None
        return axis

    @property
    def replicate(self) -> Axis | None:
        """The axis that parameters are replicated over: gradients are reduced over both."""
        return self._of("replicate")

    @property
    def only_replicates(self) -> bool:
        """Whether the axis that shards is there only because there must be one: users see parameters without it."""
        return self.replicate is not None and self.shard == by_itself(self.replicate.name)

    @property
    def regather(self) -> Axis | None:
        """Neighbours on the sharding axis, among which backward gathers again; None is the whole axis."""
        return self._of("regather")

    @property
    def pipeline(self) -> Axis | None:
        """The axis along which ranks have other stages of a pipeline."""
        return self._of("pipeline")

    @property
    def tensors(self) -> tuple[Axis, ...]:
        """The axes along which the model itself communicates, and parameters are DTensors before they are sharded."""
        return tuple(axis for axis in self.axes if axis.role == "tensor")

    def _of(self, role: Role) -> Axis | None:
        return next((axis for axis in self.axes if axis.role == role), None)

    @cached_property
    def experts(self) -> Mesh | None:
        """The mesh of the parameters that lie otherwise on the ranks than the others; None if there are none."""
        return Mesh(self.of_experts) if self.of_experts else None

    @property
    def every_axis(self) -> tuple[Axis, ...]:
        """Its axes and those of the experts' mesh; one that both have is there once."""
        return tuple(dict.fromkeys((*self.axes, *self.of_experts)))

    def named(self, name: str) -> Axis:
        """The axis that a graph or a plan names."""
        return {axis.name: axis for axis in self.every_axis}[name]

    @property
    def grid(self) -> tuple[Axis, ...]:
        """The axes that lay out the ranks, as those of the DeviceMesh do: outermost first."""
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
        """Which axis of the grid this is, or has its neighbours on."""
        names = [other.name for other in self.grid]
        if axis.name in names:  # or a pair of stages, on the axis of all
            return names.index(axis.name)
        return [other.role for other in self.grid].index(_NEIGHBOURS_ON[axis.role])

    def distance(self, axis: Axis) -> int:
        """How many ranks lie between neighbours along an axis: those of the axes behind it, and they are 1 apart."""
        if self.experts is not None and axis not in self.axes:
            inside = max(self.size // self.experts.size, 1)  # a tensor axis is inside of both, if both have it
            return self.experts.distance(axis) * inside
        return math.prod(other.size for other in self.grid[self.place(axis) + 1 :])

    def placements(self, dim: int | None, split: DTensorLayout | None = None) -> tuple[Placement, ...]:
        """Of a parameter that is sharded along a dim, as FSDP2 places it; None is a scalar.

        On the data axes; and if it is split over tensor axes, there, too. Its pieces there are what is cut.
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
    """The axis that shards where there is none: each rank is its own only neighbour on an axis that replicates."""
    return Axis(f"{name}/1", 1, "shard")


def seen_shape(shape: Mapping[str, int]) -> tuple[dict[str, int], str | None]:
    """A shape without the axis that shards because there must be one, and the name of that which only replicates.

    None for another shape.
    """
    replicating = next((name for name in shape if shape.get(by_itself(name).name) == 1), None)
    ours = by_itself(replicating).name if replicating is not None else None
    return {name: size for name, size in shape.items() if name != ours}, replicating


def _named(shape: Any) -> tuple[Sequence[str] | None, Sequence[int]]:
    """Names, if there are any, and sizes of axes."""
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
