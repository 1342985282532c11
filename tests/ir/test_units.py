"""Modules that are gathered together: units."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from torch import nn

from graphshard.errors import ArgumentError
from graphshard.ir.units import find_units, unit_of


def _module(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def _block() -> nn.Module:
    """Build a transformer layer: attention, and experts in a list."""
    experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    return _module(attention=nn.Linear(2, 2), mlp=_module(experts=experts), norm=nn.LayerNorm(2))


def _llama() -> nn.Module:
    layers = nn.ModuleList(_block() for _ in range(2))
    return _module(
        model=_module(embed_tokens=nn.Embedding(2, 2), layers=layers, norm=nn.LayerNorm(2)),
        lm_head=nn.Linear(2, 2),
    )


def test_layers_of_a_transformer() -> None:
    """The outermost list is the model's depth; lists inside a layer belong to the layer."""
    assert find_units(_llama()) == ("model.layers.0", "model.layers.1")


def test_two_stacks() -> None:
    model = _module(encoder=nn.ModuleList([_block()]), decoder=nn.ModuleList([_block(), _block()]))
    assert find_units(model) == ("encoder.0", "decoder.0", "decoder.1")


def test_lists_of_lists() -> None:
    """A list is not a block, its elements are."""
    model = _module(stages=nn.ModuleList([nn.ModuleList([_block(), _block()]), nn.ModuleList([_block()])]))
    assert find_units(model) == ("stages.0.0", "stages.0.1", "stages.1.0")


def test_a_sequential_of_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), _block(), nn.ReLU(), _block())
    assert find_units(model) == ("1", "3")


def test_a_sequential_of_layers_is_a_block() -> None:
    """Linear and BatchNorm in a Sequential are layers of a block; the module that holds the Sequential is the block."""
    stem = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
    assert find_units(stem) == ()
    assert find_units(nn.Sequential(stem, stem)) == ("0",)  # one module under two names is one block
    assert find_units(nn.ModuleList([stem, nn.Sequential(nn.Linear(2, 2))])) == ("0", "1")


def test_elements_of_dicts_are_units() -> None:
    experts = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "act": nn.ReLU()})
    assert find_units(_module(experts=experts, head=nn.Linear(2, 2))) == ("experts.a", "experts.b")
    layers = _module(layers=nn.ModuleList([nn.Linear(2, 2)]))
    assert find_units(_module(body=nn.ModuleDict({"embed": nn.Embedding(2, 2), "decoder": layers}))) == (
        "body.embed",
        "body.decoder.layers.0",
    )


def test_blocks_without_parameters_are_not_units() -> None:
    assert find_units(nn.ModuleList([nn.ReLU(), nn.Linear(2, 2), nn.Dropout()])) == ("1",)
    assert find_units(nn.Linear(2, 2)) == ()


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        (["model.layers.*"], ("model.layers.0", "model.layers.1")),
        (["lm_head", "model.layers.0"], ("model.layers.0", "lm_head")),
        (["*.layers.1"], ("model.layers.1",)),
        (["model.layers.[0]"], ("model.layers.0",)),
        (
            ["*.layers.1", "model.layers.*.attention"],
            ("model.layers.0.attention", "model.layers.1", "model.layers.1.attention"),
        ),
        (["*"], ("model", "lm_head")),
        ([], ()),
    ],
)
def test_patterns(patterns: Sequence[str], units: Sequence[str]) -> None:
    """A `*` does not cross a dot; the order is registration order."""
    assert find_units(_llama(), patterns) == units


def test_a_pattern_that_matches_nothing() -> None:
    message = (
        "units: the pattern 'layers.*' matches no submodule with parameters of Module. Use names as in "
        "named_modules(), such as ['model', 'model.embed_tokens', 'model.layers']."
    )
    with pytest.raises(ArgumentError, match=re.escape(message)):
        find_units(_llama(), ["model.layers.*", "layers.*"])


def test_modules_without_parameters_do_not_match() -> None:
    with pytest.raises(ArgumentError, match="the pattern 'act' matches no submodule with parameters"):
        find_units(_module(act=nn.ReLU(), linear=nn.Linear(2, 2)), ["act"])


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("layers.1.mlp.weight", "layers.1"),
        ("layers.1.experts.0.weight", "layers.1.experts.0"),
        ("layers.1", "layers.1"),
        ("layers.10.weight", ""),
        ("embed.weight", ""),
        ("", ""),
    ],
)
def test_parameters_belong_to_the_innermost_unit(name: str, unit: str) -> None:
    assert unit_of(name, ["layers.1", "layers.1.experts.0"]) == unit
