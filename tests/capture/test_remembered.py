"""Functions of the user's that remember their results: masks and frequencies in a `functools.cache`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError


@functools.lru_cache(maxsize=8)
def _mask(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@functools.cache
def _frequencies(size: int) -> tuple[Tensor, dict[str, Tensor]]:
    places = torch.arange(size)
    assert places.max() < 10  # what is computed with numbers has values
    angles = torch.outer(places.float(), 1 / 100 ** (torch.arange(0, 4, 2) / 4))
    return angles.cos().repeat(1, 2), {"sin": angles.sin().repeat(1, 2)}


@functools.cache
def _twice(x: Tensor) -> Tensor:
    return 2 * x


@functools.cache
def _attended(size: int) -> Tensor:
    """Attention's operator may draw random numbers, but does not here."""
    ones = torch.arange(4.0 * size).view(1, 1, size, 4)
    return F.scaled_dot_product_attention(ones, ones, ones)[0, 0]


@functools.cache
def _drawn(size: int) -> Tensor:
    return torch.rand(size)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    @functools.cache  # noqa: B019
    def positions(self, size: int) -> Tensor:
        return torch.arange(size)[:, None] * torch.ones(4)

    @functools.cache  # noqa: B019
    def scaled(self, size: int) -> Any:
        return {"scale": [self.scale * torch.ones(size, 4)]}


class _Masked(_Net):
    def forward(self, x: Tensor) -> Tensor:
        cos, more = _frequencies(len(x))
        y: Tensor = _mask(len(x)) @ self.linear(x) * cos + more["sin"] * x + self.positions(len(x)) + _attended(len(x))
        return y


class _Twice(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return _twice(self.linear(x))


class _Scaled(_Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scaled(len(x))["scale"][0]
        return y


class _Draws(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * _drawn(4)


class _Writes(_Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * _mask(len(x))[0].add_(1)
        return y


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    for function in (_mask, _frequencies, _attended, _twice, _drawn, _Net.positions, _Net.scaled):
        function.cache_clear()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_depends_on_numbers(mesh: DeviceMesh, backend: Any) -> None:
    """A traced tensor was kept, in the user's function, and used in the next trace."""
    plain = _Masked()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend=backend)
    exactly = {"rtol": 0.0, "atol": 0.0} if backend == "eager" else {}
    for size in (3, 2, 3):
        mine, expected = ours(torch.ones(size, 4)), plain(torch.ones(size, 4))
        mine.sum().backward()
        torch.testing.assert_close(mine, expected, **exactly)
    assert _mask.cache_info().misses == 2
    assert type(_mask(3)) is type(_frequencies(3)[1]["sin"]) is Tensor


@pytest.mark.parametrize(("cls", "function"), [(_Twice, _twice), (_Scaled, _Net.scaled), (_Draws, _drawn)])
def test_what_depends_on_tensors(mesh: DeviceMesh, cls: Any, function: Any) -> None:
    ours = graphshard.compile(cls(), mesh, backend="eager")
    with pytest.raises(
        CaptureError, match=r"test_remembered.py:\d+\n(.|\n)*keeps here what depends on tensors of this"
    ):
        ours(torch.ones(3, 4))
    assert function.cache_info().currsize == 0


def test_what_is_written_to(mesh: DeviceMesh) -> None:
    """The message was torch's, of a graph that is not functional."""
    ours = graphshard.compile(_Writes(), mesh, backend="eager")
    with pytest.raises(
        CaptureError, match=r"add_\(1\)\nForward writes to a tensor that it finds where no program looks"
    ):
        ours(torch.ones(4, 4))
    assert torch.equal(_mask(4)[0], torch.tensor([1.0, 0, 0, 0]))
