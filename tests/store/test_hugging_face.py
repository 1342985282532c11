"""Models of transformers, and others whose outputs are classes, are cached with all their programs."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import graphshard
from graphshard.frontend import capture
from graphshard.module import tracer
from tests.ranks import FakeWorld, reset_distributed


def _llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, vocab_size=64))


class Outputs(NamedTuple):
    """A class that pytree cannot store: the launch that finds a program takes the structure from its own trace."""

    loss: Tensor
    logits: Tensor


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Outputs:
        logits = self.head(self.embed(input_ids))
        return Outputs(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


@pytest.mark.parametrize("make", [_llama, _gpt2, Named], ids=["Llama", "GPT-2", "named tuple"])
@pytest.mark.quick_cases("GPT-2", "named tuple")
def test_models_are_cached(make, fake_world: FakeWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second launch trains and evaluates, compiles nothing and has the same outputs."""
    caplog.set_level(logging.INFO, "graphshard.cache")
    found = []
    for launch in range(3):  # transformers warns once, in the first launch
        fake_world(1)
        torch.manual_seed(0)
        model = make()
        if hasattr(model, "generation_config"):  # hash() differs between processes
            model.generation_config._original_object_hash = launch
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
        with mock.patch.object(tracer, "run_pipeline", wraps=tracer.run_pipeline) as passes:
            graphshard.compile(model, init_device_mesh("cpu", (1,)), backend="eager", cache=tmp_path)
            outputs = model(input_ids=tokens, labels=tokens)
            outputs.loss.backward()
            with torch.no_grad():
                evaluated = model.eval()(input_ids=tokens, labels=tokens)
        assert type(outputs) is type(evaluated)
        found.append((passes.call_count, outputs.loss.detach(), evaluated.loss))
        reset_distributed()
    assert found[0][0] == 2
    assert found[-1][0] == 0, caplog.text
    assert all(map(torch.equal, found[-1][1:], found[0][1:]))


def _losses(cache: Path, masks: list[Tensor]) -> int:
    """Compare losses with Python's, with a mask of padding in each call; return the number of traces."""
    torch.manual_seed(0)
    model = _llama()
    model.config.use_cache = False
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    calls = [{"input_ids": tokens, "labels": tokens, "attention_mask": mask} for mask in masks]
    expected = [copy.deepcopy(model)(**call).loss for call in calls]
    with mock.patch.object(capture, "trace_call", wraps=capture.trace_call) as traces:
        graphshard.compile(model, init_device_mesh("cpu", (1,)), backend="eager", cache=cache)
        for call, loss in zip(calls, expected):
            assert torch.equal(model(**call).loss, loss)
    return traces.call_count


def test_branches_on_values(fake_world: FakeWorld, tmp_path: Path) -> None:
    """A mask with padding makes another program than one without, in the launches that do not trace, too."""
    fake_world(1)
    whole = torch.ones(2, 16, dtype=torch.long)
    padded, other = whole.clone(), whole.clone()
    padded[0, :3] = other[1, :5] = 0
    assert _losses(tmp_path, [whole]) == 1
    assert _losses(tmp_path, [whole]) == 0
    assert _losses(tmp_path, [padded]) == 1
    assert _losses(tmp_path, [other, whole, padded]) == 0
