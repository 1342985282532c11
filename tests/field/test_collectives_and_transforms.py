"""Collectives, transforms, packed sequences, numpy and anomaly mode, in a model's forward and around it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import graphshard
from graphshard.errors import AnomalyError, CaptureError, UnsupportedError
from tests.distributed.twins import world_mesh
from tests.field.trials import assert_equal, gradients, on_fsdp2, on_graphshard, on_plain_torch, parameters
from tests.ranks import Ranks

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Units between layers of the root."""

    def __init__(self, unit: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(unit() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def energy(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)).square().mean()


def _rows(seed: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def _train(model: nn.Module, batch: Callable[[int], Any] = _rows, steps: int = 3) -> list[Tensor | None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: list[Tensor | None] = []
    for step in range(steps):
        loss = model(batch(step))
        loss.backward()
        found += [loss, *(None if each is None else each.clone() for each in gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *parameters(model), *model.buffers()]


def _programs(model: nn.Module) -> int:
    return len(graphshard.programs(model))


def _right(build: Callable[[], nn.Module], train: Callable[..., Any] = _train, most: int = 1) -> None:
    """Check that training has plain torch's numbers, with at most so many programs."""
    count = []

    def counted(model: nn.Module) -> Any:
        found = train(model)
        count.append(_programs(model))
        return found

    assert_equal(on_graphshard(build, counted), on_plain_torch(build, train))
    assert count[0] <= most, f"{count} programs"


# --- collectives ---------------------------------------------------------------------------------------------------


class _Gathered(torch.autograd.Function):
    """Sum of gathered statistics, as in the synchronized BatchNorm of detectron2 and fvcore."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.stack(parts).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Synchronized(nn.Module):
    """BatchNorm over the batches of all ranks."""

    def __init__(self, add: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.add = add
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean, square = (self.add(torch.cat([x.mean(0), x.square().mean(0)])) / dist.get_world_size()).chunk(2)
        self.running_mean += 0.1 * (mean.detach() - self.running_mean)
        return (x - mean) * torch.rsqrt(square - mean * mean + 1e-5) * self.weight + self.bias


class Counted(Net):
    """Counts tokens of experts on all ranks, as load balancing without an auxiliary loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            counts = torch.bincount(x.argmax(-1), minlength=4).float()
            dist.all_reduce(counts)
            self.counts.add_(counts)
        return super().forward(x) + (x * self.counts).mean()


class Codebook(Net):
    """Averages a buffer in place over all ranks, as the codebooks of VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            dist.all_reduce(self.mean)
            self.mean /= dist.get_world_size()
        return super().forward(x - self.mean)


class Contrastive(Net):
    """Gathers features of all ranks, with its own in the graph, as CLIP's loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        with torch.no_grad():
            gathered = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, x)
        gathered[dist.get_rank()] = x
        features = torch.cat(gathered)
        return self.head(features).square().mean() + (features @ features.T).logsumexp(-1).mean()


class Asynchronous(Net):
    """Waits for a collective by its work, which splits the module."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        work = dist.all_reduce(mean, async_op=True)
        loss = super().forward(x)
        work.wait()
        return loss + (x * mean).mean() * self.head.weight.sum()


def _with_statistics(add: Callable[[Tensor], Tensor]) -> Net:
    return Net(lambda: nn.Sequential(nn.Linear(4, 4), Synchronized(add)))


def _in_place() -> nn.Module:
    return _with_statistics(lambda x: _InPlace.apply(x))  # Dynamo of torch 2.11 cannot trace a kept `apply`


def _gathered() -> nn.Module:
    return _with_statistics(lambda x: _Gathered.apply(x))


def _differentiable() -> nn.Module:
    return _with_statistics(differentiable.all_reduce)


def _collectives(rank: int, world_size: int, build: Callable[[], nn.Module], programs: int) -> None:
    if build is not Contrastive:
        _right(build, most=programs)
        return
    theirs = on_fsdp2(build, _train)  # the gradients of ranks differ
    assert_equal(on_graphshard(build, _train), theirs)


@pytest.mark.parametrize(
    ("build", "programs"),
    [
        (_in_place, 1),
        (_gathered, 1),
        (_differentiable, 3),  # torch's own functions refuse to be traced: the units are split
        (Counted, 1),
        (Codebook, 1),
        (Contrastive, 1),
        (Asynchronous, 3),
    ],
    ids=["in place", "gathered", "torch.distributed.nn", "counts", "codebook", "contrastive", "asynchronous"],
)
@pytest.mark.quick_cases("in place", "torch.distributed.nn", "counts")
def test_collectives_of_forward(ranks: Ranks, build: Callable[[], nn.Module], programs: int) -> None:
    ranks(2).run(_collectives, build, programs)


def _sync_batch_norm(rank: int, world_size: int) -> None:
    def converted() -> nn.Module:
        net = Net(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)

    def train(model: nn.Module) -> list[Tensor | None]:
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
            model(_rows(0))
        return _train(model.eval(), steps=1)

    _right(converted, train, most=4)


def test_sync_batch_norm(ranks: Ranks) -> None:
    """torch's own trains on GPUs only; on a CPU the error is torch's, and evaluation works."""
    ranks(2).run(_sync_batch_norm)


# --- transforms ----------------------------------------------------------------------------------------------------


class Transformed(Net):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def _vmap_of_units(net: Net, x: Tensor) -> Tensor:
    x = net.first(x)
    for layer in net.layers:
        x = torch.tanh(vmap(layer)(x))
    return net.head(x).square().mean()


def _jacobians(net: Net, x: Tensor) -> Tensor:
    return (
        vmap(jacrev(net.encode))(x).square().mean() + vmap(jacfwd(net.first))(x).square().mean() + Net.forward(net, x)
    )


def _jvp(net: Net, x: Tensor) -> Tensor:
    y, tangent = jvp(net.encode, (x,), (torch.ones_like(x),))
    return tangent.square().mean() + net.head(y).square().mean()


def _vjp(net: Net, x: Tensor) -> Tensor:
    y, backward = vjp(net.encode, x)
    return backward(torch.ones_like(y))[0].square().mean() + net.head(y).square().mean()


def _forces(net: Net, x: Tensor) -> Tensor:
    return grad(net.energy)(x).square().mean() + net.energy(x)


def _laplacian(net: Net, x: Tensor) -> Tensor:
    return vmap(hessian(net.energy))(x).square().mean() + Net.forward(net, x)


def _scaled(net: Net, x: Tensor) -> Tensor:
    x = net.first(x)
    for layer in net.layers:
        scaled = {name: value * 1.5 for name, value in layer.named_parameters()}
        x = torch.tanh(functional_call(layer, scaled, (x,)))
    return net.head(x).square().mean()


def _inner_step(net: Net, x: Tensor) -> Tensor:
    x, head = net.encode(x), dict(net.head.named_parameters())

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(net.head, params, (x,)).square().mean()

    gradient = grad(loss)(head)
    return loss({name: value - 0.1 * gradient[name] for name, value in head.items()})


def _ensemble(net: Net, x: Tensor) -> Tensor:
    x, layers = net.first(x), [dict(layer.named_parameters()) for layer in net.layers]
    stacked = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    return net.head(vmap(lambda params: functional_call(net.layers[0], params, (x,)))(stacked).mean(0)).square().mean()


INSIDE: list[Forward] = [
    *(_vmap_of_units, _jacobians, _jvp, _vjp, _forces, _laplacian, _scaled, _inner_step, _ensemble),
]


class _Build:
    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __call__(self) -> nn.Module:
        return Transformed(self.forward)


def _inside(rank: int, world_size: int, forward: Forward) -> None:
    _right(_Build(forward), lambda model: _train(model, steps=2))


@pytest.mark.parametrize("forward", INSIDE, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.quick_cases("vmap_of_units", "vjp", "scaled", "ensemble")
def test_transforms_in_forward(ranks: Ranks, forward: Forward) -> None:
    """As potentials, physics-informed nets, MAML and ensembles: one program. FSDP2 fails, or drops what is passed."""
    ranks(2).run(_inside, forward)


class Encoder(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def _grad_of_model(model: nn.Module) -> list[Tensor]:
    return [grad(lambda x: model(x).sum())(_rows(0)), vmap(hessian(lambda x: model(x).sum()))(_rows(1))]


def _vmap_of_model(model: nn.Module) -> list[Tensor]:
    return [vmap(model)(_rows(0))]


def _vjp_of_model(model: nn.Module) -> list[Tensor]:
    y, backward = vjp(model, _rows(0))
    return [y, *backward(torch.ones_like(y))]


def _jvp_of_model(model: nn.Module) -> list[Tensor]:
    return list(jvp(model, (_rows(0),), (torch.ones(6, 4),)))


def _dual_numbers(model: nn.Module) -> list[Tensor]:
    with forward_ad.dual_level():
        value = forward_ad.unpack_dual(model(forward_ad.make_dual(_rows(0), torch.ones(6, 4))))
        assert value.tangent is not None
        return [value.primal, value.tangent.clone()]


OUTSIDE = [_grad_of_model, _vmap_of_model, _vjp_of_model, _jvp_of_model, _dual_numbers]


def _outside(rank: int, world_size: int, transform: Callable[[nn.Module], list[Tensor]]) -> None:
    def train(model: nn.Module) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for _ in range(2):
            results = transform(model)
            loss = torch.stack([each.square().mean() for each in (*results, model(_rows(2)))]).sum()
            loss.backward()
            found += [loss, *results, *(None if each is None else each.clone() for each in gradients(model))]
        return found

    _right(Encoder, train, most=4)  # the model's, and a gather for each unit and the root
    refused = graphshard.compile(Encoder(), world_mesh(), backend="eager", fullgraph=True)
    with pytest.raises(UnsupportedError, match=r"inside .*, which cannot see through its programs"):
        transform(refused)


@pytest.mark.parametrize("transform", OUTSIDE, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.quick_cases("vjp_of_model")
def test_transforms_of_a_model(ranks: Ranks, transform: Callable[[nn.Module], list[Tensor]]) -> None:
    """Inputs and parameters get plain torch's gradients. FSDP2 fails in backward of vjp, and with dual numbers."""
    ranks(2).run(_outside, transform)


# --- packed sequences, sparse gradients, numpy -----------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Speech(Net):
    def __init__(self) -> None:
        super().__init__(Recurrent)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = batch
        for layer in self.layers:
            x = layer(self.first(x), lengths)
        return self.head(x).square().mean()


def _utterances(step: int) -> tuple[Tensor, Tensor]:
    lengths = [[3, 2, 1], [1, 3, 2], [2, 2, 3], [3, 3, 3]][step]
    return torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(step)), torch.tensor(lengths)


def _packed(rank: int, world_size: int) -> None:
    _right(Speech, lambda model: _train(model, _utterances, steps=4), most=3)


def test_packed_sequences(ranks: Ranks) -> None:
    """Lengths are values of tensors, as in speech encoders: the unit is split, and other lengths capture nothing."""
    ranks(2).run(_packed)


class Rows(Net):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4, sparse=True) for _ in range(2))
        self.tables.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        index = x.abs().sum(1).long().clamp(max=9)
        return super().forward(x + sum(table(index) for table in self.tables))


def _sparse(rank: int, world_size: int) -> None:
    model = graphshard.compile(Rows(), world_mesh(), backend="eager")
    with pytest.raises(CaptureError, match=r"rows of tables\.0\.weight with sparse=True.* Set the attribute `sparse`"):
        model(_rows(0))
    for table in model.tables:
        table.sparse = False
    model(_rows(0)).backward()
    _right(lambda: Rows(frozen=True))


def test_sparse_gradients(ranks: Ranks) -> None:
    """An error that names the parameter; FSDP2's is "Could not run 'fsdp::chunk_cat'". Frozen tables need none."""
    ranks(2).run(_sparse)


class Matcher(nn.Module):
    """Assigns predictions to targets, as DETR does with `scipy.optimize.linear_sum_assignment`."""

    @torch.no_grad()
    def forward(self, predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        costs = torch.cdist(predicted, targets, p=1).detach().cpu().numpy()
        choices = itertools.permutations(range(len(costs)), costs.shape[1])
        best = min(choices, key=lambda rows: sum(costs[row, column] for column, row in enumerate(rows)))
        return torch.as_tensor(np.array(best)), torch.arange(costs.shape[1])


class Matched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.matcher = Matcher()

    def forward(self, x: Tensor) -> Tensor:
        targets, loss, x = x[:3, :2], torch.zeros(()), self.first(x)
        for layer in self.layers:  # a loss after each layer
            x = torch.tanh(layer(x))
            predicted = self.head(x)
            rows, columns = self.matcher(predicted, targets)
            loss = loss + (predicted[rows] - targets[columns]).square().mean()
        return loss


def _numpy(rank: int, world_size: int) -> None:
    _right(Matched, most=3)


def test_numpy_in_forward(ranks: Ranks) -> None:
    """`.detach().cpu().numpy()` and back, between units."""
    ranks(2).run(_numpy)


# --- anomaly mode --------------------------------------------------------------------------------------------------


class Rooted(Net):
    """Has a gradient of nan if the last bias is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.layers[1].bias * 0).sqrt().sum() * (x[0, 0] > 1e3)


def _anomaly(rank: int, world_size: int) -> None:
    def watched(model: nn.Module) -> Any:
        with torch.autograd.set_detect_anomaly(True):
            return _train(model)

    _right(Net, watched)
    model = graphshard.compile(Rooted(), world_mesh(), backend="eager")
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(AnomalyError, match=r"backward of Rooted makes nan .* 1 parameter, .* layers\.1\.bias"):
            model(_rows(0)).backward()
        assert gradients(model) == [None] * len(list(model.parameters()))
        with pytest.raises(UnsupportedError, match=r"autograd\.grad for it, in anomaly mode"):
            torch.autograd.grad(model(_rows(0)), list(model.parameters()))


def test_anomaly_mode(ranks: Ranks) -> None:
    """Every rank raises, though nan is in the shard of one. FSDP2 checks before it reduces, and one rank raises."""
    ranks(2).run(_anomaly)


def _leaf_hooks(rank: int, world_size: int) -> None:
    model = graphshard.compile(Net(), world_mesh(), backend="eager")
    seen: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    with torch.autograd.set_detect_anomaly(True):
        model(_rows(0)).backward()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters()), seen


def test_hooks_of_parameters_in_anomaly_mode(ranks: Ranks) -> None:
    ranks(2).run(_leaf_hooks)
