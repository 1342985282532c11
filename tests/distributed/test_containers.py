"""Units that take and return tensors in containers: casts, gradients and accumulation match FSDP2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from tests.distributed.twins import BF16, FP32, train_side_by_side, twins, world_mesh
from tests.ranks import Ranks


class Named(NamedTuple):
    x: Tensor
    skip: Tensor


@dataclass
class Unregistered:
    """A container that torch's utilities treat as a leaf and FSDP2 traverses."""

    x: Tensor
    skip: Tensor


PACK: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "list": (lambda x, skip: [x, skip], lambda p: (p[0], p[1])),
    "tuple": (lambda x, skip: (x, (skip,)), lambda p: (p[0], p[1][0])),
    "dict": (lambda x, skip: {"x": x, "rest": {"skip": skip}}, lambda p: (p["x"], p["rest"]["skip"])),
    "OrderedDict": (lambda x, skip: OrderedDict(skip=skip, x=x), lambda p: (p["x"], p["skip"])),
    "named tuple": (Named, lambda p: (p.x, p.skip)),
    "dataclass": (Unregistered, lambda p: (p.x, p.skip)),
}


class _Unit(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pack, self.unpack = PACK[kind]
        self.linear = nn.Linear(6, 6)

    def forward(self, packed: Any) -> Any:
        x, skip = self.unpack(packed)
        return self.pack(torch.tanh(self.linear(x)) + skip, skip + x)


class _Net(nn.Module):
    """Values that enter every unit and bypass it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pack, self.unpack = PACK[kind]
        self.stem = nn.Linear(6, 6)
        self.layers = nn.ModuleList(_Unit(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            y, skip = self.unpack(layer(self.pack(x, x)))
            x = x * y.to(x.dtype) + skip.to(x.dtype)
        return x.float().square().mean()


def _containers(rank: int, world_size: int, kind: str) -> None:
    for policy in (FP32, BF16):
        torch.manual_seed(0)
        pair = twins(_Net(kind), world_mesh(), mp_policy=policy)
        train_side_by_side(pair, lambda: {"x": torch.randn(5, 6)}, steps=3)


# FSDP2 frees a unit's parameters after forward, and without hooks gathers none for backward.
_looks_into_it = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.12",
    reason="FSDP2 of torch 2.11 hooks no outputs in a dataclass that is no pytree",
)
_KINDS = [pytest.param(kind, marks=_looks_into_it) if kind == "dataclass" else kind for kind in PACK]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.quick_cases("dataclass")
def test_units_take_and_return_containers(ranks: Ranks, kind: str) -> None:
    """In float32 and bfloat16, three steps match FSDP2 bit for bit."""
    ranks(2).run(_containers, kind)
