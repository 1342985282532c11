"""Parameters with FSDP2's all-gather extensions, and nets of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.two_tensor import TwoTensor

import graphshard
from graphshard.ir.subclasses import parts_of
from graphshard.torch_compat.torch_ops import pytree
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, fsdp2, local

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Net(nn.Module):
    """Blocks of two weights each; the weights of the blocks may be subclasses."""

    def __init__(self, make_weight: Callable[[Tensor], Tensor] = lambda weight: weight, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim + 3), nn.ReLU(), nn.Linear(dim + 3, dim, bias=False)) for _ in range(2)
        )
        self.head = nn.Linear(dim, 3)
        for block in self.blocks:
            for linear in (block[0], block[2]):
                linear.weight = nn.Parameter(make_weight(linear.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def even(make_weight: Callable[[Tensor], Tensor] = lambda weight: weight) -> Net:
    """Return a net whose weights divide evenly by two or four ranks."""
    torch.manual_seed(0)
    model = Net(dim=8)
    for block in model.blocks:
        block[0], block[2] = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        for linear in (block[0], block[2]):
            linear.weight = nn.Parameter(make_weight(linear.weight.detach()))
    return model


def pair(weight: Tensor) -> TwoTensor:
    return TwoTensor(weight, 0.5 * weight)


def before(self: Any, mesh: DeviceMesh) -> Any:
    return (self.a, self.b), None


def before_with_policy(
    self: Any, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
) -> Any:
    assert isinstance(module, nn.Linear)
    assert isinstance(mp_policy, MixedPrecisionPolicy)
    assert outer_stride == (outer_size[1], 1)
    return (self.a, self.b), tuple(outer_size)


def after(self: Any, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    a, b = gathered
    assert metadata in (None, tuple(a.shape))
    if out is None:
        return TwoTensor(a, b).to(param_dtype), (a, b)
    if a.dtype != param_dtype:
        out.a.copy_(a)
        out.b.copy_(b)
    return None


@contextlib.contextmanager
def pairs_follow(how: Any = before) -> Iterator[None]:
    """Give TwoTensor the all-gather extensions within the block."""
    TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather = how, after
    try:
        yield
    finally:
        del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather


def rounded(self: Any, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any) -> Any:
    """All-gather as bfloat16, whatever the policy says."""
    return (self.to(torch.bfloat16),), None


@torch.no_grad()
def widened(self: Any, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    (tensor,) = gathered
    assert tensor.dtype == torch.bfloat16
    if out is not None:
        with _unsafe_preserve_version_counter(out):
            out.copy_(tensor)
        return None
    wide = tensor.to(param_dtype)
    return wide, (tensor, wide)


def patch_shards(model: nn.Module, pre: Any = rounded, post: Any = widened) -> None:
    """Set the methods on the shards of the blocks' weights."""
    for name, param in model.named_parameters():
        if name.startswith("blocks") and name.endswith("weight"):
            shard = param._local_tensor
            shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = pre.__get__(shard), post.__get__(shard)


class Rounded(torch.Tensor):
    """A tensor that is gathered as bfloat16 and pads itself to the size of the largest shard."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        given = pytree.tree_map_only(cls, lambda whole: whole._data, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*given[0], **given[1]))

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        if outer_size[0] % mesh.size() == 0:
            return (self._data.to(torch.bfloat16),), None
        size = [math.ceil(outer_size[0] / mesh.size()), *outer_size[1:]]
        padded = torch.empty(size, dtype=torch.bfloat16, device=self.device)
        padded[: self._data.size(0)].copy_(self._data)
        return (padded,), None

    fsdp_post_all_gather = widened


def plain_parts(tensor: Tensor | None) -> dict[str, Tensor]:
    """Return copies of the plain tensors of this rank's shard."""
    return {str(i): part.detach().clone() for i, part in enumerate(parts_of(local(tensor)))}


def train_and_compare_with_fsdp2(
    make: Callable[[], nn.Module],
    mesh: DeviceMesh,
    *,
    steps: int = 2,
    dim: int = 8,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    **options: Any,
) -> nn.Module:
    """Train with Adam in graphshard and in FSDP2; check that outputs, gradients and parameters are bitwise equal.

    Args:
        make: builds equal models; some subclasses cannot be copied.
    """
    ours = graphshard.compile(make(), mesh, backend="eager", **options)
    twin = fsdp2(make(), mesh, **options)
    seen: list[dict[str, Tensor]] = []
    for trained in (ours, twin):
        prepare(trained)
        optim = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], lr=1e-2, foreach=True)
        told: dict[str, Tensor] = {}
        for step in range(steps):
            result = trained(rows(10 * step + mesh.get_rank(), 16, dim))
            result.float().square().sum().backward()
            told |= {f"result {step} {i}": part for i, part in plain_parts(result).items()}
            for name, param in trained.named_parameters():
                grad = plain_parts(param.grad) if param.requires_grad else {}
                told |= {f"gradient {step} {name} {i}": part for i, part in grad.items()}
            optim.step()
            optim.zero_grad()
            after_step(trained)
            for name, param in trained.named_parameters():
                told |= {f"parameter {step} {name} {i}": part for i, part in plain_parts(param).items()}
        seen.append(told)
    assert_same(*seen, "training")
    for param, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        assert type(local(param)) is type(local(theirs))
    return ours
