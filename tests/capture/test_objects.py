"""Objects that pytree does not know among the results of a forward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphshard.capture.objects import take_apart
from graphshard.capture.untraceable import Untraceable


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
