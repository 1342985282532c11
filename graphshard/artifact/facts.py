"""The manifest of a file as types: what is read of one is checked as a whole before anything of it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from graphshard.frontend.signature import Signature
from graphshard.ir.mesh import Mesh
from graphshard.lower.backends import Backend

Encoded = dict[str, str] | None


@dataclass(frozen=True)
class Environment:
    """See `fingerprint.environment`."""

    graphshard: str
    torch: str
    device: Literal["cpu", "cuda"]
    capability: list[int] | None
    cpu: dict[str, str] | None
    threads: int | None
    matmul_precision: str | None
    deterministic: bool | None


@dataclass(frozen=True)
class Model:
    """See `fingerprint.model_facts`."""

    model: str
    buffers: dict[str, str]


@dataclass(frozen=True)
class Policy:
    """Of mixed precision, with dtypes as `codec/values.py` writes them."""

    param_dtype: Encoded
    reduce_dtype: Encoded
    output_dtype: Encoded
    cast_forward_inputs: bool


@dataclass(frozen=True)
class Offload:
    """Of parameters to the host."""

    pin_memory: bool


@dataclass(frozen=True)
class StoredOptions:
    """See `stored_options.FACTS`: a field for each."""

    units: list[str]
    mp_policy: Policy
    mp_policies: dict[str, Policy]
    reshard_after_forward: int | None
    offload_policy: Offload | None
    backend: Backend
    passes: dict[str, str]
    dynamic_shapes: str | None
    dims: str | None


@dataclass(frozen=True)
class Backward:
    """A further backward, see `members.StoredBackward`."""

    outputs: list[str]
    microbatch: str


@dataclass(frozen=True)
class ProgramFacts:
    """A program, see `members.Captured`."""

    file: str
    entry: str
    digests: list[str]
    signature: Signature
    backwards: list[Backward]
    phases: list[str]
    region_calls: int
    collectives: int
    prediction: str


@dataclass(frozen=True)
class MeshFacts:
    """The programs for a mesh, see `members.MeshPrograms`."""

    mesh: Mesh
    shape: dict[str, int]
    place: int | None
    options: StoredOptions
    num_parameters: int
    shard_bytes: int
    programs: list[ProgramFacts]


@dataclass(frozen=True)
class KernelFacts:
    """A Triton kernel, see `lower/kernels.py`; `cubin` is its code's name in the file, `count` how often it runs."""

    name: str
    cubin: str
    count: int
    warps: int
    registers: int
    spills: int
    shared: int
    bytes: int


@dataclass(frozen=True)
class RegionFacts:
    """What there is of a region, see `members.CODES`; for GPUs by capability, such as "9.0"."""

    code: str
    why: str
    bytes: int
    gpus: dict[str, list[KernelFacts]]


@dataclass(frozen=True)
class Facts:
    """The manifest, but for its format and its checksums; `members` are in `archive.py`."""

    environment: Environment
    model: Model
    meshes: list[MeshFacts]
    regions: dict[str, RegionFacts]
    members: dict[str, Any]
    format: int
