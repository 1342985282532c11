"""Load what `graphshard.export` wrote: check, shard, bind. Nothing is traced and nothing compiled."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from graphshard.artifact import Artifact, backward_file, read_artifact
from graphshard.backends import compile_eager, compile_operators
from graphshard.checks import check_mesh, check_model, default_mesh
from graphshard.encode import Decoder
from graphshard.encode_lowered import decode_lowered, decode_region
from graphshard.encode_signature import decode_signature
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.fingerprint import (
    MODEL_FIELDS,
    OPTION_FIELDS,
    differences,
    environment,
    model_facts,
    options_of,
    refuse,
    table_differences,
)
from graphshard.lower import Boxed, RegionCall
from graphshard.meshes import axes_of
from graphshard.module import Runner
from graphshard.packages import PackagedRegion
from graphshard.params import ParamTable, build_table
from graphshard.precision import Precision
from graphshard.prepare import device_of, prepare, shard
from graphshard.program import Axis, Phase, Program, Region
from graphshard.runtime import BackwardFactory, Variant
from graphshard.signature import Signature

log = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# Conditions on dynamic sizes are those of the region's program, so no other program may use it.
_CONDITIONAL = object()


def load(path: str | os.PathLike[str], model: ModuleT, mesh: DeviceMesh | None = None, **options: Any) -> ModuleT:
    """Shard a module and run it by the programs of a file that `graphshard.export` wrote, in place.

    Nothing is traced or compiled: not now, and not at a call. A call that the file has no program for is an error.
    Everything that the programs depend on is compared first; nothing in the file is executed before. The file holds
    native code: load only what you would run.

    Args:
        path: the same file on every rank.
        model: as it was exported, on the CPU, on the mesh's device, or on the meta device.
        mesh: as for `graphshard.compile`; one of those that the file was exported for.
        options: those of `graphshard.compile`. They need not be given; those that are must be those of the export.

    Returns:
        The same object.

    Raises:
        ArtifactError: the file is damaged, or does not fit; it names what, both values, and what to do. Nothing was
            changed.
        ArgumentError: an argument is wrong.
    """
    check_model(model)
    mesh = mesh if mesh is not None else default_mesh()
    check_mesh(mesh)
    artifact = read_artifact(_path(path))
    device = device_of(mesh)
    axis, replicate = axes_of(mesh)
    index = _check_place(artifact, device, (axis,) if replicate is None else (replicate, axis))
    params = artifact.params(index)
    _check_model(artifact, model, params)
    try:
        runner = prepare(model, axis, device, mesh, **{**_options(artifact, model, params), **options})
    except TypeError as error:
        raise ArgumentError(f"load: {error}") from None
    # Passes and dynamic dims did their work when it was exported; they need not be given again.
    given = {"passes": {"passes", "activation"}, "dynamic_shapes": {"dynamic_shapes"}}
    _check_options(artifact, runner, params, [field for field, names in given.items() if not names & set(options)])
    runner.stored, runner.sealed = _stored(artifact, index, model, runner), True
    shard(model, runner)
    runner.stored.install(model, runner)
    return model


def stored_for(path: str | os.PathLike[str], model: nn.Module, runner: Runner) -> Stored | None:
    """The programs of a file for a runner; None, and a warning that says why, if it does not fit."""
    try:
        artifact = read_artifact(_path(path))
        index = _check_place(artifact, runner.spec.device, (runner.spec.axis,))
        params = artifact.params(index)
        _check_model(artifact, model, params)
        _check_options(artifact, runner, params)
        runner.stored = _stored(artifact, index, model, runner)
    except ArtifactError as error:
        log.warning("compiling instead of loading: %s", error)
        return None
    return runner.stored


@dataclass(frozen=True)
class Record:
    """A program as it is in the file."""

    entry: str
    signature: Signature
    data: dict[str, Any]
    backwards: Mapping[frozenset[str], dict[str, Any]]


@dataclass
class Stored:
    """The programs for one mesh, read for a module that is not sharded yet; a copy of it has them read again."""

    path: Path
    records: tuple[Record, ...]
    ready: list[Program] | None = None

    def serves(self, signature: Signature) -> bool:
        """Whether there is a program for calls of the model with this very signature."""
        return any(not record.entry and record.signature == signature for record in self.records)

    def read(self, module: nn.Module, runner: Runner) -> list[Program]:
        """All programs, for a module."""
        device = runner.spec.device
        return [
            decode_lowered(record.data, runner.compiled, module.get_submodule(record.entry), device)
            for record in self.records
        ]

    def install(self, module: nn.Module, runner: Runner) -> None:
        """Bind all programs to a module, the model or a copy of it, that the runner runs."""
        programs, self.ready = self.ready or self.read(module, runner), None
        for record, program in zip(self.records, programs, strict=True):
            owner = module.get_submodule(record.entry)
            target = runner.entry(record.entry, "forward", owner) if record.entry else runner
            target.install(owner, record.signature, program, self._backward_factory(record, owner, runner))

    def _backward_factory(self, record: Record, owner: nn.Module, runner: Runner) -> BackwardFactory:
        def make_backward(variant: Variant) -> Phase:
            used, accumulate = variant
            if accumulate is not None:
                raise ArtifactError(
                    f"{self.path} has no backward that accumulates gradients without reducing them. Reduce in every "
                    "microbatch, or use graphshard.compile.",
                    field="gradients",
                )
            if used not in record.backwards:
                outputs = ", ".join(sorted(used))
                raise ArtifactError(
                    f"{self.path} has no backward for gradients through outputs {outputs} of "
                    f"{record.entry or 'the model'}. Export it with graphshard.Call(..., gradients=[({outputs},)])."
                )
            program = decode_lowered(record.backwards[used], runner.compiled, owner, runner.spec.device)
            return program.phases["backward"]

        return make_backward

    def missing(self, runner: Runner, signature: Signature) -> ArtifactError:
        """The error for a call for which there is no program."""
        known = list(runner.executables)
        why = min((signature.details(other) for other in known), key=len, default="it has none at all")
        why = "; ".join(runner.misfits) or why
        return ArtifactError(
            f"{self.path} has no program for this call of {runner.name or 'the model'}: {why}. Export it with "
            "calls=[graphshard.Call(...)] for such calls too, or use graphshard.compile(..., artifact=...), which "
            "compiles what the file lacks.",
            field="inputs",
        )


def _path(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path must be a file that graphshard.export wrote, got {type(path).__name__}.")
    return Path(path)


def _check_place(artifact: Artifact, device: torch.device, axes: tuple[Axis, ...]) -> int:
    """Raise ArtifactError if versions, machine or mesh do not fit; the index of the mesh among those of the file."""
    exported = artifact.facts["environment"]
    if exported["device"] != device.type:  # the machine's other facts are those of the other kind of device
        refuse(artifact.path, differences({"device": exported["device"]}, {"device": device.type}))
    refuse(artifact.path, differences(exported, environment(device, native=artifact.native)))
    wanted = {axis.name: axis.size for axis in axes}
    meshes = [mesh["axes"] for mesh in artifact.meshes]
    if wanted not in meshes:
        raise ArtifactError(
            f"{artifact.path} does not fit: mesh was {' or '.join(map(str, meshes))} when it was exported and is "
            f"{wanted} here. Export again with this mesh in the list: export(model, [..., {wanted}], ...).",
            field="mesh",
        )
    return meshes.index(wanted)


def _check_model(artifact: Artifact, model: nn.Module, params: ParamTable) -> None:
    """Raise ArtifactError if the module is another than was exported."""
    exported, here = artifact.facts["model"], model_facts(model)
    refuse(artifact.path, differences({"model": exported["model"]}, here))
    table = build_table(model, num_shards=1, units=(), precision=Precision(), reshard_after_forward=None)
    refuse(artifact.path, table_differences(params, table, MODEL_FIELDS))
    for field in ("buffers", "attributes", "code"):
        refuse(artifact.path, differences({field: exported[field]}, here))


def _check_options(artifact: Artifact, runner: Runner, params: ParamTable, left_out: Collection[str] = ()) -> None:
    """Raise ArtifactError if the runner's options, but for some, are others than those of the export."""
    exported, here = artifact.facts["options"], options_of(runner)
    first = {name: exported[name] for name in ("units", "mp_policy", "mp_policies")}
    refuse(artifact.path, differences(first, here))
    refuse(artifact.path, table_differences(params, runner.spec.params, OPTION_FIELDS))
    refuse(artifact.path, differences({name: exported[name] for name in exported if name not in left_out}, here))


def _options(artifact: Artifact, model: nn.Module, params: ParamTable) -> dict[str, Any]:
    """The options of the export, for `prepare`."""
    stored = artifact.facts["options"]
    value = Decoder().value
    named = dict(model.named_parameters())
    dims = {id(named[row.name]): row.dim for row in params}

    def policy(of: Mapping[str, Any]) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(**{name: value(item) for name, item in of.items()})

    reshard = {row.reshard for row in params}
    offload = stored["offload_policy"]
    return {
        "mp_policy": {unit: policy(of) for unit, of in stored["mp_policies"].items()} or policy(stored["mp_policy"]),
        "reshard_after_forward": reshard.pop() if len(reshard) == 1 else None,
        "shard_placement_fn": lambda param: Shard(dims[id(param)]),
        "offload_policy": None if offload is None else CPUOffloadPolicy(pin_memory=offload["pin_memory"]),
        "ignored_params": [named[row.name] for row in params if row.ignored],
        "units": [tuple(unit.split(", ")) if ", " in unit else unit for unit in stored["units"]],
        "backend": stored["backend"],
    }


def _stored(artifact: Artifact, index: int, model: nn.Module, runner: Runner) -> Stored:
    """The programs for a mesh; the regions they call are added to the runner's."""
    try:
        return _read(artifact, index, model, runner)
    except ArtifactError:
        raise
    except Exception as error:  # contents that export did not write
        raise ArtifactError(f"{artifact.path}: a program cannot be read ({error!r}).") from error


def _read(artifact: Artifact, index: int, model: nn.Module, runner: Runner) -> Stored:
    records = []
    for program in artifact.meshes[index]["programs"]:
        file = program["file"]
        data = artifact.archive.json(f"{file}.json")
        backwards = {
            frozenset(outputs): artifact.archive.json(backward_file(file, outputs)) for outputs in program["gradients"]
        }
        for key in {key for item in (data, *backwards.values()) for key in item["regions"]}:
            if key not in runner.compiled:
                runner.compiled[key] = _region(artifact, key, runner)
        records.append(Record(program["entry"], decode_signature(program["signature"]), data, backwards))
    stored = Stored(artifact.path, tuple(records))
    stored.ready = stored.read(model, runner)
    return stored


def _region(artifact: Artifact, key: str, runner: Runner) -> RegionCall:
    """What calls a region."""
    code, device = artifact.facts["regions"][key]["code"], runner.spec.device
    conditional = "-" in key  # on dynamic sizes, which were recorded with the program that it was compiled for
    within = _CONDITIONAL if conditional else None
    if code == "native":
        return RegionCall(PackagedRegion(key, artifact.package_of(key), device), within)
    region = decode_region(key, artifact.archive.json(f"regions/{key}.json"), device)
    if code == "operators":
        return RegionCall((compile_eager if runner.backend == "eager" else compile_operators)(region), within)
    return RegionCall(_compiled_here(region, artifact), within)


def _compiled_here(region: Region, artifact: Artifact) -> Boxed:
    from graphshard import inductor  # takes seconds to import

    log.warning(
        "%s was exported without code for region %s: compiling it. Run `graphshard finish %s` once on such a machine.",
        *(artifact.path, region.key, artifact.path),
    )
    ((_, fn),) = inductor.compile_all({region.key: region}, lambda _: None)
    return fn
