"""Lockstep training of a graphshard model and an FSDP2 model, and the collectives that they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from graphshard.torch_compat.torch_ops import TorchDispatchMode, pytree
from tests.distributed.nets import Block
from tests.distributed.twins import assert_same, filled, grads_of, local, params_of

Pair = tuple[nn.Module, nn.Module]
# Comparisons with FSDP2 that need a newer torch: older FSDP2 fails or lacks the feature.
needs_fsdp2_of_2_12 = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.12", reason="FSDP2 of torch 2.11 fails here"
)
needs_newer_fsdp2 = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="FSDP2 before torch 2.13 fails here"
)


def stack(depth: int = 3, dim: int = 8, hidden: int = 12) -> nn.Sequential:
    """Build a stack of blocks, each of which is a unit; the root has no parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dim, hidden, bias=True) for _ in range(depth)))


def own_rows(step: int, *shape: int) -> Tensor:
    """Return random rows that depend on the step and the rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(*(shape or (4, 8)), generator=generator)


def squares(output: Tensor) -> Tensor:
    return output.float().square().mean()


def train_alike(
    pair: Pair,
    loss_of: Callable[[nn.Module, int], Tensor] = lambda model, step: squares(model(own_rows(step))),
    steps: int = 3,
) -> None:
    """Train both with Adam and check that losses, gradients and parameters are bitwise equal at each step.

    Gradients are set to None after every second step, and to zero after the others.
    """
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in pair]
    for step in range(steps):
        seen: list[dict[str, Any]] = []
        for model, optim in zip(pair, optims):
            loss = loss_of(model, step)
            loss.backward()
            seen.append({"loss": loss.detach(), **{n: _copied(grad) for n, grad in grads_of(model).items()}})
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 1)
        assert_same(*seen, f"loss and gradients of step {step}")
        assert_same(*map(params_of, pair), f"parameters after step {step}")


def _copied(grad: Tensor | None) -> Tensor | None:
    held = local(grad)
    return None if held is None else held.detach().clone()


@contextmanager
def reduced_dtypes() -> Iterator[set[torch.dtype]]:
    """Collect the dtypes of all tensors that are reduced within the block."""
    with _Reductions() as mode:
        yield mode.dtypes


class _Reductions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname if func.namespace in ("c10d", "_c10d_functional") else ""
        if "reduce" in name or "all_to_all" in name:  # a reduce-scatter on two gloo ranks runs as an all-to-all
            self.dtypes |= {leaf.dtype for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


@contextmanager
def launches(model: nn.Module, parts: Mapping[int, str] | None = None) -> Iterator[list[str]]:
    """Collect the collectives launched within the block, as "gather layers.0"; their numel identifies the unit.

    `parts` names units by a smaller numel, for parts that backward gathers.
    """
    with _Launches({size: name for name, size in _sizes(model).items()} | dict(parts or {})) as mode:
        yield mode.launched


def _sizes(model: nn.Module) -> dict[str, int]:
    """Return the numel of each unit's parameters, without inner units; all are sharded evenly."""
    sizes: dict[str, int] = {}
    taken: set[int] = set()
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for name, module in reversed(units):  # innermost first
        own = [param for param in module.parameters() if id(param) not in taken]
        taken |= {id(param) for param in own}
        sizes[name or "root"] = sum(param.numel() for param in own)
    assert len(set(sizes.values())) == len(sizes), f"units of one size: {sizes}"
    return sizes


class _Launches(TorchDispatchMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._opname != "wait_tensor":
            name = func._opname
            kind = "gather" if "gather" in name or name == "alltoall_base_" else "reduce"
            tensors = [leaf for leaf in pytree.tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            # On two gloo ranks a collective sends halves, as an all-to-all; the full side is the gathered or the
            # reduced tensor.
            halves = name in ("alltoall_base_", "all_to_all_single")
            most = max(tensor.numel() for tensor in ([filled(args)] if halves else tensors))
            self.launched.append(f"{kind} {self.names.get(most, most)}")
        return result


class Layer(nn.Module):
    """A residual layer that its width identifies; `checkpointed` is "", "call" or "composable"."""

    def __init__(self, hidden: int, checkpointed: str = "") -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden, bias=False)
        self.down = nn.Linear(hidden, 8, bias=False)
        self.checkpointed = checkpointed
        if checkpointed == "composable":
            composable_checkpoint(self)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed == "call" else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())
