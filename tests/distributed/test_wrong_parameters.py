"""Parameters that cannot be sharded, at compile time or later, and the errors that name them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import graphshard
from graphshard.errors import ArgumentError, MaterializationError, ParameterError
from tests.distributed.nets import Net, Tied, rows
from tests.distributed.twins import world_mesh
from tests.ranks import RankError, Ranks


class Tagged(torch.Tensor):
    """Overrides nothing, but a shard would lose the class."""


def with_stem_of(make_weight: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Return a function that builds a net whose first weight is of another class."""

    def make() -> nn.Module:
        model = Net()
        model.stem.weight = nn.Parameter(make_weight(model.stem.weight.detach()))
        return model

    return make


def _error(make: Callable[[], nn.Module], options: Callable[[nn.Module], dict[str, Any]]) -> str:
    model = make()
    before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    attributes = dict(model.__dict__)
    with pytest.raises(ArgumentError) as caught:
        graphshard.compile(model, world_mesh(), **options(model))
    assert {name: (id(p), type(p)) for name, p in model.named_parameters()} == before
    assert model.__dict__ == attributes
    assert type(model) is type(make())
    return str(caught.value)


def _wrong_arguments(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Replicate

    def given(**options: Any) -> Callable[[nn.Module], dict[str, Any]]:
        return lambda model: options

    wrong: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]], str]] = [
        (Net, given(shard_placement_fn=Shard(0)), "shard_placement_fn must be a function.*got Shard"),
        (Net, given(shard_placement_fn=lambda p: Shard(1)), r"returned Shard\(1\) for parameter stem.bias.*1D tensor"),
        (Net, given(shard_placement_fn=lambda p: Shard(-3)), r"returned Shard\(-3\) for parameter stem.weight.*2D"),
        (Net, given(shard_placement_fn=lambda p: Replicate()), r"returned a Replicate for parameter stem.weight"),
        (
            Net,
            given(ignored_params=["stem.weight"]),
            "ignored_params holds 'stem.weight', which is not a parameter of Net",
        ),
        (
            Net,
            given(ignored_params=[nn.Parameter(torch.ones(2))]),
            r"holds a tensor of shape \[2\], which is not a param",
        ),
        (Net, lambda m: {"ignored_params": m.stem.weight}, "must be a set of the model's parameters, got a Parameter"),
        (Net, given(units=[3]), "units: 3 is neither a name pattern, nor a function"),
        (Net, given(units=[lambda name, module: False]), "units: <lambda> chooses no submodule of Net"),
        (Net, given(units=[("stem", "nope")]), "units: the pattern 'nope' matches no submodule"),
        (Net, given(units=[("stem", "head"), ("head", "blocks.0")]), r"units: head is in two groups, \(stem, head\)"),
        (
            with_stem_of(lambda weight: TwoTensor(weight, weight.clone())),
            given(),
            "parameter stem.weight is a TwoTensor, a tensor subclass, and has no fsdp_pre_all_gather and fsdp_post.*or "
            "replace the parameter by a plain tensor before",
        ),
        (
            with_stem_of(lambda weight: TwoTensor(weight, weight.clone())),
            lambda m: {"ignored_params": [m.stem.weight]},
            "parameter stem.weight is a TwoTensor, a tensor subclass, and in ignored_params",
        ),
        (with_stem_of(lambda weight: weight.as_subclass(Tagged)), given(), "parameter stem.weight is a Tagged, a"),
        (lambda: Net().to(torch.float8_e4m3fn), given(), "stem.weight is trainable and of torch.float8.*freeze it"),
    ]
    for make, options, text in wrong:
        assert re.search(text, _error(make, options)), (text, _error(make, options))


def test_errors_name_the_parameter(ranks: Ranks) -> None:
    ranks(2).run(_wrong_arguments)


def _compiled_net() -> nn.Module:
    return graphshard.compile(Net(), world_mesh(), backend="eager")


def _wrong_later(rank: int, world_size: int) -> None:
    x = rows(rank)
    model = _compiled_net()
    model.stem.weight = nn.Parameter(torch.ones(8, 4))
    with pytest.raises(ParameterError, match=r"stem.weight was replaced by a plain tensor.*\[Shard\(0\)\]"):
        model(x)
    model = _compiled_net()
    del model.stem.weight
    with pytest.raises(ParameterError, match=r"stem.weight was removed, or registered under"):
        model(x)
    model = _compiled_net()
    model.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(ParameterError, match=r"parameter extra was added after graphshard.compile"):
        model(x)
    model = _compiled_net()
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(4, 8), world_mesh(), [Shard(0)]))
    with pytest.raises(ParameterError, match=r"head.weight has shape \[4, 8\], it had \[3, 8\]"):
        model(x)
    model = graphshard.compile(Tied(), world_mesh(), backend="eager")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(ParameterError, match=r"head.weight was tied to embed.weight when"):
        model(torch.tensor([1, 2]))
    for change, what in (
        (lambda m: setattr(m, "head", nn.Linear(8, 3)), r"module head, which has the parameter head.weight, was exch"),
        (
            lambda m: setattr(m, "head", nn.Linear(8, 7)),
            "module head, which has the parameter head.weight, was exchang",
        ),
        (
            lambda m: setattr(m, "blocks", m.blocks[:1]),
            r"module blocks.1.up, which has .*blocks.1.up.weight, was removed",
        ),
        (lambda m: setattr(m, "blocks", m.blocks[::-1]), r"blocks.0.up,.* was exchanged for.*and is blocks.1.up now"),
        (lambda m: m.blocks.insert(0, nn.Identity()), r"module blocks.0.up, .* was removed .*, and is blocks.1.up now"),
        (lambda m: setattr(m, "stem", nn.Sequential(m.stem)), r"module stem, .* was exchanged .*, and is stem.0 now"),
    ):
        for called in (False, True):
            model = _compiled_net()
            if called:
                model(x)
            change(model)
            with pytest.raises(ParameterError, match=what):
                model(x)
    model = graphshard.compile(Tied(), world_mesh(), backend="eager")
    model.head = nn.Linear(5, 7, bias=False)
    with pytest.raises(ParameterError, match=r"head.weight was tied to embed.weight when"):
        model(torch.tensor([1, 2]))
    with pytest.raises(ArgumentError, match="Block is a part of a compiled model"):
        graphshard.compile(_compiled_net().blocks[0], world_mesh())


def test_rejects_parameters_that_are_not_shards(ranks: Ranks) -> None:
    ranks(2).run(_wrong_later)


def _meta_device(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = Net()
    ignored = [model.head.weight]
    ours = graphshard.compile(model, world_mesh(), backend="eager", ignored_params=ignored)
    for module in (ours.stem, *ours.blocks):
        module.to_empty(device="cpu")
    with pytest.raises(MaterializationError, match=r"2 parameters.*head.weight, head.bias.*to_empty"):
        ours(rows(rank))


def test_meta_parameters_are_listed(ranks: Ranks) -> None:
    ranks(2).run(_meta_device)


def test_rank_errors_are_reported(ranks: Ranks) -> None:
    """The other tests rely on this: a failing assertion on a rank fails the test."""
    with pytest.raises(RankError, match="AssertionError"):
        ranks(2).run(_fails)


def _fails(rank: int, world_size: int) -> None:
    assert rank == 0
