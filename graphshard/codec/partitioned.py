"""Where another backward of a stored program begins, as plain JSON: what the partitioner left, and the passes to come.

    {"backward": {...}, "established": ["reduced_once"], "rest": 7}

The passes are counted: they are the last ones of the pipeline that made the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from graphshard.codec.converter import read, write
from graphshard.codec.values import Decoder
from graphshard.errors import ArtifactError
from graphshard.ir.plain import typed
from graphshard.ir.program import Program
from graphshard.pipeline.pipeline import Partitioned, Pipeline
from graphshard.torch_compat.fake_tensors import new_fake_mode


def encode_partitioned(partitioned: Partitioned, program: Program) -> dict[str, Any]:
    names = {size.symbol: size.name for size in program.sizes}
    return {**write(replace(partitioned, rest=()), names), "rest": len(partitioned.rest)}


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
        decoder = Decoder(mode=new_fake_mode(env), sizes=sizes, device=device)
        count = typed(data["rest"], int)
        partitioned = read({**data, "rest": []}, Partitioned, decoder)
        return replace(partitioned, rest=pipeline.passes[len(pipeline.passes) - count :])
    except Exception as error:  # whatever torch says of odd values
        raise ArtifactError(f"a backward cannot be read: {type(error).__name__}: {error}") from error
