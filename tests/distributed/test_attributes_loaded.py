"""Files hold what forward reads and leaves on modules: `load` runs it, or says what is another here."""

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
from graphshard.ir.errors import ArtifactError
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, fsdp2, grads_of, world_mesh
from tests.ranks import Ranks

SEEN: list[Tensor] = []


class Config:
    """Values that forward reads, and one that it does not and that differs from process to process."""

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


def halved(module: nn.Module, grads: Any, outs: Any) -> Any:
    return tuple(grad / 2 for grad in grads)


def negated(x: Tensor) -> Tensor:
    return -x


def made() -> Net:
    """The model as it is exported: with hooks, and with a forward that was replaced."""
    model = Net()
    model.layers[0].register_forward_hook(double)
    model.layers[1].register_full_backward_hook(halved)
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
    assert len(graphshard.programs(ours)) == 2
    ours.step = 20
    with pytest.raises(ArtifactError, match=r"for this call of the model: Net: lt\(add\(step, 1\), 10\) was"):
        ours(rows(rank))
    ours.step = 3
    ours.config.scale = 5.0
    with pytest.raises(ArtifactError, match=r"of the model: Net.config.scale was 2\.0 and is 5\.0\. Export it with"):
        ours(rows(rank))
    ours.config.scale = 2.0
    ours.layers[0].register_forward_hook(triple)
    with pytest.raises(ArtifactError, match=r"Net.layers.0._forward_hooks was \(double .*\) and .*triple"):
        ours(rows(rank))


def test_a_loaded_model_reads_and_leaves_what_the_compiled_one_does(ranks: Ranks, file: Path) -> None:
    ranks(2).run(_loaded, file, share=False)


def _without_hook(model: Net) -> None:
    model.layers[0]._forward_hooks.clear()


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "an attribute": (
        lambda m: setattr(m.config, "scale", 3.0),
        r"of config\.scale was 2\.0 when .* is 3\.0 here",
    ),
    "a tensor": (
        lambda m: setattr(m, "freqs", torch.ones(1)),
        r"of freqs was float32\[4\] .* is float32\[1\]",
    ),
    "no hook": (_without_hook, r"hooks of layers\.0\._forward_hooks was \(double .*\) when .* is \(\) here"),
    "another hook": (
        lambda m: m.layers[2].register_forward_hook(triple),
        r"of layers\.2\._forward_hooks was missing",
    ),
    "no replaced forward": (
        lambda m: delattr(m.layers[2], "forward"),
        r"of layers\.2\.forward was negated",
    ),
    "a replaced forward": (
        lambda m: setattr(m.act, "forward", negated),
        r"act\.forward was missing when .* negated",
    ),
    "another module": (lambda m: setattr(m, "act", nn.Sigmoid()), r"modules of act was Tanh when .* is Sigmoid here"),
}


def _refused(rank: int, world_size: int, path: Path, case: str) -> tuple[str, list[str]]:
    model = made()
    CHANGES[case][0](model)
    with pytest.raises(ArtifactError) as caught:
        graphshard.load(path, model, world_mesh())
    twin = fsdp2(copy.deepcopy(model), world_mesh())
    ours = graphshard.compile(model, world_mesh(), artifact=path, backend="eager")
    for one in (ours, twin):
        one(rows(rank)).backward()
    assert_same(grads_of(ours), grads_of(twin), "gradients")
    return str(caught.value), [program.reason for program in graphshard.programs(ours)]


@pytest.mark.parametrize("case", CHANGES)
def test_what_differs_is_named_and_compiled_where_that_is_wanted(ranks: Ranks, file: Path, case: str) -> None:
    for message, reasons in ranks(2).run(_refused, file, case, share=False):
        assert re.search(CHANGES[case][1], message), message
        assert reasons == ["first call"]
