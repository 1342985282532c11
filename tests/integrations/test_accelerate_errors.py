"""Accelerate features that graphshard supports differently or not at all: plugin settings, empty shards, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphshard
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.integrations.accelerate import use_graphshard
from tests.distributed.twins import assert_same, fsdp2, params_of, world_mesh
from tests.integrations.hugging_face import launched
from tests.ranks import Ranks


class Narrow(nn.Module):
    """Several parameters of one row; all ranks except the first have empty shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return self.first(x) + 2 * self.second(x)


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **options)


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [param]} for param in model.parameters()], lr=0.1)


def _empty_shards(rank: int, world_size: int) -> None:
    x = torch.randn(3, 4)
    theirs = fsdp2(Narrow(), world_mesh())
    optimizer = _groups(theirs)
    theirs(x).sum().backward()
    optimizer.step()
    with launched():
        model = Narrow()
        model, optimizer = use_graphshard(_accelerator(), backend="eager").prepare(model, _groups(model))
        assert [group["params"][0] for group in optimizer.param_groups] == list(model.parameters())
        model(x).sum().backward()
        optimizer.step()
    assert_same(params_of(model), params_of(theirs), "parameters")


@pytest.mark.slow
def test_empty_shards_stay_distinct(ranks: Ranks) -> None:
    """Accelerate identifies parameters by address, which empty ones lack."""
    ranks(2).run(_empty_shards)


def _settings(rank: int, world_size: int) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    def compiled(**settings: Any) -> Any:
        with launched():
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
            model = Narrow()
            use_graphshard(_accelerator(), plugin=plugin, backend="eager").prepare(model, _groups(model))
            model(torch.ones(1, 4)).sum().backward()
            (program,) = graphshard.programs(model)
            return program

    plain = compiled()
    assert {row.unit for row in plain.params} == {"", "blocks.0", "blocks.1"}
    assert all(row.reshard == bool(row.unit) for row in plain.params)
    assert not any(row.reshard for row in compiled(reshard_after_forward=False).params)
    wrapped = compiled(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"])
    assert {row.unit for row in wrapped.params} == {"blocks.0", "blocks.1", "first", "second"}
    ignored = compiled(ignored_modules="first")
    assert {row.name for row in ignored.params if row.ignored} == {"first.weight", "first.bias"}
    half = compiled(mixed_precision_policy="bf16")
    assert {row.compute_dtype for row in half.params} == {torch.bfloat16}


def test_settings_of_the_plugin_hold(ranks: Ranks) -> None:
    ranks(2).run(_settings)


def _refused(rank: int, world_size: int) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    def refused(message: str, error: type[Exception] = ArgumentError, **settings: Any) -> None:
        def prepare() -> None:
            given = settings.pop("accelerator", {})
            plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **settings})
            use_graphshard(_accelerator(**given), plugin=plugin).prepare(model, optimizer)

        with launched(), pytest.raises(error, match=message):
            prepare()

    model = Narrow()
    optimizer = _groups(model)
    unsupported = UnsupportedError
    refused("plugin is for FSDP1", fsdp_version=1)
    refused("without dynamo_backend", unsupported, accelerator={"dynamo_backend": "eager"})
    refused("cpu_ram_efficient_loading.*load_safetensors", unsupported, cpu_ram_efficient_loading=True)
    refused(
        "activation_checkpointing_offload is not supported",
        unsupported,
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
    )
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    refused("Adam has state of whole parameters already")
    optimizer = _groups(Narrow())
    refused(r"group 0 of Adam holds a tensor of shape \[4, 4\] that is not a parameter of Narrow")
    with launched(), pytest.raises(ArgumentError, match="Did you mean 'backend'"):
        use_graphshard(_accelerator(), backends="eager")
    with launched(), pytest.raises(ArgumentError, match="there are several models"):
        use_graphshard(_accelerator()).prepare(model, Narrow(), optimizer)
    assert not any(isinstance(param, torch.distributed.tensor.DTensor) for param in model.parameters())


def test_rejects_unsupported_settings(ranks: Ranks) -> None:
    """The model does not change."""
    ranks(2).run(_refused)


def test_rejects_one_process() -> None:
    from accelerate.state import AcceleratorState

    try:
        with pytest.raises(ArgumentError, match="there is one process only"):
            use_graphshard(_accelerator())
        with pytest.raises(ArgumentError, match=r"must be an accelerate\.Accelerator, got Linear\."):
            use_graphshard(nn.Linear(1, 1))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
