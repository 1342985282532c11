"""State at every entry point: registered methods, submodules' methods, files, predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.errors import ArtifactError
from tests.distributed.extended import Net as OfSubclasses
from tests.distributed.extended import Rounded
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import FakeWorld, Ranks


class _Settings:
    def __init__(self) -> None:
        self.scale = 2.0


SETTINGS = _Settings()


class _Part(nn.Module):
    """A module with a second method, which reads and writes state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.seen = 0
        self.last: Tensor | None = None
        self.history: list[Tensor] = []

    def encode(self, x: Tensor) -> Tensor:
        self.seen += 1
        y = checkpoint(lambda x: self.norm(self.linear(x)), x, use_reentrant=False)
        self.last = y.square().mean() * SETTINGS.scale
        self.history.append(y.detach().mean())
        return y * min(1.0, self.seen / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).tanh()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Part() for _ in range(2))
        self.calls = 0

    def score(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[1](self.layers[0](x)).sum() / self.calls

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _left(model: Any) -> dict[str, Tensor]:
    """Return the state on the modules of a net."""
    found = {"calls": torch.tensor(model.calls)}
    for number, layer in enumerate(model.layers):
        found |= {f"{number}.{i}": value for i, value in enumerate(layer.history)}
        found |= {f"{number}.seen": torch.tensor(layer.seen), f"{number}.last": torch.zeros(())}
        if layer.last is not None:
            found[f"{number}.last"] = layer.last.detach()
    return {**found, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def _methods(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    ours, theirs = twins(_Net(), world_mesh())
    graphshard.register_forward_method(ours, "score")
    graphshard.register_forward_method(ours, "layers.0.encode")
    register_fsdp_forward_method(theirs, "score")
    register_fsdp_forward_method(theirs.layers[0], "encode")
    for step in range(4):
        SETTINGS.scale = 2.0 if step < 2 else 3.0
        found = []
        for model in (ours, theirs):
            (model.score(rows(step + rank)) + model.layers[1].last).backward()
            between = _left(model)
            model(rows(step + rank)).backward()
            model.layers[0].encode(rows(10 + step + rank)).sum().backward()
            found.append({**{f"between {name}": value for name, value in between.items()}, **_left(model)})
        assert_same(*found, f"state of step {step}")
        assert_same(grads_of(ours), grads_of(theirs), f"gradients of step {step}")
    SETTINGS.scale = 2.0
    return [program.title for program in graphshard.programs(ours)]


@pytest.mark.slow
def test_registered_methods_read_and_write_state(ranks: Ranks) -> None:
    """Also state that several entry points share: each sees the writes of the others."""
    for titles in ranks(2).run(_methods):
        assert {title.rpartition("-")[0] for title in titles} == {"_Net-score", "_Net", "_Part-layers.0.encode"}


@pytest.mark.slow
def test_a_prediction_does_not_change_state() -> None:
    torch.manual_seed(0)
    model = _Net()
    before = _left(model)
    explained = graphshard.explain(model, (2,), example_inputs=(rows(0),), hardware="h100")
    assert explained.step_time_s > 0
    assert_same(before, _left(model), "state")


def test_rejects_files_for_subclasses(fake_world: FakeWorld, tmp_path: Path) -> None:
    """Exporting needs a mesh for the methods of subclasses; a file of plain parameters does not fit subclasses."""
    fake_world(2)
    path = tmp_path / "plain.gshard"
    graphshard.export(OfSubclasses(), (2,), path, example_inputs=(torch.ones(2, 8),), backend="eager")
    text = r"does not fit: parameter blocks\.0\.0\.weight \(Rounded\) decides itself"
    with pytest.raises(ArtifactError, match=text):
        graphshard.load(path, OfSubclasses(Rounded), init_device_mesh("cpu", (2,)))
