"""Counterparts of test_fully_shard_mixed_precision.py: dtypes of compute, reduction and accumulation."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.ir.units import reduced_in
from tests.distributed.nets import largest_dim
from tests.distributed.twins import BF16, FP32, assert_same, fsdp2, grads_of, params_of, twins, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import Pair, needs_fsdp2_of_2_12, own_rows, reduced_dtypes, squares, stack, train_alike

REDUCED_IN_BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
# reshard_after_forward, world size, and whether parameters are sharded along their largest dim.
CASES: list[tuple[bool | int, int, bool]] = [(False, 2, True), (True, 2, False), (2, 4, False), (2, 4, True)]


def _step_reducing_in(pair: Pair, dtype: torch.dtype, x: Tensor) -> None:
    """Run a step of both in which all reductions have one dtype, and gradients the parameters' dtype."""
    seen = []
    for model in pair:
        model.zero_grad()
        loss = squares(model(x))
        with reduced_dtypes() as reduced:
            loss.backward()
        assert reduced == {dtype}
        assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)
        seen.append({"loss": loss.detach()})
    assert_same(*seen, "loss")
    assert_same(*map(grads_of, pair), "gradients")


def _trained(
    rank: int, world_size: int, policy: MixedPrecisionPolicy, dtype: torch.dtype, reshard: bool | int, inner: bool
) -> None:
    options: dict[str, Any] = {"mp_policy": policy, "shard_placement_fn": largest_dim if inner else None}
    model = stack()
    # FSDP2 2.13 fails if inner dims are gathered among fewer ranks; the values equal a gather among all.
    theirs = True if inner and reshard == 2 else reshard
    twin = fsdp2(copy.deepcopy(model), world_mesh(), reshard_after_forward=theirs, **options)
    ours = graphshard.compile(model, world_mesh(), backend="eager", reshard_after_forward=reshard, **options)
    pair = ours, twin
    _step_reducing_in(pair, dtype, own_rows(9))
    for model in pair:
        model.zero_grad()
    train_alike(pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("reshard", "world_size", "inner"), CASES)
@pytest.mark.slow
def test_computed_and_reduced_in_low_precision(
    ranks: Ranks, reshard: bool | int, world_size: int, dtype: torch.dtype, inner: bool
) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_compute_dtype`: sharded along dim 0, or the largest dim."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    ranks(world_size).run(_trained, policy, reduced_in(policy, torch.float32, dtype), reshard, inner)


@pytest.mark.parametrize(
    ("policy", "dtype"), [(BF16, torch.float32), (REDUCED_IN_BF16, torch.bfloat16)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(("reshard", "world_size", "inner"), CASES)
@pytest.mark.slow
def test_reduced_in_another_dtype(
    ranks: Ranks, reshard: bool | int, world_size: int, policy: MixedPrecisionPolicy, dtype: torch.dtype, inner: bool
) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_reduce_dtype`: higher or lower than the compute dtype."""
    ranks(world_size).run(_trained, policy, dtype, reshard, inner)


class _WithIntegers(nn.Module):
    """Layers, and a frozen integer parameter in the same unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.integers = nn.Parameter(torch.ones(8, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _thawed(rank: int, world_size: int) -> None:
    """FSDP2 2.13 fixes dtypes at the first call, so its model makes no frozen call first."""
    pair = twins(_WithIntegers(), world_mesh(), mp_policy=BF16)
    pair[0].requires_grad_(False)
    with torch.no_grad():
        output = pair[0](own_rows(0))
    assert output.dtype == torch.bfloat16
    pair[0].layers.requires_grad_(True)
    _step_reducing_in(pair, torch.float32, own_rows(0))
    assert pair[0].integers.grad is None


@needs_fsdp2_of_2_12
def test_trained_after_a_call_with_everything_frozen(ranks: Ranks) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_reduce_dtype_after_frozen_first_forward`."""
    ranks(2).run(_thawed)


def _accumulated(rank: int, world_size: int, reshard: bool) -> None:
    pair = twins(stack(), world_mesh(), mp_policy=BF16, reshard_after_forward=reshard)
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in pair]
    for step in range(2):
        for microbatch in range(4):
            last = microbatch == 3
            losses = []
            for model in pair:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last or reshard)
                output = model(own_rows(microbatch))
                assert output.dtype == torch.bfloat16
                with reduced_dtypes() as reduced:
                    output.sum().backward()
                if step:  # the first step verifies programs on fake tensors
                    assert reduced == ({torch.float32} if last else set())
                losses.append({"output": output.detach()})
            assert_same(*losses, f"microbatch {microbatch} of step {step}")
        assert_same(*map(grads_of, pair), f"step {step}")
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=step == 0)
    assert_same(*map(params_of, pair), "parameters")


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.slow
def test_microbatches_accumulate_in_float32(ranks: Ranks, reshard: bool) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_grad_acc_with_reduce_dtype`."""
    ranks(2).run(_accumulated, reshard)


@dataclass
class _Inner:
    x: Tensor
    y: Tensor


@dataclass
class _Outer:
    """A dataclass in a dataclass, passed between units; not a registered pytree."""

    inner: _Inner
    z: Tensor


class _OfEach(nn.Module):
    """A layer that is applied to all tensors of a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, given: _Outer) -> _Outer:
        return _Outer(_Inner(self.layer(given.inner.x), self.layer(given.inner.y)), self.layer(given.z))


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_OfEach() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        given = _Outer(_Inner(x, x.clone()), x.clone())
        for layer in self.layers:
            given = layer(given)
        return given.inner.x + given.inner.y + given.z


def _structured(rank: int, world_size: int) -> None:
    in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for policy in (FP32, in_bf16, BF16):
        torch.manual_seed(0)
        train_alike(twins(_Structured(), world_mesh(), mp_policy=policy))


@needs_fsdp2_of_2_12
@pytest.mark.slow
def test_dataclasses_in_dataclasses_between_units(ranks: Ranks) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_structured_input_output`; see also `test_containers.py`."""
    ranks(2).run(_structured)


def _converted(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    pair = twins(stack().to(torch.bfloat16), world_mesh(), mp_policy=policy)
    for model in pair:
        model.to(torch.float32)
    for _ in range(2):
        _step_reducing_in(pair, torch.bfloat16, own_rows(0))


@pytest.mark.slow
def test_the_reduce_dtype_survives_a_conversion(ranks: Ranks) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_clamp_reduce_dtype`: the model was in bfloat16 when it was compiled."""
    ranks(2).run(_converted)
