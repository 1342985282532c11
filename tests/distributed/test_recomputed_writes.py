"""Buffer writes in checkpointed regions are repeated in backward when and where FSDP2 recomputes the regions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.errors import CaptureError
from tests.distributed.twins import assert_same, grads_of, params_of, twins, world_mesh
from tests.helpers import captured
from tests.ranks import Ranks


def _batch(rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(6, 4)


class _Statistics(nn.Module):
    """BatchNorm at some position in a checkpointed region."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.where, self.reentrant = where, reentrant

    def region(self, x: Tensor) -> Tensor:
        if self.where == "first":
            return self.second(self.norm(x)).relu()
        if self.where == "middle":
            return self.second(self.norm(self.second(x)))
        if self.where == "last":
            return self.norm(self.second(x))
        y = self.second(x).sin()
        with torch.no_grad():  # after everything that backward needs
            self.norm(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.region, self.first(x), use_reentrant=self.reentrant)).square()


def _statistics(rank: int, world_size: int, where: str, reentrant: bool) -> int:
    torch.manual_seed(0)
    pair = twins(_Statistics(where, reentrant), world_mesh())
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    for step in range(3):
        for model, optim in zip(pair, optims):
            model(_batch(rank, step)).mean().backward()
            optim.step()
            optim.zero_grad()
        assert_same(*(dict(model.named_buffers()) for model in pair), f"buffers after step {step}")
        assert_same(*map(params_of, pair), f"parameters after step {step}")
    return int(pair[0].norm.num_batches_tracked)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["first", "middle", "last", "behind"])
@pytest.mark.slow
def test_buffer_writes_are_repeated_as_in_eager_mode(ranks: Ranks, where: str, reentrant: bool) -> None:
    """Twice in a step; once after the point where a non-reentrant checkpoint stops recomputation."""
    assert ranks(2).run(_statistics, where, reentrant)[0] == (3 if where == "behind" and not reentrant else 6)


class _SharedStatistics(_Statistics):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class _Average(_Statistics):
    """The region multiplies by the buffer that it writes."""

    def region(self, x: Tensor) -> Tensor:
        y = self.second(x) * self.norm.running_mean
        self.norm.running_mean.add_(1)
        return y.sin()


def _refused(rank: int, world_size: int) -> None:
    model = graphshard.compile(_SharedStatistics("first", False), world_mesh(), backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match=r"buffer norm.running_mean, .*other code.*out of the checkp"):
        model(_batch(rank, 0))
    model = graphshard.compile(_Average("first", False), world_mesh(), backend="eager")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(_batch(rank, 0))


def test_rejects_buffers_that_would_differ(ranks: Ranks) -> None:
    """A different order of writes, and gradients of a buffer that has changed."""
    ranks(2).run(_refused)


def _split(rank: int, world_size: int, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    pair = twins(make(), world_mesh())
    for step in range(3):
        for model in pair:
            model(_batch(rank, step)).mean().backward()
        assert_same(*(dict(model.named_buffers()) for model in pair), f"buffers after step {step}")
        assert_same(*map(grads_of, pair), f"gradients after step {step}")


def _shared() -> nn.Module:
    return _SharedStatistics("first", False)


def _outside() -> nn.Module:
    return _Outside()


@pytest.mark.parametrize("make", [_shared, _outside])
@pytest.mark.quick_cases("_outside")
def test_falls_back_to_python_for_repeated_writes(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    ranks(2).run(_split, make)


# --- between forward and backward --------------------------------------------------------------------------------


class _TwoOutputs(_Statistics):
    """Only the first output's gradient passes through the region."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return super().forward(x).mean(), y.square().mean()


def _run(model: Any, rank: int, then: str) -> list[Any]:
    """Return the buffers after each operation."""
    left: list[Any] = []

    def note() -> None:
        left.append({name: buffer.clone() for name, buffer in model.named_buffers()})

    batches = [_batch(rank, step) for step in range(4)]
    if then == "two microbatches":
        sums = [model(x)[0] for x in batches[:2]]
        note()
        for total in reversed(sums):
            total.backward()
            note()
    elif then == "accumulation":
        for number, x in enumerate(batches[:3]):
            model.set_requires_gradient_sync(number == 2)
            loss = model(x)[0]
            note()
            loss.backward()
            note()
    elif then == "no backward":
        model(batches[0])
        note()
        model(batches[1])[1].backward()
        note()
        with torch.no_grad():
            model(batches[2])
        note()
        model.reshard()
        model.eval()
        model(batches[3])[0].backward()
        note()
        model.train()
        model(batches[3])[0].backward()
        note()
    elif then == "twice":
        loss = model(batches[0])[0]
        loss.backward(retain_graph=True)
        note()
        loss.backward()
        note()
    return left


def _between(rank: int, world_size: int, then: str, reentrant: bool) -> list[int]:
    torch.manual_seed(0)
    pair = twins(_TwoOutputs("middle", reentrant), world_mesh())
    ours, theirs = (_run(model, rank, then) for model in pair)
    for number, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(actual, expected, f"buffers, look {number}")
    assert_same(*map(grads_of, pair), "gradients")
    return [int(left["norm.num_batches_tracked"]) for left in ours]


LOOKS = {
    "two microbatches": [2, 3, 4],
    "accumulation": [1, 2, 3, 4, 5, 6],
    "no backward": [1, 2, 3, 3, 5],
    "twice": [2, 3],
}


@pytest.mark.parametrize(("then", "reentrant"), [(then, False) for then in LOOKS] + [("two microbatches", True)])
@pytest.mark.quick_cases("two microbatches-False")
def test_buffers_are_the_same_between_forward_and_backward(ranks: Ranks, then: str, reentrant: bool) -> None:
    """At any time: calls between the two, calls without backward, and gradients that miss the region."""
    assert ranks(2).run(_between, then, reentrant) == [LOOKS[then]] * 2


# --- attributes --------------------------------------------------------------------------------------------------


class _Leaves(nn.Module):
    """A region that writes an attribute of the module."""

    reentrant = False

    def __init__(self, leave: Callable[[Any, Tensor], None], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.leave = leave
        self.register_buffer("mean", torch.zeros(4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def region(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        self.leave(self, y)
        return y

    def forward(self, x: Tensor) -> Tensor:
        self.seen: list[Tensor] = []
        return checkpoint(self.region, x, use_reentrant=self.reentrant).sum()


def _counts(net: Any, y: Tensor) -> None:
    net.step += 1


def _appends(net: Any, y: Tensor) -> None:
    net.losses.append(y.detach().sum())


def _appends_to_a_new_one(net: Any, y: Tensor) -> None:
    net.seen.append(y.detach().sum())


def _assigns_a_buffer(net: Any, y: Tensor) -> None:
    net.mean = net.mean * 0.9 + y.detach().mean(0)


def _counts_in_a_dict(net: Any, y: Tensor) -> None:
    net.table["n"] += 1


def _leaves_a_loss(net: Any, y: Tensor) -> None:
    """Leave a loss on the module; in eager mode a reentrant region leaves one without a gradient."""
    net.aux = y.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "leave", [_counts, _appends, _appends_to_a_new_one, _assigns_a_buffer, _counts_in_a_dict, _leaves_a_loss]
)
def test_rejects_attributes_that_a_region_would_write_twice(leave: Any, reentrant: bool) -> None:
    """`compile` splits such a module: Python runs the region again."""
    model = _Leaves(leave, step=0, losses=[], table={"n": 0}, reentrant=reentrant)
    match = (
        rf"_Leaves\.forward at {re.escape(__file__)}:\d+\n.*\n(Mutating a variable from outside|Attribute 'step' on an)"
    )
    with pytest.raises(CaptureError, match=match):
        captured(model, (torch.ones(2, 4),))


class _Mixture(nn.Module):
    """Blocks that leave a loss, each of them checkpointed as a whole."""

    def __init__(self) -> None:
        super().__init__()

        def leave(net: Any, y: Tensor) -> None:
            net.aux = y.square().mean()
            net.last = {"norm": y.detach().norm() + net.aux.detach()}

        self.layers = nn.ModuleList(_Block(leave, aux=None) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean() + sum(layer.aux for layer in self.layers)


class _Block(_Leaves):
    def forward(self, x: Tensor) -> Tensor:
        return self.region(x)


def _leaves(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pair = twins(_Mixture(), world_mesh())
    for model in pair:
        model(_batch(rank, 0)).backward()
    left = [{str(i): layer.last["norm"] for i, layer in enumerate(model.layers)} for model in pair]
    assert_same(*left, "attributes")
    assert_same(*map(grads_of, pair), "gradients")


@pytest.mark.slow
def test_attributes_that_a_region_writes_identically_twice(ranks: Ranks) -> None:
    """Python runs forward, because Dynamo traces no region that changes an attribute."""
    ranks(2).run(_leaves)


class _Outside(nn.Module):
    """A buffer that depends on its previous value through a region that does not write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def _normalized(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self._normalized(self.first(x))
        return self.head(self._normalized(checkpoint(self.second, y, use_reentrant=False))).square()


def test_a_region_between_two_writes(mesh: DeviceMesh) -> None:
    """A graph break, as for a region that writes the buffer: the graph cannot distinguish the two."""
    with pytest.raises(CaptureError, match="a region and other code, write it"):
        graphshard.compile(_Outside(), mesh, backend="eager", fullgraph=True)(_batch(0, 0))
