"""Counterpart of test_fully_shard_memory.py: deleting a model frees its memory."""

from __future__ import annotations

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed.twins import OURS, local
from tests.ranks import Ranks
from tests.upstream.lockstep import own_rows, squares, stack


def _deleted(rank: int, world_size: int) -> None:
    """Delete a model; shards, gradients and optimizer states are freed with it."""
    model = stack(2)
    for module in (*model, model):
        OURS(module)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(2):
        optim.zero_grad()
        squares(model(own_rows(step))).backward()
        optim.step()
    tensors = [tensor for param in model.parameters() for tensor in (param, param.grad, *optim.state[param].values())]
    held = [StorageWeakRef(local(tensor).untyped_storage()) for tensor in tensors]
    assert not any(ref.expired() for ref in held)
    del model, module, optim, tensors
    gc.collect()
    assert all(ref.expired() for ref in held)


def test_a_deleted_model_frees_its_memory(ranks: Ranks) -> None:
    """`TestFullyShardMemory.test_fully_shard_del_memory`."""
    ranks(2).run(_deleted)
