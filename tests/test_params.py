"""The parameter table and the arithmetic of shards."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphshard.params import ParamRow, ParamTable, build_table, named_parameters
from graphshard.units import find_units
from tests.helpers import Blocks, Tied


def _row(*shape: int, num_shards: int = 2) -> ParamRow:
    f32 = torch.float32
    return ParamRow(("w",), shape, f32, f32, f32, True, num_shards, "", False)


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
        num_shards=num_shards,
        units=find_units(model),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard,
    )


@given(rows=st.integers(1, 20), num_shards=st.integers(1, 5))
@settings(deadline=None)
def test_shards_are_the_chunks_of_torch(rows: int, num_shards: int) -> None:
    """torch.chunk makes fewer chunks when rows run out; the ranks behind them hold nothing."""
    row, full = _row(rows, 3, num_shards=num_shards), torch.arange(3 * rows).view(rows, 3)
    chunks = list(full.chunk(num_shards)) + [full[:0]] * num_shards
    for rank in range(num_shards):
        start, length = row.local_range(rank)
        assert torch.equal(full[start : start + length], chunks[rank])
        assert row.local_shape(rank) == tuple(chunks[rank].shape)
    assert row.padded_shape == tuple(chunks[0].shape)
    assert row.is_even == (rows % num_shards == 0)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(deadline=None)
def test_strides_are_those_of_a_contiguous_tensor(shape: list[int]) -> None:
    row = _row(*shape)
    assert row.stride == torch.empty(shape).stride() == torch.empty(row.padded_shape).stride()


def test_units_and_their_defaults() -> None:
    """Without a choice the root keeps its parameters, and the units gather theirs again."""
    model = nn.ModuleDict({"blocks": Blocks(2), "head": nn.Linear(4, 4)})
    table = _table(model)
    assert table.units == ("blocks.layers.0", "blocks.layers.1", "")
    assert {row.name: (row.unit, row.reshard) for row in table} == {
        "blocks.layers.0.weight": ("blocks.layers.0", True),
        "blocks.layers.1.weight": ("blocks.layers.1", True),
        "head.weight": ("", False),
        "head.bias": ("", False),
    }


@pytest.mark.parametrize("reshard", [True, False])
def test_a_choice_holds_for_all(reshard: bool) -> None:
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
    # A module's own parameters come before those of its children.
    assert [row.name for row in _table(model)] == ["b", "c", "a.weight", "a.bias"]


def test_precision_follows_fsdp2() -> None:
    """Only floating parameters are computed in `param_dtype`; without `reduce_dtype` gradients keep theirs."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4))
    model.index = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)
    bf16, f32 = torch.bfloat16, torch.float32

    def dtypes(**policy: torch.dtype) -> tuple[torch.dtype, ...]:
        row = _table(model, **policy)["w"]
        return row.dtype, row.compute_dtype, row.reduce_dtype

    assert dtypes() == (f32, f32, f32)
    assert dtypes(param_dtype=bf16) == (f32, bf16, bf16)
    assert dtypes(param_dtype=bf16, reduce_dtype=f32) == (f32, bf16, f32)
    assert dtypes(reduce_dtype=bf16) == (f32, f32, bf16)
    assert _table(model, param_dtype=bf16)["index"].compute_dtype == torch.int64


def test_frozen_parameters_are_marked() -> None:
    model = Blocks(2)
    model.layers[0].requires_grad_(False)
    assert [row.trainable for row in _table(model)] == [False, True]


def test_a_row_is_plain_data() -> None:
    data = json.loads(json.dumps(_row(3, 2).to_dict()))
    assert data == {
        "names": ["w"],
        "shape": [3, 2],
        "dtype": "torch.float32",
        "compute_dtype": "torch.float32",
        "reduce_dtype": "torch.float32",
        "trainable": True,
        "num_shards": 2,
        "unit": "",
        "reshard": False,
    }
