"""torch's tools that inspect or transform a model work as with FSDP2, or raise one clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

import graphshard
from graphshard.errors import UnsupportedError
from tests.distributed.nets import Net, rows
from tests.distributed.twins import twins, world_mesh
from tests.ranks import Ranks


def _counts(model: nn.Module, rank: int) -> tuple[int, int]:
    """Count collectives and floating-point operations of a step."""
    with CommDebugMode() as collectives, FlopCounterMode(display=False) as flops:
        model(rows(rank)).sum().backward()
    return collectives.get_total_counts(), flops.get_total_flops()


def _counted(rank: int, world_size: int, backend: str) -> None:
    ours, theirs = twins(Net(), world_mesh())
    if backend == "inductor":
        ours = graphshard.compile(Net(), world_mesh())
    first, second = (_counts(ours, rank) for _ in range(2))
    assert first == second
    assert first[0] == _counts(theirs, rank)[0]
    if backend == "eager":
        assert first == _counts(theirs, rank)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.quick_cases("eager")
def test_first_and_second_call_have_fsdp2s_counts(ranks: Ranks, backend: str) -> None:
    """Tracing and compilation are not counted as part of the step."""
    ranks(2).run(_counted, backend)


def _dual(model: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda m, x: torch.func.grad(lambda y: m(y).sum())(x),
    "jvp": lambda m, x: torch.func.jvp(lambda y: m(y).sum(), (x,), (x,)),
    "vmap": lambda m, x: torch.func.vmap(lambda y: m(y).sum())(x[None]),
    "dual numbers": _dual,
}


def _transformed(rank: int, world_size: int) -> None:
    model = graphshard.compile(Net(), world_mesh(), backend="eager", fullgraph=True)
    for calls in range(2):  # before and after the first capture
        for name, transform in TRANSFORMS.items():
            with pytest.raises(UnsupportedError, match="a compiled model was called inside") as caught:
                transform(model, rows(rank))
            assert ("forward-mode" if name == "dual numbers" else "torch.func") in str(caught.value), name
        with forward_ad.dual_level():
            model(rows(rank)).sum().backward()
        assert len(graphshard.programs(model)) == 1, calls


def test_rejects_transforms(ranks: Ranks) -> None:
    ranks(2).run(_transformed)


def _functional(rank: int, world_size: int) -> None:
    ours, theirs = twins(Net(), world_mesh())
    results = []
    for model in (ours, theirs):
        doubled = {name: param.detach() * 2 for name, param in model.named_parameters()}
        results.append(torch.func.functional_call(model, doubled, (rows(rank),)))
    assert torch.equal(*results)


def test_functional_call_accepts_other_shards(ranks: Ranks) -> None:
    ranks(2).run(_functional)
