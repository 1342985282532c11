"""Counterparts of test_fully_shard_training.py: a head that is called chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from graphshard.errors import CaptureError
from tests.distributed.nets import Block
from tests.distributed.twins import CountLaunches, assert_same, grads_of, local, params_of, sharded_alike
from tests.ranks import Ranks
from tests.upstream.language import Language, language_loss, tokens
from tests.upstream.lockstep import needs_newer_fsdp2

Shard = Callable[..., Any]


def _in_chunks(model: Any, step: int, seen: dict[str, Any]) -> None:
    """Run the backward of each chunk of the head, then the backward of the rest."""
    hidden = model(tokens(step), hidden=True)
    leaf = hidden.detach().float().requires_grad_()
    seen["hidden"] = hidden.detach()
    for index, chunk in enumerate(leaf.chunk(3, dim=1)):
        out = model.head(chunk)
        out.float().square().sum().backward()
        seen[f"chunk {index}"] = out.detach()
        grad = model.head.weight.grad
        seen[f"gradient after chunk {index}"] = None if grad is None else grad.to_local().clone()
    hidden.backward(leaf.grad.to(hidden.dtype))


def _chunked(shard: Shard, model: Any, *, inner: Any = None, outer: Any = None, **options: Any) -> None:
    inner, outer = inner or MixedPrecisionPolicy(), outer or MixedPrecisionPolicy()
    tied = model.head.weight is model.embed.weight
    for layer in model.layers:
        shard(layer, mp_policy=outer, **options)
    if not tied:
        shard(model.embed, mp_policy=outer, **options)
    shard([model.embed, model.norm, model.head][not tied :], mp_policy=inner, **options)
    shard(model, mp_policy=outer, **options)


HALF_OUT = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
CHUNKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resharded": ({}, {"reshard_after_forward": True}),
    "kept": ({}, {"reshard_after_forward": False}),
    "kept on one rank": ({}, {"reshard_after_forward": 1}),
    "tied": ({"tied": True}, {}),
    "tied, in bfloat16": ({"tied": True}, {"inner": HALF_OUT, "outer": HALF_OUT}),
    "in bfloat16": ({}, {"inner": HALF_OUT, "outer": HALF_OUT}),
    "head in bfloat16": ({}, {"inner": HALF_OUT, "outer": MixedPrecisionPolicy(param_dtype=torch.float32)}),
    "checkpointed": ({"checkpointed": "composable"}, {}),
}


def _chunks(rank: int, world_size: int, case: str) -> None:
    of_model, options = CHUNKED[case]
    pair = sharded_alike(functools.partial(_chunked, **options), Language(**of_model))
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in pair]
    for step in range(2):
        seen: list[dict[str, Any]] = [{}, {}]
        for model, optim, found in zip(pair, optims, seen):
            _in_chunks(model, step, found)
            optim.step()
            optim.zero_grad()
        assert_same(*seen, f"step {step}")
        assert_same(*map(params_of, pair), f"parameters after step {step}")


@needs_newer_fsdp2
@pytest.mark.parametrize("case", CHUNKED)
@pytest.mark.slow
def test_a_head_that_forward_does_not_call(ranks: Ranks, case: str) -> None:
    """`TestFullyShard1DTrainingCompose.test_partial_group_forward_then_standalone`: the gradient after each chunk."""
    ranks(2).run(_chunks, case)


def _accumulated_chunks(rank: int, world_size: int) -> None:
    for reshard in (True, False):
        pair = sharded_alike(functools.partial(_chunked, reshard_after_forward=reshard), Language())
        seen: list[dict[str, Any]] = [{}, {}]
        for model, found in zip(pair, seen):
            for microbatch in range(3):
                model.set_requires_gradient_sync(microbatch == 2)
                model.set_is_last_backward(microbatch == 2)
                _in_chunks(model, microbatch, found)
        ours, theirs = map(grads_of, pair)
        # FSDP2 reduces the norm's accumulated gradient with the head's first chunk, and the rest separately.
        for name in ("norm.weight", "norm.bias"):
            torch.testing.assert_close(local(ours.pop(name)), local(theirs.pop(name)))
        assert_same(ours, theirs, f"{reshard=}")


@needs_newer_fsdp2
@pytest.mark.slow
def test_chunks_of_microbatches(ranks: Ranks) -> None:
    """`TestFullyShard1DTrainingCompose.test_partial_group_forward_grad_accum_chunked`."""
    ranks(2).run(_accumulated_chunks)


def _kept_for_chunks(rank: int, world_size: int) -> None:
    for tied in (False, True):
        pair = sharded_alike(_chunked, Language(tied=tied))
        optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in pair]
        for step in range(3):
            seen: list[dict[str, Any]] = [{}, {}]
            for model, optim, found in zip(pair, optims, seen):
                hidden = model(tokens(step), hidden=True)
                leaf = hidden.detach().requires_grad_()
                model.head.set_reshard_after_forward(False)
                model.head.set_reshard_after_backward(False)
                for index, chunk in enumerate(leaf.chunk(3, dim=1)):
                    with CountLaunches() as count:
                        model.head(chunk).square().sum().backward()
                    assert index == 0 or not count.of("gather") or step == 0
                model.head.set_reshard_after_forward(True)
                model.head.set_reshard_after_backward(True)
                model.head.reshard()
                assert isinstance(model.head.weight, DTensor)
                hidden.backward(leaf.grad)
                found |= {name: grad.to_local().clone() for name, grad in grads_of(model).items()}
                optim.step()
                optim.zero_grad()
            assert_same(*seen, f"gradients of step {step}, {tied=}")
            assert_same(*map(params_of, pair), f"parameters after step {step}, {tied=}")


@needs_newer_fsdp2
@pytest.mark.slow
def test_a_head_that_stays_gathered_for_all_chunks(ranks: Ranks) -> None:
    """`TestFullyShard1DTrainingCompose.test_partial_group_reshard_toggle`: toggled as in torchtitan."""
    ranks(2).run(_kept_for_chunks)


def _two_partial_forwards(rank: int, world_size: int) -> None:
    pair = sharded_alike(_chunked, Language())
    for model in pair:
        hidden = [model(tokens(step), hidden=True) for step in range(2)]
        (hidden[0].sum() + hidden[1].square().sum()).backward()
    for name, param in params_of(pair[0]).items():
        other = pair[1].get_parameter(name).grad
        assert (param.grad is None) == (other is None) == (name == "head.weight")
        if param.grad is not None:
            torch.testing.assert_close(param.grad.to_local(), other.to_local())


def test_two_forwards_that_do_not_call_the_head(ranks: Ranks) -> None:
    """`TestFullyShard1DTrainingCompose.test_double_partial_forward_then_backward`."""
    ranks(2).run(_two_partial_forwards)


class _Armed(Block):
    armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise ValueError("armed")
        return super().forward(x)


def _after_an_exception(rank: int, world_size: int) -> None:
    model = Language()
    model.layers[1] = _Armed(8, 12)
    pair = sharded_alike(_chunked, model)
    for each in pair:
        for known in (False, True):  # whether a step ran before
            each.layers[1].armed = True
            with pytest.raises((ValueError, CaptureError), match="armed"):  # graphshard's names the line
                each(tokens(0), hidden=known)
            each.layers[1].armed = False
            each.reset_iter_state()
            each.zero_grad()
            language_loss(each, 1).backward()
    assert_same(*map(grads_of, pair), "gradients")


@needs_newer_fsdp2
@pytest.mark.slow
def test_a_step_after_forward_raised(ranks: Ranks) -> None:
    """`TestFullyShard1DTrainingCompose.test_reset_iter_state_after_exception`."""
    ranks(2).run(_after_an_exception)
