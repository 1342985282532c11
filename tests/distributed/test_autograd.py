"""Autograd features: custom backwards, hooks, double backward, and execution order.

Each net trains with the bits of FSDP2, and like plain torch with gradients averaged over the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.distributed.nets import full, rows
from tests.distributed.twins import BF16, FP32, assert_same, grads_of, params_of, twins, world_mesh
from tests.ranks import RankError, Ranks

WIDTH = 5


class _Steep(torch.autograd.Function):
    """A function that doubles, and triples the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class _Recomputing(torch.autograd.Function):
    """A function that saves its inputs, one a parameter, and returns a gradient for one only half of the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return F.linear(x, weight).tanh() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        inner = grad * ctx.scale * (1 - F.linear(x, weight).tanh().square())
        by_x = inner @ weight if ctx.needs_input_grad[0] else None
        return by_x, inner.flatten(0, -2).t() @ x.flatten(0, -2), None


@torch.library.custom_op("graphshard_tests::cube", mutates_args=())
def _cube(x: Tensor) -> Tensor:
    return x * x * x


@_cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cube_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * x  # not the derivative


_cube.register_autograd(_cube_backward, setup_context=_keep_input)


class _Blocks(nn.Module):
    """Blocks between two linear layers; a block is a linear layer and an operation that each net defines."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for linear in self.blocks:
            x = self.block(linear, x)
        return x


class _CustomFunction(_Blocks):
    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        return _Steep.apply(linear(x)).tanh()


class _FunctionOfParameters(nn.Module):
    """An autograd function in the unit that holds its parameter."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return _Recomputing.apply(x, self.weight, 0.5)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _CheckpointedFunction(_Blocks):
    """A custom function in a checkpoint, which recomputes its saved tensors."""

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda y: _Steep.apply(linear(y)).tanh(), x, use_reentrant=False)


class _TensorHook(_Blocks):
    """Tensor hooks that scale, that read a gradient's values, and that only observe."""

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        y = linear(x)
        y.register_hook(lambda grad: grad * 0.2)
        y.register_hook(lambda grad: grad / (1 + grad.norm()))
        y.register_hook(lambda grad: None)
        return y.tanh()


class _GradientPenalty(_Blocks):
    """A loss that includes norms of gradients with respect to the inputs of blocks."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(super().forward(x))
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + (grad.norm(dim=-1, keepdim=True) - 1).square()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(WIDTH, WIDTH) for _ in range(2))

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        return linear(x)


class _PenaltyThroughUnits(_Blocks):
    """A usual gradient penalty: the gradient of the whole model with respect to the input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = super().forward(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.cat([y.mean(-1), (grad.norm(dim=-1) - 1).square()])

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(linear(x))


class _NormFirst(nn.Module):
    """A norm-first layer, whose dropout sees a non-contiguous value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, norm_first=True, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.flip(0), x.cos()])
        for block in self.blocks:
            x = block(x)
        return x


class _Linalg(_Blocks):
    """Factorizations and solvers."""

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        y = linear(x)
        matrix = y.t() @ y + torch.eye(WIDTH)
        lower = torch.linalg.cholesky(matrix)
        return torch.linalg.solve(matrix, y.t()).t() + y @ torch.linalg.inv(lower)


class _CustomOperator(_Blocks):
    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        return _cube(linear(x)).tanh()


class _Autocast(_Blocks):
    """Half of a block in bfloat16, with weights that are cast once for both calls."""

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(linear(x).relu())
            with torch.autocast("cpu", enabled=False):
                return y.float().tanh()


class _CompiledBlock(_Blocks):
    """A block with a function compiled by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.compile(lambda y: y.sin() * y.cos(), backend="eager")

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        return self.activation(linear(x))


class _Bypassed(_Blocks):
    """Values that enter a unit and bypass it, and one that all units use."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        for linear in self.blocks:
            x = x * linear(x).sigmoid() + first + linear(first).tanh() * x
        return x + first


NETS: dict[str, Callable[[], nn.Module]] = {
    "custom function": _CustomFunction,
    "custom function of parameters": _FunctionOfParameters,
    "custom function, checkpointed": _CheckpointedFunction,
    "tensor hook": _TensorHook,
    "gradient penalty": _GradientPenalty,
    "norm first": _NormFirst,
    "linalg": _Linalg,
    "custom operator": _CustomOperator,
    "autocast": _Autocast,
    "compiled block": _CompiledBlock,
    "bypassed": _Bypassed,
}
IN_FLOAT32 = ["linalg", "autocast"]


def _steps(model: nn.Module, average: Callable[[nn.Module], None]) -> list[dict[str, Any]]:
    """Train three steps of SGD on this rank's inputs; return losses, gradients and parameters of each."""
    rank = dist.get_rank()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        optim.zero_grad()
        torch.manual_seed(10 * step + rank)
        loss = model(rows(10 * step + rank)).float().square().mean()
        loss.backward()
        average(model)
        seen.append({"loss": loss.detach(), **full({f"gradient of {n}": g for n, g in grads_of(model).items()})})
        optim.step()
        seen.append({n: p.clone() for n, p in full(params_of(model)).items()})
    return seen


def _mean_of_ranks(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)


def _train(rank: int, world_size: int, name: str, policy: MixedPrecisionPolicy) -> None:
    torch.manual_seed(1)
    model = NETS[name]()
    plain = copy.deepcopy(model)
    ours, theirs = (_steps(sharded, lambda _: None) for sharded in twins(model, world_mesh(), mp_policy=policy))
    for index, both in enumerate(zip(ours, theirs)):
        assert_same(*both, f"{name}, {index}")
    if policy == FP32:
        for actual, expected in zip(ours, _steps(plain, _mean_of_ranks)):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.quick_cases("linalg")
def test_autograd_matches_eager_mode(ranks: Ranks, name: str) -> None:
    ranks(2).run(_train, name, FP32)


@pytest.mark.parametrize("name", sorted(NETS.keys() - set(IN_FLOAT32)))
@pytest.mark.quick_cases("norm first")
def test_autograd_in_mixed_precision(ranks: Ranks, name: str) -> None:
    ranks(2).run(_train, name, BF16)


def _through_units(rank: int, world_size: int) -> None:
    """FSDP2 frees parameters after the gradient in forward, and fails in backward."""
    torch.manual_seed(1)
    model = _PenaltyThroughUnits()
    expected = _steps(copy.deepcopy(model), _mean_of_ranks)
    ours = _steps(graphshard.compile(model, world_mesh(), backend="eager"), lambda _: None)
    for actual, averaged in zip(ours, expected):
        torch.testing.assert_close(actual, averaged, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradient_penalty_through_units(ranks: Ranks) -> None:
    ranks(2).run(_through_units)


class _InputRequired(_Blocks):
    """A model whose input requires a gradient from the first call on."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        return super().forward(x)

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(linear(x))


def _gradients_of_the_input(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> None:
    torch.manual_seed(1)
    seen = []
    for model in twins(_InputRequired(), world_mesh(), mp_policy=policy):
        x = rows(rank)
        for _ in range(2):  # the second call gets an input that requires a gradient
            model(x).square().mean().backward()
        seen.append({"flag": x.requires_grad, "gradient": x.grad, **full(grads_of(model))})
    assert_same(*seen, f"rank {rank}")
    assert seen[0]["flag"] == (policy == FP32)  # with another dtype forward gets a copy


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.quick_cases("bf16")
def test_an_input_that_forward_makes_require_a_gradient(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    ranks(2).run(_gradients_of_the_input, policy)


class _Writing(_Blocks):
    """A model whose forward writes a parameter; FSDP2 loses the write."""

    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            linear.weight.mul_(0.5)
        return linear(x)


class _WritingData(_Blocks):
    def block(self, linear: nn.Module, x: Tensor) -> Tensor:
        linear.weight.data.mul_(0.5)
        return linear(x)


WRITING: dict[str, Callable[[], nn.Module]] = {"under no_grad": _Writing, "by data": _WritingData}


def _writes(rank: int, world_size: int, name: str) -> None:
    model, _ = twins(WRITING[name](), world_mesh())
    model(rows(rank))


@pytest.mark.parametrize("name", WRITING)
def test_rejects_parameters_that_forward_writes(ranks: Ranks, name: str) -> None:
    with pytest.raises(RankError, match=r"(?s)CaptureError: .*test_autograd\.py.*blocks\.0\.weight"):
        ranks(2).run(_writes, name)
