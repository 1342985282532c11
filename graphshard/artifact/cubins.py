"""Code for GPUs in a file: its members, what the manifest says of its kernels, and whether a GPU is one of its."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphshard.artifact.archive import Archive
from graphshard.codec.gpu_code import cubin_name, decode_gpu_code
from graphshard.codec.lowered import decode_region
from graphshard.errors import ArtifactError
from graphshard.ir.gpus import CAPABILITIES, Capability
from graphshard.lower.eager import outputs_of
from graphshard.lower.kernels import GpuCode, check_code, dotted


def gpu_file(key: str, capability: str) -> str:
    """The member with a region's code for GPUs of a capability, such as "9.0"."""
    return f"regions/{key}.sm_{capability.replace('.', '')}.json"


def cubin_file(cubin: str) -> str:
    """The member with a kernel's code."""
    return f"cubins/{cubin}.cubin"


def kernel_facts(code: GpuCode) -> list[dict[str, Any]]:
    """What the manifest says of a region's kernels."""
    counts = Counter(str(node.target) for node in code.graph.find_nodes(op="call_module"))
    return [
        {
            "name": kernel.name,
            "cubin": cubin_name(kernel.cubin),
            "count": counts[name],
            "warps": kernel.warps,
            "registers": kernel.registers,
            "spills": kernel.spills,
            "shared": kernel.shared,
            "bytes": len(kernel.cubin),
        }
        for name, kernel in code.kernels.items()
    ]


def capabilities_of(facts: Mapping[str, Any]) -> list[Capability]:
    """Compute capabilities that a file has code for, by its manifest; [] if it has no kernels."""
    named = dict.fromkeys(name for region in facts["regions"].values() for name in region["gpus"])
    return [(int(major), int(minor)) for major, _, minor in (name.partition(".") for name in named)]


def read_gpu_code(archive: Archive, key: str, capability: Capability, device: torch.device) -> GpuCode:
    """A region's code for GPUs of a capability, read for a device, and checked against the region.

    Raises:
        ArtifactError: it cannot be read, or does not fit.
    """
    name = gpu_file(key, dotted(capability))
    rows = archive.facts["regions"][key]["gpus"].get(dotted(capability))
    where = f"{archive.path}: {name}"
    if rows is None:
        raise ArtifactError(f"{where} is not there: the region was compiled for other GPUs. Export it again.")
    cubins = {row["cubin"]: archive.members[cubin_file(row["cubin"])] for row in rows}
    code = decode_gpu_code(where, archive.json(name), cubins, device)
    if code.capability != capability:
        raise ArtifactError(f"{where} is for compute capability {dotted(code.capability)}. It is not loaded.")
    region = decode_region(key, archive.json(f"regions/{key}.json"), device)
    check_code(where, code, region.module.graph.find_nodes(op="placeholder"), outputs_of(region.module))
    return code


def check_capability(here: Capability, compiled: list[Capability], path: Path) -> None:
    """Raise ArtifactError if a file has no code for the GPU that is here."""
    if compiled and here not in compiled:
        known = " and ".join(map(dotted, compiled))
        remedy = f"with capability={here}; several in one list make one file for all."
        if here not in CAPABILITIES:
            remedy = "without capability=: then regions are compiled where the file is loaded."
        raise ArtifactError(
            f"{path} does not fit: its kernels are compiled for compute capability {known}, and the GPU here has "
            f"{dotted(here)}. Export again {remedy}",
            field="capability",
        )
