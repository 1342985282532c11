"""Models that libraries shard with their own calls of FSDP2, taken over by `graphshard.compile(model)`.

verl and axolotl need GPUs to train, so the functions in which they shard a model are called here. Install them without
their dependencies, which are many: `pip install --no-deps verl axolotl addict`; verl imports Ray and hydra-core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import graphshard
from graphshard.integrations.accelerate import become_fsdp2
from tests.distributed.twins import assert_same, params_of, world_mesh
from tests.integrations.hugging_face import VOCAB, launched, llama, loss_of
from tests.ranks import Ranks

pytestmark = pytest.mark.slow


def _by_verl(model: nn.Module) -> nn.Module:
    """Shard a model as `FSDPEngine._build_fsdp_module` does, which then loads the weights of the first rank."""
    from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    settings = {"mesh": world_mesh(), "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
    state = model.state_dict()
    apply_fsdp2(model, settings, {"forward_prefetch": True})
    with mock.patch("verl.utils.fsdp_utils.get_device_id", return_value="cpu"):  # it would ask for a GPU
        fsdp2_load_full_state_dict(model, state, world_mesh(), None)
    return model


def _by_axolotl(model: nn.Module) -> nn.Module:
    """Shard a model with adapters by the function that axolotl puts in place of Accelerate's."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from axolotl.monkeypatch.accelerate.fsdp2 import fsdp2_prepare_model
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False))
    accelerator = Accelerator(cpu=True)
    names = ["LlamaDecoderLayer"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
    )
    become_fsdp2(accelerator, plugin)
    return fsdp2_prepare_model(accelerator, model)


def _train(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    found = {}
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = loss_of(model, torch.randint(0, VOCAB, (2, 8)))
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return found


def _trains(rank: int, world_size: int, shard: Callable[[nn.Module], Any]) -> None:
    with launched():
        torch.manual_seed(0)
        theirs = shard(llama(num_hidden_layers=2))
        torch.manual_seed(0)
        ours = shard(llama(num_hidden_layers=2))
        units = [name for name, module in ours.named_modules() if isinstance(module, FSDPModule)]
        graphshard.compile(ours, backend="eager")
        assert_same(_train(ours), _train(theirs), "losses")
        assert_same(params_of(ours), params_of(theirs), "parameters")
        assert len(graphshard.programs(ours)) == 1
        assert [name for name, module in ours.named_modules() if isinstance(module, FSDPModule)] == units


def test_verls_engine(ranks: Ranks) -> None:
    pytest.importorskip("verl.utils.fsdp_utils", reason="pip install verl", exc_type=ImportError)
    ranks(2).run(_trains, _by_verl)


def test_axolotls_accelerate(ranks: Ranks) -> None:
    pytest.importorskip("axolotl.integrations.expert_parallel", reason="pip install axolotl", exc_type=ImportError)
    ranks(2).run(_trains, _by_axolotl)
