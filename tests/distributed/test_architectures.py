"""Transformer architectures of different kinds in default configurations match FSDP2's training bit for bit.

`benchmarks/architectures.py` defines models and batches and runs all architectures.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from benchmarks.architectures import compare
from benchmarks.tiny_models import batch_of, tiny_model
from tests.ranks import Ranks

ARCHITECTURES = (
    "llama",  # returns a DynamicCache
    "bert",
    "clip",  # logit_scale is a scalar
    *("t5", "mixtral", "mamba", "whisper", "aya_vision", "bart", "gemma3", "segformer", "deepseek_v3", "nllb-moe"),
    *("swin", "wav2vec2"),  # wav2vec2 chooses labels by value and guards their range
)
# The masks that wav2vec2 draws with numpy would be the same at each call.
CHANGES: dict[str, dict[str, Any]] = {"wav2vec2": {"apply_spec_augment": False}}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.slow
def test_training_matches_fsdp2(ranks: Ranks, name: str) -> None:
    """Losses, gradients and parameters of two steps on two ranks with different batches."""
    first, _ = ranks(2).run(compare, name, CHANGES.get(name, {}))
    assert "fsdp2" not in first, first["fsdp2"]
    assert (first["result"], first.get("difference")) == ("equal", 0.0), first.get("why")


@pytest.mark.slow
def test_caches_match_eager_mode(mesh: DeviceMesh) -> None:
    """Each call returns a new cache with the call's keys and values, which transformers can use."""
    model, task = tiny_model("llama")
    torch.manual_seed(0)
    batches = [batch_of(model, task) for _ in range(2)]
    plain = copy.deepcopy(model)
    compiled = graphshard.compile(model, mesh, backend="eager")
    caches = [compiled(**batch).past_key_values for batch in batches]
    for batch, cache in zip(batches, caches, strict=True):
        expected = plain(**batch).past_key_values
        assert type(cache) is type(expected)
        assert cache.get_seq_length() == expected.get_seq_length() == batch["input_ids"].shape[1]
        for layer, other in zip(cache.layers, expected.layers, strict=True):
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)
    assert caches[0].layers is not caches[1].layers


def test_generation(mesh: DeviceMesh) -> None:
    """Compiled programs generate with a cache and without one, and so does the uncompiled model."""
    model, _ = tiny_model("llama")
    plain = copy.deepcopy(model).eval()
    compiled = graphshard.compile(model.eval(), mesh, backend="eager")
    tokens = torch.arange(5, 10)[None]
    expected = plain.generate(tokens, max_new_tokens=2, do_sample=False)
    assert torch.equal(compiled.generate(tokens, max_new_tokens=2, do_sample=False, use_cache=False), expected)
    assert torch.equal(compiled.generate(tokens, max_new_tokens=2, do_sample=False), expected)
    with graphshard.uncompiled(compiled):
        assert torch.equal(compiled.generate(tokens, max_new_tokens=2, do_sample=False), expected)
