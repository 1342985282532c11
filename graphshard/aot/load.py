"""Load what `graphshard.export` wrote: check, shard, and let traces of calls choose programs. Nothing is compiled."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram
from typing_extensions import Unpack

from graphshard.errors import ArgumentError, ArtifactError, GraphshardError
from graphshard.exported.exported_program import module_of
from graphshard.ir.gpus import CAPABILITIES, dotted
from graphshard.ir.mesh import ExpertMeshes, Mesh
from graphshard.ir.param_table import ParamTable, build_table, named_parameters
from graphshard.ir.program import Program
from graphshard.ir.subclasses import PRE, is_extended, shard_in
from graphshard.ir.units import Precision
from graphshard.module.compiled_module import CompiledModule, compiled_module, make_runner, make_tracer, shard
from graphshard.module.runner import Runner
from graphshard.options.options import CompileArguments, Options, options_given, takes_options
from graphshard.options.resolve import device_of, find_axes, request_for
from graphshard.options.validate import check_model, default_mesh
from graphshard.runtime.process_groups import neighbors, ranks_of, whole_mesh
from graphshard.store.artifact_file import Artifact, read_artifact
from graphshard.store.artifact_manifest import MeshEntry
from graphshard.store.fingerprint import (
    MODEL_FIELDS,
    check_same_options,
    differences,
    environment,
    model_facts,
    refuse,
    restored_options,
    table_differences,
)
from graphshard.store.program_library import read_programs
from graphshard.store.signing import verifier_of
from graphshard.torch_compat.dtensor import group_of
from graphshard.utils.argument_validation import path_of

log = logging.getLogger(__name__)


@takes_options
def load(
    path: str | os.PathLike[str],
    model: nn.Module | ExportedProgram | str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    *,
    trust: Any = None,
    **options: Unpack[CompileArguments],
) -> CompiledModule:
    """Shard a module and run it by the programs of a file that `graphshard.export` wrote, in place.

    Nothing is planned or compiled: not now, and not at a call. The first call of each kind traces forward, to be sure
    that the file's program is the program of the model's present code. A call that the file has no program for is an
    error. The machine, the mesh, options, parameters and buffers are compared first; nothing in the file is executed
    before. The file holds native code: load only what you would run.

    Other arguments have the meaning they have in `graphshard.compile`. They need not be given: they default to those in
    the export, and what is given must be equal. Only `max_captures` and `verify` are not compared.

    Args:
        path: the same file on every rank.
        model: as it was exported, on the CPU, on the mesh's device, or on the meta device; or the exported program
            that was given to `graphshard.export`.
        mesh: as for `graphshard.compile`; one that the file was exported for.
        trust: the ed25519 public key of the file's author, as a PEM file or as an object of the package
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
    module: nn.Module = module_of(model)
    contents = check_model(module)
    mesh = mesh if mesh is not None else default_mesh()
    contents, axes = find_axes(contents, mesh, Options())
    data, tensor, experts = axes.data, axes.tensor, axes.experts
    assert data is not None
    whole = axes.mesh if tensor is None else axes.mesh.with_tensors(tensor)
    whole = whole if experts is None else whole.with_experts(experts.mesh)
    artifact = read_artifact(artifact_path("path", path), verifier_of(trust))
    device = device_of(data)
    with _refusing(artifact, given=bool(options)):
        entry = _check_place(artifact, device, whole, _shape_here(mesh, whole), _rank_in(whole_mesh(data, tensor)))
        _check_model(artifact, module, entry.params, whole, experts, contents.params)
        wanted = Options(**{**restored_options(entry.options, contents.params, entry.params), **options})
        tracer = make_tracer(request_for(contents, replace(axes, placements=None), wanted, device))
        check_same_options(artifact.path, entry, tracer, given=options.keys())
        runner = make_runner(tracer, data)
        _give_programs(artifact, entry, module, runner)
    runner.sealed = True
    shard(module, runner)
    return compiled_module(module)


def library_for(path: Path, model: nn.Module, runner: Runner, mesh: DeviceMesh) -> None:
    """Give the programs of a file to a runner for a mesh as it was given; log a warning if the file does not fit."""
    try:
        artifact = read_artifact(path)
        spec = runner.tracer.spec
        with _refusing(artifact, given=False):
            rank = _rank_in(whole_mesh(runner.mesh, spec.tensor))
            entry = _check_place(artifact, spec.device, spec.mesh, _shape_here(mesh, spec.mesh), rank)
            _check_model(artifact, model, entry.params, spec.mesh, spec.experts)
            check_same_options(artifact.path, entry, runner.tracer)
            _give_programs(artifact, entry, model, runner)
    except ArtifactError as error:
        log.warning("compiling instead of loading: %s", error)


def _give_programs(artifact: Artifact, entry: MeshEntry, model: nn.Module, runner: Runner) -> None:
    """Read the programs for a mesh, compare them with the other ranks', and give them to the runner."""
    library, programs = read_programs(artifact, entry.programs, model, runner)
    groups = _groups_found(programs, runner.groups, whole_mesh(runner.mesh, runner.tracer.spec.tensor))
    runner.groups.update(groups)
    library.check_same(model, runner)
    runner.library = library


def _rank_in(mesh: DeviceMesh) -> int:
    return ranks_of(mesh).index(dist.get_rank())


@contextlib.contextmanager
def _refusing(artifact: Artifact, *, given: bool) -> Iterator[None]:
    """Turn errors except differences into an ArtifactError, unless options were given, which may be the cause."""
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
    """Return the argument with the path of an artifact; raise ArgumentError if it is not a path."""
    return path_of(name, path, "a file that graphshard.export wrote")


def _check_place(artifact: Artifact, device: torch.device, mesh: Mesh, shape: dict[str, int], rank: int) -> MeshEntry:
    """Return the entry of the mesh, as it was given, for a rank; raise ArtifactError if machine or mesh differ."""
    manifest, path = artifact.manifest, artifact.path
    here = environment(device, native=artifact.native)
    # The other facts describe that kind of device.
    names = ["device"] if manifest.environment.device != device.type else None
    refuse(path, differences(manifest.environment, here, names))
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is not None and manifest.capabilities and capability not in manifest.capabilities:
        remedy = f"with capability={capability}; several in one list make one file for all."
        if capability not in CAPABILITIES:
            remedy = "without capability=: then regions are compiled where the file is loaded."
        raise ArtifactError(
            f"{path} does not fit: its kernels are compiled for compute capability "
            f"{' and '.join(map(dotted, manifest.capabilities))}, and the GPU here has {dotted(capability)}. Export "
            f"again {remedy}",
            field="capability",
        )
    # The number of ranks to gather again among is an option, compared later.
    wanted = (mesh.grid, mesh.of_experts, list(shape.items()))
    fits = {
        entry.place: entry
        for entry in manifest.meshes
        if (entry.mesh.grid, entry.mesh.of_experts, list(entry.shape.items())) == wanted
    }
    if not fits:
        known = " or ".join(dict.fromkeys(str(entry.shape) for entry in manifest.meshes))
        raise ArtifactError(
            f"{path} does not fit: mesh was {known} when it was exported and is {shape} here. Export "
            f"again with this mesh in the list: export(model, [..., {shape}], ...).",
            field="mesh",
        )
    return fits[None] if None in fits else fits[rank % len(fits)]


def _check_model(
    artifact: Artifact,
    model: nn.Module,
    params: ParamTable,
    mesh: Mesh,
    experts: ExpertMeshes | None,
    found: Mapping[tuple[str, ...], nn.Parameter] | None = None,
) -> None:
    """Raise ArtifactError if the module, of which parameters were `found`, is not the one that was exported."""
    exported, here = artifact.manifest.model, model_facts(model)
    refuse(artifact.path, differences(exported, here, ["model"]))
    for (name, *_), param in named_parameters(model).items():
        if is_extended(param):
            raise ArtifactError(
                f"{artifact.path} does not fit: parameter {name} ({type(shard_in(param)).__name__}) decides itself "
                f"what is gathered of it, in {PRE}, which no file holds. Use graphshard.compile, which captures it.",
                field="parameters",
            )
    one = mesh.resized("shard", 1)
    names = () if experts is None else experts.params
    settings: Any = {"units": (), "precision": Precision(), "reshard_after_forward": None}
    table = build_table(model, mesh=one, experts=names, params=found, **settings)
    refuse(artifact.path, table_differences(params, table, MODEL_FIELDS))
    refuse(artifact.path, differences(exported, here))


def _shape_here(given: DeviceMesh, mesh: Mesh) -> dict[str, int]:
    """Return the sizes by name of the axes of a mesh as it was given, where several may shard as one."""
    names = given.mesh_dim_names
    if not names or mesh.only_replicates:
        return mesh.shape
    return dict(zip(names, given.shape)) | {axis.name: axis.size for axis in mesh.tensors}


def _groups_found(programs: Iterable[Program], known: Mapping[str, str], mesh: DeviceMesh) -> dict[str, str]:
    """Return the groups of neighbors, by name, that programs need beyond known ones; raise ArtifactError if lacking."""
    found = {}
    for program in programs:
        for axis in program.mesh.axes:
            if axis.name in known:
                continue
            ranks = neighbors(program.mesh, mesh, axis)
            group = group_of(ranks)
            if group is None:
                raise ArtifactError(
                    f"a program communicates among neighbors ({axis.name}), ranks {ranks} here, and this process has "
                    "no group of them. Make the model as it was made for the export before it is loaded.",
                    field="mesh",
                )
            found[axis.name] = group
    return found
