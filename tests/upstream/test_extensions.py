"""Counterparts of test_fully_shard_extensions.py: parameters with all-gather extensions."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from tests.distributed.extended import (
    BF16,
    before,
    before_with_policy,
    even,
    pair,
    pairs_follow,
    train_and_compare_with_fsdp2,
)
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import own_rows, squares


def _materialized(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.trunc_normal_(param)


def _from_meta(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return even(pair)

    for how in (before, before_with_policy):
        for reshard in (True, False):
            with pairs_follow(how):
                train_and_compare_with_fsdp2(
                    make, world_mesh(), prepare=_materialized, mp_policy=BF16, reshard_after_forward=reshard
                )


@pytest.mark.slow
def test_subclasses_from_the_meta_device(ranks: Ranks) -> None:
    """`TestFullyShardAllGatherExtensionsMultiThread.test_all_gather_extensions_end_to_end`: in bfloat16."""
    ranks(2).run(_from_meta)


def _with_methods(linear: nn.Linear, before: Any, after: Any) -> nn.Linear:
    shard = linear.weight._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before.__get__(shard), after.__get__(shard)
    return linear


def _weight_and_more(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return (self, (self + 1).to(torch.bfloat16)), tuple(outer_size)


def _bytes_of_both(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    payloads, metadata = _weight_and_more(self, mesh, outer_size, outer_stride, module, mp_policy)
    return tuple(payload.view(torch.uint8) for payload in payloads), metadata


def _finished(weight: Tensor, out: Tensor | None) -> Any:
    """Check FSDP2's protocol of `fsdp_post_all_gather`: `out` is None at the first gather only."""
    if out is None:
        return weight, (weight,)
    with _unsafe_preserve_version_counter(out):
        out.copy_(weight)
    return None


@torch.no_grad()
def _sum_of_both(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    weight, more = gathered
    return _finished(weight.view(torch.float32).view(metadata) + more.view(torch.bfloat16).view(metadata), out)


def _payloads(rank: int, world_size: int, before: Any) -> None:
    """With one rank per shard group FSDP2 2.13 returns only the first tensor; compare with plain arithmetic there."""
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))["shard"]
    plain = nn.Linear(8, 6, bias=False)
    ours, theirs = twins(copy.deepcopy(plain), world_mesh())
    on_one = graphshard.compile(copy.deepcopy(plain), alone, backend="eager")
    for model in (ours, theirs, on_one):
        _with_methods(model, before, _sum_of_both)
    weight = plain.weight.detach()
    for step in range(2):
        losses = []
        for model in (ours, theirs):
            model.zero_grad()
            loss = squares(model(own_rows(step)))
            loss.backward()
            losses.append({"loss": loss.detach()})
        assert_same(*losses, f"step {step}")
        assert_same(grads_of(ours), grads_of(theirs), f"step {step}")
        expected = own_rows(step) @ (weight + (weight + 1).to(torch.bfloat16)).t()
        assert torch.equal(on_one(own_rows(step)), expected)


@pytest.mark.parametrize("before", [_weight_and_more, _bytes_of_both])
@pytest.mark.quick_cases("_bytes_of_both")
def test_several_tensors_and_their_bytes(ranks: Ranks, before: Any) -> None:
    """`TestFullyShardAllGatherExtensionsMultiThread.test_all_gather_extension_single_rank_payloads`; also two."""
    ranks(2).run(_payloads, before)


def _weight_and_nothing(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return (self, self.new_empty(self.size(0), 0)), None


@torch.no_grad()
def _weight_of_two(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    weight, nothing = gathered
    assert nothing.shape == (weight.size(0), 0)
    return _finished(weight, out)


def _nothing(rank: int, world_size: int) -> None:
    """FSDP2 2.13 cannot gather the empty tensor; without it the weight is the same."""
    ours, theirs = twins(nn.Linear(8, 6, bias=False), world_mesh())
    _with_methods(ours, _weight_and_nothing, _weight_of_two)
    for step in range(2):
        results = [{"output": model(own_rows(step))} for model in (ours, theirs)]
        for result in results:
            squares(result["output"]).backward()
        assert_same(*results, f"step {step}")
        assert_same(grads_of(ours), grads_of(theirs), f"step {step}")


def test_a_tensor_without_elements(ranks: Ranks) -> None:
    """`TestFullyShardAllGatherExtensionsMultiThread.test_all_gather_extension_zero_size_trailing_dim`."""
    ranks(2).run(_nothing)


SETTINGS = types.SimpleNamespace(factor=1.0)


def _changing(rank: int, world_size: int) -> None:
    """Change the number of tensors, a size, and factors that are attributes of an object and of the module."""
    count, rows = 1, 4

    def before(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        tags = torch.arange(float(rows)) * SETTINGS.factor * module.factor
        return (self,) * count + (tags,), count

    @torch.no_grad()
    def after(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return _finished(sum(gathered[:metadata]) * gathered[-1].sum(), out)

    plain = nn.Linear(8, 6, bias=False)
    ours = _with_methods(graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager"), before, after)
    for count, rows, SETTINGS.factor, ours.factor in CHANGES:
        factor = count * world_size * sum(range(rows)) * SETTINGS.factor * ours.factor
        torch.testing.assert_close(ours(own_rows(0)), own_rows(0) @ (factor * plain.weight).t())
    assert len(graphshard.programs(ours)) == len(set(CHANGES))
    assert "or what they read" in graphshard.programs(ours)[-1].reason


CHANGES = [(1, 4, 1.0, 1.0), (2, 4, 1.0, 1.0), (2, 3, 1.0, 1.0), (2, 3, 0.5, 1.0), (2, 3, 0.5, 3.0), (1, 4, 1.0, 1.0)]


def test_methods_whose_variables_change(ranks: Ranks) -> None:
    """`TestFullyShardAllGatherExtensionsMultiThread.test_all_gather_extension_errors_name_param`, and
    `TestFullyShardAllGatherExtensionsMultiThread.test_all_gather_extension_smaller_payload`.

    FSDP2 keeps the buffers of the first gather, so it rejects a different number of tensors and larger tensors.
    Graphshard captures again.
    """
    ranks(2).run(_changing)
