"""Losses that read the head's weight outside of the model's forward.

Fused linear cross-entropy (Liger, cut cross-entropy, unsloth) never makes logits, so it takes hidden states and the
head's weight; trainers reach the weight in several ways. With FSDP2 all of these work while the weight's unit is
unsharded, and its gradient is reduced when that of the rest of the unit is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import UnsupportedError
from tests.distributed.twins import CountLaunches, fsdp2, world_mesh
from tests.field.trials import assert_equal, full, gradients, on_graphshard, on_plain_torch
from tests.ranks import Ranks

TOKENS = torch.arange(12).view(2, 6) % 7
LABELS = (TOKENS + 1) % 7
KEEP = {"reshard_after_forward": False}
BY_LAYERS = ["model.layers.*"]


class Body(nn.Module):
    """The backbone, whose first and last layers are in the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(x)


class Net(nn.Module):
    """A causal language model as transformers writes it; `hidden=True` leaves out the head, as torchtune's does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, tokens: Tensor, hidden: bool = False) -> Any:
        x = self.model(tokens)
        return x if hidden else (x, self.head(x))


class Split(Net):
    """A model with a graph break."""

    def forward(self, tokens: Tensor, hidden: bool = False) -> Any:
        if self.head.weight.isnan().any():
            raise ValueError("nan")
        return super().forward(tokens, hidden)


class FusedLoss(torch.autograd.Function):
    """Linear layer and cross-entropy that compute gradients in forward, as Liger's kernel does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            x, w = (tensor.detach().requires_grad_() for tensor in (hidden, weight))
            loss = F.cross_entropy(F.linear(x, w), labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, (x, w)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return grad * of_hidden, grad * of_weight, None


def _fused(hidden: Tensor, weight: Tensor, labels: Tensor = LABELS) -> Tensor:
    return FusedLoss.apply(hidden.flatten(0, 1), weight, labels.flatten())


class Redirection:
    """TRL's `_ForwardRedirection`, which is Lightning's: the method runs within the hooks of `model.__call__`."""

    def __call__(self, wrapper: nn.Module, original: nn.Module, method: Callable[..., Any], *args: Any) -> Any:
        before = original.forward

        def wrapped_forward(*given: Any) -> Any:
            original.forward = before  # type: ignore[method-assign]
            return method(*given)

        original.forward = wrapped_forward  # type: ignore[method-assign]
        return wrapper(*args)


class Trainer:
    """A trainer whose loss is redirected."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.metrics = model, []

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """As TRL's `_compute_loss`: the backbone, the head's weight, and a metric that is logged."""
        loss = _fused(model.model(tokens), model.head.weight)
        self.metrics.append(loss.item())
        return loss

    def training_step(self, tokens: Tensor, batch_index: int) -> Tensor:
        """As Lightning's: it is given tensors and numbers only, and can be captured."""
        return _fused(self.model(tokens, hidden=True), self.model.head.weight) + batch_index


# --- losses ------------------------------------------------------------------------------------------------------

Loss = Callable[[nn.Module, Trainer, int], Tensor]


def _unsharded(loss: Loss) -> Loss:
    def unshard_first(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
        if isinstance(model, FSDPModule):
            model.unshard()
        return loss(model, trainer, step)

    return unshard_first


def _accumulated(loss: Loss) -> Loss:
    """Two microbatches, the first without communication."""

    def accumulate(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
        sync = getattr(model, "set_requires_gradient_sync", lambda _: None)
        sync(False)
        loss(model, trainer, step).backward()
        sync(True)
        return loss(model, trainer, step)

    return accumulate


def _redirected(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    return Redirection()(model, model, trainer.loss, model, TOKENS)


def _lightning(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    return Redirection()(model, model, trainer.training_step, TOKENS, 3)


def _alternating(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """Redirected calls between plain ones, and evaluation."""
    with torch.no_grad():
        _redirected(model, trainer, step)
    return model(TOKENS)[1].square().mean() if step % 2 else _redirected(model, trainer, step)


def _of_hidden(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    return _fused(model(TOKENS, hidden=True), model.head.weight)


def _of_both(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """The head is used in forward, too: both gradients are added before they are reduced."""
    hidden, logits = model(TOKENS)
    return _fused(hidden, model.head.weight) + F.linear(hidden, model.head.weight).mean() + logits.square().mean()


def _of_tied(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """The embedding is the head: forward reads it, and its backward does not."""
    return _fused(model(TOKENS, hidden=True), model.model.embed.weight)


def _evaluated(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """Evaluation first, and what is asked about the weight on the way."""
    with torch.no_grad():
        _of_tied(model, trainer, step)
    hidden, weight = model(TOKENS, hidden=True), model.model.embed.weight
    assert weight.shape == (7, 4)
    assert weight.requires_grad
    assert "7, 4" in repr(weight) or "tensor" in repr(weight)
    return _fused(hidden, weight) + (hidden @ weight.T).square().mean()


def _balanced(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """As GradNorm: the gradient of a shared weight decides the weight of a loss."""
    loss = model(TOKENS)[1].square().mean()
    for weights in ([model.head.weight], list(model.parameters())):
        grad = full(torch.autograd.grad(loss, weights, retain_graph=True)[-1])
        loss = loss * grad.square().sum()
    return loss


def _penalty(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """A penalty on weights in the loss, of the root and of a unit, after the call."""
    loss = model(TOKENS)[1].square().mean()
    return loss + model.head.weight.square().sum() + model.model.layers[0].weight.abs().sum()


def _penalty_first(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """As `_penalty`, begun before the call."""
    penalty = model.head.weight.square().sum()
    return model(TOKENS)[1].square().mean() + penalty


def _in_chunks(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """A backward for each chunk, then one for the hidden states."""
    hidden = model(TOKENS, hidden=True)
    leaf = hidden.detach().requires_grad_()
    for chunk, labels in zip(leaf.chunk(3, 1), LABELS.chunk(3, 1)):
        _fused(chunk, model.head.weight, labels).backward()
    assert leaf.grad is not None
    return (hidden * leaf.grad).sum()


def _head_in_chunks(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """As torchtune's LinearCrossEntropyLoss: the head is called for each chunk."""
    chunks = zip(model(TOKENS, hidden=True).chunk(3, 1), LABELS.chunk(3, 1))
    return sum((F.cross_entropy(model.head(x).flatten(0, 1), y.flatten()) for x, y in chunks), torch.zeros(()))


def _titan(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    """As torchtitan's ChunkedLossWrapper: the head is a unit that stays gathered, and the last chunk reduces."""
    hidden, head = model(TOKENS, hidden=True), model.head
    leaf, is_sharded = hidden.detach().requires_grad_(), isinstance(head, FSDPModule)
    if is_sharded:
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
    for index, (chunk, labels) in enumerate(zip(leaf.chunk(3, 1), LABELS.chunk(3, 1))):
        if is_sharded and index == 2:
            head.set_requires_gradient_sync(True, recurse=False)
        F.cross_entropy(head(chunk).flatten(0, 1), labels.flatten()).backward()
    if is_sharded:
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.reshard()
    assert leaf.grad is not None
    return (hidden * leaf.grad).sum()


# Each with options, and the number of programs that it may take.
CASES: dict[str, tuple[Loss, dict[str, Any], int]] = {
    "redirected": (_redirected, {}, 4),
    "redirected, kept": (_redirected, KEEP, 4),
    "redirected, accumulated": (_accumulated(_redirected), {}, 4),
    "lightning": (_lightning, {}, 4),
    "alternating": (_alternating, {}, 6),
    "hidden": (_of_hidden, {}, 2),
    "tied": (_of_tied, {}, 3),
    "tied, accumulated": (_accumulated(_of_tied), {}, 3),
    "tied, kept": (_of_tied, KEEP, 2),
    "tied, in one unit": (_of_tied, {"units": []}, 3),
    "evaluated": (_evaluated, {}, 5),
    "both": (_of_both, {}, 2),
    "balanced": (_balanced, {}, 1),
    "split": (_of_tied, {}, 4),
    "split, evaluated": (_evaluated, {}, 7),
    "hidden, kept": (_of_hidden, KEEP, 2),
    "hidden, kept, accumulated": (_accumulated(_of_hidden), KEEP, 2),
    "hidden, unsharded": (_unsharded(_of_hidden), {}, 3),
    "both, kept": (_of_both, KEEP, 2),
    "both, unsharded": (_unsharded(_of_both), {}, 3),
    "penalty, kept": (_penalty, KEEP, 3),
    "penalty, unsharded": (_unsharded(_penalty_first), {}, 3),
    "chunks, kept": (_in_chunks, KEEP, 2),
    "chunks, unsharded": (_unsharded(_in_chunks), {}, 3),
    "head in chunks": (_head_in_chunks, {}, 5),
    "head in chunks of titan": (_titan, {"units": [*BY_LAYERS, "head"]}, 4),
}
QUICK = (
    "redirected",
    "lightning",
    "hidden",
    "tied",
    "evaluated",
    "split",
    "both",
    "both, kept",
    "penalty, unsharded",
    "chunks, kept",
)


# --- tests -------------------------------------------------------------------------------------------------------


def _train(loss_of: Loss, most: int, model: nn.Module) -> list[Tensor | None]:
    trainer, optimizer = Trainer(model), torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor | None] = []
    for step in range(4):
        loss = loss_of(model, trainer, step)
        loss.backward()
        found += [loss.detach(), *(None if grad is None else full(grad) for grad in gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(model, FSDPModule):
        titles = [program.title for program in graphshard.programs(model)]
        assert len(titles) <= most, titles
    return found


def _trial(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    for name in names:
        loss_of, options, most = CASES[name]
        train = functools.partial(_train, loss_of, most)
        build = Split if "split" in name else Net
        ours = on_graphshard(build, train, **{"units": BY_LAYERS, **options})
        try:
            assert_equal(ours, on_plain_torch(build, train))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("num_ranks", [2, 1])
@pytest.mark.quick_cases("2")
def test_gradients_reach_the_shards(ranks: Ranks, num_ranks: int) -> None:
    """In four steps, with the bits of plain torch and no new programs after the first steps."""
    ranks(num_ranks).run(_trial, QUICK)


@pytest.mark.slow
def test_further_ways(ranks: Ranks) -> None:
    ranks(2).run(_trial, tuple(name for name in CASES if name not in QUICK))


def _beside_fsdp2(rank: int, world_size: int) -> None:
    """With other batches on each rank: FSDP2's bits, and no more gathers.

    The backbone's program reduces its gradients, and the head's gradient is reduced by itself.
    """
    tokens = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(rank))

    def both(model: nn.Module) -> Tensor:
        hidden, logits = model(tokens)
        return _fused(hidden, model.head.weight) + logits.square().mean()

    def redirected(model: nn.Module) -> Tensor:
        return Redirection()(model, model, lambda m, t: _fused(m.model(t), m.head.weight), model, tokens)

    def tied(model: nn.Module) -> Tensor:
        return _fused(model(tokens, hidden=True), model.model.embed.weight)

    for loss_of, options, reductions in ((both, KEEP, 0), (both, {}, 0), (tied, {}, 0), (redirected, {}, 1)):
        torch.manual_seed(0)
        nets = [Net(), Net()]
        nets[1].load_state_dict(nets[0].state_dict())
        ours = graphshard.compile(nets[0], world_mesh(), units=BY_LAYERS, backend="eager", **options)
        theirs = fsdp2(nets[1], world_mesh(), units=BY_LAYERS, **options)
        for step in range(4):
            counts, found = [], []
            for model in (ours, theirs):
                launches = CountLaunches()
                # The second call finds out that each redirection has another function.
                with launches if step > 1 else contextlib.nullcontext():
                    loss = loss_of(model)
                    loss.backward()
                counts.append({kind: launches.of(kind) for kind in ("gather", "scatter")})
                found.append([loss.detach(), *gradients(model)])
                model.zero_grad()
            assert counts[0]["gather"] <= counts[1]["gather"], counts
            assert counts[0]["scatter"] <= counts[1]["scatter"] + reductions, counts
            assert_equal(*([tensor if tensor is None else full(tensor) for tensor in each] for each in found))


def test_bits_and_collectives_of_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_beside_fsdp2)


def _written(rank: int, world_size: int) -> None:
    """What is done to a weight that is an attribute is done to the shard, or an error."""
    model = graphshard.compile(Net(), world_mesh(), units=BY_LAYERS, backend="eager")
    head = dict(model.named_parameters())["head.weight"]
    model(TOKENS)
    weight: Any = model.head.weight
    assert isinstance(weight, nn.Parameter)
    assert not isinstance(weight, DTensor)
    assert dict(model.named_parameters())["head.weight"] is head
    assert torch.equal(weight.full_tensor(), full(head))
    with torch.no_grad():
        weight.fill_(2.0)
        nn.init.constant_(model.model.embed.weight, 3.0)
        model.model.norm.weight.data.mul_(4.0)
    assert all(float(full(model.get_parameter(name)).max()) == value for name, value in VALUES.items())
    with pytest.raises(UnsupportedError, match=r"parameter head\.weight was given to an optimizer, and grad"):
        torch.optim.SGD([model.head.weight], lr=0.1)
    with torch.no_grad():
        model.head.weight.detach()[0] = 1.0
    with pytest.raises(UnsupportedError, match=r"^the gathered parameter head\.weight was written to after a forward"):
        model(TOKENS)
    model(TOKENS)[1].sum().backward()
    assert model.head.weight is head
    with pytest.raises(UnsupportedError, match=r"^the full parameter head\.weight was read .* Read the attribute"):
        weight + 1


VALUES = {"head.weight": 2.0, "model.embed.weight": 3.0, "model.norm.weight": 4.0}


def test_writes_reach_the_shards(ranks: Ranks) -> None:
    ranks(2).run(_written)


def _second_order(model: nn.Module) -> list[Tensor | None]:
    """Penalize gradients of a loss that reads the head outside of forward."""
    trained = list(model.parameters())
    logits = F.linear(model(TOKENS, hidden=True), model.head.weight) + model.model.embed.weight.sum()
    loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()) + logits.square().mean()
    grads = torch.autograd.grad(loss, trained, create_graph=True)
    squares = [grad.square().sum() for grad in grads]
    penalty = sum(x.full_tensor() if isinstance(x, DTensor) else x for x in squares)
    (loss + penalty).backward()
    return [loss.detach(), *gradients(model)]


def _differentiated_twice(rank: int, world_size: int) -> None:
    expected = on_plain_torch(Net, _second_order)
    for options in (KEEP, {}):
        for one, other in zip(on_graphshard(Net, _second_order, units=BY_LAYERS, **options), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_second_order(ranks: Ranks) -> None:
    """As gradient penalties do; up to rounding, as squares are summed by shards."""
    ranks(2).run(_differentiated_twice)
