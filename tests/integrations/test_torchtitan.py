"""torchtitan's Llama trains with the manual's `parallelize_fn` as with torchtitan's, which uses FSDP2: the same bits.

torchtitan is in the extra `integrations`. On a CPU it needs triton, which it imports, and its attention without a mask,
because FlexAttention has no backward there.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sybil import Example
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.distributed.twins import assert_same, params_of
from tests.docs.test_pages import parse
from tests.ranks import Ranks

pytest.importorskip("torchtitan", reason="pip install -e '.[integrations]'")
pytest.importorskip("triton", reason="torchtitan imports it")
pytestmark = pytest.mark.slow

PAGE = "docs/integrations/torchtitan.md"
LENGTH = 16


def _from_the_manual() -> Callable[..., nn.Module]:
    """Return the manual's function, with the eager backend."""
    namespace: dict[str, Any] = {}

    def run(block: Example) -> None:
        if "def parallelize" in block.parsed:
            exec(compile(block.parsed.replace("units=", 'backend="eager", units='), PAGE, "exec"), namespace)

    for example in parse(PAGE, python=run):
        example.evaluate()
    return namespace["parallelize"]


def _config(parallelism: Any, tied: bool) -> Any:
    """Return the config of torchtitan's debug model with two layers."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="varlen")
    layers = config.layers[:2]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=LENGTH)
    config = dataclasses.replace(config, layers=layers, enable_weight_tying=tied)
    config.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
    return config


def _model(
    parallelize: Callable[..., nn.Module], world_size: int, folder: str, *, bf16: bool, tied: bool, checkpointing: bool
) -> nn.Module:
    """Create a model as torchtitan's trainer does: on the meta device, parallelized, then initialized."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC

    # The default needs a feature of FSDP2 after torch 2.13.
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    degrees = {"dp_replicate": 1, "dp_shard": world_size, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    dims = ParallelDims(**degrees, world_size=world_size, spmd_backend=parallelism.spmd_backend)
    with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):  # it would assume a GPU
        dims.build_mesh()
    with torch.device("meta"):
        model = _config(parallelism, tied).build()
    model = parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="bfloat16" if bf16 else "float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if checkpointing else None,
        dump_folder=folder,
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def _train(model: nn.Module, chunks: int) -> dict[str, Tensor]:
    """Train two steps as torchtitan's trainer does; return losses and norms."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed.utils import clip_grad_norm_

    if chunks:
        criterion = ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=CrossEntropyLoss.Config()).build()
        criterion.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    else:
        criterion = CrossEntropyLoss.Config().build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: dict[str, Tensor] = {}
    for step in range(2):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        tokens, labels = torch.randint(0, 2048, (2, 2, LENGTH)).unbind()
        count = torch.tensor(labels.numel() * dist.get_world_size())
        loss, _ = criterion(model(tokens), labels, count)
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        seen[f"norm {step}"] = clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _side_by_side(rank: int, world_size: int, folder: str, chunks: int, options: dict[str, bool]) -> None:
    from torchtitan.models.llama3 import parallelize_llama

    with mock.patch("torchtitan.distributed.utils._spmd_backend", "partial_dtensor"):  # as set by its trainer
        models = [_model(make, world_size, folder, **options) for make in (_from_the_manual(), parallelize_llama)]
        assert_same(params_of(models[0]), params_of(models[1]), "after initialisation")
        for module in models[1].modules():
            if isinstance(module, FSDPModule):  # otherwise FSDP2 needs a premultiplied sum, which only NCCL has
                module.set_force_sum_reduction_for_comms(True)
        ours, theirs = (_train(model, chunks) for model in models)
    assert_same(ours, theirs, "losses and norms")
    assert ours["loss 0"] != ours["loss 1"]
    assert_same(params_of(models[0]), params_of(models[1]), "after two steps")


@pytest.mark.parametrize(
    ("chunks", "changed"),
    [(0, {}), (0, {"bf16": True}), (4, {}), (0, {"tied": True}), (0, {"checkpointing": True})],
    ids=["float32", "bfloat16", "chunked loss", "tied", "checkpointed"],
)
def test_matches_torchtitans_fsdp2(ranks: Ranks, tmp_path: Path, chunks: int, changed: dict[str, bool]) -> None:
    """Losses, norms and parameters of two steps."""
    options = {"bf16": False, "tied": False, "checkpointing": False} | changed
    ranks(2).run(_side_by_side, str(tmp_path), chunks, options)
