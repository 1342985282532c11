"""Models that transformers shards with FSDP2 while it loads them, `from_pretrained(distributed_config=...)`.

`graphshard.compile(model)` takes such a model over. It is compared with FSDP2, and with plain torch where FSDP2 is
wrong: weights that are tied after loading, whose rows the ranks do not divide evenly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import graphshard
from tests.distributed.twins import assert_same, local, params_of
from tests.integrations.hugging_face import VOCAB, gpt2, launched, llama, loss_of
from tests.ranks import Ranks

try:
    from transformers import AutoModelForCausalLM, DistributedConfig, TrainerCallback
except ImportError:
    pytest.skip("DistributedConfig is of transformers 5.24", allow_module_level=True)

SIZES = {"num_hidden_layers": 2}


def _saved(build: Callable[..., Any], folder: Path, name: str) -> str:
    torch.manual_seed(0)
    path = folder / name
    build().save_pretrained(path)
    return str(path)


def _sharded(path: str, **sizes: int) -> Any:
    sizes = sizes or {"fsdp_size": dist.get_world_size()}
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**sizes)).train()


def _train(model: nn.Module, *, same: bool = False) -> dict[str, Tensor]:
    """Train three steps with an optimizer of the parameters that the model has now."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = {}
    for step in range(3):
        torch.manual_seed(step if same else 10 * step + dist.get_rank())
        loss = loss_of(model, torch.randint(0, VOCAB, (2, 8)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found


def _trains(rank: int, world_size: int, path: str, tied: str) -> None:
    with launched():
        ours, theirs = _sharded(path), _sharded(path)
        graphshard.compile(ours, backend="eager")
        assert_same(_train(ours), _train(theirs), "losses")
        assert_same(params_of(ours), params_of(theirs), "parameters")
        assert len(graphshard.programs(ours)) == 1

        ours = graphshard.compile(_sharded(tied), backend="eager")
        plain = AutoModelForCausalLM.from_pretrained(tied).train()
        assert_same(_train(ours, same=True), _train(plain, same=True), "tied weights")


def test_loads_into_shards_and_trains_as_fsdp2(ranks: Ranks, tmp_path: Path) -> None:
    """FSDP2 trains the tied GPT-2, of 61 rows, with two copies that drift apart: its second loss is off by 2 %."""
    ranks(2).run(_trains, _saved(lambda: llama(**SIZES), tmp_path, "llama"), _saved(gpt2, tmp_path, "gpt2"))


def _trains_split(rank: int, world_size: int, path: str) -> None:
    """Train models whose weights are cut along a tensor axis, and along a data axis if there are four ranks."""
    sizes = {"tp_size": 2} if world_size == 2 else {"fsdp_size": 2, "tp_size": 2}
    with launched():
        ours, theirs = (_sharded(path, **sizes) for _ in range(2))
        graphshard.compile(ours, backend="eager")
        losses = [_train(model, same=True) for model in (ours, theirs)]
        assert_same(losses[0], losses[1], "losses")
        for name, param in theirs.named_parameters():
            assert torch.equal(local(params_of(ours)[name]), local(param)), name


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_trains_along_a_tensor_axis(ranks: Ranks, tmp_path: Path, num_ranks: int) -> None:
    path = _saved(lambda: llama(num_key_value_heads=2, num_hidden_layers=1), tmp_path, "llama")
    ranks(num_ranks).run(_trains_split, path)


def _saves(rank: int, world_size: int, path: str, folder: str) -> None:
    with launched():
        model = graphshard.compile(_sharded(path), backend="eager")
        _train(model)
        model.save_pretrained(f"{folder}/whole")
        dist.barrier()
        assert json.loads(Path(folder, "whole/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert_same(dict(AutoModelForCausalLM.from_pretrained(f"{folder}/whole").state_dict()), whole, "one file")
        model.save_pretrained(f"{folder}/shards", distributed_checkpoint=True)
        again = graphshard.compile(_sharded(f"{folder}/shards"), backend="eager")
        assert_same(params_of(again), params_of(model), "a file for each rank")
        assert_same(_train(again), _train(model), "training of what was loaded")


def test_saves_whole_and_in_shards(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_saves, _saved(lambda: llama(**SIZES), tmp_path, "llama"), str(tmp_path))


class Compiles(TrainerCallback):
    """Compiles what the Trainer, or a library that changes it, has sharded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        graphshard.compile(model, backend="eager")


def _in_trainer(rank: int, world_size: int, path: str, folder: str) -> None:
    from tests.integrations.test_trainer import log_by_step, trainer_of

    found = []
    for implementation in ("before", "callback", "FSDP2"):
        with launched():
            model = _sharded(path)
            if implementation == "before":
                graphshard.compile(model, backend="eager")
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
            callbacks = [Compiles()] if implementation == "callback" else []
            trainer = trainer_of(folder, "", model, save_strategy="no", callbacks=callbacks)
            trainer.train()
            trained = {name: local(param).clone() for name, param in params_of(model).items()}
            found.append(log_by_step(trainer) | trained | {"eval": trainer.evaluate()["eval_loss"]})
    assert_same(found[0], found[2], "compiled before")
    assert_same(found[1], found[2], "compiled by a callback")


@pytest.mark.slow
def test_trains_in_the_trainer(ranks: Ranks, tmp_path: Path) -> None:
    """With two microbatches a step; the Trainer defers FSDP2's reductions, and so ours."""
    ranks(2).run(_in_trainer, _saved(lambda: llama(**SIZES), tmp_path, "llama"), str(tmp_path))
