"""The programs of an artifact: read for a module, and bound to it when it is sharded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphshard.artifact.cubins import read_gpu_code
from graphshard.artifact.members import Artifact, backward_file, partitioned_file
from graphshard.artifact.whole import check_program, check_region
from graphshard.capture.signature import Signature
from graphshard.codec.converter import read
from graphshard.codec.lowered import decode_lowered, decode_region
from graphshard.codec.partitioned import decode_partitioned
from graphshard.codec.passes import decode_pass
from graphshard.ir.errors import ArtifactError
from graphshard.ir.program import Program, Region
from graphshard.lower.kernels import GpuRegion
from graphshard.lower.operators import compile_eager, compile_operators
from graphshard.lower.packages import PackagedRegion
from graphshard.lower.regions import Boxed, RegionCall
from graphshard.module.runner import Runner
from graphshard.passes import AccumulateGradients
from graphshard.pipeline.graph_rules import Checked
from graphshard.runtime.step import BackwardFactory, Strides, Variant

log = logging.getLogger(__name__)

# Conditions on dynamic sizes are those of the region's program, so no other program may use it.
_CONDITIONAL = object()


@dataclass(frozen=True)
class Record:
    """A program as it is in the file, with its further backwards, and where others begin, which is read when needed."""

    entry: str
    signature: Signature
    data: dict[str, Any]
    backwards: Mapping[Variant, dict[str, Any]]
    partitioned: Callable[[], dict[str, Any]] | None


@dataclass
class StoredPrograms:
    """The programs for one mesh, read for a module that is not sharded yet; a copy of it has them read again."""

    path: Path
    records: tuple[Record, ...]
    ready: list[Program] | None = None

    def serves(self, signature: Signature) -> bool:
        """Whether there is a program for calls of the model with this very signature."""
        return any(not record.entry and record.signature == signature for record in self.records)

    def read(self, module: nn.Module, runner: Runner) -> list[Program]:
        """All programs, for a module."""
        device = runner.tracer.spec.device
        return [
            decode_lowered(record.data, runner.tracer.compiled, module.get_submodule(record.entry), device)
            for record in self.records
        ]

    def install(self, module: nn.Module, runner: Runner) -> None:
        """Bind all programs to a module, the model or a copy of it, that the runner runs."""
        programs, self.ready = self.ready or self.read(module, runner), None
        for record, program in zip(self.records, programs, strict=True):
            owner = module.get_submodule(record.entry)
            target = runner.entry(record.entry, "forward", owner) if record.entry else runner
            target.install(owner, record.signature, program, self._backward_factory(record, program, owner, target))

    def _backward_factory(
        self, record: Record, program: Program, owner: nn.Module, runner: Runner
    ) -> BackwardFactory | None:
        partitioned, device = record.partitioned, runner.tracer.spec.device
        if partitioned is None:
            return None

        def make_backward(variant: Variant, _: Strides) -> Program:
            if variant in record.backwards:
                other = decode_lowered(record.backwards[variant], runner.tracer.compiled, owner, device)
                if variant[1] is not None:
                    runner.agreement.check_accumulation(other)
                return other
            lacks = self._lacks(record, variant)
            if runner.sealed:
                raise lacks
            log.warning("compiling instead of loading: %s", lacks)
            return runner.rerun(program, decode_partitioned(partitioned(), program, runner.passes, device), variant)

        return make_backward

    def _lacks(self, record: Record, variant: Variant) -> ArtifactError:
        """The error for a backward that is not there."""
        used, accumulate = variant
        accumulating = [step for _, step in record.backwards if step is not None]
        if accumulate is not None and not accumulating:
            return ArtifactError(
                f"{self.path} has no backward that accumulates gradients without reducing them, as "
                "set_requires_gradient_sync(False) asks for. Export it with accumulate=True, reduce in every "
                "microbatch, or use graphshard.compile(..., artifact=...), which compiles what the file lacks.",
                field="gradients",
            )
        if accumulate is not None and any(used == outputs for outputs, step in record.backwards if step is not None):
            return ArtifactError(
                f"{self.path} has backwards for microbatches that accumulate the gradients of all parameters of "
                f"{record.entry or 'the model'} alike, one with sync or all-reduce at the end, and this one does "
                "otherwise. Call set_requires_gradient_sync or set_requires_all_reduce for the whole model, one of "
                "them, or use graphshard.compile(..., artifact=...), which compiles what the file lacks.",
                field="gradients",
            )
        outputs = ", ".join(sorted(used))
        return ArtifactError(
            f"{self.path} has no backward for gradients through outputs {outputs} of "
            f"{record.entry or 'the model'}. Export it with graphshard.Call(..., gradients=[({outputs},)])."
        )

    def missing(self, runner: Runner, signature: Signature) -> ArtifactError:
        """The error for a call for which there is no program."""
        known = list(runner.executables.known)
        why = min((signature.details(other) for other in known), key=len, default="it has none at all")
        why = "; ".join(runner.executables.changes or runner.executables.misfits) or why
        return ArtifactError(
            f"{self.path} has no program for this call of {runner.tracer.name or 'the model'}: {why}. Export it with "
            "calls=[graphshard.Call(...)] for such calls too, or use graphshard.compile(..., artifact=...), which "
            "compiles what the file lacks.",
            field="inputs",
        )


def read_programs(artifact: Artifact, index: int, model: nn.Module, runner: Runner) -> StoredPrograms:
    """The programs for a mesh; the regions they call are added to the runner's.

    Raises:
        ArtifactError: something cannot be read.
    """
    try:
        return _read(artifact, index, model, runner)
    except ArtifactError:
        raise
    except Exception as error:  # contents that export did not write
        raise ArtifactError(f"{artifact.path}: a program cannot be read ({error!r}).") from error


def _read(artifact: Artifact, index: int, model: nn.Module, runner: Runner) -> StoredPrograms:
    records, regions, checked = [], {}, Checked()
    for program in artifact.meshes[index]["programs"]:
        data = artifact.archive.json(f"{program['file']}.json")
        files = (artifact.archive.json(backward_file(program["file"], row)) for row in program["backwards"])
        backwards = {_variant(row, item): item for row, item in zip(program["backwards"], files)}
        for key in {key for item in (data, *backwards.values()) for key in item["regions"]}:
            if key not in runner.tracer.compiled:
                runner.tracer.compiled[key], regions[key] = _region(artifact, key, runner, checked)
        start = next((functools.partial(artifact.archive.json, name) for name in partitioned_file(program)), None)
        records.append(Record(program["entry"], read(program["signature"], Signature), data, backwards, start))
    stored = StoredPrograms(artifact.path, tuple(records))
    stored.ready = stored.read(model, runner)
    for record, program, row in zip(records, stored.ready, artifact.meshes[index]["programs"]):
        called = {
            name: region for name, key in program.region_names.items() if (region := regions.get(key)) is not None
        }
        check_program(program, record.signature, row["phases"], model.get_submodule(record.entry), called)
    return stored


def _variant(row: Mapping[str, Any], data: Mapping[str, Any]) -> Variant:
    """What a further backward is for."""
    if data["accumulate"] is None:
        return frozenset(row["outputs"]), None
    step = decode_pass(data["accumulate"]).step
    if not isinstance(step, AccumulateGradients):
        raise ArtifactError("a program cannot be read: it accumulates gradients in a way that this version lacks.")
    return frozenset(row["outputs"]), step


def _region(artifact: Artifact, key: str, runner: Runner, checked: Checked) -> tuple[RegionCall, Region | None]:
    """What calls a region, and its operators unless it is compiled."""
    code, device = artifact.facts["regions"][key]["code"], runner.tracer.spec.device
    conditional = "-" in key  # on dynamic sizes, which were recorded with the program that it was compiled for
    within = _CONDITIONAL if conditional else None
    if code == "native":
        return RegionCall(PackagedRegion(key, artifact.package_of(key), device), within), None
    if code == "gpu":
        capability = torch.cuda.get_device_capability(device)
        return RegionCall(GpuRegion(read_gpu_code(artifact.archive, key, capability, device), device), within), None
    region = decode_region(key, artifact.archive.json(f"regions/{key}.json"), device)
    check_region(region, checked)
    if code == "operators":
        run = (compile_eager if runner.tracer.options.backend == "eager" else compile_operators)(region)
        return RegionCall(run, within), region
    return RegionCall(_compiled_here(region, artifact), within), region


def _compiled_here(region: Region, artifact: Artifact) -> Boxed:
    from graphshard.lower import inductor  # takes seconds to import

    log.warning(
        "%s was exported without code for region %s: compiling it. Run `graphshard finish %s` once on such a machine.",
        *(artifact.path, region.key, artifact.path),
    )
    ((_, fn),) = inductor.compile_all({region.key: region}, lambda _: None)
    return fn
