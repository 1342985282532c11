"""test_fully_shard_mixed_precision.py of PyTorch: the dtypes that are computed, reduced and accumulated in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.distributed.nets import largest_dim
from tests.distributed.twins import BF16, FP32, assert_same, fsdp2, grads_of, params_of, twins, world_mesh
from tests.ranks import Ranks
from tests.upstream.alike import Pair, own_rows, reduced_dtypes, squares, stack, train_alike

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16)
REDUCED_IN_BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
# Resharding on as many ranks.
RESHARD: list[tuple[bool | int, int]] = [(False, 2), (True, 2), (2, 4)]


def _step_reducing_in(pair: Pair, dtype: torch.dtype, x: Tensor) -> None:
    """A step of both, in which every reduction is in one dtype, and gradients have that of the parameters."""
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
    # FSDP2 2.13 fails where inner dims are gathered among fewer ranks; gathered among all, they are the same.
    theirs = True if inner and reshard == 2 else reshard
    twin = fsdp2(copy.deepcopy(model), world_mesh(), reshard_after_forward=theirs, **options)
    ours = graphshard.compile(model, world_mesh(), backend="eager", reshard_after_forward=reshard, **options)
    pair = ours, twin
    _step_reducing_in(pair, dtype, own_rows(9))
    for model in pair:
        model.zero_grad()
    train_alike(pair)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("reshard", "world_size"), RESHARD)
def test_computed_and_reduced_in_low_precision(
    ranks: Ranks, reshard: bool | int, world_size: int, dtype: torch.dtype, inner: bool
) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_compute_dtype`: sharded along dim 0, or the largest."""
    ranks(world_size).run(_trained, MixedPrecisionPolicy(param_dtype=dtype), dtype, reshard, inner)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    ("policy", "dtype"), [(BF16, torch.float32), (REDUCED_IN_BF16, torch.bfloat16)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(("reshard", "world_size"), RESHARD)
def test_reduced_in_another_dtype(
    ranks: Ranks, reshard: bool | int, world_size: int, policy: MixedPrecisionPolicy, dtype: torch.dtype, inner: bool
) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_reduce_dtype`: a higher one than that of the product, or a lower."""
    ranks(world_size).run(_trained, policy, dtype, reshard, inner)


class _WithIntegers(nn.Module):
    """Layers, and a frozen parameter of integers in the same unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.integers = nn.Parameter(torch.ones(8, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _thawed(rank: int, world_size: int) -> None:
    """FSDP2 2.13 settles dtypes at the first call, so its own has no frozen call before."""
    pair = twins(_WithIntegers(), world_mesh(), mp_policy=BF16)
    pair[0].requires_grad_(False)
    with torch.no_grad():
        output = pair[0](own_rows(0))
    assert output.dtype == torch.bfloat16
    pair[0].layers.requires_grad_(True)
    _step_reducing_in(pair, torch.float32, own_rows(0))
    assert pair[0].integers.grad is None


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
                if step:  # in the first, programs are verified: on fake tensors
                    assert reduced == ({torch.float32} if last else set())
                losses.append({"output": output.detach()})
            assert_same(*losses, f"microbatch {microbatch} of step {step}")
        assert_same(*map(grads_of, pair), f"step {step}")
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=step == 0)
    assert_same(*map(params_of, pair), "parameters")


@pytest.mark.parametrize("reshard", [True, False])
def test_microbatches_add_up_in_float32(ranks: Ranks, reshard: bool) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_grad_acc_with_reduce_dtype`."""
    ranks(2).run(_accumulated, reshard)


@dataclass
class _Inner:
    x: Tensor
    y: Tensor


@dataclass
class _Outer:
    """What units give each other, a dataclass in a dataclass; no pytree."""

    inner: _Inner
    z: Tensor


class _OfEach(nn.Module):
    """A layer for all tensors of a dataclass."""

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


def test_dataclasses_in_dataclasses_between_units(ranks: Ranks) -> None:
    """`TestFullyShardMixedPrecisionTraining.test_structured_input_output`; see also `test_containers.py`."""
    ranks(2).run(_structured)


class _Told(nn.Module):
    """A layer that writes down the dtypes it is given."""

    def __init__(self, name: str, told: list[Any]) -> None:
        super().__init__()
        self.linear, self.name, self.told = nn.Linear(8, 8), name, told

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.told.append((self.name, x.dtype, None if y is None else y.dtype))
        return self.linear(x.to(self.linear.weight.dtype))


class _Two(nn.Module):
    """Two such layers; the second may be given a tensor that is made here."""

    def __init__(self, *, external: bool = False) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.first, self.second = _Told("first", self.told), _Told("second", self.told)
        self.external = external

    def forward(self, x: Tensor) -> Tensor:
        self.told.append(("root", x.dtype, None))
        y = torch.ones(4, 8, dtype=torch.float32) if self.external else None
        return self.second(self.first(x), y)


def _told_alike(pair: Pair) -> list[Any]:
    """What both write down in one step."""
    seen = []
    for model in pair:
        output = model(own_rows(0))
        squares(output).backward()
        seen.append({"output": output.detach()})
    assert_same(*seen, "outputs")
    assert_same(*map(grads_of, pair), "gradients")
    assert pair[0].told == pair[1].told
    return pair[0].told


HALF, WHOLE = torch.float16, torch.float32
ONE_UNIT: dict[str, tuple[str, MixedPrecisionPolicy, list[torch.dtype]]] = {
    "cast by FSDP": ("second", FLOAT16, [WHOLE, WHOLE, HALF]),
    "cast by the module": ("second", MixedPrecisionPolicy(HALF, cast_forward_inputs=False), [WHOLE, WHOLE, WHOLE]),
    "and cast back": ("first", MixedPrecisionPolicy(HALF, output_dtype=WHOLE), [WHOLE, HALF, WHOLE]),
}


def _one_unit(rank: int, world_size: int, case: str) -> None:
    unit, policy, expected = ONE_UNIT[case]
    pair = twins(_Two(), world_mesh(), units=[unit], mp_policy={unit: policy, "": FP32})
    assert [dtype for _, dtype, _ in _told_alike(pair)] == expected


@pytest.mark.parametrize("case", ONE_UNIT)
def test_one_unit_in_half_precision(ranks: Ranks, case: str) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_float16_on_one_submodule`: root, first and second are given these."""
    ranks(2).run(_one_unit, case)


def _external(rank: int, world_size: int, cast: bool) -> None:
    policies = {"second": MixedPrecisionPolicy(HALF, cast_forward_inputs=cast), "": FLOAT16}
    pair = twins(_Two(external=True), world_mesh(), units=["second"], mp_policy=policies)
    root, first, second = _told_alike(pair)
    assert (root[1], first[1], second[1:]) == (HALF, HALF, (HALF, HALF if cast else WHOLE))


@pytest.mark.parametrize("cast", [False, True])
def test_inputs_of_a_unit_that_are_made_outside(ranks: Ranks, cast: bool) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_submodules_with_external_inputs`."""
    ranks(2).run(_external, cast)


class _Checkpointed(nn.Module):
    """A unit within a checkpoint, whose input and output are cast at its border, when it is run again, too."""

    def __init__(self, given: torch.dtype, returned: torch.dtype, *, writes_down: bool = False) -> None:
        super().__init__()
        self.layer = _InBfloat16(8, 8)
        self.given, self.returned = given, returned
        self.told: list[torch.dtype] | None = [] if writes_down else None

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x.to(self.given), use_reentrant=False, early_stop=False)
        return y.float().tanh()

    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        assert y.dtype == self.returned
        if self.told is not None:
            self.told.append(y.dtype)
        return y


class _InBfloat16(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        return super().forward(x)


CASTS: dict[str, tuple[MixedPrecisionPolicy, torch.dtype, torch.dtype]] = {
    "inputs": (MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), torch.float32, torch.bfloat16),
    "outputs": (
        MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False),
        torch.bfloat16,
        torch.float32,
    ),
}


def _recomputed(rank: int, world_size: int, casts: str) -> None:
    policy, *dtypes = CASTS[casts]
    train_alike(twins(_Checkpointed(*dtypes), world_mesh(), units=["layer"], mp_policy=policy))
    ours, theirs = twins(_Checkpointed(*dtypes, writes_down=True), world_mesh(), units=["layer"], mp_policy=policy)
    theirs(own_rows(0)).sum().backward()
    assert theirs.told == [dtypes[1]] * 2
    with pytest.raises(graphshard.CaptureError, match=r"checkpoint changes told, which eager mode does once more"):
        ours(own_rows(0))


@pytest.mark.parametrize("casts", CASTS)
def test_casts_are_made_again_in_checkpoints(ranks: Ranks, casts: str) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_checkpoint_recompute_casts_forward_inputs` and
    `TestFullyShardMixedPrecisionCasts.test_checkpoint_recompute_casts_outputs`.

    Both look twice at dtypes, which the model asserts here. To write them down in a checkpoint is an error.
    """
    ranks(2).run(_recomputed, casts)


def _with_norm(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    if isinstance(norm, nn.BatchNorm2d):
        return nn.Sequential(nn.Conv2d(1, 5, 3), norm, nn.Conv2d(5, 4, 3))
    return nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))


def _outcome(model: nn.Module, x: Tensor, dtype: torch.dtype) -> dict[str, Any] | str:
    """Result, gradients and buffers of a step; or what torch's kernel says."""
    try:
        output = model(x)
    except RuntimeError as error:
        return str(error)
    assert output.dtype == dtype
    output.sum().backward()
    return {"output": output.detach(), **grads_of(model), **dict(model.named_buffers())}


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(8),
    "batch": lambda: nn.BatchNorm1d(8),
    "batch, images": lambda: nn.BatchNorm2d(5),
}


def _norms(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, str]:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    own = {"1": MixedPrecisionPolicy(output_dtype=dtype), "0": policy, "2": policy, "": policy}
    refused = {}
    for name, norm in NORMS.items():
        x = own_rows(0, 3, 1, 9, 9) if "images" in name else own_rows(0)
        for how, policies in (("", policy), (", buffers cast", policy), (", in float32", own)):
            pair = twins(_with_norm(norm()), world_mesh(), units=["0", "1", "2"], mp_policy=policies)
            if "buffers" in how and name != "layer":
                for model in pair:
                    model[1].running_mean = model[1].running_mean.to(dtype)
                    model[1].running_var = model[1].running_var.to(dtype)
            ours, theirs = (_outcome(model, x, dtype) for model in pair)
            if isinstance(ours, str) or isinstance(theirs, str):
                assert ours == theirs, f"{name}{how}"
                refused[name + how] = ours
            else:
                assert_same(ours, theirs, f"{name}{how}")
    return refused


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BFloat16"), (torch.float16, "Half")], ids=str)
def test_norms(ranks: Ranks, dtype: torch.dtype, name: str) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_norm_modules_bf16` and
    `TestFullyShardMixedPrecisionCasts.test_norm_modules_fp16`.

    Buffers of batch norm stay in float32, which torch's kernel for CPUs refuses in both alike.
    """
    error = f"expected scalar type {name} but found Float"
    for refused in ranks(2).run(_norms, dtype):
        assert refused == {"batch": error, "batch, images": error}


def _converted(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    pair = twins(stack().to(torch.bfloat16), world_mesh(), mp_policy=policy)
    for model in pair:
        model.to(torch.float32)
    for _ in range(2):
        _step_reducing_in(pair, torch.bfloat16, own_rows(0))


def test_the_reduced_dtype_outlives_a_conversion(ranks: Ranks) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_clamp_reduce_dtype`: the model was in bfloat16 when it was compiled."""
    ranks(2).run(_converted)
