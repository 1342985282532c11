"""Lightning's Trainer with `ModelParallelStrategy` trains a compiled model like FSDP2's, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import graphshard
from tests.distributed.twins import CountLaunches, assert_same, fsdp2, params_of
from tests.docs.nets import Transformer
from tests.ranks import Ranks

pytestmark = pytest.mark.slow

BATCHES, MICROBATCHES = 5, 2
STEPS = 3  # the last one has a different batch
SIZE = 2  # of a batch


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Sequences determined by their index."""

    def __len__(self) -> int:
        return BATCHES * SIZE * 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(index, index + 3) % 16, torch.arange(index, index + 3) * 7 % 16


class Module(lightning.LightningModule):
    """A language model that `parallelize` shards."""

    def __init__(self, parallelize: Callable[..., nn.Module], sync_last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model: nn.Module = Transformer()
        self._parallelize, self._sync_last = parallelize, sync_last
        self.losses: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        self._parallelize(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self._sync_last:
            last = (index + 1) % self.trainer.accumulate_grad_batches == 0
            self.model.set_requires_gradient_sync(last or self.trainer.is_last_batch)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.model(*batch)
        self.losses[f"step {index}"] = loss.detach()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.losses[f"validation {index}"] = self.model(*batch).detach()


def _compile(model: nn.Module, mesh: Any) -> nn.Module:
    return graphshard.compile(model, mesh, backend="eager")


def _trainer(rank: int, world_size: int, folder: str, **options: Any) -> lightning.Trainer:
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with mock.patch.dict(os.environ, LOCAL_RANK=str(rank)):
        return lightning.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            default_root_dir=folder,
            enable_checkpointing=False,
            accumulate_grad_batches=MICROBATCHES,
            gradient_clip_val=0.5,
            num_sanity_val_steps=0,
            **quiet,
            **options,
        )


def _data() -> DataLoader[Any]:
    return DataLoader(Tokens(), batch_size=SIZE)


def _fit(rank: int, world_size: int, folder: str, sync_last: bool) -> None:
    modules, launches = [], []
    for parallelize in (_compile, fsdp2):
        module = Module(parallelize, sync_last)
        with CountLaunches() as counts:
            _trainer(rank, world_size, folder, max_epochs=1).fit(module, _data(), _data())
        module.model.reshard()  # FSDP2 keeps the root gathered after the validation
        modules.append(module)
        # graphshard's traced collectives are counted under other names than the all-to-alls of two gloo ranks.
        launches.append(counts.launches["reduce_scatter_by_all_to_all_single"] + counts.of("_reduce_scatter_base_"))
    ours, theirs = modules
    assert len(ours.losses) == 2 * BATCHES
    assert ours.losses["step 0"] != ours.losses["step 4"]
    assert_same(ours.losses, theirs.losses, "losses")
    assert_same(params_of(ours), params_of(theirs), "after training")
    units, reducing = 3, STEPS if sync_last else BATCHES
    assert launches == [units * reducing] * 2


def test_equals_fsdp2(ranks: Ranks, tmp_path: Path) -> None:
    """Training, clipping and validation; every microbatch reduces, the Trainer's default."""
    ranks(2).run(_fit, str(tmp_path), False)


def test_no_sync(ranks: Ranks, tmp_path: Path) -> None:
    """With the switch in a hook, one reduction per step."""
    ranks(2).run(_fit, str(tmp_path), True)


def _resume(rank: int, world_size: int, folder: str) -> None:
    path = Path(folder, "half.ckpt")
    whole = Module(_compile, False)
    _trainer(rank, world_size, folder, max_epochs=2).fit(whole, _data())

    first = Module(_compile, False)
    trainer = _trainer(rank, world_size, folder, max_epochs=1)
    trainer.fit(first, _data())
    trainer.save_checkpoint(path)
    for parallelize in (_compile, fsdp2):
        second = Module(parallelize, False)
        _trainer(rank, world_size, folder, max_epochs=2).fit(second, _data(), ckpt_path=path, weights_only=False)
        assert_same(whole.losses, second.losses, "losses of the second epoch")
        assert_same(params_of(whole), params_of(second), "after two epochs")


def test_resume(ranks: Ranks, tmp_path: Path) -> None:
    """The Trainer's checkpoint after an epoch resumes bit for bit, in graphshard and in FSDP2."""
    ranks(2).run(_resume, str(tmp_path))
