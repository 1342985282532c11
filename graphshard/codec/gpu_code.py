"""A region's code for a GPU as plain JSON; its cubins are members of their own, under the hash of their content.

{"capability": [9, 0],
 "graph": [...],                                    as `codec/stage.py` describes, with launches as "call_module"
 "kernels": {"kernel_0": {"name": "triton_per_fused_0", "types": "OOOiiOO", "warps": 2, "shared": 8,
                          "registers": 14, "spills": 0, "cubin": "9f3c...", "source": "def triton_per_..."}}}
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from graphshard.codec.graphs import decode_graph, encode_graph
from graphshard.codec.values import Decoder, identifier
from graphshard.errors import ArtifactError
from graphshard.ir.plain import typed
from graphshard.lower.kernels import GpuCode, Kernel

_NUMBERS = ("warps", "shared", "registers", "spills")


def cubin_name(content: bytes) -> str:
    """What a cubin is called in a file."""
    return hashlib.sha256(content).hexdigest()[:32]


def encode_gpu_code(code: GpuCode) -> dict[str, Any]:
    """A region's code as plain JSON."""
    return {
        "capability": list(code.capability),
        "graph": encode_graph(code.graph),
        "kernels": {
            name: {
                "name": kernel.name,
                "types": kernel.types,
                **{number: getattr(kernel, number) for number in _NUMBERS},
                "cubin": cubin_name(kernel.cubin),
                "source": kernel.source,
            }
            for name, kernel in code.kernels.items()
        },
    }


def decode_gpu_code(name: str, data: dict[str, Any], cubins: Mapping[str, bytes], device: torch.device) -> GpuCode:
    """Inverse of `encode_gpu_code`, for a device; `name` is what messages call it.

    Args:
        cubins: by their names in the file.

    Raises:
        ArtifactError: this is no such code.
    """
    try:
        major, minor = _numbers(data["capability"])
        kernels = {
            identifier(key): Kernel(
                name=typed(row["name"], str),
                types=typed(row["types"], str),
                **{number: typed(row[number], int) for number in _NUMBERS},
                cubin=cubins[row["cubin"]],
                source=typed(row["source"], str),
            )
            for key, row in typed(data["kernels"], dict).items()
        }
        decoder = Decoder(device=device, regions=frozenset(kernels))
        return GpuCode((major, minor), decode_graph(data["graph"], decoder), kernels)
    except Exception as error:  # whatever torch says of odd values
        raise ArtifactError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def _numbers(data: Any) -> list[int]:
    """A list of ints, checked."""
    return [typed(item, int) for item in typed(data, list)]
