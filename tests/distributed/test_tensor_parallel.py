"""Tensor parallelism composed with sharding: bit for bit what FSDP2 makes of the same parallelized model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.tensor_parallel import llama, mesh_of, mlps, pair_of, rows, tokens, train_alike
from tests.ranks import Ranks

OPTIMIZERS = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}


def _train_mlps(rank: int, world_size: int, optimizer: str, options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    train_alike(pair_of(mlps, mesh, **options), mesh, rows, optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mlps_train_as_with_fsdp2(ranks: Ranks, optimizer: str) -> None:
    """Losses, gradients, norms, parameters, placements and the state dict, on 2 x 2 ranks."""
    ranks(4).run(_train_mlps, optimizer, {})


def _train_llama(rank: int, world_size: int, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = mesh_of(*shape)
    train_alike(pair_of(llama, mesh, **options), mesh, tokens)


def test_a_llama_with_sequence_parallelism_trains_as_with_fsdp2(ranks: Ranks) -> None:
    """The usual plan: norms on pieces of the sequence, whose gradients are partial sums on the tensor axis."""
    ranks(4).run(_train_llama, (2, 2), {})
