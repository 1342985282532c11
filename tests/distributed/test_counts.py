"""Numbers of gathers and reductions in every mode of accumulation: at most FSDP2's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from tests.distributed.twins import POLICIES, CountLaunches, assert_same, fsdp2, grads_of, params_of
from tests.ranks import Ranks
from tests.upstream.lockstep import needs_newer_fsdp2


class Chunked(nn.Module):
    """A trunk of two units, and a unit of two modules, whose head is called chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor, *, hidden: bool = False) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm(x)
        return x if hidden else self.head(x)


def _step(model: Any, x: Tensor) -> None:
    model(x).sum().backward()


def _accumulate(model: Any, x: Tensor, *, keep: bool = False, switch: str = "set_requires_gradient_sync") -> None:
    for last in (False, False, True):
        getattr(model, switch)(last)
        if keep:
            model.set_reshard_after_backward(last)
        _step(model, x)


def _head_accumulates(model: Any, x: Tensor) -> None:
    """Run a backward for each chunk, of which the last one reduces."""
    hidden = model(x, hidden=True)
    leaf = hidden.detach().requires_grad_()
    for index, chunk in enumerate(leaf.chunk(3)):
        model.head.set_requires_gradient_sync(index == 2)
        model.head(chunk).square().sum().backward()
    hidden.backward(leaf.grad)


def _head_in_chunks(model: Any, x: Tensor) -> None:
    """Run one backward for all chunks."""
    torch.stack([model.head(chunk).square().sum() for chunk in model(x, hidden=True).chunk(3)]).sum().backward()


def _twice(model: Any, x: Tensor) -> None:
    """Call the model twice, like contrastive losses."""
    (model(x) - model(-x)).square().sum().backward()


def _all_kept(model: Any, x: Tensor) -> None:
    model.set_reshard_after_forward(False)
    (model(x) - model(-x) + model(2 * x)).square().sum().backward()


MODES: dict[str, Callable[[Any, Tensor], None]] = {
    "a step": _step,
    "microbatches": _accumulate,
    "microbatches that keep parameters": lambda m, x: _accumulate(m, x, keep=True),
    "microbatches that reduce over shards": lambda m, x: _accumulate(m, x, switch="set_requires_all_reduce"),
    "two calls before a backward": _twice,
    "three calls that keep parameters": _all_kept,
    "a head in chunks": _head_in_chunks,
    "a head that accumulates chunks": _head_accumulates,
}


def _counted(rank: int, world_size: int, mode: str) -> None:
    run = MODES[mode]
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    ours, theirs = Chunked(), Chunked()
    graphshard.compile(ours, mesh, backend="eager", units=["layers.*", ("norm", "head")])
    fully_shard([theirs.norm, theirs.head], mesh=mesh)
    fsdp2(theirs, mesh)
    x = torch.randn(6, 8)
    counts = []
    for model in (ours, theirs):
        for _ in range(2):  # the first step detects repeated calls
            run(model, x)
        with CountLaunches() as count:
            run(model, x)
        counts.append({kind: count.of(kind) for kind in ("gather", "scatter", "all_reduce")})
    actual, expected = counts
    for kind in actual:
        assert actual[kind] <= expected[kind], counts
    assert min(actual.values()) > 0


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=needs_newer_fsdp2 if m == "a head that accumulates chunks" else ()) for m in MODES]
)
@pytest.mark.slow
def test_collectives_of_a_step(ranks: Ranks, mode: str) -> None:
    ranks(4).run(_counted, mode)


def _equal(rank: int, world_size: int, mode: str, policy: MixedPrecisionPolicy) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    ours, theirs = Chunked(), Chunked()
    theirs.load_state_dict(ours.state_dict())
    graphshard.compile(ours, mesh, backend="eager", units=["layers.*", ("norm", "head")], mp_policy=policy)
    fully_shard([theirs.norm, theirs.head], mesh=mesh, mp_policy=policy)
    fsdp2(theirs, mesh, mp_policy=policy)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    for step in range(3):
        for model in (ours, theirs):
            MODES[mode](model, torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank)))
            model.reshard()  # FSDP2 may leave a unit of several modules gathered
        assert_same(*map(grads_of, (ours, theirs)), f"gradients of step {step}")
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same(*map(params_of, (ours, theirs)), "after training")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(
    "mode", ["two calls before a backward", "three calls that keep parameters", "a head in chunks"]
)
@pytest.mark.quick_cases("a head in chunks-fp32")
def test_several_calls_with_one_backward_match_fsdp2(ranks: Ranks, mode: str, policy: MixedPrecisionPolicy) -> None:
    """Their gradients are accumulated before they are reduced, in the compute dtype."""
    ranks(2).run(_equal, mode, policy)


def _failed_backward(rank: int, world_size: int) -> None:
    """A backward that fails between the parts of two calls does not affect the next backward."""
    ours, theirs = (Chunked() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    graphshard.compile(ours, init_device_mesh("cpu", (world_size,)), backend="eager")

    def fail(_: Tensor) -> None:
        raise ValueError("enough")

    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    first = ours(x)
    first.register_hook(fail)
    with pytest.raises(ValueError, match="enough"):
        (first - ours(-x)).sum().backward()
    _step(ours, x)
    fsdp2(theirs, init_device_mesh("cpu", (world_size,)))
    _step(theirs, x)
    assert_same(*map(grads_of, (ours, theirs)), "gradients of the next")


def test_a_failed_backward_leaves_no_gradients(ranks: Ranks) -> None:
    ranks(2).run(_failed_backward)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.mul_(2),
    "of the detached": lambda p: p.detach().mul_(2),
    "of the shard": lambda p: (p.to_local() if isinstance(p, DTensor) else p).mul_(2),
}


def _written(rank: int, world_size: int) -> None:
    """Weights may change between two calls."""
    plain = Chunked()
    ours = copy.deepcopy(plain)
    graphshard.compile(ours, init_device_mesh("cpu", (world_size,)), backend="eager")
    x = torch.randn(6, 8)
    for how, write in WRITES.items():
        _twice(ours, x)
        for model in (plain, ours):
            model(x)
            with torch.no_grad():
                for param in model.parameters():
                    write(param)
        assert torch.equal(plain(x), ours(x)), how
    # Writes that torch does not record are detected after one step's number of calls.
    for model in (plain, ours):
        model(x), model(x)
        for param in model.parameters():
            param.data.mul_(2)
    assert torch.equal(plain(x), ours(x))


@pytest.mark.slow
def test_weights_written_between_two_calls(ranks: Ranks) -> None:
    ranks(2).run(_written)
