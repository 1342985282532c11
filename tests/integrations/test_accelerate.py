"""Accelerate trains a compiled model like FSDP2's, bit for bit: accumulation, clipping, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphshard.integrations.accelerate import become_fsdp2, use_graphshard
from tests.distributed.twins import BF16, assert_same, fsdp2, params_of, world_mesh
from tests.docs.nets import Config, Transformer
from tests.integrations.hugging_face import VOCAB, gpt2, launched, llama, loader, loss_of, text
from tests.ranks import Ranks

EVERY = 2  # microbatches of a step


def small() -> nn.Module:
    """Build a model that captures quickly."""
    torch.manual_seed(0)
    return Transformer(Config(vocab=VOCAB))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "small": small}


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows, rows) if isinstance(model, Transformer) else loss_of(model, rows)


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, gradient_accumulation_steps=EVERY, **options)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW with separate groups for biases and norms."""
    params = list(model.parameters())
    matrices, rest = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def _train(accelerator: Any, model: nn.Module, optimizer: Any, batches: Any, schedule: Any = None) -> list[Tensor]:
    """Train one epoch as in Accelerate's guide; return losses and norms."""
    told = []
    for (rows,) in batches:
        with accelerator.accumulate(model):
            loss = _loss(model, rows)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                told.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        told.append(loss.detach())
    return told


def _train_with_fsdp2_calls(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int
) -> list[Tensor]:
    """Train with the FSDP2 calls that Accelerate wraps."""
    told = []
    batches = text(24).split(2)[rank::world_size]
    for number, rows in enumerate(batches, 1):
        model.set_requires_gradient_sync(number % EVERY == 0)
        loss = _loss(model, rows)
        (loss / EVERY).backward()
        if number % EVERY == 0:
            told.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
        told.append(loss.detach())
    return told


def _trains(rank: int, world_size: int, name: str, precision: str) -> None:
    mp = {} if precision == "no" else {"mp_policy": BF16}
    theirs = fsdp2(MODELS[name](), world_mesh(), **mp)
    expected = _train_with_fsdp2_calls(theirs, _adamw(theirs), rank, world_size)
    with launched():
        accelerator = use_graphshard(_accelerator(mixed_precision=precision), backend="eager", **mp)
        given = MODELS[name]()
        model, optimizer, batches = accelerator.prepare(given, _adamw(given), loader())
        assert model is given
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len(group["params"]) for group in _adamw(theirs).param_groups
        ]
        assert accelerator.unwrap_model(model) is model
        told = _train(accelerator, model, optimizer, batches)
    assert_same(*({str(i): value for i, value in enumerate(both)} for both in (told, expected)), "losses and norms")
    assert len(told) == 9
    assert_same(params_of(model), params_of(theirs), "parameters")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_training_matches_fsdp2(ranks: Ranks, name: str) -> None:
    ranks(2).run(_trains, name, "no")


def test_mixed_precision(ranks: Ranks) -> None:
    ranks(2).run(_trains, "small", "bf16")


def _resume(rank: int, world_size: int, folder: str, kind: str, writer: str) -> None:
    """Save after an epoch and train another; load the checkpoint and train the same epoch again."""
    from accelerate import FullyShardedDataParallelPlugin

    def start(impl: str) -> tuple[Any, ...]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        accelerator, model = _accelerator(), small()
        if impl == "graphshard":
            use_graphshard(accelerator, plugin=plugin, backend="eager")
        else:
            become_fsdp2(accelerator, plugin)
        optimizer = _adamw(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return accelerator, *accelerator.prepare(model, optimizer, loader(), schedule)

    with launched():
        accelerator, model, optimizer, batches, schedule = start(writer)
        _train(accelerator, model, optimizer, batches, schedule)
        accelerator.save_state(folder)
        expected = _train(accelerator, model, optimizer, batches, schedule)
    with launched():
        accelerator, resumed, optimizer, batches, schedule = start("graphshard")
        accelerator.load_state(folder)
        told = _train(accelerator, resumed, optimizer, batches, schedule)
    assert_same(*({str(i): value for i, value in enumerate(both)} for both in (told, expected)), "losses and norms")
    assert_same(params_of(resumed), params_of(model), "parameters")


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("writer", ["graphshard", "fsdp2"])
@pytest.mark.slow
def test_training_resumes(ranks: Ranks, tmp_path: Path, kind: str, writer: str) -> None:
    """From a state that Accelerate saved here, or with its FSDP2."""
    ranks(2).run(_resume, str(tmp_path), kind, writer)
