"""Gradient accumulation: collectives of each microbatch, and bitwise equality with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import graphshard
from graphshard.errors import UnsupportedError
from tests.distributed.nets import rows
from tests.distributed.twins import (
    BF16,
    FP32,
    CountLaunches,
    assert_same,
    example_llama,
    grads_of,
    params_of,
    twins,
    world_mesh,
)
from tests.helpers import Blocks
from tests.ranks import RankError, Ranks

POLICIES = {"fp32": FP32, "bf16": BF16, "bf16 reductions": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}

# Settings before a microbatch, for graphshard and for FSDP2.
Setting = Callable[[Any, bool], None]


def _square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _no_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _no_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def _one_block(model: Any, last: bool) -> None:
    """Accumulate in the first block, reduce the rest every time."""
    if isinstance(model, FSDPModule):
        model.layers[0].set_requires_gradient_sync(last)
    else:
        model.set_requires_gradient_sync(last, units=["layers.0"])


def _root_only(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last, recurse=False)


def _both(model: Any, last: bool) -> None:
    """Accumulate the first microbatch on the rank, the second on the shards."""
    if last:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
    elif getattr(model, "second", False):
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)
    else:
        model.set_requires_gradient_sync(False)
    model.second = not last


SETTINGS = {"no sync": _no_sync, "one block": _one_block, "root only": _root_only}
REPLICATED = {"no sync": _no_sync, "no all-reduce": _no_all_reduce, "both": _both}


def _train(rank: int, world_size: int, setting: Setting, policy: MixedPrecisionPolicy) -> None:
    model, batch = example_llama()
    pair = twins(model, _square() if world_size == 4 else world_mesh(), mp_policy=policy)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    for step in range(2):
        for microbatch in range(3):
            last = microbatch == 2
            losses = []
            for compiled in pair:
                setting(compiled, last)
                torch.manual_seed(100 * step + 10 * microbatch + rank)
                loss = compiled(**batch())
                loss.backward()
                losses.append({"loss": loss.detach()})
            assert_same(*losses, f"microbatch {microbatch} of step {step}")
            assert_same(*map(grads_of, pair), f"gradients after microbatch {microbatch} of step {step}")
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same(*map(params_of, pair), "after training")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.slow
def test_microbatches_without_sync_match_fsdp2(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Gradients accumulate in the reduce dtype."""
    ranks(2).run(_train, _no_sync, policy)


@pytest.mark.parametrize("setting", [_one_block, _root_only])
@pytest.mark.slow
def test_accumulation_in_some_units_matches_fsdp2(ranks: Ranks, setting: Setting) -> None:
    ranks(2).run(_train, setting, BF16)


@pytest.mark.parametrize("setting", REPLICATED.values(), ids=REPLICATED)
@pytest.mark.slow
def test_microbatches_over_replicas_match_fsdp2(ranks: Ranks, setting: Setting) -> None:
    ranks(4).run(_train, setting, FP32)


class Expanded(nn.Module):
    """A model whose parameter gradient is an expanded scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale.sum()).square().mean()


def _train_expanded(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> None:
    torch.manual_seed(0)
    pair = twins(Expanded(), world_mesh(), mp_policy=policy)
    for microbatch in range(3):
        for model in pair:
            _no_sync(model, microbatch == 2)
            model(rows(10 * microbatch + rank)).backward()
        assert_same(*map(grads_of, pair), f"gradients after microbatch {microbatch}")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.quick_cases("bf16 reductions")
def test_expanded_gradients_accumulate(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    ranks(2).run(_train_expanded, policy)


def _counts(rank: int, world_size: int) -> list[list[dict[str, int]]]:
    """Count reductions of graphshard and FSDP2, without sync and without all-reduce."""
    counted = []
    for model in twins(Blocks(3, 8), _square()):
        counted.append([])
        for warm in (False, True):
            for setting in (_no_sync, _no_all_reduce):
                with CountLaunches() as mode:
                    for last in (False, False, True):
                        setting(model, last)
                        model(torch.randn(2, 8)).backward()
                if warm:
                    counted[-1].append({kind: mode.of(kind) for kind in ("scatter", "all_reduce")})
    return counted


@pytest.mark.slow
def test_reductions_of_three_microbatches(ranks: Ranks) -> None:
    """Three units are reduced once; or over shards for each microbatch and over replicas once, as in FSDP2."""
    for ours, theirs in ranks(4).run(_counts):
        assert ours == theirs == [{"scatter": 3, "all_reduce": 3}, {"scatter": 9, "all_reduce": 3}]


class Choice(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index](x).square().sum()


def _unused_in_the_last(rank: int, world_size: int) -> None:
    """The last microbatch also reduces layers that it does not use."""
    pair = twins(Choice(), world_mesh())
    for model in pair:
        torch.manual_seed(rank)
        for index, last in ((0, False), (1, False), (1, True)):
            model.set_requires_gradient_sync(last)
            model(torch.randn(2, 3), index).backward()
    assert_same(*map(grads_of, pair), "gradients")
    assert all(grad is not None for grad in grads_of(pair[0]).values())


def test_a_layer_unused_in_the_last_microbatch(ranks: Ranks) -> None:
    ranks(2).run(_unused_in_the_last)


def _pipelined(rank: int, world_size: int) -> None:
    """Run 1F1B: two microbatches are in flight at once, as in a pipeline stage."""
    model, batch = example_llama(layers=1)
    pair = twins(model, world_mesh(), reshard_after_forward=False)
    for compiled in pair:
        torch.manual_seed(rank)
        losses: list[Tensor] = []
        compiled.set_requires_gradient_sync(False)
        compiled.set_is_last_backward(False)
        for _ in range(4):
            losses.append(compiled(**batch()))
            if len(losses) == 2:
                losses.pop(0).backward()
        compiled.set_requires_gradient_sync(True)
        compiled.set_is_last_backward(True)
        losses.pop().backward()
    assert_same(*map(grads_of, pair), "gradients")


def test_interleaved_microbatches_match_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_pipelined)


def _given_up(rank: int, world_size: int, setting: Setting) -> None:
    """FSDP2 runs the second microbatch only: its `reset_iter_state` keeps unreduced gradients (torch 2.13)."""
    ours, theirs = twins(Blocks(2, 4), _square())
    x = torch.full((2, 4), rank + 1.0)
    setting(ours, False)
    ours(10 * x).backward()
    ours.reset_iter_state()
    setting(ours, True)
    for model in (ours, theirs):
        model(x).backward()
    assert_same(grads_of(ours), grads_of(theirs), "gradients")


@pytest.mark.parametrize("setting", [_no_sync, _no_all_reduce])
@pytest.mark.slow
def test_an_abandoned_step_leaves_no_gradients(ranks: Ranks, setting: Setting) -> None:
    """With gradients on the rank and on the shards."""
    ranks(4).run(_given_up, setting)


def _typing_error(rank: int, world_size: int) -> None:
    model = graphshard.compile(Blocks(2, 4), world_mesh(), backend="eager")
    model.set_requires_gradient_sync(False, units=["layer.*"])


def test_rejects_unknown_units(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"units: 'layer\.\*' names no unit; there are '', 'layers\.0', 'layers\.1'\."):
        ranks(2).run(_typing_error)


def _inputs_only(rank: int, world_size: int, setting: Setting) -> None:
    """Compute the input's gradient in each microbatch; it must not affect the accumulated gradients.

    FSDP2 is not compared: it reduces the accumulated sum as soon as any gradient is computed, and the rest afterwards.
    """
    ours, theirs = pair = twins(Blocks(2, 8), _square())
    for microbatch in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * microbatch + rank))
        leaves = [x.clone().requires_grad_() for _ in pair]
        for model in pair:
            setting(model, microbatch == 2)
        loss = ours(leaves[0]).square().sum()
        (asked,) = torch.autograd.grad(loss, leaves[0], retain_graph=True)
        loss.backward()
        theirs(leaves[1]).square().sum().backward()
        assert_same(
            {"x": asked, "x of backward": leaves[0].grad},
            dict.fromkeys(("x", "x of backward"), leaves[1].grad),
            f"{microbatch}",
        )
        assert_same(*map(grads_of, pair), f"gradients after microbatch {microbatch}")
    assert all(grad is not None for grad in grads_of(ours).values())


@pytest.mark.parametrize("setting", REPLICATED.values(), ids=REPLICATED)
@pytest.mark.slow
def test_input_gradients_alone_do_not_accumulate(ranks: Ranks, setting: Setting) -> None:
    ranks(4).run(_inputs_only, setting)


def _some_parameters(rank: int, world_size: int) -> None:
    model = graphshard.compile(Blocks(2, 8), world_mesh(), backend="eager")
    first, *_ = params = list(model.parameters())
    model.set_requires_gradient_sync(False)
    x = torch.randn(4, 8)
    with pytest.raises(UnsupportedError, match=r"^inputs: the gradient of layers\.1\.weight is added"):
        model(x).sum().backward(inputs=[first])
    model(x).sum().backward(inputs=params)
    model.set_requires_gradient_sync(True)
    model(x).sum().backward(inputs=params)
    assert all(param.grad is not None for param in params)


def test_rejects_accumulating_a_part_of_the_gradients(ranks: Ranks) -> None:
    ranks(2).run(_some_parameters)
