"""What checkpointed regions write is written again in backward, when and where FSDP2 runs the regions again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.distributed.twins import assert_same, grads_of, params_of, twins, world_mesh
from tests.helpers import captured
from tests.ranks import Ranks


def _batch(rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(6, 4)


class _Statistics(nn.Module):
    """BatchNorm somewhere in a checkpointed region."""

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
        with torch.no_grad():  # behind all that backward needs
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
def test_buffers_are_written_again_where_eager_mode_does(ranks: Ranks, where: str, reentrant: bool) -> None:
    """Twice in a step; once behind the point where a checkpoint that is not reentrant stops to compute again."""
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
    for cls, reason in ((_SharedStatistics, "code outside"), (_Average, "gradients depend on it")):
        model = graphshard.compile(cls("first", False), world_mesh(), backend="eager")
        with pytest.raises(graphshard.CaptureError, match=rf"buffer norm.running_mean, .*{reason}.*out of the checkp"):
            model(_batch(rank, 0))


def test_buffers_that_would_differ_are_refused(ranks: Ranks) -> None:
    """Another order of writes, and gradients of a buffer that has changed."""
    ranks(2).run(_refused)


# --- between forward and backward --------------------------------------------------------------------------------


class _TwoOutputs(_Statistics):
    """Only the first output's gradient goes through the region."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return super().forward(x).mean(), y.square().mean()


def _run(model: Any, rank: int, then: str) -> list[Any]:
    """What is in the buffers after each thing that is done."""
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
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(mine, other, f"buffers, look {number}")
    assert_same(*map(grads_of, pair), "gradients")
    return [int(left["norm.num_batches_tracked"]) for left in ours]


LOOKS = {
    "two microbatches": [2, 3, 4],
    "accumulation": [1, 2, 3, 4, 5, 6],
    "no backward": [1, 2, 3, 3, 5],
    "twice": [2, 3],
}


@pytest.mark.parametrize(("then", "reentrant"), [(then, False) for then in LOOKS] + [("two microbatches", True)])
def test_buffers_are_the_same_between_forward_and_backward(ranks: Ranks, then: str, reentrant: bool) -> None:
    """Whenever somebody looks: calls between the two, calls without backward, and gradients that miss the region."""
    assert ranks(2).run(_between, then, reentrant) == [LOOKS[then]] * 2


# --- attributes --------------------------------------------------------------------------------------------------


class _Leaves(nn.Module):
    """A region that leaves something on the module."""

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


@pytest.mark.parametrize(
    ("leave", "what"),
    [
        (_counts, "step"),
        (_appends, "losses"),
        (_appends_to_a_new_one, "seen"),
        (_assigns_a_buffer, "mean"),
        (_counts_in_a_dict, "table"),
    ],
)
def test_what_a_region_would_leave_twice_is_an_error_with_its_line(leave: Any, what: str) -> None:
    model = _Leaves(leave, step=0, losses=[], table={"n": 0})
    with pytest.raises(graphshard.CaptureError) as caught:
        captured(model, (torch.ones(2, 4),))
    found = str(caught.value)
    assert re.search(
        rf"_Leaves.forward at {re.escape(__file__)}:\d+: a region of .* changes {what}, which eager", found
    )
    captured(model, (torch.ones(2, 4),), grad=False)  # eager mode runs the region once


def test_a_loss_that_a_reentrant_region_leaves_is_an_error() -> None:
    """In eager mode it requires no gradient, as the region runs without; nobody would notice that it trains nothing."""

    def leave(net: Any, y: Tensor) -> None:
        net.aux = y.square().mean()

    model = _Leaves(leave, reentrant=True)
    line = re.escape(f"{__file__}:{leave.__code__.co_firstlineno + 1}")
    with pytest.raises(graphshard.CaptureError, match=rf"at {line}: .* leaves aux without a gradient in eager mode"):
        captured(model, (torch.ones(2, 4, requires_grad=True),))


def _leaves(rank: int, world_size: int) -> None:
    def leave(net: Any, y: Tensor) -> None:
        net.aux = y.square().mean()
        net.last = {"norm": y.detach().norm() + net.aux.detach()}

    torch.manual_seed(0)
    pair = twins(_Leaves(leave, aux=None), world_mesh())
    for model in pair:
        loss = model(_batch(rank, 0)) + model.aux
        loss.backward()
    assert_same(*({"aux": model.aux.detach(), **model.last} for model in pair), "attributes")
    assert_same(*map(grads_of, pair), "gradients")


def test_what_a_region_leaves_the_same_again_is_left(ranks: Ranks) -> None:
    ranks(2).run(_leaves, share=False)


class _Outside(nn.Module):
    """A buffer that depends on what was in it before through a region, which does not write it."""

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


def _outside(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pair = twins(_Outside(), world_mesh())
    for step in range(2):
        for model in pair:
            model(_batch(rank, step)).mean().backward()
        assert_same(*(dict(model.named_buffers()) for model in pair), f"buffers after step {step}")
        assert_same(*map(grads_of, pair), f"gradients of step {step}")


def test_a_region_between_two_writes(ranks: Ranks) -> None:
    ranks(2).run(_outside)
