"""The programs of an artifact for one mesh; traces of calls select them by their digests."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphshard.codec.converter import decode_pass
from graphshard.codec.graph_format import strings
from graphshard.codec.program_format import decode_lowered, decode_partitioned, graph_digest
from graphshard.codec.size_format import parse_size
from graphshard.cross.gpu_kernels import GpuRegion
from graphshard.errors import ArtifactError
from graphshard.frontend.signature import Signature
from graphshard.ir.graph_break import GraphBreak
from graphshard.ir.printer import number, print_program
from graphshard.ir.program import Program, Region
from graphshard.lower.aoti_package import PackagedRegion
from graphshard.lower.backends import Backend
from graphshard.lower.eager import compile_eager, compile_operators
from graphshard.lower.region_store import KeptRegion
from graphshard.lower.regions import Boxed, RegionCall
from graphshard.module.installed_programs import reason_of
from graphshard.module.program_compiler import LoweredProgram, ProgramCompiler
from graphshard.module.runner import Runner
from graphshard.passes import AccumulateGradients
from graphshard.pipeline.rules import Checked
from graphshard.runtime.executable import BackwardFactory, Strides, Variant
from graphshard.store.artifact_file import Artifact
from graphshard.store.artifact_manifest import BackwardEntry, ProgramEntry
from graphshard.store.validate_program import check_program, check_region, differs_from_trace
from graphshard.utils.text import brief

log = logging.getLogger(__name__)

# Characters of a line in a message.
_LONGEST = 200
# Conditions on dynamic sizes belong to the region's program, so no other program may use it.
_CONDITIONAL = object()


@dataclass(frozen=True)
class StoredProgram:
    """A program of a file: its entry in the manifest, and the data of its lowered code and of further backwards."""

    entry: ProgramEntry
    data: dict[str, Any]
    backwards: Mapping[Variant, dict[str, Any]]


@dataclass
class ProgramLibrary:
    """The programs of a file for one mesh, each selected by the digest of a trace and read for the traced module."""

    artifact: Artifact
    programs: tuple[StoredProgram, ...]

    @property
    def entries(self) -> frozenset[str]:
        """Names of the submodules that there are programs of; "" is the model."""
        return frozenset(program.entry.entry for program in self.programs)

    def of(self, entry: str) -> list[StoredProgram]:
        """Return the programs of the model, or of a submodule that is called on its own."""
        return [program for program in self.programs if program.entry.entry == entry]

    def read(self, stored: StoredProgram, module: nn.Module, runner: ProgramCompiler) -> Program:
        """Return the program for its module."""
        return decode_lowered(stored.data, runner.tracer.compiled, module, runner.tracer.spec.device)

    def check_same(self, module: nn.Module, runner: ProgramCompiler) -> None:
        """Check that the other ranks have read the same programs; all ranks call this together."""
        for stored in self.programs:
            runner.agreement.anew().check(self.read(stored, module.get_submodule(stored.entry.entry), runner))

    def find(self, runner: ProgramCompiler, module: nn.Module, traced: Program) -> LoweredProgram | None:
        """Return the program of a trace, ready to be installed; None if the file has none.

        Raises:
            ArtifactError: the program of this digest belongs to another trace: export did not write the file.
        """
        digest = graph_digest(traced)
        for stored in self.of(runner.tracer.name):
            if digest not in stored.entry.digests or not _conditions_hold(stored, traced):
                continue
            program = self.read(stored, module, runner)
            fault = differs_from_trace(program, traced)
            if fault:
                raise ArtifactError(f"{self.artifact.path}: a program is for another call: {fault}. Export it again.")
            program.trace, program.taken, program.digest = traced.trace, traced.taken, digest
            make_backward = self._backward_factory(stored, program, module, runner)
            return LoweredProgram(program, make_backward, of_file=True)
        return None

    def _backward_factory(
        self, stored: StoredProgram, program: Program, owner: nn.Module, runner: ProgramCompiler
    ) -> BackwardFactory | None:
        device = runner.tracer.spec.device
        if not stored.entry.partitioned_files:
            return None

        def make_backward(variant: Variant, _: Strides) -> Program:
            if variant in stored.backwards:
                other = decode_lowered(stored.backwards[variant], runner.tracer.compiled, owner, device)
                if variant[1] is not None:
                    runner.agreement.check(other)
                return other
            lacks = self._no_backward(stored, variant)
            if runner.sealed:
                raise lacks
            log.warning("compiling instead of loading: %s", lacks)
            (file,) = stored.entry.partitioned_files
            start = decode_partitioned(self.artifact.archive.json(file), program, runner.passes, device)
            return runner.rerun(program, start, variant)

        return make_backward

    def _no_backward(self, stored: StoredProgram, variant: Variant) -> ArtifactError:
        path, (used, accumulate) = self.artifact.path, variant
        model = stored.entry.entry or "the model"
        accumulating = [outputs for outputs, step in stored.backwards if step is not None]
        if accumulate is not None and not accumulating:
            return ArtifactError(
                f"{path} has no backward that accumulates gradients without reducing them, as "
                "set_requires_gradient_sync(False) asks for. Export it with accumulate=True, reduce in every "
                "microbatch, or use graphshard.compile(..., artifact=...), which compiles what the file lacks.",
                field="gradients",
            )
        if accumulate is not None and used in accumulating:
            return ArtifactError(
                f"{path} has backwards for microbatches that accumulate the gradients of all parameters of {model} "
                "alike, one with sync or all-reduce at the end, and this one does otherwise. Call "
                "set_requires_gradient_sync or set_requires_all_reduce for the whole model, one of them, or use "
                "graphshard.compile(..., artifact=...), which compiles what the file lacks.",
                field="gradients",
            )
        outputs = ", ".join(sorted(used))
        return ArtifactError(
            f"{path} has no backward for gradients through outputs {outputs} of {model}. Export it with "
            f"graphshard.Call(..., gradients=[({outputs},)])."
        )

    def missing(self, runner: ProgramCompiler, call: Signature, traced: Program) -> ArtifactError:
        """Return the error for a call for which there is no program."""
        found = self.of(runner.tracer.name)
        why = self._reason(runner, call)
        if not why:
            why = self._different_trace(traced, [stored for stored in found if stored.entry.signature == call])
        conditions = dict.fromkeys(text for stored in found for text in stored.data["conditions"])
        if conditions:
            why += f" (programs of dynamic sizes hold where {brief(', '.join(conditions))})"
        return self._no_program(
            runner,
            f"{why}. Export it with calls=[graphshard.Call(...)] for such calls too, or use "
            "graphshard.compile(..., artifact=...), which compiles what the file lacks.",
        )

    def untraceable(self, runner: ProgramCompiler, call: Signature, error: GraphBreak) -> ArtifactError:
        """Return the error for a call that cannot be traced whole, so that no program can be for it."""
        return self._no_program(runner, f"{self._reason(runner, call) or 'it has a graph break'}. {error}")

    def _no_program(self, runner: ProgramCompiler, why: str) -> ArtifactError:
        model = runner.tracer.name or "the model"
        return ArtifactError(f"{self.artifact.path} has no program for this call of {model}: {why}", field="inputs")

    def _reason(self, runner: ProgramCompiler, call: Signature) -> str:
        """Return how a call differs from the calls of the file; "" if its signature does not."""
        found = self.of(runner.tracer.name)
        return reason_of(call, [stored.entry.signature for stored in found]).text if found else "it has none at all"

    def _different_trace(self, traced: Program, found: Sequence[StoredProgram]) -> str:
        """Return the first line in which a trace differs from the traces of the file, of calls with equal inputs."""
        number(traced)
        here = print_program(traced).splitlines()
        for stored in found:
            there = self.artifact.archive.text(f"{stored.entry.file}.trace.txt").splitlines()
            for was, now in itertools.zip_longest(there, here, fillvalue="(nothing)"):
                if was != now:
                    was, now = (line.strip()[:_LONGEST] for line in (was, now))
                    return f"forward computes something else: its trace had the line {was!r}, and now has {now!r}"
        return "forward computes something else than when it was exported"


def _conditions_hold(stored: StoredProgram, traced: Program) -> bool:
    """Add a program's assumptions about dynamic sizes to the guards of a trace; return whether they hold."""
    sizes = {size.name: size.value for size in traced.sizes}
    return all(bool(parse_size(text, sizes)) for text in strings(stored.data["conditions"]))


def read_programs(
    artifact: Artifact, index: int, model: nn.Module, runner: Runner
) -> tuple[ProgramLibrary, list[Program]]:
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


def _read(artifact: Artifact, index: int, model: nn.Module, runner: Runner) -> tuple[ProgramLibrary, list[Program]]:
    tracer, regions, checked = runner.tracer, dict[str, Region | None](), Checked()
    stored = []
    for entry in artifact.manifest.meshes[index].programs:
        data = artifact.archive.json(f"{entry.file}.json")
        others = [(row, artifact.archive.json(entry.backward_file(row))) for row in entry.backwards]
        stored.append(StoredProgram(entry, data, {_variant(row, item): item for row, item in others}))
        for key in {key for item in (data, *(item for _, item in others)) for key in item["regions"]}:
            if key not in tracer.compiled:
                if artifact.manifest.regions[key].code == "later":
                    log.warning(
                        "%s was exported without code for region %s: compiling it. Run `graphshard finish %s` once on "
                        "such a machine.",
                        *(artifact.path, key, artifact.path),
                    )
                fn, regions[key] = read_region(artifact, key, tracer.options.backend, tracer.spec.device, checked)
                # Regions with dynamic sizes have the number of their program in their keys.
                tracer.compiled[key] = RegionCall(fn, _CONDITIONAL if "-" in key else None, kept=True)
    library, programs = ProgramLibrary(artifact, tuple(stored)), []
    for found in stored:
        module = model.get_submodule(found.entry.entry)
        program = library.read(found, module, runner)
        called = {
            name: region for name, key in program.region_names.items() if (region := regions.get(key)) is not None
        }
        check_program(program, found.entry.phases, module, called)
        programs.append(program)
    return library, programs


def _variant(entry: BackwardEntry, data: Mapping[str, Any]) -> Variant:
    if data["accumulate"] is None:
        return frozenset(entry.outputs), None
    step = decode_pass(data["accumulate"]).step
    if not isinstance(step, AccumulateGradients):
        raise ArtifactError("a program cannot be read: it accumulates gradients in a way that this version lacks.")
    return frozenset(entry.outputs), step


def read_region(
    artifact: Artifact, key: str, backend: Backend, device: torch.device, checked: Checked | None = None
) -> tuple[Boxed, Region | None]:
    """Return the function that runs a region of a file, and its operators unless there is code for it.

    Args:
        checked: calls that were found right in other regions; None does not check them.
    """
    code = artifact.manifest.regions[key].code
    if code == "native":
        return PackagedRegion(key, artifact.package_of(key), device), None
    if code == "kernels":
        return KeptRegion(key, artifact.kernels_of(key)), None
    if code == "gpu":
        capability = torch.cuda.get_device_capability(device)
        return GpuRegion(artifact.gpu_code(key, capability, device), device), None
    region = artifact.region(key, device)
    if checked is not None:
        check_region(region, checked)
    if code == "operators":
        return (compile_eager if backend == "eager" else compile_operators)(region), region
    from graphshard.lower import inductor  # takes seconds to import

    ((_, fn),) = inductor.compile_all({key: region}, lambda _: None)
    return fn, region
