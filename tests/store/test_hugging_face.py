"""transformers models are cached; its decorators and logging are no obstacle."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import graphshard
from graphshard.module import tracer
from tests.ranks import FakeWorld, reset_distributed


def _llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, vocab_size=64))


@pytest.mark.parametrize("make", [_llama, _gpt2], ids=["Llama", "GPT-2"])
@pytest.mark.quick_cases("GPT-2")
def test_models_are_cached(make, fake_world: FakeWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second launch compiles nothing and has the same loss."""
    caplog.set_level(logging.INFO, "graphshard.cache")
    found = []
    for launch in range(3):  # transformers warns once, in the first launch
        fake_world(1)
        torch.manual_seed(0)
        model = make()
        model.generation_config._original_object_hash = launch  # hash() differs between processes
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
        with mock.patch.object(tracer, "run_pipeline", wraps=tracer.run_pipeline) as passes:
            graphshard.compile(model, init_device_mesh("cpu", (1,)), backend="eager", cache=tmp_path)
            loss = model(tokens, labels=tokens, use_cache=False, return_dict=False)[0]
        found.append((passes.call_count, loss.detach()))
        reset_distributed()
    assert found[-1][0] == 0, caplog.text
    assert all(torch.equal(loss, found[0][1]) for _, loss in found)
