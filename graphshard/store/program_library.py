"""The programs of an artifact for one mesh; traces of calls select them by their digests.

A program that loads can be called. Reading has checked the type of each field; then fields are compared with each
other: slots with graphs, calls with regions, operators with their values, and inputs with those of the trace. Thus
forged contents with the right digest are an error of loading, before anything is changed.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from graphshard.codec.graph_format import parse_size, strings
from graphshard.codec.program_format import decode_lowered, decode_partitioned, graph_digest
from graphshard.cross.gpu_kernels import GpuRegion
from graphshard.errors import ArtifactError, GraphBreak
from graphshard.frontend.signature import Signature
from graphshard.ir.printer import describe, number, print_program
from graphshard.ir.program import Phase, Program, Region, Size
from graphshard.lower.backends import Backend, compiler_for
from graphshard.lower.eager import compile_eager, compile_operators
from graphshard.lower.region_store import KeptRegion
from graphshard.lower.regions import Boxed, RegionCall
from graphshard.module.installed_programs import reason_of
from graphshard.module.program_compiler import LoweredProgram, ProgramCompiler
from graphshard.module.runner import Runner
from graphshard.pipeline.rules import Made, consistent_values, saved_is_returned, wrong_values
from graphshard.runtime.executable import BackwardFactory, Strides, Variant
from graphshard.store.artifact_file import Artifact
from graphshard.store.artifact_manifest import ProgramEntry
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

    @classmethod
    def of(cls, artifact: Artifact, entry: ProgramEntry) -> StoredProgram:
        """Return a program of an artifact."""
        others = {each.variant: artifact.archive.json(entry.backward_file(each)) for each in entry.backwards}
        return cls(entry, artifact.archive.json(f"{entry.file}.json"), others)

    @property
    def regions(self) -> list[str]:
        """Keys of the regions that it calls."""
        return list(dict.fromkeys(key for data in (self.data, *self.backwards.values()) for key in data["regions"]))

    def conflict(self, sizes: Sequence[Size]) -> str:
        """Return the first condition of the program that does not hold at the sizes of a trace; "" if all do.

        The others become guards of the trace.
        """
        known = {size.name: size.value for size in sizes}
        return next((text for text in strings(self.data["conditions"]) if not bool(parse_size(text, known))), "")


@dataclass
class ProgramLibrary:
    """The programs of a file for one mesh, each selected by the digest of a trace and read for the traced module."""

    artifact: Artifact
    programs: Sequence[StoredProgram]

    @property
    def entries(self) -> frozenset[str]:
        """Names of the submodules that there are programs of; "" is the model."""
        return frozenset(program.entry.entry for program in self.programs)

    def of(self, entry: str) -> list[StoredProgram]:
        """Return the programs of the model, or of a submodule that is called on its own."""
        return [program for program in self.programs if program.entry.entry == entry]

    def check_same(self, module: nn.Module, runner: ProgramCompiler) -> None:
        """Check that the other ranks have read the same programs; all ranks call this together."""
        for stored in self.programs:
            runner.agreement.anew().check(_decoded(stored.data, module.get_submodule(stored.entry.entry), runner))

    def find(self, runner: ProgramCompiler, module: nn.Module, traced: Program) -> LoweredProgram | None:
        """Return the program of a trace, ready to be installed; None if the file has none.

        Raise ArtifactError if the program of this digest belongs to another trace: export did not write the file.
        """
        digest = graph_digest(traced)
        for stored in self.of(runner.tracer.name):
            if digest not in stored.entry.digests or stored.conflict(traced.sizes):
                continue
            program = _decoded(stored.data, module, runner)
            fault = differs_from_trace(program, traced)
            if fault:
                raise ArtifactError(f"{self.artifact.path}: a program is for another call: {fault}. Export it again.")
            program.take_trace(traced, digest)
            make_backward = self._backward_factory(stored, program, module, runner)
            return LoweredProgram(program, make_backward, of_file=True)
        return None

    def _backward_factory(
        self, stored: StoredProgram, program: Program, owner: nn.Module, runner: ProgramCompiler
    ) -> BackwardFactory | None:
        def make_backward(variant: Variant, _: Strides) -> Program:
            if variant in stored.backwards:
                other = _decoded(stored.backwards[variant], owner, runner)
                if variant[1] is not None:
                    runner.agreement.check(other)
                return other
            lacks = self._no_backward(stored, variant)
            if runner.sealed:
                raise lacks
            log.warning("compiling instead of loading: %s", lacks)
            (file,) = stored.entry.partitioned_files
            data, device = self.artifact.archive.json(file), runner.tracer.spec.device
            return runner.rerun(program, decode_partitioned(data, program, runner.passes, device), variant)

        return make_backward if stored.entry.partitioned_files else None

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

    def missing(self, maker: ProgramCompiler, call: Signature, traced: Program | GraphBreak) -> ArtifactError:
        """Return the error for a call for which there is no program, or that cannot be traced whole."""
        found, model = self.of(maker.tracer.name), maker.tracer.name or "the model"
        why = reason_of(call, [stored.entry.signature for stored in found]).text if found else "it has none at all"
        if isinstance(traced, GraphBreak):
            why, remedy = why or "it has a graph break", str(traced)
        else:
            why = why or self._different_trace(traced, [stored for stored in found if stored.entry.signature == call])
            conditions = dict.fromkeys(text for stored in found for text in stored.data["conditions"])
            if conditions:
                why += f" (programs of dynamic sizes hold where {brief(', '.join(conditions))})"
            remedy = (
                "Export it with calls=[graphshard.Call(...)] for such calls too, or use "
                "graphshard.compile(..., artifact=...), which compiles what the file lacks."
            )
        text = f"{self.artifact.path} has no program for this call of {model}: {why}. {remedy}"
        return ArtifactError(text, field="inputs")

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


def _decoded(data: dict[str, Any], module: nn.Module, runner: ProgramCompiler) -> Program:
    return decode_lowered(data, runner.tracer.compiled, module, runner.tracer.spec.device)


def read_programs(
    artifact: Artifact, entries: Sequence[ProgramEntry], model: nn.Module, runner: Runner
) -> tuple[ProgramLibrary, list[Program]]:
    """Read programs, and check them; the regions that they call are added to the runner's."""
    tracer, regions, made = runner.tracer, dict[str, Region | None](), Made()
    library = ProgramLibrary(artifact, [StoredProgram.of(artifact, entry) for entry in entries])
    for key in {key for stored in library.programs for key in stored.regions} - tracer.compiled.keys():
        if artifact.manifest.regions[key].code == "later":
            log.warning(
                "%s was exported without code for region %s: compiling it. Run `graphshard finish %s` once on such a "
                "machine.",
                *(artifact.path, key, artifact.path),
            )
        fn, regions[key] = read_region(artifact, key, tracer.options.backend, tracer.spec.device, made)
        tracer.compiled[key] = RegionCall(fn, within_of(key), kept=True)
    programs = []
    for stored in library.programs:
        module = model.get_submodule(stored.entry.entry)
        program = _decoded(stored.data, module, runner)
        program.regions = {key: artifact.region(key, tracer.spec.device) for key in program.regions}
        called = {name: regions.get(key) for name, key in program.region_names.items()}
        check_program(program, stored.entry.phases, module, called)
        programs.append(program)
    return library, programs


def within_of(key: str) -> object:
    """Return what a region of a file is `within`: one with dynamic sizes has a mark of its program in its key."""
    return _CONDITIONAL if "-" in key else None


def read_region(
    artifact: Artifact, key: str, backend: Backend, device: torch.device, made: Made | None = None
) -> tuple[Boxed, Region | None]:
    """Return the function that runs a region of a file, and its operators unless there is code for it.

    They are checked if the results of operators in other regions are given as `made`.
    """
    code = artifact.manifest.regions[key].code
    if code == "native":
        return KeptRegion(key, artifact.kernels_of(key)), None
    if code == "gpu":
        capability = torch.cuda.get_device_capability(device)
        return GpuRegion(artifact.gpu_code(key, capability, device), device), None
    region = artifact.region(key, device)
    if made is not None:
        check_region(region, made)
    if code == "operators":
        return (compile_eager if backend == "eager" else compile_operators)(region), region
    ((_, fn),) = compiler_for("inductor")({key: region}, lambda _: None)
    return fn, region


# --- consistency of a program that was read ----------------------------------------------------------------------

_OF_PARAMETERS = ("param", "part", "gathered", "grad", "accumulated", "partial", "pending", "piece")
_OF_TENSORS = ("mutation", "saved", "accumulated", "partial", "pending", "piece")


def check_program(program: Program, phases: list[str], module: nn.Module, regions: Mapping[str, Region | None]) -> None:
    """Raise ArtifactError for the first inconsistency of a program.

    Args:
        phases: of the program, as the manifest says.
        regions: by the names that the program calls them by; None is native code, which checks its inputs itself.
    """

    def faults() -> Iterator[str]:
        if list(program.phases) != phases or "forward" not in phases:
            yield f"its phases are {brief(list(program.phases))}, and not {brief(phases)}"
        yield from _faults_of_outputs(program)
        for name, phase in program.phases.items():
            yield from _faults_of_slots(program, phase, module)
            yield from _faults_of_calls(phase.module.graph, regions)
            rules = [*consistent_values(program, name), *saved_is_returned(program, name)]
            yield from (violation.message for violation in rules)

    for fault in faults():
        raise ArtifactError(f"a program cannot run: {fault}. Export it again.")


def check_region(region: Region, made: Made) -> None:
    """Raise ArtifactError if a value of a region is not what its operator makes."""
    for violation in wrong_values(region.module.graph, made):
        raise ArtifactError(f"region {region.key} cannot run: {violation.message}. Export it again.")


def differs_from_trace(program: Program, traced: Program) -> str:
    """Return how a program's inputs and outputs differ from a trace's, before passes; "" if they do not."""
    for what, found, wanted in (
        ("structure of the output", program.out_spec, traced.out_spec),
        ("outputs with gradients", program.tangents, traced.tangents),
        ("device", program.device, traced.device),
        ("dynamic sizes", [(s.name, s.source) for s in program.sizes], [(s.name, s.source) for s in traced.sizes]),
    ):
        if found != wanted:
            return f"its {what}: {brief(str(found))}, and not {brief(str(wanted))}"
    ((_, phase),) = traced.phases.items()
    given = {slot: _described(node) for node, slot in phase.slot_of().items() if slot.kind == "input"}
    for node, slot in program.phases["forward"].slot_of().items():
        if slot.kind == "input" and _described(node) != given.get(slot):
            return f"{slot} is {_described(node)}, and not {given.get(slot, 'there')}"
    return ""


def _described(node: Node) -> str:
    """Return dtype and shape of an input; symbols of dynamic sizes differ between programs."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return describe(value)
    return f"{value.dtype}{[size if type(size) is int else None for size in value.shape]}"


def _faults_of_outputs(program: Program) -> Iterator[str]:
    """Outputs are numbered in order, and match the structure, the checks and the tangents."""
    forward = program.phases["forward"]
    results = [(value, slot) for value, slot in zip(forward.results, forward.outputs) if slot.kind == "output"]
    names = [slot.name for _, slot in results]
    if names != [str(index) for index in range(len(names))]:
        yield f"its outputs are called {brief(names)}"
    returned, checks = program.out_spec.num_leaves, len(program.checks)
    if returned != len(names) - checks:
        yield f"it has {len(names)} outputs, the structure of the output has {returned}, and {checks} are checked"
    tensors = {slot.name for value, slot in results if isinstance(value, Node)}
    inputs = program.phases["backward"].inputs if "backward" in program.phases else ()
    arriving = {slot.name for slot in inputs if slot.kind == "tangent"}
    if not arriving <= set(program.tangents) <= tensors:
        yield f"it is differentiated through {brief(program.tangents)} of the outputs {brief(sorted(tensors))}"


def _faults_of_slots(program: Program, phase: Phase, module: nn.Module) -> Iterator[str]:
    """Every slot names something that exists, and is a tensor where one is bound."""
    sizes, params = {size.name for size in program.sizes}, {row.name for row in program.params}
    buffers = {*program.constants, *(name for name, _ in module.named_buffers(remove_duplicate=False))}
    known = {"buffer": buffers, "late": buffers, "size": sizes, **dict.fromkeys(_OF_PARAMETERS, params)}
    for value, slot in [*zip(phase.placeholders, phase.inputs), *zip(phase.results, phase.outputs)]:
        kind = slot.of if slot.kind in ("mutation", "grad") else slot.kind
        if kind in known and slot.name not in known[kind]:
            yield f"{brief(str(slot))} is not there"
        if slot.kind in _OF_TENSORS and not isinstance(value, Node):
            yield f"{brief(str(slot))} is {brief(value)} and no tensor"
        if slot.kind == "grad" and not (value is None or isinstance(value, Node)):
            yield f"{brief(str(slot))} is {brief(value)} and no gradient"


def _faults_of_calls(graph: Graph, regions: Mapping[str, Region | None]) -> Iterator[str]:
    """Calls fit their regions, and parts that are picked exist."""
    for node in graph.nodes:
        if node.target is operator.getitem:
            several, index = node.args[0].meta.get("val"), node.args[1]
            if not isinstance(several, (list, tuple)) or type(index) is not int or not 0 <= index < len(several):
                yield f"{brief(node.name)} is part {brief(index)} of {describe(several)}"
        if node.op != "call_module":
            continue
        given = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(given, (list, tuple)) or not all(isinstance(item, Node) for item in given):
            yield f"{brief(node.name)} calls {brief(node.target)} with {brief(node.args)}"
            continue
        region = regions.get(str(node.target))
        if region is None:
            continue
        (output,) = region.module.graph.find_nodes(op="output")
        for what, here, there in (
            ("takes", given, region.module.graph.find_nodes(op="placeholder")),
            ("makes", node.meta.get("val"), output.args[0]),
        ):
            said, wanted = (brief(_ranks(values)) for values in (here, there))
            if said != wanted:
                yield f"{brief(node.name)}: its region {what} tensors of {wanted} dimensions, it has {said}"


def _ranks(values: Any) -> list[Any]:
    """Return number of dimensions and dtype of tensors; sizes may be dynamic, under other names."""
    found = values if isinstance(values, (list, tuple)) else [values]
    vals = [value.meta.get("val") if isinstance(value, Node) else value for value in found]
    return [(val.dim(), val.dtype) if isinstance(val, torch.Tensor) else type(val).__name__ for val in vals]
