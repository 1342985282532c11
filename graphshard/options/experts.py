"""Which parameters lie otherwise than the others on the ranks, as those of experts do, and on which meshes.

init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "ep"))      DTensors on mesh["ep"] are sharded over "dp" alone,
                                                                   the others over both axes, as one; any may be on
                                                                   the whole mesh, where data axes replicate them
shard_placement_fn=lambda p: ShardPlacementResult(...)             each as FSDP2's function says
fully_shard(experts, mesh=mesh["dp"]), fully_shard(block, ...)     those of a part that was sharded over another mesh
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphshard.ir.device_meshes import ExpertMeshes, axes_of_mesh
from graphshard.ir.distributed_internals import ShardPlacementResult, is_part, mesh_of_both
from graphshard.ir.errors import ArgumentError, UnsupportedError
from graphshard.ir.make_table import named_parameters
from graphshard.ir.mesh import EXPERT
from graphshard.ir.params import chunk_range
from graphshard.ir.subclasses import is_subclass
from graphshard.ir.text import brief
from graphshard.options.meshes import axes_by_role, check_placement, data_axes_of, dims_named


def experts_by_name(mesh: DeviceMesh, dp_mesh_dims: Any = None) -> ExpertMeshes | None:
    """What a mesh with an expert axis is to experts: the other data axes, and that one.

    Raises:
        ArgumentError: there is no other axis to shard over, or several expert axes.
    """
    names = tuple((mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None) or ())
    found = [name for name in names if name in EXPERT]
    if dp_mesh_dims is not None:  # what it does not name is the tensor axis, whatever it is called
        found = [name for name in found if name in dims_named(names, dp_mesh_dims)[1]]
    if not found:
        return None
    if len(found) > 1:
        raise ArgumentError(f"mesh {names} has {len(found)} expert axes. Give it one.")
    data, _ = axes_by_role(mesh, dp_mesh_dims, without=found[0])
    return ExpertMeshes(data, mesh[found[0]])


def experts_of(
    model: nn.Module,
    data: DeviceMesh,
    given: ExpertMeshes | None,
    answers: Mapping[str, Any],
    left_out: Container[nn.Parameter],
    *,
    whole_model: bool = True,
) -> ExpertMeshes | None:
    """The meshes of the parameters that lie otherwise than the others, with their names; None if there are none.

    Args:
        data: the axes that the others are sharded and replicated over.
        given: what the axes of the mesh say by their names.
        answers: of `shard_placement_fn`, by names of parameters.
        left_out: parameters that are sharded already, or to be left alone.
        whole_model: False for a part of one, which need not have experts.

    Raises:
        ArgumentError: there is an expert axis and no parameter on it, or meshes that do not fit each other.
        UnsupportedError: there are several such meshes.
    """
    named = {name: param for (name, *_), param in named_parameters(model).items() if param not in left_out}
    found = _by_answers(answers, data)
    if given is not None and given.axis is not None:
        on_axis = {
            name
            for name, p in named.items()
            if isinstance(p, DTensor) and is_part(given.axis, p.device_mesh) and not data_axes_of(p, data)
        }
        if whole_model and not on_axis:
            raise ArgumentError(
                f"mesh has an expert axis, {given.axis_name!r}, and all parameters of {type(model).__name__} lie alike "
                "along it. Deal the experts out first, such as distribute_tensor(weight, mesh['ep'], [Shard(0)]) for "
                "each of their weights, or call the axis 'cp' if the model has none."
            )
        found |= {name: found.get(name, given.data) for name in on_axis}
    if not found:
        return None
    axes = {name: _dealt_along(named[name], over) for name, over in found.items()}
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
                f"and {axes[first]}. One mesh besides that of the others is supported."
            ) from None
    meshes = ExpertMeshes(mesh, axis, frozenset(found))
    check_meshes(meshes, data, first)
    for name in found:
        param = named[name]
        if not isinstance(param, DTensor) and is_subclass(param):
            raise UnsupportedError(
                f"parameter {name} is a {type(param).__name__}, a tensor subclass, and on another mesh than others. "
                "Use plain tensors for experts."
            )
        if isinstance(param, DTensor):
            check_placement(name, param)
            _check_dealt(name, param)
    return meshes


def params_of(model: nn.Module, experts: ExpertMeshes | None) -> set[nn.Parameter]:
    """The parameters of a model that lie otherwise than the others."""
    return {model.get_parameter(name) for name in experts.params} if experts is not None else set()


def _dealt_along(param: nn.Parameter, data: DeviceMesh) -> DeviceMesh | None:
    """The axes that a parameter is a DTensor on, without data axes if it lies on those, too; None if there are none.

    Args:
        data: the axes that it is to be sharded over.
    """
    if not isinstance(param, DTensor):
        return None
    names, around = param.device_mesh.mesh_dim_names or (), data_axes_of(param, data)
    if len(around) == param.device_mesh.ndim:
        return None
    return axes_of_mesh(param.device_mesh, names[len(around) :]) if around else param.device_mesh


def _by_answers(answers: Mapping[str, Any], data: DeviceMesh) -> dict[str, DeviceMesh]:
    """The mesh of each parameter for which `shard_placement_fn` names another than that of the others."""
    found: dict[str, DeviceMesh] = {}
    for name, answer in answers.items():
        if ShardPlacementResult is None or not isinstance(answer, ShardPlacementResult):
            continue
        info = answer.mesh_info
        dims = (getattr(info, "replicate_mesh_dim", None), getattr(info, "shard_mesh_dim", None))
        if not isinstance(getattr(info, "mesh", None), DeviceMesh) or dims != (
            (None, 0) if info.mesh.ndim == 1 else (0, 1)
        ):
            raise ArgumentError(
                f"shard_placement_fn returned a ShardPlacementResult with the mesh_info {brief(info)} for parameter "
                f"{name}. Give FSDPMeshInfo(mesh, shard_mesh_dim=0) of a mesh of one axis, or HSDPMeshInfo(mesh, "
                "replicate_mesh_dim=0, shard_mesh_dim=1) of two."
            )
        if info.mesh != data:
            found[name] = info.mesh
    return found


def check_meshes(meshes: ExpertMeshes, data: DeviceMesh, name: str) -> None:
    """Raise ArgumentError if axes are not of one mesh, or cannot be told apart from those of the other parameters.

    Args:
        name: a parameter on it, for the error.
    """
    try:
        whole = meshes.whole
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"parameter {name} is sharded over {meshes.data} and distributed over {meshes.axis}, which are no axes of "
            f"one mesh ({error}). Take both from one."
        ) from error
    for axis in set(whole.mesh_dim_names or ()).intersection(data.mesh_dim_names or ()):
        if _ranks(whole, axis) != _ranks(data, axis):
            raise ArgumentError(
                f"parameter {name}: {whole} and {data} each have an axis {axis!r}, along which this rank has others. "
                "Give axes names of their own, with mesh_dim_names."
            )


def _ranks(mesh: DeviceMesh, axis: str) -> Sequence[int]:
    own = mesh if mesh.ndim == 1 else mesh[axis]
    ranks: list[int] = own.mesh.flatten().tolist()
    return ranks


def _check_dealt(name: str, param: DTensor) -> None:
    for size, placement in zip(param.device_mesh.shape, param.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and chunk_range(param.shape[dim], size, size - 1)[1] == 0:
            raise UnsupportedError(
                f"parameter {name} of shape {list(param.shape)} is dealt out along dim {dim} to {size} ranks, and some "
                "of them get nothing. Use more experts, or fewer ranks on the axis."
            )


def _both(first: DeviceMesh | None, second: DeviceMesh | None) -> DeviceMesh | None:
    """The axes of both, which are parts of one mesh, or none of both."""
    if first is None or second is None:
        if first is not second:
            raise RuntimeError("one of them is no DTensor")
        return None
    return first if is_part(second, first) else mesh_of_both(first, second)
