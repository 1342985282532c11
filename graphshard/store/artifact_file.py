"""Files of compiled programs, `.gshard` of `graphshard.export` and `.gscache` of the compile cache: one format.

first line                          `ArtifactManifest`: environment, model, parameters and programs by mesh, regions
summary.txt                         for people
programs/0.json  programs/0.txt     lowered program, its scheduled graph as text
programs/0.trace.txt                traced graph as text, to say how another trace differs
programs/0.partitioned.json         start of another backward
programs/0.backward-1.json          backward for gradients through output 1
programs/0.backward-0-no-sync-first.json   backward for the first of several microbatches
regions/9f3c....json                operators of a region
regions/9f3c....py  9f3c.../f.so    its Inductor code and the libraries of its kernels
regions/9f3c....sm_90.json          its code for GPUs of compute capability 9.0
cubins/1b2c....cubin                kernel of such code, by the hash of its content; regions share them
key.json                            of a cached program: everything that it depends on

`ArtifactWriter` writes. `read_artifact` reads, and checks the digest of the file (`utils/archive.py`), the type of each
field, and that exactly those members are there that the manifest asks for. Nothing is executed or unpickled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from graphshard.codec.converter import cubin_name, read, write
from graphshard.codec.program_format import decode_gpu_code, decode_region, encode_region
from graphshard.cross.gpu_kernels import GpuCode, KernelFacts, check_code
from graphshard.errors import ArtifactError
from graphshard.frontend.signature import Signature
from graphshard.ir.gpus import Capability, dotted
from graphshard.ir.program import Region
from graphshard.lower.eager import outputs_of
from graphshard.lower.region_store import Kernels, Package
from graphshard.store.artifact_manifest import (
    ArtifactManifest,
    BackwardEntry,
    CacheLabel,
    Code,
    Environment,
    KernelEntry,
    MeshEntry,
    ModelFacts,
    ProgramEntry,
    RegionEntry,
    cubin_file,
    gpu_file,
    library_file,
    summarize,
)
from graphshard.utils.archive import Archive, Signer, Verifier, read_archive, write_archive
from graphshard.utils.text import brief

# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Artifact:
    """A file that was read and checked."""

    archive: Archive
    manifest: ArtifactManifest

    @property
    def path(self) -> Path:
        return self.archive.path

    @property
    def native(self) -> bool:
        """Whether some region is native code for CPUs."""
        return any(region.code == "native" for region in self.manifest.regions.values())

    @property
    def later(self) -> list[str]:
        """Keys of the regions that are yet to be compiled."""
        return [key for key, region in self.manifest.regions.items() if region.code == "later"]

    def kernels_of(self, key: str) -> Kernels:
        """Return Inductor's code of a native region."""
        members = self.archive.members
        libraries = {name: members[library_file(key, name)] for name in self.manifest.regions[key].libraries}
        return Kernels(members[f"regions/{key}.py"].decode(), libraries)

    def region(self, key: str, device: torch.device) -> Region:
        """Return the operators of a region."""
        return decode_region(key, self.archive.json(f"regions/{key}.json"), device)

    def gpu_code(self, key: str, capability: Capability, device: torch.device) -> GpuCode:
        """Return a region's code for GPUs of a capability; raise ArtifactError if it does not fit the region."""
        name = gpu_file(key, dotted(capability))
        kernels = self.manifest.regions[key].gpus.get(dotted(capability))
        where = f"{self.path}: {name}"
        if kernels is None:
            raise ArtifactError(f"{where} is not there: the region was compiled for other GPUs. Export it again.")
        cubins = {kernel.cubin: self.archive.members[cubin_file(kernel.cubin)] for kernel in kernels}
        code = decode_gpu_code(where, self.archive.json(name), cubins, device)
        if code.capability != capability:
            raise ArtifactError(f"{where} is for compute capability {dotted(code.capability)}. It is not loaded.")
        region = self.region(key, device)
        check_code(where, code, region.module.graph.find_nodes(op="placeholder"), outputs_of(region.module))
        return code


def read_artifact(path: Path, verify: Verifier | None = None) -> Artifact:
    """Read a file; raise ArtifactError if `verify` refuses its signature, or it is not whole and complete."""
    return artifact_of(read_archive(path, verify))


def artifact_of(archive: Archive) -> Artifact:
    """Return the artifact in an archive; raise ArtifactError if it is not one, or not complete."""
    path = archive.path
    try:
        artifact = Artifact(archive, read(dict(archive.facts), ArtifactManifest))
        expected = set(artifact.manifest.members)
        libraries = (name for region in artifact.manifest.regions.values() for name in region.libraries)
        if odd := [name for name in libraries if not name.isidentifier()]:
            raise ArtifactError(f"{path} has a library {brief(odd[0])}, as no region has. It is not loaded.")
    except ArtifactError:
        raise
    except Exception as error:  # a manifest with the right digest and other fields
        raise ArtifactError(f"{path}: its manifest is not one of graphshard.export ({error!r}).") from None
    found = set(archive.members)
    if found != expected:
        name = min(found ^ expected)
        what = "has no" if name in expected else "has an unexpected"
        raise ArtifactError(f"{path} {what} {name}: it was changed after it was exported. Copy or export it again.")
    return artifact


# --- writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompiledProgram:
    """A program on its way into a file: its entry, where `file` is "", and its members by their endings.

    After `period` ranks it may be the program of a rank again, see `aot/export.py`.
    """

    entry: ProgramEntry
    members: dict[str, bytes]
    period: int = 1

    @classmethod
    def of(
        cls,
        data: Mapping[str, Any],
        *,
        entry: str,
        digests: list[str],
        signature: Signature,
        partitioned: Mapping[str, Any] | None,
        backwards: Sequence[tuple[BackwardEntry, Mapping[str, Any]]] = (),
        text: str = "",
        trace: str = "",
        prediction: str = "",
        period: int = 1,
    ) -> CompiledProgram:
        """Encode a lowered program.

        Args:
            partitioned: start of another backward; None without a backward.
            text, trace: its scheduled and its traced graphs, as they print.
        """
        phases, calls, collectives = list(data["phases"]), len(data["region_calls"]), len(data["communication"])
        entries = [backward for backward, _ in backwards]
        found = ProgramEntry("", entry, digests, signature, entries, phases, calls, collectives, prediction)
        members = {".json": to_bytes(data), ".txt": text.encode(), ".trace.txt": trace.encode()}
        members |= {name: to_bytes(partitioned) for name in found.partitioned_files}
        members |= {found.backward_file(backward): to_bytes(content) for backward, content in backwards}
        return cls(found, members, period)


@dataclass
class ArtifactWriter:
    """Collects the content of a file."""

    members: dict[str, bytes] = field(default_factory=dict)
    regions: dict[str, RegionEntry] = field(default_factory=dict)
    meshes: list[MeshEntry] = field(default_factory=list)

    def add_mesh(self, mesh: MeshEntry, programs: Sequence[CompiledProgram]) -> None:
        """Add a mesh, and its programs."""
        entries = []
        for number, program in enumerate(programs, start=sum(len(mesh.programs) for mesh in self.meshes)):
            file = f"programs/{number}"
            entries.append(replace(program.entry, file=file))
            self.members |= {f"{file}{ending}": content for ending, content in program.members.items()}
        self.meshes.append(replace(mesh, programs=entries))

    def add_region(self, key: str, region: Region, code: Package, *, otherwise: Code) -> None:
        """Add a region: its operators, and its code, or how it runs otherwise."""
        self.members[f"regions/{key}.json"] = to_bytes(encode_region(region))
        self.add_code(key, code, otherwise=otherwise)

    def add_code(self, key: str, code: Package, *, otherwise: Code = "operators") -> None:
        """Add the code of a region, in place of what there is."""
        libraries = code.kernels.libraries if code.kernels is not None else {}
        if code.kernels is not None:
            self.members[f"regions/{key}.py"] = code.kernels.source.encode()
            self.members |= {library_file(key, name): content for name, content in libraries.items()}
        gpus: dict[str, list[KernelEntry]] = {}
        for found in code.codes:
            capability = dotted(found.capability)
            self.members[gpu_file(key, capability)] = to_bytes(write(found))
            counts = Counter(str(node.target) for node in found.graph.find_nodes(op="call_module"))
            for name, kernel in found.kernels.items():
                cubin = cubin_name(kernel.cubin)
                self.members[cubin_file(cubin)] = kernel.cubin
                facts = {each.name: getattr(kernel, each.name) for each in fields(KernelFacts)}
                entry = KernelEntry(**facts, cubin=cubin, count=counts[name], bytes=len(kernel.cubin))
                gpus.setdefault(capability, []).append(entry)
            gpus.setdefault(capability, [])
        size = sum(map(len, libraries.values())) + sum(kernel.bytes for each in gpus.values() for kernel in each)
        kind: Code = "native" if code.kernels is not None else "gpu" if code.codes else otherwise
        self.regions[key] = RegionEntry(kind, code.problem, size, gpus, list(libraries))

    def write(
        self,
        path: Path,
        environment: Environment,
        model: ModelFacts,
        *,
        cached: CacheLabel | None = None,
        sign: Signer | None = None,
    ) -> None:
        """Write a file that is whole or absent; raise OSError if it cannot be written."""
        manifest = ArtifactManifest(environment, model, self.meshes, self.regions, cached)
        write_archive(path, write(manifest), {**self.members, "summary.txt": summarize(manifest).encode()}, sign)


def to_bytes(value: Any) -> bytes:
    """Return plain data as the content of a JSON member; raise ValueError for what JSON does not have."""
    return (json.dumps(value, allow_nan=False) + "\n").encode()
