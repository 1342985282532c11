"""Gradients of gradients from outside of the model: `torch.autograd.grad(..., create_graph=True)`, then backward.

Both ranks get the same batches, so that plain torch in one process is the reference. In float64, so that what is summed
in another order is told from what is wrong.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.errors import InputError, ParameterError
from graphshard.module.compiled_module import CompiledModule
from tests.distributed.twins import BF16, CountLaunches, fsdp2, world_mesh
from tests.field.trials import assert_equal, full, on_fsdp2, on_graphshard, on_plain_torch
from tests.ranks import Ranks

Loss = Callable[[nn.Module], Tensor]
WIDTH = 6


class Net(nn.Module):
    """Units between parameters of the root."""

    def __init__(self, outputs: int = 1, num_blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, outputs)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = x + self.call(block, x)
        return self.head(self.norm(x))


class Dropout(Net):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh())


class BatchNorm(Net):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class SpectralNorm(Net):
    """Each forward overwrites buffers that it has read."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


class Checkpointed(Net):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Cube(torch.autograd.Function):
    """A function whose backward is not the derivative, and reads an input, a result and a value between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        cube = square * x
        ctx.save_for_backward(x, square, cube)
        return cube

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, square, cube = ctx.saved_tensors
        return grad * (square + 2 * x + cube)


class CustomFunction(Net):
    """A function, a hook, and a value without a gradient."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        y = Cube.apply(block(x))
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        with torch.no_grad():
            scale = x.mean()
        return y * scale


@torch.compiler.disable
def _untraced(x: Tensor) -> Tensor:
    return x * x.sin()


class Untraced(Net):
    """A function that no trace looks into."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return _untraced(block(x))


class Attention(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative in plain torch either
            return block(self.attention(x[None], x[None], x[None])[0][0])


class Split(Net):
    """Python runs its forward, and programs its units."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if x.sum() > -1000 else x


# --- losses ------------------------------------------------------------------------------------------------------


def _batch() -> Tensor:
    return torch.rand(4, 3, dtype=torch.float64)


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def _wgan_gp(model: nn.Module) -> Tensor:
    """Return the loss of a critic: real, generated and mixed batches before one backward."""
    real, fake = _batch(), _batch()
    return model(fake).mean() - model(real).mean() + 10 * _penalty(model, (real + fake) / 2)


def _penalty_first(model: nn.Module) -> Tensor:
    real, fake = _batch(), _batch()
    return 10 * _penalty(model, (real + fake) / 2) + model(fake).mean() - model(real).mean()


def _r1(model: nn.Module) -> Tensor:
    """Return StyleGAN2's loss on real images: the penalty and the ordinary loss of one call."""
    real = _batch().requires_grad_()
    out = model(real)
    (gradient,) = grad(out.sum(), real, create_graph=True)
    return F.softplus(-out).mean() + gradient.square().sum(1).mean()


def _forces(model: nn.Module) -> Tensor:
    """Return the loss of a potential (MACE, NequIP, SchNet): energies, and forces that are their gradient."""
    positions = _batch().requires_grad_()
    energy = model(positions).sum()
    (forces,) = grad(-energy, positions, create_graph=True)
    return (energy - 1).square() + (forces - 0.3).square().mean()


def _score_matching(model: nn.Module) -> Tensor:
    """Return the loss of score matching: the divergence, one gradient for each dimension."""
    x = _batch().requires_grad_()
    score = model(x)
    rows = [grad(score[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(score.shape[1])]
    return (sum(rows) + 0.5 * score.square().sum(1)).mean()


def _physics(model: nn.Module) -> Tensor:
    """Return the residual of a differential equation (PINN): second derivatives, which are differentiated again."""
    x = _batch().requires_grad_()
    u = model(x)
    (first,) = grad(u.sum(), x, create_graph=True)
    (second,) = grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + first[:, 1] + u[:, 0]).square().mean()


def _molecules(model: nn.Module) -> Tensor:
    """Return the loss of a potential for another number of atoms in each call."""
    positions = torch.rand(int(torch.randint(3, 9, ())), 3, dtype=torch.float64, requires_grad=True)
    energy = model(positions).sum()
    (forces,) = grad(-energy, positions, create_graph=True)
    return (energy - len(positions)).square() + forces.square().mean()


def _hessian(model: nn.Module) -> Tensor:
    hessian = torch.autograd.functional.hessian(lambda x: model(x).sum(), _batch(), create_graph=True)
    return torch.as_tensor(hessian).square().sum()


def _many_at_once(model: nn.Module) -> Tensor:
    x = _batch().requires_grad_()
    (rows,) = grad(model(x)[:, 0], x, torch.eye(4, dtype=x.dtype), is_grads_batched=True, create_graph=True)
    return rows.square().sum()


def _norm_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([_whole(tensor.square().sum()) for tensor in tensors]).sum()


def _whole(tensor: Tensor) -> Tensor:
    """Return a number of shards as a plain tensor, with its graph."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gradient_norm(model: nn.Module) -> Tensor:
    """Return a loss with the norm of its gradients (gradient regularization)."""
    params = list(model.parameters())
    loss = model(_batch()).square().mean()
    return loss + 0.1 * _norm_of(grad(loss, params, create_graph=True))


def _both(model: nn.Module) -> Tensor:
    """Penalize gradients of parameters and of inputs, twice each, in one step."""
    x = _batch().requires_grad_()
    out = model(x)
    params = list(model.parameters())
    first = _norm_of(grad(out.square().mean(), params, create_graph=True))
    second = _norm_of(grad(out.sum(), [x], create_graph=True))
    return out.mean() + first + second + _penalty(model, _batch()) + _gradient_norm(model)


def _hessian_vector(model: nn.Module) -> Tensor:
    """Return a loss, and add to it Hessian-vector products, which have no graph."""
    loss, params = model(_batch()).square().mean(), list(model.parameters())
    gradients = grad(loss, params, create_graph=True)
    along = torch.stack([_whole((each * each.detach()).sum()) for each in gradients]).sum()
    return loss + _norm_of(grad(along, params, retain_graph=True))


def _backward_with_graph(model: nn.Module) -> Tensor:
    loss, params = model(_batch()).square().mean(), list(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a cycle of references
        loss.backward(create_graph=True)
    gradients = [param.grad for param in params if param.grad is not None]
    for param in params:
        param.grad = None
    return loss + _norm_of(gradients)


def _maml(model: nn.Module) -> Tensor:
    """Return the loss after one inner step, of MAML."""
    params = dict(model.named_parameters())
    gradients = grad(model(_batch()).square().mean(), list(params.values()), create_graph=True)
    fast = {name: param - 0.1 * gradient for (name, param), gradient in zip(params.items(), gradients)}
    return torch.func.functional_call(model, fast, (_batch(),)).square().mean()


OF_INPUTS: list[Loss] = [
    *(_wgan_gp, _forces, _physics, _score_matching),
    *(_penalty_first, _r1, _hessian, _many_at_once),
]
OTHERS: list[Loss] = [_gradient_norm, _maml, _both, _molecules, _hessian_vector, _backward_with_graph]
NETS = [Dropout, BatchNorm, SpectralNorm, Checkpointed, CustomFunction, Untraced, Attention, Split]


# --- training ----------------------------------------------------------------------------------------------------


def _train(loss_of: Loss, before: int, model: nn.Module) -> list[Tensor | None]:
    """Train three steps after calls that are not trained on."""
    for _ in range(before):
        loss_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[Tensor | None] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        found += [loss, *(None if param.grad is None else full(param.grad) for param in model.parameters())]
        optimizer.step()
    return found


def _build(net: Callable[[], nn.Module], loss_of: Loss) -> nn.Module:
    return (Net(outputs=3) if loss_of is _score_matching else net()).double()


def _equal(
    rank: int, world_size: int, net: Callable[[], nn.Module], losses: Sequence[Loss], options: dict[str, Any]
) -> None:
    """Compare bit for bit: from the second call on, which runs as in plain torch."""
    for loss_of in losses:
        build, train = functools.partial(_build, net, loss_of), functools.partial(_train, loss_of, 1)
        assert_equal(on_graphshard(build, train, **options), on_plain_torch(build, train))


def _close(
    rank: int, world_size: int, net: Callable[[], nn.Module], losses: Sequence[Loss], options: dict[str, Any]
) -> None:
    """Compare from the first call on, which adds the same gradients in another order."""
    for loss_of in losses:
        build, train = functools.partial(_build, net, loss_of), functools.partial(_train, loss_of, 0)
        ours, expected = on_graphshard(build, train, **options), on_plain_torch(build, train)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("losses", [OF_INPUTS[:4], OF_INPUTS[4:]], ids=["first", "others"])
@pytest.mark.quick_cases("first")
def test_gradients_of_inputs(ranks: Ranks, losses: list[Loss]) -> None:
    ranks(2).run(_equal, Net, losses, {})


@pytest.mark.parametrize("losses", [OTHERS[:2], OTHERS[2:]], ids=["first", "others"])
@pytest.mark.quick_cases("first")
def test_other_gradients(ranks: Ranks, losses: list[Loss]) -> None:
    """FSDP2 has none of parameters: shards are not in its graph."""
    ranks(2).run(_close, Net, losses, {})


@pytest.mark.parametrize("net", NETS)
@pytest.mark.quick_cases("CustomFunction")
def test_models(ranks: Ranks, net: Callable[[], nn.Module]) -> None:
    ranks(2).run(_equal, net, [_forces], {})
    ranks(2).run(_close, net, [_forces, _gradient_norm], {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "full"},
        {"offload_policy": CPUOffloadPolicy()},
        {"reshard_after_forward": False},
        {"units": []},
        {"backend": "inductor"},
    ],
    ids=lambda options: "".join(options),
)
def test_options(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks(2).run(_close, Dropout, [_forces, _gradient_norm], options)


def _deep(rank: int, world_size: int) -> None:
    """Train a model of which a few blocks are captured for all."""
    build = functools.partial(Net, num_blocks=9)
    _close(rank, world_size, build, [_forces], {})


def _cached(rank: int, world_size: int, cache: str) -> None:
    for _ in range(2):
        _close(rank, world_size, Net, [_forces], {"cache": cache})


@pytest.mark.slow
def test_programs_of_the_cache(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_cached, str(tmp_path))


@pytest.mark.slow
def test_equal_blocks(ranks: Ranks) -> None:
    ranks(2).run(_deep)


# --- other cases -------------------------------------------------------------------------------------------------


def _like_fsdp2(rank: int, world_size: int) -> None:
    """Train in bfloat16 with FSDP2's bits; FSDP2 needs `set_reshard_after_backward(False)` for its own gradients."""

    def train(loss_of: Loss, model: Any) -> list[Tensor | None]:
        params = list(model.parameters())
        loss_of(model)
        model.zero_grad()
        if not isinstance(model, CompiledModule):
            model.set_reshard_after_backward(False)
        loss = loss_of(model)
        loss.backward()
        return [loss, *(None if param.grad is None else full(param.grad) for param in params)]

    for loss_of in (_forces, _wgan_gp):
        run = functools.partial(train, loss_of)
        assert_equal(on_graphshard(Net, run, mp_policy=BF16), on_fsdp2(Net, run, mp_policy=BF16))


def test_bits_of_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_like_fsdp2)


def _one_program(rank: int, world_size: int) -> None:
    """Capture a program for the calls, and one that gathers; run programs again where gradients have no graph."""
    model: Any = graphshard.compile(Net().double(), world_mesh(), backend="eager")
    theirs: Any = fsdp2(Net().double(), world_mesh())
    theirs.set_reshard_after_backward(False)
    counts = []
    for each in (theirs, model):
        with CountLaunches() as launches:
            _forces(each).backward()
        counts.append((launches.of("gather"), launches.of("scatter")))
    for _ in range(2):
        with CountLaunches() as launches:
            _forces(model).backward()
        counts.append((launches.of("gather"), launches.of("scatter")))
    assert all(gathers <= counts[0][0] and reductions <= counts[0][1] for gathers, reductions in counts[2:]), counts
    assert len(graphshard.programs(model)) == 2
    (installed,) = model._graphshard.executables.programs
    assert installed.executable.runs_eagerly
    model(_batch().requires_grad_()).sum().backward()
    assert not installed.executable.runs_eagerly
    assert len(graphshard.programs(model)) == 2


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class OnceDifferentiable(Net):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return Once.apply(block(x))


def _errors(rank: int, world_size: int) -> None:
    """Raise where gradients would be of other values, or would miss a part."""
    model: Any = graphshard.compile(Net().double(), world_mesh(), backend="eager")
    params = list(model.parameters())
    x = _batch()
    out = model(x).sum()
    x.mul_(2)
    with pytest.raises(InputError, match=r"modified by an inplace operation: an input.*Net.*create_graph=True"):
        grad(out, params, create_graph=True)
    for number in range(2):  # by a program, then by operators
        x = _batch().requires_grad_()
        (gradient,) = grad(model(x).sum(), x, create_graph=True)
        with torch.no_grad():
            params[number].mul_(0.5)
        with pytest.raises(ParameterError, match=r"modified by an inplace operation.*was written to in place"):
            gradient.square().sum().backward()
    once = graphshard.compile(OnceDifferentiable().double(), world_mesh(), backend="eager")
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):  # as in plain torch
        _forces(once).backward()


def test_errors(ranks: Ranks) -> None:
    ranks(2).run(_errors)


def test_programs_and_collectives(ranks: Ranks) -> None:
    ranks(2).run(_one_program)
