"""torch's own context parallelism, which has kernels for CUDA only, is captured for GPUs that are not there."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import graphshard
from graphshard.artifact.members import read_artifact

attention = pytest.importorskip("torch.distributed.tensor.experimental._attention")
if not hasattr(attention, "_ContextParallel"):
    pytest.skip("a release of torch without it", allow_module_level=True)


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.inner = nn.Linear(64, 192), Inner()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.inner(q, k, v).sum()


def _parallelize(model: Attention, mesh: DeviceMesh) -> nn.Module:
    attention._enable_context_parallel_dispatcher()
    style = attention._ContextParallel
    parallelize_module(model.inner, mesh["cp"], style(seq_dim=2, attention_type=style.AttentionType.SDPA))
    return model


def test_it_is_captured(tmp_path: Path) -> None:
    """Flash attention of two parts of a sequence on each rank; gradients of keys and values are sent."""
    pytest.importorskip("triton")
    with torch.device("meta"):
        model = Attention().bfloat16()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with mock.patch.object(DTensor._op_dispatcher, "_custom_op_handlers", handlers):
        path = graphshard.export(
            model,
            {"dp": 2, "cp": 2},
            tmp_path / "attention.gshard",
            example_inputs=(torch.randn(2, 8, 64, dtype=torch.bfloat16),),
            parallelize=_parallelize,
            backend="eager",
            device="cuda",
            capability=(9, 0),
        )
        attention._disable_context_parallel_dispatcher()
    artifact = read_artifact(path)
    assert [row["place"] for row in artifact.meshes] == [0, 1]
    text = "".join(str(artifact.archive.json(f"regions/{key}.json")) for key in artifact.facts["regions"])
    assert "_scaled_dot_product_flash_attention_backward" in text
    programs = str([artifact.archive.json(f"{row['programs'][0]['file']}.json") for row in artifact.meshes])
    assert "exchanged" in programs
