"""Manifest of a file of compiled programs: what the file was made for, and what is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from graphshard.codec.converter import write
from graphshard.cross.gpu_kernels import KernelFacts
from graphshard.frontend.signature import Signature
from graphshard.ir.gpus import Capability, dotted
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamTable
from graphshard.lower.backends import Backend
from graphshard.passes import AccumulateGradients
from graphshard.runtime.executable import Variant
from graphshard.utils.text import format_bytes

# How a region runs, and what the summary says of it.
Code = Literal["native", "gpu", "operators", "later"]
_CODES: dict[Code, str] = {
    "native": "compiled",
    "gpu": "compiled to kernels",
    "operators": "that run as ATen operators",
    "later": "to be compiled on the target, by `graphshard finish` or when they are loaded",
}


@dataclass(frozen=True)
class Environment:
    """Versions and machine. Fields that matter only to native code are None without any."""

    graphshard: str
    torch: str
    device: Literal["cpu", "cuda"]
    capability: list[int] | None
    cpu: dict[str, str] | None
    threads: int | None
    matmul_precision: str | None
    deterministic: bool | None


@dataclass(frozen=True)
class ModelFacts:
    """Class and buffers of a module; its parameters are in the parameter table."""

    model: str
    buffers: dict[str, str]


@dataclass(frozen=True)
class StoredOptions:
    """Options of an export, as far as the parameter table does not show them.

    Attributes:
        reshard_after_forward: number of ranks to gather again among, if that is not the whole axis.
        passes: settings of each pass by its name, and their classes and order.
    """

    units: list[str]
    mp_policy: MixedPrecisionPolicy
    mp_policies: dict[str, MixedPrecisionPolicy]
    reshard_after_forward: int | None
    offload_policy: CPUOffloadPolicy | None
    backend: Backend
    passes: dict[str, str]
    dynamic_shapes: str | None


@dataclass(frozen=True)
class BackwardEntry:
    """A further backward, for gradients through these outputs, and for one microbatch of several.

    Attributes:
        microbatch: name such as "no-sync-first"; "" if gradients are not accumulated.
        accumulate: how they are.
    """

    outputs: list[str]
    microbatch: str
    accumulate: AccumulateGradients | None

    @property
    def variant(self) -> Variant:
        """The backward that the runtime asks for."""
        return frozenset(self.outputs), self.accumulate


@dataclass(frozen=True)
class ProgramEntry:
    """A program of the submodule `entry`; "" is the model.

    Attributes:
        file: its members begin with this.
        digests: of the traces that it serves, see `graph_digest`: of all blocks, and of a few of equal ones.
        signature: the call that it was captured for; it describes the program, and does not select it.
        prediction: expected time of a step, as text; "" for inference.
    """

    file: str
    entry: str
    digests: list[str]
    signature: Signature
    backwards: list[BackwardEntry]
    phases: list[str]
    region_calls: int
    collectives: int
    prediction: str

    @property
    def partitioned_files(self) -> list[str]:
        """The member with the start of another backward, if there is one."""
        return [f"{self.file}.partitioned.json"] if "backward" in self.phases else []

    def backward_file(self, backward: BackwardEntry) -> str:
        """Return the member with a further backward."""
        outputs = "-".join(sorted(backward.outputs)) or "none"
        return f"{self.file}.backward-{outputs}{'-' if backward.microbatch else ''}{backward.microbatch}.json"

    @property
    def files(self) -> list[str]:
        """All members."""
        texts = [f"{self.file}{ending}" for ending in (".json", ".txt", ".trace.txt")]
        return [*texts, *self.partitioned_files, *map(self.backward_file, self.backwards)]


@dataclass(frozen=True)
class MeshEntry:
    """The programs for a mesh.

    Attributes:
        shape: sizes of the axes as they were given, of which several may shard as one.
        place: position on the axes along which the model communicates; None is all of them.
    """

    mesh: Mesh
    shape: dict[str, int]
    place: int | None
    options: StoredOptions
    params: ParamTable
    programs: list[ProgramEntry]


@dataclass(frozen=True)
class KernelEntry(KernelFacts):
    """A Triton kernel; `cubin` names its code, `count` is the number of its calls."""

    cubin: str
    count: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.name}{f' x{self.count}' if self.count > 1 else ''}: {self.taken}"


@dataclass(frozen=True)
class RegionEntry:
    """The code of a region, its bytes, and why it was not compiled.

    `gpus` has kernels by compute capability, such as "9.0"; `libraries` are the ones that Inductor made.
    """

    code: Code
    why: str
    bytes: int
    gpus: dict[str, list[KernelEntry]]
    libraries: list[str]


@dataclass(frozen=True)
class CacheLabel:
    """A cached program, as `graphshard cache list` shows it; `key` is the hash of what it depends on."""

    key: str
    model: str
    label: str
    inputs: str
    mesh: str
    backend: str
    torch: str


@dataclass(frozen=True)
class ArtifactManifest:
    """The first line of a file, without its format and the sizes of members."""

    environment: Environment
    model: ModelFacts
    meshes: list[MeshEntry]
    regions: dict[str, RegionEntry]
    cached: CacheLabel | None

    @property
    def capabilities(self) -> list[Capability]:
        """Compute capabilities that there are kernels for."""
        named = dict.fromkeys(name for region in self.regions.values() for name in region.gpus)
        return [(int(major), int(minor)) for major, _, minor in (name.partition(".") for name in named)]

    @property
    def members(self) -> Iterator[str]:
        """Names of the members that there must be."""
        yield "summary.txt"
        if self.cached is not None:
            yield "key.json"
        for mesh in self.meshes:
            for program in mesh.programs:
                yield from program.files
        for key, region in self.regions.items():
            yield f"regions/{key}.json"
            if region.code == "native":
                yield f"regions/{key}.py"
            yield from (library_file(key, name) for name in region.libraries)
            for capability, kernels in region.gpus.items():
                yield gpu_file(key, capability)
                yield from (cubin_file(kernel.cubin) for kernel in kernels)


def gpu_file(key: str, capability: str) -> str:
    """Return the member with a region's code for GPUs of a capability, such as "9.0"."""
    return f"regions/{key}.sm_{capability.replace('.', '')}.json"


def cubin_file(cubin: str) -> str:
    """Return the member with a kernel's code."""
    return f"cubins/{cubin}.cubin"


def library_file(key: str, name: str) -> str:
    """Return the member with a library that Inductor made for a region."""
    return f"regions/{key}/{name}.so"


def summarize(manifest: ArtifactManifest) -> str:
    """Return a few lines on the model, the machine, each mesh and its programs, and the regions."""
    environment, regions = manifest.environment, manifest.regions
    orders = dict.fromkeys(mesh.options.passes["(order)"] for mesh in manifest.meshes)
    codes = Counter(region.code for region in regions.values())
    counts = ", ".join(f"{codes[code]} {text}" for code, text in _CODES.items() if codes[code])
    size = format_bytes(sum(region.bytes for region in regions.values()))
    target = f"{environment.device}, any"
    if manifest.capabilities or environment.capability:
        known = list(map(dotted, manifest.capabilities)) or [".".join(map(str, environment.capability or ()))]
        target = f"{environment.device}, compute capability {' and '.join(known)}"
    elif environment.cpu:
        target = f"cpu, {environment.cpu['machine']} {environment.cpu['vectors']}, {environment.threads} threads"
    lines = [
        f"model      {manifest.model.model}",
        f"made with  graphshard {environment.graphshard}, torch {environment.torch}, "
        f"{manifest.meshes[0].options.backend}",
        f"device     {target}",
        *(f"passes     {order}" for order in orders),
        *(line for mesh in manifest.meshes for line in _mesh_lines(mesh)),
        f"regions    {len(regions)} distinct: {counts or 'none'}; {size} of code",
        # Most that run as operators are of one operator; the others are worth a line.
        *(f"  {key}: {region.why}" for key, region in regions.items() if "Inductor" in region.why.partition(" ")[0]),
    ]
    for key, region in regions.items():
        for capability, kernels in region.gpus.items():
            count = f"{len(kernels) or 'no'} kernel{'' if len(kernels) == 1 else 's'}"
            lines += [f"  {key}, compute capability {capability}: {count}", *(f"    {kernel}" for kernel in kernels)]
    return "\n".join(lines) + "\n"


def _mesh_lines(mesh: MeshEntry) -> Iterator[str]:
    shape = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    at = "" if mesh.place is None else f", place {mesh.place}"
    shards = format_bytes(sum(row.shard_bytes(row.compute_dtype) for row in mesh.params))
    yield f"mesh       {shape}{at}: {len(mesh.params)} parameters, {shards} of shards per rank"
    for program in mesh.programs:
        inputs = [item for item in write(program.signature)["inputs"] if "shape" in item]
        shapes = ", ".join(f"{item['dtype']}{item['shape']}" for item in inputs)
        calls = f"{program.region_calls} region calls, {program.collectives} collectives"
        microbatches: dict[str, list[str]] = {}
        for backward in program.backwards:
            microbatches.setdefault(", ".join(backward.outputs), []).append(backward.microbatch)
        more = "".join(f", gradients of outputs {outputs}" for outputs, names in microbatches.items() if "" in names)
        what = f"{program.entry or 'the model'}({shapes}): {' and '.join(program.phases)}, {calls}{more}"
        yield f"  {program.file}: {what}"
        for outputs, names in microbatches.items():
            if any(names):
                yield f"    microbatches, gradients of outputs {outputs}: {', '.join(filter(None, names))}"
        yield from (f"    {line.strip()}" for line in program.prediction.splitlines())
