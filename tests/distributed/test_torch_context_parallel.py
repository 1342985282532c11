"""torch's context parallelism on ranks matches FSDP2, with emulated flash attention kernels on CPUs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import graphshard
from tests.distributed.twins import assert_same, fsdp2, grads_of, params_of
from tests.ranks import Ranks

attention = pytest.importorskip("torch.distributed.tensor.experimental._attention")
if not hasattr(attention, "_ContextParallel"):
    pytest.skip("a release of torch without it", allow_module_level=True)

aten = torch.ops.aten
WIDTH, HEADS, LENGTH = 16, 2, 8


def _scores(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if is_causal else None
    return scores if sees is None else scores.masked_fill(~sees, -math.inf)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *_: object, **__: object
) -> tuple[Any, ...]:
    scores = _scores(q, k, is_causal)
    none = torch.zeros((), dtype=torch.int64)
    return scores.softmax(-1) @ v, scores.logsumexp(-1), none, none, q.shape[2], k.shape[2], none, none, none.clone()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    is_causal = rest[5]
    weights = (_scores(q, k, is_causal) - logsumexp.unsqueeze(-1)).exp()
    of_scores = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return of_scores @ k, of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """Register CPU versions of the kernels that the DTensor handlers call on each part."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "CPU")
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with mock.patch.object(DTensor._op_dispatcher, "_custom_op_handlers", handlers):
        attention._enable_context_parallel_dispatcher()
        try:
            yield
        finally:
            attention._disable_context_parallel_dispatcher()
            library._destroy()


class _Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.inner, self.out = nn.Linear(WIDTH, 3 * WIDTH), _Inner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(self.inner(q, k, v).transpose(1, 2).flatten(2))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(WIDTH, WIDTH), _Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x)).square().mean()


def _sequences(step: int, data: int) -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(10 * step + data))


def _compare_with_fsdp2(rank: int, world_size: int, method: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    style = attention._ContextParallel
    ours, theirs, plain = _Net(), _Net(), _Net()
    for model in (ours, theirs):
        parallelize_module(model.block.inner, mesh["cp"], style(seq_dim=2, attention_type=style.AttentionType.SDPA))
    fsdp2(theirs, mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    graphshard.compile(ours, mesh, backend="eager")
    data, place = mesh.get_coordinate()
    # Each rank has one part of the front and one of the back, which balances the causal mask.
    parts = torch.arange(LENGTH).chunk(4)
    own = torch.cat((parts[place], parts[3 - place]))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    with _kernels(), mock.patch.object(attention._cp_options, "rotate_method", attention._RotateMethod[method]):
        for step in range(3):
            losses = []
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(model(_sequences(step, data)[:, own]))
                losses[-1].backward()
            assert torch.equal(*losses)
            assert_same(grads_of(ours), grads_of(theirs), "gradients")
            if step == 0:
                sum(plain(_sequences(0, each)) for each in range(2)).div(2).backward()
                for (name, actual), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6, msg=name)
            for optimizer in optimizers:
                optimizer.step()
    assert_same(params_of(ours), params_of(theirs), "parameters")
    return [line for line in graphshard.programs(ours)[0].communication if " over " in line]


@pytest.mark.parametrize("method", [pytest.param("ALL_GATHER", marks=pytest.mark.slow), "ALL_TO_ALL"])
def test_matches_fsdp2_and_whole_sequences(ranks: Ranks, method: str) -> None:
    """Keys and values are gathered at once, or sent around the ring; each rank's part is balanced."""
    for lines in ranks(4).run(_compare_with_fsdp2, method):
        kind = {"ALL_GATHER": "start_all_gather", "ALL_TO_ALL": "start_all_to_all"}[
            method
        ]  # next to attention on the local part
        assert f"forward: {kind} over dp_shard_cp/2" in lines
