"""Kernels of models match the operators of their regions under Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import graphshard
from graphshard.store.artifact_file import read_artifact
from tests.cross.test_compile_for_gpus import Net, assert_kernels_compute

pytest.importorskip("cffi")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU"),
]

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {"bf16": BF16, "fp32": None}


class ResidualBlock(nn.Module):
    """A ResNet block with a head and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.shortcut = nn.Conv2d(4, 8, 1)
        self.norm, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(images)))
        x = F.relu(self.norm2(self.second(x)) + self.shortcut(images))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


def _block() -> tuple[nn.Module, dict[str, Any]]:
    return ResidualBlock(), {"images": torch.zeros(2, 4, 6, 6), "labels": torch.zeros(2, dtype=torch.int64)}


def _of_transformers(name: str, experts: str = "", **changes: Any) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        pytest.importorskip("transformers")
        from benchmarks.tiny_models import batch_of, tiny_model

        model, task = tiny_model(name, num_hidden_layers=1, **changes)
        if experts:
            model.set_experts_implementation(experts)
        return model, batch_of(model, task)

    return make


MODELS = {
    "llama": _of_transformers("llama", use_cache=False),
    "gpt2": _of_transformers("gpt2", use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "vit": _of_transformers("vit"),
    # Not sorted by expert: the order of equal numbers is undefined.
    "mixtral": _of_transformers("mixtral", "batched_mm", use_cache=False),
    "resnet": _block,
}


@pytest.mark.slow
def test_in_bfloat16(tmp_path: Path) -> None:
    """A norm, a gated layer and a loss, forward and backward."""
    given: dict[str, Any] = {"example_inputs": (torch.zeros(6, dtype=torch.int64),), "mp_policy": BF16}
    file = graphshard.export(Net(), (2,), tmp_path / "net.gshard", **given, device="cuda", capability=(9, 0))
    assert_kernels_compute(file, tmp_path)


class Scan(nn.Module):
    """A model whose kernel calls a function of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).cumsum(-1).square().mean()


def test_functions_that_kernels_call(tmp_path: Path) -> None:
    """The shown source contains them, and is sufficient for the interpreter."""
    given: dict[str, Any] = {"example_inputs": (torch.ones(4, 8),)}
    file = graphshard.export(Scan(), (2,), tmp_path / "scan.gshard", **given, device="cuda", capability=(9, 0))
    members = read_artifact(file).archive.members
    assert any(b"def _triton_helper_fn" in code for name, code in members.items() if name.endswith(".sm_90.json"))
    assert_kernels_compute(file, tmp_path)


class Wide(nn.Module):
    """A convolution with enough channels for a channels-last layout by Inductor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 80, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layer(images) + 1).mean()


@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.slow
def test_layouts_of_convolutions(tmp_path: Path, given: torch.memory_format) -> None:
    """Kernels read cuDNN's result layouts, which the CPU's convolutions have, too."""
    images = torch.zeros(2, 4, 5, 5).to(memory_format=given)
    file = graphshard.export(
        Wide(), (2,), tmp_path / "wide.gshard", example_inputs=(images,), device="cuda", capability=(9, 0)
    )
    assert_kernels_compute(file, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 110 s on a busy machine; the interpreter runs the programs of a kernel sequentially
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # from transformers
# The interpreter lacks bfloat16 atomic adds, which sum gradients of selected experts.
@pytest.mark.parametrize(("name", "dtype"), sorted({*itertools.product(MODELS, POLICIES)} - {("mixtral", "bf16")}))
def test_models(name: str, dtype: str, tmp_path: Path) -> None:
    """Every region with fused operators has kernels, forward and backward, with correct results."""
    model, kwargs = MODELS[name]()
    given: dict[str, Any] = {"example_kwargs": kwargs, "mp_policy": POLICIES[dtype]}
    file = graphshard.export(model, (2,), tmp_path / "model.gshard", **given, device="cuda", capability=(9, 0))
    regions = read_artifact(file).manifest.regions
    assert {row.why for row in regions.values() if row.code != "gpu"} <= {
        "one operator, which nothing can be fused with",
        "copies that start together, which nothing can be fused with",
    }
    assert sum(row.code == "gpu" for row in regions.values()) >= 2
    assert_kernels_compute(file, tmp_path)
