"""Training matches FSDP2 bit for bit: losses, gradients, norms, parameters and buffers.

FSDP2 shards a copy of the model, with `fully_shard` on each unit that graphshard found and on the root, under the same
policy. Both train on gloo ranks, and are compared at every step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.twins import (
    BF16,
    POLICIES,
    VOCAB,
    Batch,
    example_llama,
    fsdp2,
    tokens,
    train_side_by_side,
    twins,
    world_mesh,
)
from tests.ranks import RankError, Ranks

# --- models -------------------------------------------------------------------------------------------------


def _hf_llama(layers: int, hidden_size: int = 16, length: int = 8) -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config), lambda: _text(length)


def _hf_llama_long(layers: int) -> tuple[nn.Module, Batch]:
    """Build a Llama for 64 tokens and head size 16: masked attention with repeated heads rounds differently in float32.

    Hugging Face's code uses it when it detects tracing.
    """
    return _hf_llama(layers, hidden_size=64, length=64)


def _hf_gpt2(layers: int) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=layers, n_head=4, n_positions=16, use_cache=False)
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1
    return model, _text


def _text(length: int = 8) -> dict[str, Any]:
    text = tokens(length)
    return {"input_ids": text, "labels": text}


def _hf_vit(layers: int) -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=16,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config), _images


def _hf_resnet(layers: int) -> tuple[nn.Module, Batch]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, layers], num_labels=10, layer_type="basic")
    return ResNetForImageClassification(config), _images


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 10, (4,))}


def _example_llama(layers: int) -> tuple[nn.Module, Batch]:
    return example_llama(layers)


MODELS = {
    "example-llama": _example_llama,
    "hf-llama": _hf_llama,
    "hf-llama-long": _hf_llama_long,
    "hf-gpt2": _hf_gpt2,
    "hf-vit": _hf_vit,
    "hf-resnet": _hf_resnet,
}


# --- tests --------------------------------------------------------------------------------------------------


def _train_side_by_side(rank: int, world_size: int, name: str, precision: str, options: dict[str, Any]) -> None:
    model, batch = MODELS[name](4 - world_size)
    pair = twins(model, world_mesh(), mp_policy=POLICIES[precision], **options)
    train_side_by_side(pair, batch)


# The example in both precisions on 2 and 3 ranks, models of transformers in float32 on two, one in bfloat16 on three.
QUICK = {*((name, "fp32", 2) for name in MODELS), ("hf-gpt2", "bf16", 3)}
CASES = [
    pytest.param(
        name,
        precision,
        world_size,
        id=f"{name}-{precision}-{world_size}ranks",
        marks=() if name == "example-llama" or (name, precision, world_size) in QUICK else pytest.mark.slow,
    )
    for name in MODELS
    for precision in POLICIES
    for world_size in (2, 3)
    if (name, precision) != ("hf-resnet", "bf16")
]


@pytest.mark.parametrize(("name", "precision", "world_size"), CASES)
@pytest.mark.quick_cases("example-llama-bf16-3ranks", "hf-gpt2-bf16-3ranks")
def test_training_equals_fsdp2(ranks: Ranks, name: str, precision: str, world_size: int) -> None:
    """20 steps of AdamW with clipped gradients; two blocks on two ranks, one on three, to save time."""
    ranks(world_size).run(_train_side_by_side, name, precision, {})


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.quick_cases("False")
def test_reshard_after_forward_equals_fsdp2(ranks: Ranks, reshard: bool) -> None:
    """None, which keeps the root, is the default and tested above."""
    ranks(2).run(_train_side_by_side, "example-llama", "fp32", {"reshard_after_forward": reshard})


def _resnet_in_bf16_with_fsdp2(rank: int, world_size: int) -> None:
    model, batch = _hf_resnet(layers=1)
    fsdp2(model, world_mesh(), mp_policy=BF16)(**batch()).loss.backward()


def test_fsdp2_cannot_train_batch_norm_in_bf16_on_cpu(ranks: Ranks) -> None:
    """The reason why there is no such case above."""
    with pytest.raises(RankError, match=r"batch_norm|BatchNorm|dtype"):
        ranks(2).run(_resnet_in_bf16_with_fsdp2)
