"""Counterparts of test_fully_shard_mixed_precision.py: dtypes of the inputs and outputs of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.distributed.twins import FP32, assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import Pair, needs_newer_fsdp2, own_rows, squares, train_alike

FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16)


class _RecordsDtypes(nn.Module):
    """A layer that records the dtypes of its inputs."""

    def __init__(self, name: str, told: list[Any]) -> None:
        super().__init__()
        self.linear, self.name, self.told = nn.Linear(8, 8), name, told

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.told.append((self.name, x.dtype, None if y is None else y.dtype))
        return self.linear(x.to(self.linear.weight.dtype))


class _Two(nn.Module):
    """Two such layers; the second may get an input that is created here."""

    def __init__(self, *, external: bool = False) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.first, self.second = _RecordsDtypes("first", self.told), _RecordsDtypes("second", self.told)
        self.external = external

    def forward(self, x: Tensor) -> Tensor:
        self.told.append(("root", x.dtype, None))
        y = torch.ones(4, 8, dtype=torch.float32) if self.external else None
        return self.second(self.first(x), y)


def _compare_dtypes(pair: Pair) -> list[Any]:
    """Run a step of both, check that they record the same dtypes, and return these."""
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
    assert [dtype for _, dtype, _ in _compare_dtypes(pair)] == expected


@pytest.mark.parametrize("case", ONE_UNIT)
@pytest.mark.quick_cases("cast by the module", "and cast back")
def test_one_unit_in_half_precision(ranks: Ranks, case: str) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_float16_on_one_submodule`: dtypes at the root, first and second layer."""
    ranks(2).run(_one_unit, case)


def _external(rank: int, world_size: int, cast: bool) -> None:
    policies = {"second": MixedPrecisionPolicy(HALF, cast_forward_inputs=cast), "": FLOAT16}
    pair = twins(_Two(external=True), world_mesh(), units=["second"], mp_policy=policies)
    root, first, second = _compare_dtypes(pair)
    assert (root[1], first[1], second[1:]) == (HALF, HALF, (HALF, HALF if cast else WHOLE))


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.quick_cases("False")
def test_inputs_of_a_unit_that_are_made_outside(ranks: Ranks, cast: bool) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_submodules_with_external_inputs`."""
    ranks(2).run(_external, cast)


class _Checkpointed(nn.Module):
    """A unit within a checkpoint; its input and output are cast at its boundary, during recomputation, too."""

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
    ours(own_rows(0)).sum().backward()
    assert ours.told == theirs.told


@needs_newer_fsdp2
@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.slow
def test_checkpoints_recompute_casts(ranks: Ranks, casts: str) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_checkpoint_recompute_casts_forward_inputs` and
    `TestFullyShardMixedPrecisionCasts.test_checkpoint_recompute_casts_outputs`.

    Dtypes are checked in forward and in recomputation: the model asserts them, or records them within a checkpoint.
    """
    ranks(2).run(_recomputed, casts)


def _with_norm(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    if isinstance(norm, nn.BatchNorm2d):
        return nn.Sequential(nn.Conv2d(1, 5, 3), norm, nn.Conv2d(5, 4, 3))
    return nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))


def _outcome(model: nn.Module, x: Tensor, dtype: torch.dtype) -> dict[str, Any] | str:
    """Return result, gradients and buffers of a step, or the kernel's error."""
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
                # graphshard's text ends with the line of forward.
                assert isinstance(theirs, str), f"{name}{how}"
                assert str(ours).startswith(theirs), f"{name}{how}"
                refused[name + how] = theirs
            else:
                assert_same(ours, theirs, f"{name}{how}")
    return refused


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BFloat16"), (torch.float16, "Half")], ids=str)
@pytest.mark.slow
def test_norms(ranks: Ranks, dtype: torch.dtype, name: str) -> None:
    """`TestFullyShardMixedPrecisionCasts.test_norm_modules_bf16` and
    `TestFullyShardMixedPrecisionCasts.test_norm_modules_fp16`.

    Buffers of batch norm stay in float32, which torch's CPU kernel rejects for both models.
    """
    error = f"expected scalar type {name} but found Float"
    for refused in ranks(2).run(_norms, dtype):
        assert refused == {"batch": error, "batch, images": error}
