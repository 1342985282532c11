"""Load what `graphshard.export` wrote: check, shard, and let traces of calls choose programs. Nothing is compiled."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from graphshard.artifact.cubins import capabilities_of, check_capability
from graphshard.artifact.fingerprint import (
    MODEL_FIELDS,
    differences,
    environment,
    model_facts,
    refuse,
    table_differences,
)
from graphshard.artifact.library import read_programs
from graphshard.artifact.members import Artifact, read_artifact
from graphshard.artifact.places import groups_found, shape_here
from graphshard.artifact.signing import trusted
from graphshard.artifact.stored_options import check_same_options, restored_options
from graphshard.codec.converter import read
from graphshard.errors import ArgumentError, ArtifactError, GraphshardError
from graphshard.exported.exported_program import module_of
from graphshard.ir.mesh import ExpertMeshes, Mesh
from graphshard.ir.param_table import ParamTable, build_table, named_parameters
from graphshard.ir.precision import Precision
from graphshard.ir.subclasses import PRE, is_extended, shard_in
from graphshard.module.compiled_module import make_runner, make_tracer, shard
from graphshard.module.runner import Runner
from graphshard.options.options import CompileArguments, Options, options_given, takes_options
from graphshard.options.resolve import device_of, find_axes, request_for
from graphshard.options.validate import check_model, default_mesh
from graphshard.runtime.process_groups import ranks_of, whole_mesh
from graphshard.utils.argument_validation import path_of

log = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@takes_options
def load(
    path: str | os.PathLike[str],
    model: ModuleT,
    mesh: DeviceMesh | None = None,
    *,
    trust: Any = None,
    **options: Unpack[CompileArguments],
) -> ModuleT:
    """Shard a module and run it by the programs of a file that `graphshard.export` wrote, in place.

    Nothing is planned or compiled: not now, and not at a call. The first call of each kind traces forward, to be sure
    that the file's program is that of the model's code as it is now. A call that the file has no program for is an
    error. The machine, the mesh, options, parameters and buffers are compared first; nothing in the file is executed
    before. The file holds native code: load only what you would run.

    Arguments that are not described here are those of `graphshard.compile`. They need not be given: they are those of
    the export, and what is given must be equal. Only `max_captures` and `verify` are not compared.

    Args:
        path: the same file on every rank.
        model: as it was exported, on the CPU, on the mesh's device, or on the meta device; or the exported program
            that was given to `graphshard.export`.
        mesh: as for `graphshard.compile`; one of those that the file was exported for.
        trust: the ed25519 public key of whoever exported the file, as a PEM file or as an object of the package
            cryptography, or a list of several: a file that none of them signed is refused before anything of it is
            read. None takes every file.

    Returns:
        The same object.

    Raises:
        ArtifactError: the file is damaged, or does not fit; it names what, both values, and what to do. Nothing was
            changed.
        ArgumentError: an argument is wrong.
    """
    options_given(load, options)
    model = module_of(model)
    contents = check_model(model)
    mesh = mesh if mesh is not None else default_mesh()
    axes = find_axes(contents, mesh, Options())
    data, tensor, experts = axes.data, axes.tensor, axes.experts
    assert data is not None
    whole = axes.mesh if tensor is None else axes.mesh.with_tensors(tensor)
    whole = whole if experts is None else whole.with_experts(experts.mesh)
    shape = shape_here(mesh, whole)
    artifact = read_artifact(artifact_path("path", path), () if trust is None else trusted(trust))
    device = device_of(data)
    with _as_exported(artifact, given=bool(options)):
        all_ranks = whole_mesh(data, tensor)
        index = _check_place(artifact, device, whole, shape, ranks_of(all_ranks).index(dist.get_rank()))
        params = artifact.params(index)
        _check_model(artifact, model, params, whole, experts)
        stored = artifact.meshes[index]["options"]
        wanted = Options(**{**restored_options(stored, model, params), **options})
        tracer = make_tracer(request_for(contents, replace(axes, placements=None), wanted, device))
        check_same_options(artifact.path, stored, params, tracer, given=options.keys())
        runner = make_runner(model, tracer, data)
        library, programs = read_programs(artifact, index, model, runner)
        runner.groups.update(groups_found(programs, runner.groups, all_ranks))
    library.check_same(model, runner)
    runner.library, runner.sealed = library, True
    shard(model, runner)
    return model


def library_for(path: Path, model: nn.Module, runner: Runner, mesh: DeviceMesh) -> None:
    """Give the programs of a file to a runner. Log a warning that says why if it does not fit.

    Args:
        mesh: as it was given to `compile`.
    """
    try:
        artifact = read_artifact(path)
        spec = runner.tracer.spec
        shape = shape_here(mesh, spec.mesh)
        with _as_exported(artifact, given=False):
            all_ranks = whole_mesh(runner.mesh, spec.tensor)
            index = _check_place(artifact, spec.device, spec.mesh, shape, ranks_of(all_ranks).index(dist.get_rank()))
            params = artifact.params(index)
            _check_model(artifact, model, params, spec.mesh, spec.experts)
            check_same_options(artifact.path, artifact.meshes[index]["options"], params, runner.tracer)
            library, programs = read_programs(artifact, index, model, runner)
            runner.groups.update(groups_found(programs, runner.groups, all_ranks))
        library.check_same(model, runner)
        runner.library = library
    except ArtifactError as error:
        log.warning("compiling instead of loading: %s", error)


@contextlib.contextmanager
def _as_exported(artifact: Artifact, *, given: bool) -> Iterator[None]:
    """Whatever else than a difference is found in a file, is an ArtifactError: `export` did not write it.

    Args:
        given: there are options of the user's, which may be to blame.
    """
    try:
        yield
    except GraphshardError as error:
        if given or not isinstance(error, ArgumentError):
            raise
        raise ArtifactError(f"{artifact.path} cannot be loaded: {error}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ArtifactError(f"{artifact.path} has contents that graphshard.export did not write ({what}).") from error


def artifact_path(name: str, path: Any) -> Path:
    """The argument with the path of a file of `export`; raise ArgumentError if it is no path."""
    return path_of(name, path, "a file that graphshard.export wrote")


def _check_place(artifact: Artifact, device: torch.device, mesh: Mesh, shape: dict[str, int], rank: int) -> int:
    """Raise ArtifactError if versions, machine or mesh do not fit; the index of the mesh among those of the file.

    Args:
        shape: of the mesh as it was given.
        rank: this one's number among all ranks of the mesh.
    """
    exported = artifact.facts["environment"]
    if exported["device"] != device.type:  # the machine's other facts are those of the other kind of device
        refuse(artifact.path, differences({"device": exported["device"]}, {"device": device.type}))
    refuse(artifact.path, differences(exported, environment(device, native=artifact.native)))
    if device.type == "cuda":
        check_capability(torch.cuda.get_device_capability(device), capabilities_of(artifact.facts), artifact.path)
    # What is regathered over is an option, compared later.
    here = (mesh.grid, mesh.of_experts, list(shape.items()))
    rows = [(read(row["mesh"], Mesh), row) for row in artifact.meshes]
    fits: dict[int | None, int] = {
        row["place"]: index
        for index, (other, row) in enumerate(rows)
        if (other.grid, other.of_experts, list(row["shape"].items())) == here
    }
    if not fits:
        known = " or ".join(dict.fromkeys(str(row["shape"]) for row in artifact.meshes))
        raise ArtifactError(
            f"{artifact.path} does not fit: mesh was {known} when it was exported and is {shape} here. Export "
            f"again with this mesh in the list: export(model, [..., {shape}], ...).",
            field="mesh",
        )
    return fits[None] if None in fits else fits[rank % len(fits)]


def _check_model(
    artifact: Artifact, model: nn.Module, params: ParamTable, mesh: Mesh, experts: ExpertMeshes | None
) -> None:
    """Raise ArtifactError if the module is another than was exported."""
    exported, here = artifact.facts["model"], model_facts(model)
    refuse(artifact.path, differences({"model": exported["model"]}, here))
    for (name, *_), param in named_parameters(model).items():
        if is_extended(param):
            raise ArtifactError(
                f"{artifact.path} does not fit: parameter {name} ({type(shard_in(param)).__name__}) decides itself "
                f"what is gathered of it, in {PRE}, which no file holds. Use graphshard.compile, which captures it.",
                field="parameters",
            )
    one = mesh.resized("shard", 1)
    names = () if experts is None else experts.params
    table = build_table(model, mesh=one, units=(), precision=Precision(), reshard_after_forward=None, experts=names)
    refuse(artifact.path, table_differences(params, table, MODEL_FIELDS))
    refuse(artifact.path, differences({"buffers": exported["buffers"]}, here))
