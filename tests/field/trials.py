"""The same training on plain torch, with FSDP2, and with graphshard.

All ranks run it on the same batches, so plain torch in one process has the right numbers, bit for bit: the mean of
equal gradients is each of them. FSDP2 is there to show what its users have today.

    def _train(model: nn.Module) -> list[Tensor]:
        loss = model(torch.ones(2, 4))
        loss.backward()
        return [loss, *gradients(model)]

    def _trial(rank: int, world_size: int) -> None:
        assert_equal(on_graphshard(Net, _train), on_plain_torch(Net, _train))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from tests.distributed.twins import fsdp2, world_mesh

Build: TypeAlias = Callable[[], nn.Module]
Train: TypeAlias = Callable[[nn.Module], Sequence[Tensor | None]]


def on_plain_torch(build: Build, train: Train) -> list[Tensor | None]:
    """Train the model on this rank alone."""
    return _numbers(_built(build), train)


def on_fsdp2(build: Build, train: Train, **options: Any) -> list[Tensor | None]:
    """Train the model sharded by FSDP2; its units are graphshard's."""
    return _numbers(fsdp2(_built(build), world_mesh(), **options), train)


def on_graphshard(build: Build, train: Train, **options: Any) -> list[Tensor | None]:
    """Train the model compiled by graphshard, with the eager backend unless the options name another."""
    return _numbers(graphshard.compile(_built(build), world_mesh(), **{"backend": "eager", **options}), train)


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Return the gradients of all parameters."""
    return [param.grad for param in model.parameters()]


def parameters(model: nn.Module) -> list[Tensor]:
    """Return the full values of all parameters."""
    return [full(param) for param in model.parameters()]


def full(tensor: Tensor) -> Tensor:
    """Return a full copy of a tensor, which may be sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_equal(ours: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Check that both have the same number of tensors with bitwise equal values."""
    assert len(ours) == len(expected), f"{len(ours)} tensors, expected {len(expected)}"
    differing = [at for at, (a, b) in enumerate(zip(ours, expected)) if not _equal(a, b)]
    assert not differing, f"of {len(ours)} tensors, those at {differing} differ"


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def _built(build: Build) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _numbers(model: nn.Module, train: Train) -> list[Tensor | None]:
    torch.manual_seed(1)
    return [tensor if tensor is None else full(tensor) for tensor in train(model)]
