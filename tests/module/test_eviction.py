"""Eviction of programs over the limit: which one, what is freed with it, and what stays while in use."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.lower.regions import RegionCall, drop_regions
from graphshard.module.runner import Runner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def _dynamic(rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def _x(rows: int) -> Tensor:
    """Return an input for a separate program: its sizes do not become dynamic at the second value."""
    x = _dynamic(rows)
    torch._dynamo.mark_static(x)
    return x


def _compiled(mesh: DeviceMesh, most: int, **options: Any) -> Any:
    return graphshard.compile(Net(), mesh, backend="eager", max_captures=most, **options)


def _rows(model: Any) -> list[int]:
    """Return the batch sizes of the model's programs."""
    known = _runner(model).executables.programs
    rows = {one.executable.program.title: one.call.inputs[0][0][0] for one in known if one.call}
    return [rows[program.title] for program in graphshard.programs(model)]


def _grads(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def _runner(model: Any) -> Runner:
    return model._graphshard


def test_evicts_the_least_recently_used(mesh: DeviceMesh) -> None:
    model = _compiled(mesh, 3)
    for rows in (2, 3, 4, 2, 5):
        model(_x(rows))
    assert _rows(model) == [2, 4, 5]
    assert len(_runner(model).executables.programs) == 3
    titles = [program.title for program in graphshard.programs(model)]
    assert titles == ["Net-0", "Net-2", "Net-3"]  # numbers are not reused
    model(_x(3))
    assert _rows(model) == [2, 5, 3]


def test_evicts_programs_of_one_signature(mesh: DeviceMesh) -> None:
    """They differ in an attribute."""
    model = _compiled(mesh, 2)
    for flag in ("a", "b", "c", "b", "a"):
        model.flag = flag
        model(_x(2))
    runner = _runner(model)
    assert len(graphshard.programs(model)) == len(runner.executables.programs) <= 2


@pytest.mark.slow
def test_memory_of_an_evicted_program_is_freed(mesh: DeviceMesh) -> None:
    model = _compiled(mesh, 1)
    model(_x(2)).backward()
    runner = _runner(model)
    (installed,) = runner.executables.programs
    program = weakref.ref(installed.executable.program)
    forward = weakref.ref(installed.executable.program.phases["forward"].module)
    executable, regions = weakref.ref(installed.executable), [*map(weakref.ref, runner.tracer.compiled.values())]
    del installed
    model(_x(3)).backward()
    gc.collect()
    assert [found() for found in (program, forward, executable, *regions)] == [None] * (3 + len(regions))
    assert len(runner.tracer.compiled) == len(regions)


def test_regions_of_other_programs_stay(mesh: DeviceMesh) -> None:
    """A copy of the model and another program call them."""
    model = _compiled(mesh, 2)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each(_x(2)).backward()
    compiled = _runner(model).tracer.compiled
    assert _runner(twin).tracer.compiled is compiled
    before = dict(compiled)
    for rows in (3, 4):
        model(_x(rows)).backward()
    assert before.items() <= compiled.items()
    twin(_x(2)).backward()
    plain = Net()
    plain(_x(2)).backward()
    plain(_x(2)).backward()
    assert all(map(torch.equal, _grads(twin), _grads(plain)))


def test_a_region_from_a_file_stays() -> None:
    program: Any = SimpleNamespace(phases={}, region_names={"region_0": "a", "region_1": "b"})
    compiled = {"a": RegionCall(list, kept=True), "b": RegionCall(list)}
    drop_regions(compiled, [program])
    assert list(compiled) == ["a"]


def test_a_pending_backward(mesh: DeviceMesh) -> None:
    model, plain = _compiled(mesh, 1), Net()
    for each in (model, plain):
        losses = [each(_x(rows)) for rows in (2, 3, 4)]
        for loss in losses:
            loss.backward()
    assert _rows(model) == [4]
    assert all(map(torch.equal, _grads(model), _grads(plain)))


def test_another_backward_of_an_evicted_program(mesh: DeviceMesh) -> None:
    """It is lowered after the program's regions are gone."""

    class Two(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = self.first(x).tanh()
            return y.sum(), self.second(y).sum()

    model, plain = graphshard.compile(Two(), mesh, backend="eager", max_captures=1), Two()
    for each in (model, plain):
        kept = each(_x(2))
        for loss in each(_x(3)):
            loss.backward(retain_graph=True)
        kept[1].backward(retain_graph=True)
        kept[0].backward()
    assert all(map(torch.equal, _grads(model), _grads(plain)))


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.quick_cases("after")
def test_accumulated_gradients(mesh: DeviceMesh, late: bool) -> None:
    """The only program that reduces them stays, whether its backward runs before or after the other call."""
    model, plain = _compiled(mesh, 1), Net()
    model.set_requires_gradient_sync(False)
    loss = model(_x(2))
    if not late:
        loss.backward()
    with torch.no_grad():
        model(_x(2))
    if late:
        loss.backward()
    assert len(graphshard.programs(model)) == 2
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    plain(_x(2)).backward()
    assert all(map(torch.equal, _grads(model), _grads(plain)))
    del loss
    with torch.no_grad():
        model(_x(3))
    assert [program.backward is None for program in graphshard.programs(model)] == [True]


def test_microbatches_of_other_shapes(mesh: DeviceMesh) -> None:
    model, plain = _compiled(mesh, 1), Net()
    for rows in (2, 3, 4, 5):
        model.set_requires_gradient_sync(rows == 5)
        model(_x(rows)).backward()
        plain(_x(rows)).backward()
    for found, expected in zip(_grads(model), _grads(plain)):
        torch.testing.assert_close(found, expected)
    assert _rows(model) == [5]


def test_a_failed_capture_evicts_nothing(mesh: DeviceMesh) -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("three rows")
            return super().forward(x)

    model = graphshard.compile(Fails(), mesh, backend="eager", max_captures=1)
    model(_x(2))
    with pytest.raises(ValueError, match="three rows"):
        model(_x(3))
    assert graphshard.programs(model)[0].title == "Fails-0"  # Python runs it with separate programs


@pytest.mark.slow
def test_programs_of_a_file_stay(mesh: DeviceMesh, tmp_path: Path) -> None:
    """They do not count, and no capture evicts them."""
    calls = [graphshard.Call((_dynamic(rows),)) for rows in (2, 3, 4)]
    path = graphshard.export(Net(), (1,), tmp_path / "net.gshard", calls=calls, backend="eager")
    model, plain = _compiled(mesh, 1, artifact=path), Net()
    for rows in (2, 5, 6, 3, 4, 5):
        model(_dynamic(rows)).backward()
        plain(_dynamic(rows)).backward()
    assert all(map(torch.equal, _grads(model), _grads(plain)))
    assert len(graphshard.programs(model)) == 2  # the file's, and one with dynamic sizes
    sealed = graphshard.load(path, Net(), mesh, max_captures=1)
    for rows in (2, 3, 4, 2):
        sealed(_dynamic(rows)).backward()
    assert sorted(_rows(sealed)) == [2, 3, 4]


def test_each_entry_point_has_a_limit(mesh: DeviceMesh) -> None:
    model = _compiled(mesh, 1)
    for rows in (2, 3):
        model(_x(rows))
        model.first(_x(rows))
    assert [program.title for program in graphshard.programs(model)] == ["Net-1", "Linear-first-1"]
