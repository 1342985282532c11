"""Objects that pytree does not know among the results of a forward."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.export import Dim

import graphshard
from graphshard.capture.objects import take_apart
from graphshard.capture.untraceable import Untraceable
from tests.ranks import FakeWorld


class Layer:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.names = ["keys"]
        self.filled = True


class Cache:
    def __init__(self, *keys: Tensor) -> None:
        self.layers = [Layer(each) for each in keys]
        self.config = nn.Identity()  # an object that is shared
        self.length = 3


def _remade(result: Any, tensors: list[Tensor]) -> Any:
    leaves, structure = torch.utils._pytree.tree_flatten(take_apart(result, lambda leaf: isinstance(leaf, Tensor)))
    assert all(isinstance(leaf, (Tensor, int)) for leaf in leaves)
    given = iter(tensors)
    return torch.utils._pytree.tree_unflatten([next(given) if isinstance(t, Tensor) else t for t in leaves], structure)


def test_an_object_is_made_anew_with_other_tensors() -> None:
    cache = Cache(torch.ones(2), torch.ones(3))
    tensors = [torch.zeros(2), torch.zeros(3)]
    made, number = _remade((cache, 5), tensors)
    assert number == 5
    assert type(made) is Cache
    assert made is not cache
    assert [layer.keys for layer in made.layers] == tensors
    assert (made.length, made.layers[0].filled, made.layers[0].names) == (3, True, ["keys"])
    assert made.layers[0].names is not cache.layers[0].names
    assert made.config is cache.config


def test_objects_without_tensors() -> None:
    made = _remade({"cache": Cache()}, [])["cache"]
    assert (type(made), made.layers, made.length) == (Cache, [], 3)


class Slotted:
    __slots__ = ("__dict__", "hidden")

    def __init__(self) -> None:
        self.hidden = 3


class Names(list[str]):
    pass


@pytest.mark.parametrize("result", [Counter("ab"), Slotted(), Names(["a"])], ids=lambda result: type(result).__name__)
def test_what_holds_more_than_attributes_is_refused(result: Any) -> None:
    """It was a TypeError of Python's, or an object without what it held."""
    with pytest.raises(Untraceable, match=f"a {type(result).__name__}, which is more than its attributes"):
        take_apart([result], lambda leaf: isinstance(leaf, Tensor))


def test_what_cannot_be_seen_is_refused() -> None:
    itself = Cache()
    itself.layers = [itself, torch.ones(1)]
    for result, name in ((lambda: 1, "function"), (nn.Identity(), "Identity"), ({1, 2}, "set")):
        with pytest.raises(Untraceable, match=f"a {name}"):
            take_apart([result], lambda leaf: isinstance(leaf, Tensor))
    with pytest.raises(Untraceable, match="a Cache that refers to itself"):
        take_apart(itself.layers, lambda leaf: isinstance(leaf, Tensor))


class _Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, torch.Size, dict[str, torch.Size]]:
        y = self.linear(x)
        return y, y.shape, {"first": x.size()[:1], "none": torch.Size([])}


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_stay_sizes(fake_world: FakeWorld, tmp_path: Path, dynamic: bool) -> None:
    """They were tuples, in programs from a file, too."""
    fake_world(1)
    mesh, plain = init_device_mesh("cpu", (1,)), _Sizes()
    given = {"dynamic_shapes": {"x": {0: Dim("rows")}}} if dynamic else {}
    example = torch.ones(3, 4)
    path = graphshard.export(plain, (1,), tmp_path / "a", example_inputs=(example,), backend="eager", **given)
    compiled = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager", **given)
    for model in (compiled, graphshard.load(path, copy.deepcopy(plain), mesh)):
        for rows in (3, 5) if dynamic else (3,):
            _, shape, others = model(torch.ones(rows, 4))
            assert [type(size) for size in (shape, *others.values())] == [torch.Size] * 3
            assert (shape, others) == (torch.Size([rows, 4]), {"first": torch.Size([rows]), "none": torch.Size([])})
            assert shape.numel() == 4 * rows
