"""The programs of an artifact, which traces of the module choose."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphshard.artifact.cubins import read_gpu_code
from graphshard.artifact.members import Artifact, backward_file, partitioned_file
from graphshard.artifact.whole import check_program, check_region, other_call
from graphshard.codec.converter import read
from graphshard.codec.graph_digest import graph_digest
from graphshard.codec.lowered import decode_lowered, decode_region
from graphshard.codec.partitioned import decode_partitioned
from graphshard.codec.passes import decode_pass
from graphshard.codec.sizes import parse_size
from graphshard.codec.values import strings
from graphshard.errors import ArtifactError
from graphshard.frontend.signature import Signature
from graphshard.ir.graph_break import GraphBreak
from graphshard.ir.printer import number, print_program
from graphshard.ir.program import Program, Region
from graphshard.lower.aoti_package import PackagedRegion
from graphshard.lower.eager import compile_eager, compile_operators
from graphshard.lower.kernels import GpuRegion
from graphshard.lower.regions import Boxed, RegionCall
from graphshard.module.installed_programs import reason_of
from graphshard.module.program_compiler import CachedProgram, ProgramCompiler
from graphshard.module.runner import Runner
from graphshard.passes import AccumulateGradients
from graphshard.pipeline.rules import Checked
from graphshard.runtime.executable import BackwardFactory, Strides, Variant
from graphshard.utils.text import brief

log = logging.getLogger(__name__)

# Characters of a line in a message.
_LONGEST = 200
# Conditions on dynamic sizes are those of the region's program, so no other program may use it.
_CONDITIONAL = object()


@dataclass(frozen=True)
class Record:
    """A program as it is in the file.

    Attributes:
        digests: of the traces that it serves.
        signature: of the call that it was captured for, which describes it.
        backwards: further backwards.
        partitioned: reads where others begin; None if there are none.
        trace: reads the traced graph as text.
    """

    entry: str
    digests: Collection[str]
    signature: Signature
    data: dict[str, Any]
    backwards: Mapping[Variant, dict[str, Any]]
    partitioned: Callable[[], dict[str, Any]] | None
    trace: Callable[[], str]


@dataclass
class StoredPrograms:
    """The programs of a file for one mesh. Each is chosen by the digest of a trace, and read for the traced module."""

    path: Path
    records: tuple[Record, ...]

    @property
    def entries(self) -> frozenset[str]:
        """Names of what there are programs of; "" is the model."""
        return frozenset(record.entry for record in self.records)

    def of(self, entry: str) -> list[Record]:
        """Return the records of the model, or of a submodule that is called on its own."""
        return [record for record in self.records if record.entry == entry]

    def read(self, record: Record, module: nn.Module, runner: ProgramCompiler) -> Program:
        """Return the program of a record, for the module that it is of."""
        return decode_lowered(record.data, runner.tracer.compiled, module, runner.tracer.spec.device)

    def check_same(self, module: nn.Module, runner: ProgramCompiler) -> None:
        """Check that the other ranks have read the same programs; all ranks call this together."""
        for record in self.records:
            runner.agreement.anew().check(self.read(record, module.get_submodule(record.entry), runner))

    def find(self, runner: ProgramCompiler, module: nn.Module, traced: Program) -> CachedProgram | None:
        """Return the program of a trace, ready to be installed; None if the file has none.

        Raises:
            ArtifactError: the program of this digest is that of another trace: export did not write the file.
        """
        digest = graph_digest(traced)
        for record in self.of(runner.tracer.name):
            if digest not in record.digests or not _conditions_hold(record, traced):
                continue
            program = self.read(record, module, runner)
            fault = other_call(program, traced)
            if fault:
                raise ArtifactError(f"{self.path}: a program is for another call: {fault}. Export it again.")
            program.trace, program.taken, program.digest = traced.trace, traced.taken, digest
            make_backward = self._backward_factory(record, program, module, runner)
            return CachedProgram(program, None, {}, of_file=True, make_backward=make_backward)
        return None

    def _backward_factory(
        self, record: Record, program: Program, owner: nn.Module, runner: ProgramCompiler
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

    def missing(self, runner: ProgramCompiler, call: Signature, traced: Program) -> ArtifactError:
        """Return the error for a call for which there is no program."""
        records = self.of(runner.tracer.name)
        why = reason_of(call, [record.signature for record in records]).text if records else "it has none at all"
        if records and not why:
            why = _different_trace(traced, [record for record in records if record.signature == call])
        conditions = dict.fromkeys(text for record in records for text in record.data["conditions"])
        if conditions:
            why += f" (programs of dynamic sizes hold where {brief(', '.join(conditions))})"
        return ArtifactError(
            f"{self.path} has no program for this call of {runner.tracer.name or 'the model'}: {why}. Export it with "
            "calls=[graphshard.Call(...)] for such calls too, or use graphshard.compile(..., artifact=...), which "
            "compiles what the file lacks.",
            field="inputs",
        )

    def untraceable(self, runner: ProgramCompiler, call: Signature, error: GraphBreak) -> ArtifactError:
        """Return the error for a call that cannot be traced whole, so that no program can be for it."""
        records = self.of(runner.tracer.name)
        why = reason_of(call, [record.signature for record in records]).text if records else "it has none at all"
        return ArtifactError(
            f"{self.path} has no program for this call of {runner.tracer.name or 'the model'}: "
            f"{why or 'it has a graph break'}. {error}",
            field="inputs",
        )


def _conditions_hold(record: Record, traced: Program) -> bool:
    """Take for granted, in the guards of a trace, what the program holds for dynamic sizes; return whether it holds."""
    sizes = {size.name: size.value for size in traced.sizes}
    return all(bool(parse_size(text, sizes)) for text in strings(record.data["conditions"]))


def _different_trace(traced: Program, records: Sequence[Record]) -> str:
    """Return the first line in which a trace differs from those of records; all are of calls with equal inputs."""
    number(traced)
    here = print_program(traced).splitlines()
    for record in records:
        there = record.trace().splitlines()
        for was, now in itertools.zip_longest(there, here, fillvalue="(nothing)"):
            if was != now:
                was, now = (line.strip()[:_LONGEST] for line in (was, now))
                return f"forward computes something else: its trace had the line {was!r}, and now has {now!r}"
    return "forward computes something else than when it was exported"


def read_programs(
    artifact: Artifact, index: int, model: nn.Module, runner: Runner
) -> tuple[StoredPrograms, list[Program]]:
    """Read the programs for a mesh, and check them; the regions that they call are added to the runner's.

    Raises:
        ArtifactError: something cannot be read.
    """
    try:
        return _read(artifact, index, model, runner)
    except ArtifactError:
        raise
    except Exception as error:  # contents that export did not write
        raise ArtifactError(f"{artifact.path}: a program cannot be read ({error!r}).") from error


def _read(artifact: Artifact, index: int, model: nn.Module, runner: Runner) -> tuple[StoredPrograms, list[Program]]:
    records, regions, checked = [], {}, Checked()
    for program in artifact.meshes[index]["programs"]:
        file = program["file"]
        data = artifact.archive.json(f"{file}.json")
        files = (artifact.archive.json(backward_file(file, row)) for row in program["backwards"])
        backwards = {_variant(row, item): item for row, item in zip(program["backwards"], files)}
        for key in {key for item in (data, *backwards.values()) for key in item["regions"]}:
            if key not in runner.tracer.compiled:
                runner.tracer.compiled[key], regions[key] = _region(artifact, key, runner, checked)
        start = next((functools.partial(artifact.archive.json, name) for name in partitioned_file(program)), None)
        text = functools.partial(artifact.archive.text, f"{file}.trace.txt")
        signature, digests = read(program["signature"], Signature), frozenset(program["digests"])
        records.append(Record(program["entry"], digests, signature, data, backwards, start, text))
    stored, programs = StoredPrograms(artifact.path, tuple(records)), []
    for record, row in zip(records, artifact.meshes[index]["programs"]):
        module = model.get_submodule(record.entry)
        found = stored.read(record, module, runner)
        called = {name: region for name, key in found.region_names.items() if (region := regions.get(key)) is not None}
        check_program(found, row["phases"], module, called)
        programs.append(found)
    return stored, programs


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
        return RegionCall(PackagedRegion(key, artifact.package_of(key), device), within, kept=True), None
    if code == "gpu":
        capability = torch.cuda.get_device_capability(device)
        return RegionCall(
            GpuRegion(read_gpu_code(artifact.archive, key, capability, device), device), within, kept=True
        ), None
    region = decode_region(key, artifact.archive.json(f"regions/{key}.json"), device)
    check_region(region, checked)
    if code == "operators":
        run = (compile_eager if runner.tracer.options.backend == "eager" else compile_operators)(region)
        return RegionCall(run, within, kept=True), region
    return RegionCall(_compiled_here(region, artifact), within, kept=True), region


def _compiled_here(region: Region, artifact: Artifact) -> Boxed:
    from graphshard.lower import inductor  # takes seconds to import

    log.warning(
        "%s was exported without code for region %s: compiling it. Run `graphshard finish %s` once on such a machine.",
        *(artifact.path, region.key, artifact.path),
    )
    ((_, fn),) = inductor.compile_all({region.key: region}, lambda _: None)
    return fn
