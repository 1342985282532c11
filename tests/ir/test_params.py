"""The parameter table and shard arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamSpec, ParamTable, build_table, memory_order, named_parameters
from graphshard.ir.units import Precision, find_units
from tests.helpers import Blocks, Tied


def _row(*shape: int, num_shards: int = 2) -> ParamSpec:
    f32 = torch.float32
    return ParamSpec(("w",), shape, f32, f32, f32, True, num_shards, "", False)


def _table(
    model: nn.Module,
    *,
    num_shards: int = 2,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard: bool | None = None,
) -> ParamTable:
    return build_table(
        model,
        mesh=Mesh.of_shape(num_shards),
        units=find_units(model),
        precision=Precision(MixedPrecisionPolicy(param_dtype, reduce_dtype)),
        reshard_after_forward=reshard,
    )


@st.composite
def _rows(draw: st.DrawFn) -> tuple[ParamSpec, torch.Tensor]:
    """Draw a row of any shape, dim, memory order and number of shards, and a matching parameter."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    memory = torch.arange(math.prod(shape)).view([shape[d] for d in order])
    full = memory.permute(sorted(range(len(shape)), key=order.__getitem__))
    row = replace(
        _row(*shape, num_shards=draw(st.integers(1, 5))),
        dim=draw(st.integers(0, len(shape) - 1)),
        order=memory_order(full),
    )
    return row, full


@given(_rows())
@settings(deadline=None)
def test_shards_match_torch_chunk(drawn: tuple[ParamSpec, torch.Tensor]) -> None:
    """torch.chunk makes fewer chunks when elements run out; the remaining ranks are empty."""
    row, full = drawn
    empty = full.narrow(row.dim, 0, 0)
    chunks = [*full.chunk(row.num_shards, row.dim), *[empty] * row.num_shards]
    for rank in range(row.num_shards):
        assert torch.equal(full.narrow(row.dim, *row.local_range(rank)), chunks[rank])
        assert row.local_shape(rank) == tuple(chunks[rank].shape)
    assert row.padded_shape == tuple(chunks[0].shape)
    assert row.is_even == (row.shape[row.dim] % row.num_shards == 0)


@given(_rows())
@settings(deadline=None)
def test_strides_are_dense_in_the_memory_order(drawn: tuple[ParamSpec, torch.Tensor]) -> None:
    """A contiguous tensor has order (); dims of size 1 leave the order open, and their strides do not matter."""
    row, full = drawn
    assert (row.order == ()) == full.is_contiguous()
    in_memory = torch.empty_strided(row.shape, row.stride_of(row.shape)).permute(row.order or tuple(range(full.dim())))
    assert in_memory.is_contiguous()
    assert row.in_memory(row.shape) == tuple(in_memory.shape)
    if 1 not in row.shape:
        assert row.stride_of(row.shape) == full.stride()
    assert row.in_memory(row.shape)[row.memory_dim] == row.shape[row.dim]


def test_strided_tensors_have_no_order() -> None:
    gaps = torch.empty(4, 6)[:, ::2]
    overlapping = torch.empty(4, 1).expand(4, 3)
    assert memory_order(gaps) == memory_order(overlapping) == ()


def test_units_and_their_defaults() -> None:
    """By default the root keeps its parameters, and units gather theirs again."""
    model = nn.Module()
    model.blocks, model.head = Blocks(2), nn.Linear(4, 4)
    table = _table(model)
    assert table.units == ("blocks.layers.0", "blocks.layers.1", "")
    assert {row.name: (row.unit, row.reshard) for row in table} == {
        "blocks.layers.0.weight": ("blocks.layers.0", True),
        "blocks.layers.1.weight": ("blocks.layers.1", True),
        "head.weight": ("", False),
        "head.bias": ("", False),
    }


@pytest.mark.parametrize("reshard", [True, False])
def test_an_explicit_choice_applies_to_all_units(reshard: bool) -> None:
    table = _table(nn.ModuleDict({"blocks": Blocks(1), "head": nn.Linear(4, 4)}), reshard=reshard)
    assert {row.reshard for row in table} == {reshard}


def test_tied_weights_share_a_row() -> None:
    table = _table(Tied())
    (row,) = table
    assert row.names == ("embed.weight", "head.weight")
    assert table["head.weight"] is table["embed.weight"] is row
    assert len(table) == 1


def test_a_module_under_two_names_shares_rows() -> None:
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": layer, "b": layer})
    assert list(named_parameters(model)) == [("a.weight", "b.weight"), ("a.bias", "b.bias")]


def test_rows_are_in_registration_order() -> None:
    model = nn.Module()
    model.b = nn.Parameter(torch.ones(2))
    model.a = nn.Linear(2, 2)
    model.c = nn.Parameter(torch.ones(2))
    # A module's parameters come before its children's.
    assert [row.name for row in _table(model)] == ["b", "c", "a.weight", "a.bias"]


def test_precision_follows_fsdp2() -> None:
    """Only floating-point parameters use `param_dtype`; the default of `reduce_dtype` depends on torch."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4))
    model.index = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)
    bf16, f32 = torch.bfloat16, torch.float32

    def dtypes(**policy: torch.dtype) -> tuple[torch.dtype, ...]:
        row = _table(model, **policy)["w"]
        return row.dtype, row.compute_dtype, row.reduce_dtype

    assert dtypes() == (f32, f32, f32)
    new = hasattr(FSDPModule, "finalize_backward")  # from torch 2.15 on gradients are reduced in the shard's dtype
    assert dtypes(param_dtype=bf16) == (f32, bf16, f32 if new else bf16)
    assert dtypes(param_dtype=bf16, reduce_dtype=bf16) == (f32, bf16, bf16)
    assert dtypes(param_dtype=bf16, reduce_dtype=f32) == (f32, bf16, f32)
    assert dtypes(reduce_dtype=bf16) == (f32, f32, bf16)
    assert _table(model, param_dtype=bf16)["index"].compute_dtype == torch.int64


def test_frozen_parameters_are_marked() -> None:
    model = Blocks(2)
    model.layers[0].requires_grad_(False)
    assert [row.trainable for row in _table(model)] == [False, True]


def test_packing_order_has_submodules_before_their_parents() -> None:
    """`nn.MultiheadAttention` has parameters and a child with parameters."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "head": nn.Linear(4, 2)})
    table = build_table(model, mesh=Mesh.of_shape(2), units=(), precision=Precision(), reshard_after_forward=None)
    own, out, head = ["in_proj_weight", "in_proj_bias"], ["out_proj.weight", "out_proj.bias"], ["weight", "bias"]
    assert [row.name for row in table] == [
        *(f"attention.{name}" for name in own + out),
        *(f"head.{name}" for name in head),
    ]
    assert [row.name for row in table.in_packing_order] == [
        *(f"attention.{name}" for name in out + own),
        *(f"head.{name}" for name in head),
    ]
