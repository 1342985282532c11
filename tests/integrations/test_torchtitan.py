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
from torch.torch_version import TorchVersion

import graphshard
from tests.distributed.twins import assert_same, params_of
from tests.docs.test_pages import parse
from tests.ranks import Ranks

pytest.importorskip("torchtitan", reason="pip install -e '.[integrations]'")
pytest.importorskip("triton", reason="torchtitan imports it")
pytestmark = pytest.mark.slow

PAGE = "docs/integrations/torchtitan.md"
LENGTH, VOCAB = 16, 2048
DEFAULT = "spmd_types"
OPTIONS = {"bf16": False, "tied": False, "checkpointing": False}


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


def _dims(world_size: int, backend: str, tp: int = 1) -> Any:
    """Return torchtitan's meshes."""
    from torchtitan.distributed import ParallelDims

    degrees = {"dp_replicate": 1, "dp_shard": world_size // tp, "cp": 1, "tp": tp, "pp": 1, "ep": 1}
    dims = ParallelDims(**degrees, world_size=world_size, spmd_backend=backend)
    with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):  # it would assume a GPU
        dims.build_mesh()
    return dims


def _model(
    parallelize: Callable[..., nn.Module], dims: Any, folder: str, *, bf16: bool, tied: bool, checkpointing: bool
) -> nn.Module:
    """Create a model as torchtitan's trainer does: on the meta device, parallelized, then initialized."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC

    parallelism = ParallelismConfig(spmd_backend=dims.spmd_backend, tensor_parallel_degree=dims.tp)
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


def _train(model: nn.Module, chunks: int, dims: Any) -> dict[str, Tensor]:
    """Train two steps as torchtitan's trainer does; return losses and norms."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed.utils import clip_grad_norm_

    entropy = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    if chunks:
        criterion = ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=entropy).build()
        criterion.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    else:
        criterion = entropy.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: dict[str, Tensor] = {}
    for step in range(2):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank() // dims.tp)
        tokens, labels = torch.randint(0, VOCAB, (2, 2, LENGTH)).unbind()
        count = torch.tensor(labels.numel() * dims.dp_shard)
        loss, _ = criterion(model(tokens), labels, count)
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        seen[f"norm {step}"] = clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _side_by_side(
    rank: int, world_size: int, folder: str, chunks: int, options: dict[str, bool], backend: str, tp: int
) -> None:
    from torchtitan.distributed.utils import get_spmd_context
    from torchtitan.models.llama3 import parallelize_llama

    def taken_over(model: nn.Module, **given: Any) -> nn.Module:
        return graphshard.compile(parallelize_llama(model, **given), backend="eager")

    dims = _dims(world_size, backend, tp)
    ways = [_from_the_manual(), parallelize_llama]
    if backend == DEFAULT:
        ways.append(taken_over)
    set_backend = mock.patch("torchtitan.distributed.utils._spmd_backend", backend)  # as its trainer does
    with set_backend, get_spmd_context(parallel_dims=dims)():
        ours, theirs, *taken = (_model(make, dims, folder, **options) for make in ways)
        assert_same(params_of(ours), params_of(theirs), "after initialisation")
        assert [p.placements for p in ours.parameters()] == [p.placements for p in theirs.parameters()]
        for model in (theirs, *taken):
            for module in model.modules():
                if isinstance(module, FSDPModule):  # FSDP2 needs a premultiplied sum, which only NCCL has
                    module.set_force_sum_reduction_for_comms(True)
        expected = _train(theirs, chunks, dims)
        for model in (ours, *taken):
            assert_same(_train(model, chunks, dims), expected, "losses and norms")
    assert expected["loss 0"] != expected["loss 1"]
    for model in (ours, *taken):
        assert_same(params_of(model), params_of(theirs), "after two steps")


@pytest.mark.parametrize(
    ("chunks", "changed"),
    [(0, {}), (0, {"bf16": True}), (4, {}), (0, {"tied": True}), (0, {"checkpointing": True})],
    ids=["float32", "bfloat16", "chunked loss", "tied", "checkpointed"],
)
def test_matches_torchtitans_fsdp2(ranks: Ranks, tmp_path: Path, chunks: int, changed: dict[str, bool]) -> None:
    """Losses, norms and parameters of two steps."""
    ranks(2).run(_side_by_side, str(tmp_path), chunks, OPTIONS | changed, "partial_dtensor", 1)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.14", reason="FSDP2 reads annotations from 2.14 on")
@pytest.mark.parametrize(
    ("num_ranks", "tp", "chunks", "changed"),
    [(2, 1, 4, {"bf16": True}), (2, 2, 0, {}), (4, 2, 0, {"checkpointing": True})],
    ids=["data", "tensor", "both"],
)
def test_default_backend(
    ranks: Ranks, tmp_path: Path, num_ranks: int, tp: int, chunks: int, changed: dict[str, bool]
) -> None:
    """Annotated local tensors: by the manual's function, and what torchtitan has sharded taken over."""
    ranks(num_ranks).run(_side_by_side, str(tmp_path), chunks, OPTIONS | changed, DEFAULT, tp)
