"""Role of each axis of a mesh: data axes replicate or shard, the model communicates along tensor and expert axes.

    init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "tp"))         by their names
    init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "cp"))         sharded over both, as one axis
    init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "ep"))         so are parameters that are not DTensors on
                                                                          "ep"; those, the experts', over "dp" alone
    compile(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard="x"))    as told; other axes are tensor axes
    compile(model, mesh, dp_mesh_dims=DataParallelMeshDims(replicate="x"))    nothing is sharded: FSDP2's DDP
    fully_shard(block, mesh=mesh["dp"])                                   by the DTensors among the parameters
    shard_placement_fn=lambda p: ShardPlacementResult(...)                another mesh for a parameter, as in FSDP2

An axis whose name says nothing is an error where it matters. Of two data axes the first replicates, as in FSDP2.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.mesh import (
    CONTEXT,
    DATA,
    EXPERT,
    OTHERS,
    REPLICATING,
    SHARDING,
    TENSOR,
    ExpertMeshes,
    Mesh,
    axes_of_mesh,
    only_replicating,
    seen_axes,
    seen_shape,
)
from graphshard.ir.param_table import chunk_range
from graphshard.ir.subclasses import is_subclass
from graphshard.options.validate import ModelContents
from graphshard.torch_compat.dtensor import ShardPlacementResult, flattened_mesh, is_part, joined_mesh, mesh_of_both
from graphshard.utils.text import brief

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # torch 2.11 has none, so that axes go by their names
    DataParallelMeshDims = None  # type: ignore[assignment, misc]


_NUMBER = "mesh {} must have one data axis (to shard over) or two (to replicate and to shard over), and has {}."


@dataclass(frozen=True, eq=False)
class MeshAxes:
    """Axes of a mesh by what a model does along them.

    `mesh` and `data` are the data axes, by name and role and as a DeviceMesh, which need not exist; `placements` those
    that `shard_placement_fn` chose, by names of parameters, None if it has not been asked.
    """

    mesh: Mesh
    data: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    experts: ExpertMeshes | None = None
    placements: Mapping[str, Any] | None = None


# --- data axes ---------------------------------------------------------------------------------------------------


def data_and_tensor(
    mesh: DeviceMesh, dp_mesh_dims: Any = None, *, without: str = ""
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the data axes of a mesh, and its tensor axes if it has any.

    Parameters are sharded over a context axis, too: its ranks have pieces of the same sequences. With the sharding
    axis around it, it is one axis. `dp_mesh_dims` names the data axes; None goes by names. `without` is left out.
    """
    if not isinstance(mesh, DeviceMesh):
        return mesh, None  # check_mesh refuses it
    names = tuple(mesh.mesh_dim_names or ())
    if dp_mesh_dims is not None:
        replicating, sharding = dims_named(names, dp_mesh_dims)
        return _split(mesh, names, replicating, sharding, without)
    if not set(names).intersection((*TENSOR, *OTHERS)):
        return mesh, None  # one axis, or two of which the first replicates
    for name in names:
        if name not in (*DATA, *TENSOR, *CONTEXT, *EXPERT):
            raise ArgumentError(
                f"mesh {names}: the name of the axis {name!r} does not say what it is for. Data axes are "
                f"{_listed(DATA)}, context axes {_listed(CONTEXT)}, expert axes {_listed(EXPERT)}, tensor axes "
                f"{_listed(TENSOR)}. Rename it, pass the data axes alone, such as mesh['dp'], or name them: "
                "dp_mesh_dims=DataParallelMeshDims(shard='dp')."
            )
    data = [name for name in names if name in DATA]
    if len(data) > 2:
        raise ArgumentError(_NUMBER.format(names, _listed(data)))
    replicates = len(data) == 2 or data[:1] in [[name] for name in REPLICATING]
    sharding = [name for name in names if name in (*CONTEXT, *EXPERT)]
    if data and not data[replicates:] and not sharding:
        raise ArgumentError(
            f"mesh {names} has no axis to shard over, as {data[-1]!r} replicates. Add one; of size 1 it cuts nothing. "
            f"Or say that nothing is sharded: dp_mesh_dims=DataParallelMeshDims(replicate={data[-1]!r})."
        )
    return _split(mesh, names, data[:replicates], [*data[replicates:], *sharding], without)


def dims_named(names: Sequence[str], dims: Any) -> tuple[list[str], list[str]]:
    """Return the axes that `dp_mesh_dims` names to replicate and to shard over."""
    if DataParallelMeshDims is None or not isinstance(dims, DataParallelMeshDims):
        raise ArgumentError(
            "dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims such as "
            f"DataParallelMeshDims(shard='dp'), got {brief(dims)}."
        )
    found: list[str] = []
    for name in (*dims.replicate_names, *dims.shard_names):
        if name not in names:
            raise ArgumentError(f"dp_mesh_dims: mesh has no axis {name!r}. It has {_listed(names) or 'no names'}.")
        if name in found:
            raise ArgumentError(f"dp_mesh_dims: the axis {name!r} is used twice. Give each axis one role.")
        found.append(name)
    if not found:
        raise ArgumentError(
            "dp_mesh_dims names no axis. Name those to shard over, to replicate over, or both, as in "
            "DataParallelMeshDims(shard='dp')."
        )
    return list(dims.replicate_names), list(dims.shard_names)


def dims_of(shape: Mapping[str, int]) -> Any:
    """Return the `dp_mesh_dims` of a mesh with a shape on which nothing is sharded, which names do not say."""
    _, replicating = seen_shape(shape)
    return None if replicating is None or DataParallelMeshDims is None else DataParallelMeshDims(replicate=replicating)


def _split(
    mesh: DeviceMesh, names: tuple[str, ...], replicating: list[str], sharding: list[str], without: str
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of the data axes, of which the sharding ones are one, and the mesh of the others."""
    data = [*replicating, *sharding]
    others = [name for name in names if name not in data]
    if not data:
        raise ArgumentError(_NUMBER.format(names, "none"))
    if data != [name for name in names if name in data]:
        raise ArgumentError(
            f"mesh {names}: data axes that replicate are outermost, those that shard inside of them, and context and "
            f"expert axes inside of these, as in {(*data, *others)}."
        )
    exchanged = any(name in SHARDING for name in replicating) or any(name in REPLICATING for name in sharding)
    if sharding and exchanged:
        raise ArgumentError(
            f"mesh {names}: of two data axes the outer one replicates and the inner one shards. Exchange "
            f"{_listed(data)}."
        )
    sharding = [name for name in sharding if name != without]
    if not sharding and without:
        raise ArgumentError(
            f"mesh {names} has no axis besides {without!r} to shard experts over. Add one; of size 1 it cuts nothing."
        )
    groups = [tuple(group) for group in (replicating, sharding) if group]
    parts = [mesh[group[0]] if len(group) == 1 else flattened_mesh(mesh[group]) for group in groups]
    whole = parts[0] if len(parts) == 1 else joined_mesh(*parts)
    return whole if sharding else only_replicating(whole), mesh[tuple(others)] if others else None


# --- tensor axes -------------------------------------------------------------------------------------------------


def tensor_axis(
    contents: ModelContents,
    data: DeviceMesh,
    given: DeviceMesh | None,
    experts: ExpertMeshes | None,
    known: Container[nn.Parameter] = (),
    *,
    whole_model: bool = True,
) -> DeviceMesh | None:
    """Return the mesh of the tensor axes that the model's DTensors are on; None if it has none.

    `given` are the tensor axes of the mesh to compile for, `known` parameters that are sharded already. A part of a
    model need not have DTensors.
    """
    found, first, whole = given, "", None
    of_experts = experts.params if experts is not None else ()
    used, data = set(_names(experts.axis if experts is not None else None)), seen_axes(data)
    for name, param in contents.named.items():
        if not isinstance(param, DTensor) or param in known or name in of_experts:
            continue
        mesh, around = param.device_mesh, data_axes_of(param, data)
        if around:
            _check_whole(name, mesh, whole, data, around)
            whole = mesh
            check_placement(name, param)
            if len(around) == mesh.ndim:
                continue
            mesh = mesh[_names(mesh)[len(around) :]]
        elif _is_replicated_on(param, data):
            raise UnsupportedError(
                f"parameter {name} is a DTensor on the data axes, too, of {mesh}, where they are not the outermost. "
                "Order the axes as in ('dp', 'tp'), or distribute it over the tensor axis alone: "
                "parallelize_module(model, mesh['tp'], plan)."
            )
        names = _names(mesh)
        shards = bool({*names} & {*_names(data)}) and (mesh.ndim > 1 or mesh == data)
        if shards or mesh == data or (not names and (mesh.ndim > 1 or found is None)):
            raise ArgumentError(
                f"parameter {name} is a DTensor already (fully_shard or parallelize_module was applied). "
                "Compile the plain module, or one with DTensors on another axis of the mesh than the data axes, by "
                f"parallelize_module(model, mesh['tp'], plan); they are on {mesh}."
            )
        if found is None:
            _check_joins(name, data, mesh)
            found = mesh
        elif not is_part(mesh, found):
            try:
                if given is not None:
                    raise RuntimeError
                found = mesh_of_both(found, mesh)
                _check_joins(name, data, found)
            except (RuntimeError, KeyError):
                others = f"parameter {first} is" if first else "the tensor axis is"
                raise ArgumentError(
                    f"parameter {name} is distributed over {mesh}, and {others} on {found}. Distribute all parameters "
                    "over axes of the mesh that the model is compiled for."
                ) from None
        check_placement(name, param)
        first = first or name
        used.update(names)
    for axis in _names(found) if whole_model else ():
        if axis not in used:
            raise ArgumentError(
                f"mesh has a tensor axis, {axis!r}, and no parameter of {type(contents.model).__name__} is distributed "
                "over it. Call torch.distributed.tensor.parallel.parallelize_module first, or pass the data axes "
                "alone, such as mesh['dp']."
            )
    return found


def data_axes_of(param: DTensor, data: DeviceMesh) -> tuple[str, ...]:
    """Return the data axes that a DTensor is replicated on, outside of others: FSDP2's full SPMD mesh.

    There are none for one on tensor axes alone, and for a shard. A data axis that was made of several is called "x_y".
    """
    names = _names(param.device_mesh)
    found = 0
    for axis in data.mesh_dim_names or (None,):
        ends = (end for end in range(found + 1, len(names) + 1) if "_".join(names[found:end]) == axis)
        found = next(ends, 0)
        if not found:
            return ()
    replicated = all(placement.is_replicate() for placement in param.placements[:found])
    return names[:found] if replicated and param.dim() else ()


def _check_whole(
    name: str, mesh: DeviceMesh, whole: DeviceMesh | None, data: DeviceMesh, around: tuple[str, ...]
) -> None:
    """Raise ArgumentError unless DTensors on all axes are on one mesh, of the ranks that are sharded over."""
    of_data = mesh if len(around) == mesh.ndim else mesh[around]
    if of_data.mesh.flatten().tolist() != data.mesh.flatten().tolist() or mesh != (whole or mesh):
        other = f"others over {whole}" if whole else f"is to be over {data}"
        raise ArgumentError(
            f"parameter {name} is distributed over {mesh}, and {other}. "
            "Distribute all parameters over the mesh that the model is compiled for."
        )


def _is_replicated_on(param: DTensor, data: DeviceMesh) -> bool:
    """Return whether a DTensor is on data axes and others, and replicated on the data axes."""
    names = _names(param.device_mesh)
    of_data = [p for name, p in zip(names, param.placements) if name in _names(data)]
    return len(names) > len(of_data) > 0 and all(isinstance(placement, Replicate) for placement in of_data)


def _check_joins(name: str, data: DeviceMesh, tensor: DeviceMesh) -> None:
    try:
        joined_mesh(data, tensor)
    except (RuntimeError, AssertionError, TypeError) as error:  # the last for axes without names
        raise ArgumentError(
            f"parameter {name} is distributed over {tensor}, which is not another axis of the mesh that {data} is of "
            f"({error}). Take both from one mesh: mesh['dp'] and mesh['tp']."
        ) from error


def check_placement(name: str, param: DTensor) -> None:
    """Raise UnsupportedError for a DTensor on some axes that cannot be sharded over others."""
    for placement in param.placements:
        if type(placement) not in (Shard, Replicate):
            raise UnsupportedError(
                f"parameter {name} is placed as {placement} on the tensor axis. Use Shard or Replicate, as "
                "ColwiseParallel, RowwiseParallel and SequenceParallel do."
            )
    if is_subclass(param._local_tensor):
        raise UnsupportedError(
            f"parameter {name} is a DTensor of a {type(param._local_tensor).__name__}, a tensor subclass. Distribute "
            "plain tensors."
        )
    if not param._local_tensor.is_contiguous():
        raise UnsupportedError(
            f"parameter {name} has pieces that are not contiguous on the tensor axis. Make it contiguous before it is "
            "distributed."
        )


# --- expert axes -------------------------------------------------------------------------------------------------


def experts_by_name(mesh: DeviceMesh, dp_mesh_dims: Any = None) -> ExpertMeshes | None:
    """Return the meshes of experts by the names of a mesh's axes: its other data axes, and the expert axis."""
    names = _names(mesh if isinstance(mesh, DeviceMesh) else None)
    found = [name for name in names if name in EXPERT]
    if dp_mesh_dims is not None:  # an axis that it does not name is a tensor axis, whatever it is called
        found = [name for name in found if name in dims_named(names, dp_mesh_dims)[1]]
    if not found:
        return None
    if len(found) > 1:
        raise ArgumentError(f"mesh {names} has {len(found)} expert axes. Give it one.")
    data, _ = data_and_tensor(mesh, dp_mesh_dims, without=found[0])
    return ExpertMeshes(data, mesh[found[0]])


def find_experts(
    contents: ModelContents,
    data: DeviceMesh,
    given: ExpertMeshes | None,
    placements: Mapping[str, Any],
    left_out: Container[nn.Parameter],
    *,
    whole_model: bool = True,
) -> ExpertMeshes | None:
    """Return the meshes of the parameters that are sharded over another mesh than `data`; None without such.

    `given` are the expert axes by their names, `left_out` parameters that are sharded already or to be left alone. A
    part of a model need not have experts.
    """
    named = {name: param for name, param in contents.named.items() if param not in left_out}
    found = _chosen_meshes(placements, data)
    if given is not None and given.axis is not None:
        on_axis = {
            name
            for name, p in named.items()
            if isinstance(p, DTensor) and is_part(given.axis, p.device_mesh) and not data_axes_of(p, data)
        }
        if whole_model and not on_axis:
            name = (given.axis.mesh_dim_names or ("expert",))[0]
            raise ArgumentError(
                f"mesh has an expert axis, {name!r}, and all parameters of {type(contents.model).__name__} "
                "lie alike along it. Deal the experts out first, such as distribute_tensor(weight, mesh['ep'], "
                "[Shard(0)]) for each of their weights, or call the axis 'cp' if the model has none."
            )
        found |= {name: found.get(name, given.data) for name in on_axis}
    if not found:
        return None
    axes = {name: _model_axes(named[name], over) for name, over in found.items()}
    (first, mesh), *others = found.items()
    axis = axes[first]
    for name, other in others:
        try:
            if other != mesh:
                raise RuntimeError
            axis = _both(axis, axes[name])
        except (RuntimeError, KeyError):
            raise UnsupportedError(
                f"parameter {name} is sharded over {other} and distributed over {axes[name]}, and {first} over {mesh} "
                f"and {axes[first]}. One other mesh is supported."
            ) from None
    meshes = ExpertMeshes(mesh, axis, frozenset(found))
    check_meshes(meshes, data, first)
    for name in found:
        _check_expert(name, named[name])
    return meshes


def _model_axes(param: nn.Parameter, data: DeviceMesh) -> DeviceMesh | None:
    """Return the axes that a parameter is a DTensor on, without the data axes that it is to be sharded over."""
    if not isinstance(param, DTensor):
        return None
    names, around = _names(param.device_mesh), data_axes_of(param, data)
    if len(around) == param.device_mesh.ndim:
        return None
    return axes_of_mesh(param.device_mesh, names[len(around) :]) if around else param.device_mesh


def _chosen_meshes(placements: Mapping[str, Any], data: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the mesh of each parameter for which `shard_placement_fn` chose another one."""
    found: dict[str, DeviceMesh] = {}
    for name, placement in placements.items():
        if ShardPlacementResult is None or not isinstance(placement, ShardPlacementResult):
            continue
        info = placement.mesh_info
        mesh = getattr(info, "mesh", None)
        dims = (getattr(info, "replicate_mesh_dim", None), getattr(info, "shard_mesh_dim", None))
        if not isinstance(mesh, DeviceMesh) or dims != ((None, 0) if mesh.ndim == 1 else (0, 1)):
            raise ArgumentError(
                f"shard_placement_fn returned a ShardPlacementResult with the mesh_info {brief(info)} for parameter "
                f"{name}. Give FSDPMeshInfo(mesh, shard_mesh_dim=0) of a mesh of one axis, or HSDPMeshInfo(mesh, "
                "replicate_mesh_dim=0, shard_mesh_dim=1) of two."
            )
        if mesh != data:
            found[name] = mesh
    return found


def check_meshes(meshes: ExpertMeshes, data: DeviceMesh, name: str) -> None:
    """Raise ArgumentError if axes are not of one mesh, or have the name of another axis of the other parameters."""
    try:
        whole = meshes.whole
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"parameter {name} is sharded over {meshes.data} and distributed over {meshes.axis}, which are not axes of "
            f"one mesh ({error}). Take both from one."
        ) from error
    for axis in set(_names(whole)).intersection(_names(data)):
        if _ranks(whole, axis) != _ranks(data, axis):
            raise ArgumentError(
                f"parameter {name}: {whole} and {data} each have an axis {axis!r}, along which this rank has others. "
                "Give each axis another name, with mesh_dim_names."
            )


def _ranks(mesh: DeviceMesh, axis: str) -> list[int]:
    own = mesh if mesh.ndim == 1 else mesh[axis]
    ranks: list[int] = own.mesh.flatten().tolist()
    return ranks


def _check_expert(name: str, param: nn.Parameter) -> None:
    if not isinstance(param, DTensor):
        if is_subclass(param):
            raise UnsupportedError(
                f"parameter {name} is a {type(param).__name__}, a tensor subclass, and on another mesh than others. "
                "Use plain tensors for experts."
            )
        return
    check_placement(name, param)
    for size, placement in zip(param.device_mesh.shape, param.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and chunk_range(param.shape[dim], size, size - 1)[1] == 0:
            raise UnsupportedError(
                f"parameter {name} of shape {list(param.shape)} is dealt out along dim {dim} to {size} ranks, and some "
                "of them get nothing. Use more experts, or fewer ranks on the axis."
            )


def _both(first: DeviceMesh | None, second: DeviceMesh | None) -> DeviceMesh | None:
    """Return the axes of both, which are parts of one mesh, or none of both."""
    if first is None or second is None:
        if first is not second:
            raise RuntimeError("one of them is no DTensor")
        return None
    return mesh_of_both(first, second)


def _names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    return () if mesh is None else tuple(mesh.mesh_dim_names or ())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
