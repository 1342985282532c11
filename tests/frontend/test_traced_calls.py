"""Calls of models traced by Dynamo: the program that serves them, and what is traced or compiled again."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.errors import CaptureError
from graphshard.frontend.dynamo_capture import TRACING
from tests.conftest import FakeWorld
from tests.ranks import check_modes


class Net(nn.Module):
    """Reads an attribute, counts its calls, and keeps the last loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.step = nn.Linear(4, 4), 1.0, 0
        self.last = torch.zeros(())

    def forward(self, x: torch.Tensor, rate: float = 0.1, times: int = 2, tag: str = "", seen: int = 0) -> Any:
        self.step += 1
        loss = (self.inner(x) * rate * times / self.scale).square().sum() * (self.step / 10)
        self.last = loss.detach()
        return loss


class Listing(nn.Module):
    """Keeps all losses in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.inner(x).square().sum()
        self.losses.append(loss.detach())
        return loss


class Block(nn.Module):
    """One of equal blocks, with an attribute that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh() * self.scale


class Deep(nn.Module):
    """Eight equal blocks, of which five are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum() / len(self.layers)


def compiled(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return graphshard.compile(copy.deepcopy(model), mesh, backend="eager", **options)


def same_gradients(ours: nn.Module, plain: nn.Module) -> bool:
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return all(torch.equal(actual.grad.full_tensor(), expected.grad) for actual, expected in pairs)


def test_two_programs_serve_all_changes(mesh: DeviceMesh) -> None:
    """Learning rate, count, attribute, counter and batch size become symbols at their second value."""
    plain = Net()
    ours = compiled(plain, mesh)
    for step in range(2, 14):
        plain.scale = ours.scale = 1 + step / 8
        x = torch.randn(2 + step % 5, 4)
        losses = [each(x, 0.1 * step, step, f"tag {step}", step * 7) for each in (plain, ours)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert same_gradients(ours, plain)
    assert ours.step == plain.step == 12
    assert torch.equal(ours.last, plain.last)
    assert len(graphshard.programs(ours)) == 2


def test_an_equal_trace_compiles_nothing(mesh: DeviceMesh) -> None:
    """The list grows at each call, so guards fail, but the graph is the same."""
    ours = compiled(Listing(), mesh)
    for _ in range(4):
        ours(torch.ones(3, 4)).backward()
    assert len(ours.losses) == 4
    assert len(graphshard.programs(ours)) == 1


@pytest.mark.slow
def test_a_change_in_a_block_that_was_not_traced_is_noticed(mesh: DeviceMesh) -> None:
    plain = Deep()
    ours = compiled(plain, mesh)
    x = torch.randn(3, 4)
    assert torch.equal(ours(x), plain(x))
    plain.layers[3].scale = ours.layers[3].scale = 2.0
    assert torch.equal(ours(x), plain(x))
    reasons = [program.reason for program in graphshard.programs(ours)]
    assert len(reasons) == 2
    assert "layers.3.scale" in reasons[1]


@pytest.mark.slow
def test_few_blocks_build_the_program_of_all(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = Deep(), torch.randn(3, 4)
    few = compiled(plain, mesh)
    few(x).backward()
    monkeypatch.setenv("GRAPHSHARD_EVERY_BLOCK", "1")
    every = compiled(plain, mesh)
    every(x).backward()
    plain(x).backward()
    assert same_gradients(few, plain)
    assert same_gradients(every, plain)
    texts = [[str(phase.module.graph) for phase in graphshard.programs(m)[0].phases.values()] for m in (few, every)]
    assert [text.count("addmm") for text in texts[0]] == [text.count("addmm") for text in texts[1]]


@pytest.mark.slow
def test_a_replaced_forward_is_traced_again(mesh: DeviceMesh) -> None:
    ours = compiled(Deep(), mesh)
    x = torch.randn(3, 4)
    before = ours(x)
    ours.layers[3].forward = lambda x: x * 2
    assert not torch.equal(ours(x), before)
    del ours.layers[3].forward
    assert torch.equal(ours(x), before)


def test_another_launch_finds_the_program_by_its_graph(
    mesh: DeviceMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, x = Deep(), torch.randn(3, 4)
    with caplog.at_level(logging.INFO, "graphshard.cache"):
        first = compiled(plain, mesh, cache=tmp_path)
        first(x).backward()
        caplog.clear()
        second = compiled(plain, mesh, cache=tmp_path)
        second(x).backward()
        assert "Deep found in" in caplog.text
        plain(x).backward()
        assert same_gradients(second, plain)
        caplog.clear()
        plain.layers[3].scale = 0.25
        third = compiled(plain, mesh, cache=tmp_path)
        third(x)
        assert "is not in" in caplog.text
        assert torch.equal(third(x), plain(x))


@pytest.mark.slow
def test_a_file_serves_traces_of_few_blocks(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Loading traces few of many equal blocks, although all were traced for the file."""
    x = torch.randn(3, 4)
    path = graphshard.export(Deep(), (1,), tmp_path / "deep.gshard", example_inputs=(x,), backend="eager", device="cpu")
    model, plain = Deep(), Deep()
    model.load_state_dict(plain.state_dict())
    graphshard.load(path, model, mesh)
    assert torch.equal(model(x), plain(x))
    assert model._graphshard.tracer._every_block is False


@pytest.mark.slow
def test_a_joint_program_runs_without_a_forward(mesh: DeviceMesh) -> None:
    """It has no forward that Dynamo could trace."""
    plain, x = Deep(), torch.randn(3, 4)
    source = compiled(plain, mesh)
    source(x).backward()
    program = graphshard.programs(source)[0].exported
    made = graphshard.compile(program, mesh, backend="eager").to_empty(device="cpu")
    made.load_state_dict(source.state_dict())
    results = made(x)
    loss = results[0] if isinstance(results, (list, tuple)) else results
    assert torch.equal(loss, plain(x))


def test_a_program_of_a_model_on_the_meta_device_serves_it_later(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.ones(2, 4)
    graphshard.compile(model, mesh, backend="eager", example_inputs=(x,))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    assert torch.equal(model(x), torch.zeros(2, 4))
    assert len(graphshard.programs(model)) == 1


def test_an_example_that_is_a_dtensor(fake_world: FakeWorld) -> None:
    class Multiplies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: DTensor, factor: torch.Tensor) -> torch.Tensor:
            return self.linear(x.to_local() * factor)  # type: ignore[no-any-return]

    fake_world(1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    inputs = distribute_tensor(torch.ones(2, 4), mesh["tp"], [Replicate()]), torch.ones(4)
    model = graphshard.compile(Multiplies(), mesh["dp"], backend="eager", example_inputs=inputs)
    assert len(graphshard.programs(model)) == 1
    model(*inputs)
    assert len(graphshard.programs(model)) == 1


def test_a_submodule_called_directly_sees_a_replaced_forward(mesh: DeviceMesh) -> None:
    ours = compiled(Deep(), mesh)
    x = torch.randn(3, 4)
    before = ours.layers[3](x)
    ours.layers[3].forward = types.MethodType(lambda self, x: self.inner(x) * 5, ours.layers[3])
    assert torch.equal(ours.layers[3](x), ours.layers[3].inner(x) * 5)
    del ours.layers[3].forward
    assert torch.equal(ours.layers[3](x), before)


class Checkpointed(nn.Module):
    """A batch norm in a checkpoint: eager mode updates its statistics twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.norm(self.inner(y)).sin(), x, use_reentrant=False).square().sum()


def test_a_submodule_other_than_a_unit_is_called_directly(mesh: DeviceMesh) -> None:
    """Its class does not change, and guards name sources in its base classes."""
    plain = Checkpointed()
    ours = compiled(plain, mesh)
    x = torch.randn(5, 4)
    for model in (plain, ours):
        model.norm(model.inner(x)).square().sum().backward()
    assert same_gradients(ours, plain)


class Reads(nn.Module):
    """Reads a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.activation = nn.Parameter(torch.randn(4, 4)), F.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x @ self.weight).square().sum()


class Distributes(Reads):
    """Has a DTensor as its parameter."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh["tp"], [Replicate()]))


@pytest.mark.parametrize("axes", [("dp",), ("dp", "tp")], ids=["plain", "tensor axis"])
@pytest.mark.slow
def test_traces_are_freed_with_the_model(fake_world: FakeWorld, axes: tuple[str, ...]) -> None:
    """Otherwise each model would leak its graphs, its mesh and the threads of the mesh's process groups."""
    fake_world(2 ** len(axes))
    mesh = init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)

    def train() -> None:
        model = graphshard.compile(Distributes(mesh) if "tp" in axes else Reads(), mesh, backend="eager")
        x = torch.randn(3, 8)[:, :4]  # a view
        model(DTensor.from_local(x, mesh["tp"], [Replicate()]) if "tp" in axes else x).backward()

    def alive() -> list[ShapeEnv]:
        gc.collect()
        return [each for each in gc.get_objects() if issubclass(type(each), ShapeEnv)]

    of_others = weakref.WeakSet(alive())
    train()
    train()
    before = len(set(alive()) - set(of_others))  # torch keeps the last traces
    train()
    train()
    assert len(set(alive()) - set(of_others)) <= before


class Halves(nn.Module):
    """Compares a number computed from a size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(x) / 2
        return self.inner(x).sum() * (0.0 if half == float("inf") or half != half else half)


def test_numbers_of_sizes_are_finite(mesh: DeviceMesh) -> None:
    """One program for all sizes of a declared range, because no size gives NaN or infinity."""
    plain = Halves()
    ours = compiled(plain, mesh, dynamic_shapes=({0: Dim("rows", min=2, max=64)},))
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4)
        assert torch.equal(ours(x), plain(x))
    assert len(graphshard.programs(ours)) == 1


class _Fails(nn.Module):
    """Writes a parameter, which no program supports, or asks for its address, while a torch mode is active."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.linear, self.mode = nn.Linear(4, 4), mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "checkpoint":
            return checkpoint(self._in_autocast, x, use_reentrant=False)
        if self.mode == "vmap":
            return torch.func.vmap(self._written)(x)
        return self._in_autocast(x)

    def _in_autocast(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x * id(x) if self.mode == "graph break" else self._written(self.linear(x))

    def _written(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.mul_(0.5)
        return self.linear(x)


@pytest.mark.parametrize("mode", ["autocast", "checkpoint", "vmap", "graph break"])
def test_an_error_leaves_no_mode_open(mesh: DeviceMesh, mode: str) -> None:
    model = graphshard.compile(_Fails(mode), mesh, backend="eager", fullgraph=True)
    with (
        torch.no_grad() if mode != "graph break" else contextlib.nullcontext(),
        pytest.raises(CaptureError),
    ):
        model(torch.ones(2, 4))
    check_modes()


@torch.library.custom_op("graphshard_tests::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    """Return twice the input, without an autograd formula."""
    return x * 2


@_twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _twice(self.linear(x))


def test_an_operator_without_an_autograd_formula(mesh: DeviceMesh) -> None:
    module = _Twice()
    expected = module(torch.ones(2, 4)).detach()
    model = graphshard.compile(module, mesh, backend="eager")
    with pytest.raises(
        CaptureError,
        match=r"gradients flow through graphshard_tests\.twice\.default at .*test_traced_calls\.py:\d+: "
        r"return _twice\(self\.linear\(x\)\)\. It has no autograd formula\. Register one with "
        r"torch\.library\.register_autograd, or pass x\.detach\(\) to it\.",
    ):
        model(torch.ones(2, 4))
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 4)), expected)


def test_threads_in_torch_compile_wait_for_a_trace() -> None:
    """They do not see patches that are active during a trace."""
    found: list[torch.Tensor] = []
    x = torch.ones(2)
    thread = threading.Thread(target=lambda: found.append(torch.compile(torch.sin, backend="eager")(x)))
    with TRACING:
        thread.start()
        thread.join(0.3)
        assert not found
    thread.join()
    assert torch.equal(found[0], x.sin())
