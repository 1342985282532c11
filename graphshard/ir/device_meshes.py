"""Meshes of devices beside the one that a program is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import UnsupportedError
from graphshard.ir.mesh import Mesh, by_itself
from graphshard.torch_compat.dtensor import joined_mesh, root_of, split_mesh


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
