"""Attributes, hooks and replaced forwards of a loaded model match the traced model, or an error names them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.errors import ArtifactError
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, fsdp2, grads_of, world_mesh
from tests.ranks import Ranks

SEEN: list[Tensor] = []


class Config:
    """Values that forward reads, and one that it does not read and that differs between processes."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.hash = id(self)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.act = nn.Tanh()
        self.config = Config()
        self.freqs = torch.arange(4.0)
        self.step = 0
        self.history: list[Tensor] = []
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        for layer in self.layers:
            x = self.act(layer(x)) * self.config.scale + self.freqs
        self.history.append(x.detach().mean())
        self.aux = x.square().mean()
        return x.sum() if self.step < 10 else x.mean()


def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    SEEN.append(out.detach().sum())
    return out * 2


def triple(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 3


def negated(x: Tensor) -> Tensor:
    return -x


def made() -> Net:
    """Build the exported model, with hooks and a replaced forward."""
    model = Net()
    model.layers[0].register_forward_hook(double)
    model.layers[2].forward = negated
    return model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "net.gshard"
    calls = [graphshard.Call((rows(0)[:, :4],), entry="layers.0")]
    graphshard.export(made(), (2,), path, example_inputs=(rows(0),), calls=calls, backend="eager")
    SEEN.clear()
    return path


def _loaded(rank: int, world_size: int, path: Path) -> None:
    model, twin = made(), fsdp2(made(), world_mesh())
    ours = graphshard.load(path, model, world_mesh())
    found: list[dict[str, Any]] = []
    for one in (ours, twin):
        SEEN.clear()
        for number in range(3):
            (one(rows(number + rank)) + one.aux).backward()
        found.append(
            {"aux": one.aux.detach(), "step": one.step, **{f"{i}": t for i, t in enumerate((*one.history, *SEEN))}}
        )
        assert len(one.history) == len(SEEN) == 3
    assert_same(*found, "attributes")
    assert_same(grads_of(ours), grads_of(twin), "gradients")
    ours.step = 20
    with pytest.raises(ArtifactError, match=r"this call of the model: forward computes something else: its trace had"):
        ours(rows(rank))
    ours.step = 3
    ours.config.scale = 5.0
    with pytest.raises(ArtifactError, match=r"had the line '.*2\.0\)?.*', and now has '.*5\.0"):
        ours(rows(rank))
    ours.config.scale = 2.0
    ours.layers[0].register_forward_hook(triple)
    with pytest.raises(ArtifactError, match=r"forward computes something else"):
        ours(rows(rank))


@pytest.mark.slow
def test_a_loaded_model_reads_and_writes_like_the_compiled_one(ranks: Ranks, file: Path) -> None:
    ranks(2).run(_loaded, file)


def _without_hook(model: Net) -> None:
    model.layers[0]._forward_hooks.clear()


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "an attribute": (lambda m: setattr(m.config, "scale", 3.0), r"had the line '.*2\.0.*', and now has '.*3\.0"),
    "a tensor": (lambda m: setattr(m, "freqs", torch.ones(1)), r"had the line '.*f32\[4\].*and now has '.*f32\[1\]"),
    "no hook": (_without_hook, "forward computes something else"),
    "another hook": (lambda m: m.layers[2].register_forward_hook(triple), "forward computes something else"),
    "no replaced forward": (lambda m: delattr(m.layers[2], "forward"), r"and now has '.*layers\.2"),
    "a replaced forward": (
        lambda m: setattr(m.act, "forward", negated),
        r"the line '.*tanh.*', and now has '.*neg",
    ),
    "another module": (lambda m: setattr(m, "act", nn.Sigmoid()), r"had the line '.*tanh.*', and now has '.*sigmoid"),
}


def _refused(rank: int, world_size: int, path: Path, case: str) -> tuple[str, list[str]]:
    model = made()
    CHANGES[case][0](model)
    with pytest.raises(ArtifactError) as caught:
        graphshard.load(path, copy.deepcopy(model), world_mesh())(rows(rank))
    twin = fsdp2(copy.deepcopy(model), world_mesh())
    ours = graphshard.compile(model, world_mesh(), artifact=path, backend="eager")
    for one in (ours, twin):
        one(rows(rank)).backward()
    assert_same(grads_of(ours), grads_of(twin), "gradients")
    return str(caught.value), [program.reason for program in graphshard.programs(ours)]


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.quick_cases("no hook")
def test_a_difference_is_named_and_compiled_on_request(ranks: Ranks, file: Path, case: str) -> None:
    for message, reasons in ranks(2).run(_refused, file, case):
        assert re.search(CHANGES[case][1], message), message
        assert reasons == ["first call"]
