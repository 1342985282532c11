"""Meaning of a mixed precision policy for one parameter, by torch release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.errors import UnsupportedError
from graphshard.ir import units
from graphshard.ir.units import check_policy, reduced_in
from tests.helpers import Blocks
from tests.ranks import FakeWorld

FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("reduce_dtype", "own_dtype", "expected"),
    [
        (None, False, HALF),
        (None, True, FLOAT),
        (FLOAT, False, FLOAT),
        (FLOAT, True, FLOAT),
        (HALF, False, HALF),
        (HALF, True, HALF),
        (torch.float64, False, torch.float64),
    ],
)
def test_reduce_dtype_follows_the_installed_torch(
    monkeypatch: pytest.MonkeyPatch, reduce_dtype: torch.dtype | None, own_dtype: bool, expected: torch.dtype
) -> None:
    """Since 2.15 FSDP2 defaults to the parameter's dtype, before to the gradient's."""
    monkeypatch.setattr(units, "_IN_OWN_DTYPE", own_dtype)
    assert reduced_in(MixedPrecisionPolicy(HALF, reduce_dtype), own=FLOAT, grad=HALF) == expected


def test_rejects_dtypes_by_parameter() -> None:
    @dataclass(frozen=True)
    class Newer(MixedPrecisionPolicy):
        """The policy class of torch 2.15."""

        param_dtype_override_fn: Any = None

    check_policy(Newer(), "mp_policy")
    with pytest.raises(UnsupportedError, match=r"mp_policy\.param_dtype_override_fn is not .* Make units"):
        check_policy(Newer(param_dtype_override_fn=lambda param: None), "mp_policy")


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
def test_rejects_gradients_of_another_dtype(fake_world: FakeWorld, dtype: torch.dtype | None) -> None:
    fake_world(2)
    model = Blocks(2)
    model.layers[0].weight.grad_dtype = dtype
    with pytest.raises(UnsupportedError) as error:
        graphshard.compile(model, init_device_mesh("cpu", (2,)))
    assert str(error.value) == (
        "parameter layers.0.weight is of torch.float32 and wants gradients of another dtype "
        f"(grad_dtype={dtype}). Leave grad_dtype as it is: gradients are reduced in reduce_dtype of mp_policy, and are "
        "then of the parameter's dtype."
    )
    assert type(model) is Blocks
