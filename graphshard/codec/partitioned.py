"""Where another backward of a stored program begins, as plain JSON: what the partitioner left, and the passes to come.

    {"phase": {...}, "established": ["reduced_once"], "passes": 7}

`codec/graphs.py` says what a phase looks like; "passes" counts those of the pipeline that follow.
"""

from __future__ import annotations

from typing import Any

import torch

from graphshard.codec.graphs import decode_phase, encode_phase
from graphshard.codec.values import Decoder, strings, typed
from graphshard.ir.errors import ArtifactError
from graphshard.ir.program import Program
from graphshard.ir.torch_internals import new_fake_mode
from graphshard.pipeline.pipeline import Partitioned, Pipeline


def encode_partitioned(partitioned: Partitioned, program: Program) -> dict[str, Any]:
    return {
        "phase": encode_phase(partitioned.backward, {size.symbol: size.name for size in program.sizes}),
        "established": sorted(partitioned.established),
        "passes": len(partitioned.rest),
    }


def decode_partitioned(data: dict[str, Any], program: Program, pipeline: Pipeline, device: torch.device) -> Partitioned:
    """Inverse of `encode_partitioned`.

    Args:
        program: the stored program, whose dynamic sizes it shares.
        pipeline: the passes that made the program.

    Raises:
        ArtifactError: nothing was written so.
    """
    try:
        env = program.sizes[0].value.node.shape_env if program.sizes else None
        sizes = {size.name: size.value for size in program.sizes}
        phase = decode_phase(data["phase"], Decoder(mode=new_fake_mode(env), sizes=sizes, device=device))
        rest = pipeline.passes[len(pipeline.passes) - typed(data["passes"], int) :]
        return Partitioned(phase, rest, frozenset(strings(data["established"])))
    except Exception as error:  # whatever torch says of odd values
        raise ArtifactError(f"a backward cannot be read: {type(error).__name__}: {error}") from error
