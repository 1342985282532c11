"""Mesh search for Llama 70B: the model and its tensor-parallel plan, for `graphshard explain`.

    cd examples
    graphshard explain llama_on_meshes.py:llama_70b --parallelize llama_on_meshes.py:tensor_parallel \\
        --mesh 256 --degrees pp=1,4,8 tp=1,8 --batch 1,8192 --inputs 2 --global-batch 256 \\
        --param-dtype bfloat16 --reduce-dtype float32 --activation full --best 6

It needs no GPU and no process group, and the model has no values.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent))
import llama


def llama_8b() -> llama.Llama:
    """Return a model with the shapes of Llama 3 8B."""
    sizes = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256}
    return llama.Llama(llama.LlamaConfig(seq=8192, **sizes))


def llama_70b() -> llama.Llama:
    """Return a model with the shapes of Llama 3 70B."""
    sizes = {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 128256}
    return llama.Llama(llama.LlamaConfig(seq=8192, **sizes))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every matrix product over the axis "tp", and the activations in between along the sequence."""
    gathered, cut = Replicate(), Shard(1)
    outer = {
        "embed": RowwiseParallel(input_layouts=gathered, output_layouts=cut),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=gathered),
    }
    parallelize_module(model, mesh["tp"], outer)
    for block in model.get_submodule("layers").children():
        whole = {"input_layouts": (cut,), "desired_input_layouts": (gathered,)}
        plan = {
            **dict.fromkeys(("attention_norm", "feed_forward_norm"), SequenceParallel()),
            **dict.fromkeys(("attention", "feed_forward"), PrepareModuleInput(**whole)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
            **{name: RowwiseParallel(output_layouts=cut) for name in ("attention.wo", "feed_forward.down")},
        }
        parallelize_module(block, mesh["tp"], plan)
