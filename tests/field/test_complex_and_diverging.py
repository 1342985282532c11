"""Complex and mixed parameters, vectors of parameters, ranks that differ, and notebooks: interrupts and `exec`."""

from __future__ import annotations

import functools
import linecache
import os
import pkgutil
import re
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parameters_to_vector

import graphshard
from graphshard.errors import DivergenceError, PeerError
from tests.distributed.twins import BF16, world_mesh
from tests.field.trials import assert_equal, full, gradients, on_graphshard, on_plain_torch, parameters
from tests.ranks import Ranks, check_modes


def _rows(seed: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def _train(optimizer: Callable[..., torch.optim.Optimizer], model: nn.Module) -> list[Tensor | None]:
    made, found = optimizer(model.parameters()), list[Tensor | None]()
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            made.zero_grad()
            loss = model(_rows(step))
            loss.backward()
            found.extend([loss.detach(), *(None if each is None else each.clone() for each in gradients(model))])
            return loss

        made.step(closure)
    return [*found, *parameters(model)]


def _adamw(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.AdamW, lr=0.05, **options)


_LBFGS = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=3)

# --- complex and mixed parameters ------------------------------------------------------------------------------------


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: complex weights in a unit with real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4, 2, dtype=torch.complex64) / 4)
        self.skip = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x.T[None])
        mixed = torch.zeros_like(modes)
        mixed[..., :2] = torch.einsum("bix,iox->box", modes[..., :2], self.weight)
        return torch.fft.irfft(mixed, n=len(x))[0].T + self.skip(x)


class StateSpace(nn.Module):
    """Diagonal state space model (S4D): complex poles and a real step size."""

    def __init__(self) -> None:
        super().__init__()
        self.poles = nn.Parameter(-0.5 + 1j * torch.arange(4.0))
        self.out = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.step = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        kernel = 2 * (self.out @ torch.exp(self.poles[:, None] * self.step * torch.arange(size))).real
        spectrum = torch.fft.rfft(kernel, n=2 * size) * torch.fft.rfft(x.T, n=2 * size)
        return torch.fft.irfft(spectrum, n=2 * size)[:, :size].T


class Conjugated(nn.Module):
    """Complex weights only, which are conjugated and have an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return ((x.to(torch.complex64) @ self.weight.mH) @ self.weight).real.to(x.dtype)


class Doubles(nn.Module):
    """Weights in complex128, of which no dtype holds the bits of an element: trained, frozen, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex128) / 2)
        self.poles = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.fixed = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x.to(torch.complex128) @ self.weight.mH @ self.weight) * self.poles
        return (mixed + (self.fixed @ self.fixed.mH).sum()).real.to(x.dtype)


class Halves(nn.Module):
    """A projection in bfloat16 and a norm in float32, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.norm = nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.projection(x.bfloat16()).float())


class Net(nn.Module):
    def __init__(self, unit: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(unit() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def _compiled_step(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if isinstance(model, torch.distributed.fsdp.FSDPModule):
        step = graphshard.compile_step(model, optimizer)
    else:

        def step(x: Tensor) -> None:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

    for seed in range(2):
        step(_rows(seed))
    return parameters(model)


def _accumulated(model: nn.Module) -> list[Tensor | None]:
    for seed in range(2):
        (model(_rows(seed)) / 2).backward()
    return gradients(model)


def _numbers(rank: int, world_size: int, units: list[Callable[[], nn.Module]], train: Callable[..., Any]) -> None:
    for unit in units:
        build = functools.partial(Net, unit)
        assert_equal(on_graphshard(build, train), on_plain_torch(build, train))


_COMPLEX = [Spectral, StateSpace, Conjugated, Doubles]


@pytest.mark.parametrize(
    ("units", "train"),
    [
        (_COMPLEX, functools.partial(_train, _adamw())),
        ([Conjugated], functools.partial(_train, _LBFGS)),
        ([Spectral], _compiled_step),
        ([Spectral], _accumulated),
        ([Halves], functools.partial(_train, _adamw())),
        ([Halves], functools.partial(_train, _adamw(fused=True))),
        ([Halves], _compiled_step),
    ],
    ids=["complex", "LBFGS", "compiled step", "accumulated", "mixed", "mixed fused", "mixed compiled step"],
)
@pytest.mark.quick_cases("complex", "mixed")
def test_complex_and_mixed_parameters(ranks: Ranks, units: list[Callable[[], nn.Module]], train: Any) -> None:
    """FSDP2: "FSDP expects uniform original parameter dtype"."""
    ranks(2).run(_numbers, units, train)


def _in_bfloat16(rank: int, world_size: int) -> None:
    """mp_policy leaves complex parameters as they are; FSDP2 casts them to real numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if world_size == 4 else world_mesh()
    found = []
    for policy in (MixedPrecisionPolicy(), BF16):
        torch.manual_seed(0)
        model = graphshard.compile(Net(Conjugated), mesh, backend="eager", mp_policy=policy)
        model(_rows(0)).backward()
        assert model.layers[0].weight.grad.dtype == torch.complex64
        found.append([full(each) for each in gradients(model) if each is not None])
    for exact, rounded in zip(*found):
        torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.01)
    torch.manual_seed(0)
    plain = Net(Conjugated)
    plain(_rows(0)).backward()
    assert_equal(found[0], gradients(plain))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_mixed_precision_of_complex_parameters(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(_in_bfloat16)


def _vector(model: nn.Module) -> list[Tensor]:
    loss = model(_rows(0))
    loss.backward()
    return [loss, parameters_to_vector(model.parameters()), parameters_to_vector(gradients(model))]


def _vectors(rank: int, world_size: int) -> None:
    build = functools.partial(Net, lambda: nn.Linear(4, 4))
    assert_equal(on_graphshard(build, _vector), on_plain_torch(build, _vector))
    train = functools.partial(_train, functools.partial(_LBFGS, line_search_fn="strong_wolfe"))
    assert_equal(on_graphshard(build, train), on_plain_torch(build, train))


def test_vectors_of_parameters(ranks: Ranks) -> None:
    """`parameters_to_vector`, as second-order optimizers flatten parameters, and LBFGS with a line search."""
    ranks(2).run(_vectors)


# --- ranks that take other branches ----------------------------------------------------------------------------------


class Multimodal(nn.Module):
    """Runs a vision tower if there are images, or if their values say so."""

    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.reads_values = reads_values
        self.vision = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        if images is not None and (not self.reads_values or (images != 0).any()):
            x = x + self.vision(images)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


_UNITS = ["vision", "layers.*"]


def _first_call(rank: int) -> None:
    model = graphshard.compile(Multimodal(), world_mesh(), backend="eager", units=_UNITS)
    model(_rows(0), _rows(1) if rank == 0 else None).backward()


def _known_programs(rank: int) -> None:
    model = graphshard.compile(Multimodal(), world_mesh(), backend="eager", units=_UNITS)
    for images in (_rows(1), None, _rows(1) if rank == 0 else None):
        model(_rows(0), images).backward()


def _values(rank: int) -> None:
    model = graphshard.compile(Multimodal(reads_values=True), world_mesh(), backend="eager", units=_UNITS)
    for factor in (1, 0, rank):
        model(_rows(0), _rows(1) * factor).backward()


def _values_for_the_root(rank: int) -> None:
    model = graphshard.compile(Multimodal(reads_values=True), world_mesh(), backend="eager", units=["layers.*"])
    for factor in (1, 0, rank):
        model(_rows(0), _rows(1) * factor).backward()


def _no_backward(rank: int) -> None:
    model = graphshard.compile(Multimodal(), world_mesh(), backend="eager", units=_UNITS)
    model(_rows(0)).backward()
    loss = model(_rows(0))
    if rank == 0:
        loss.backward()
    model(_rows(0))


def _differs(rank: int, world_size: int, run: Callable[[int], None]) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(DivergenceError) as raised:
        run(rank)
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (_first_call, r"made a different program.*\n.*gather"),
        (_known_programs, r"runs forward of Multimodal \(gather: 4\).*They first differ.* gather vision\.0\.weight"),
        (_values, r"runs forward of Sequential-vision.*runs forward of Linear-layers\.0|layers\.0.*vision"),
        (_values_for_the_root, r"runs backward of Linear-layers\.0 .*They first differ at collective 0: "),
        (_no_backward, r"runs backward of Multimodal.*runs forward of Multimodal|forward.*backward"),
    ],
    ids=["first call", "known programs", "values", "values for the root", "no backward"],
)
@pytest.mark.quick_cases("known programs", "values for the root")
def test_ranks_that_take_other_branches(ranks: Ranks, run: Callable[[int], None], message: str) -> None:
    """As batches of only text on one rank. With FSDP2, gloo ends the process, and NCCL waits."""
    for text, seconds in ranks(2).run(_differs, run):
        assert re.search(message, text), text
        assert seconds < 60  # of capture; the difference is found at once


# --- notebooks -------------------------------------------------------------------------------------------------------


_BIND = "graphshard.module.runner.Runner._bind"
_TRACE = "graphshard.frontend.dynamo_capture.fullgraph_capture"


def _interrupted(rank: int, world_size: int, name: str, on_ranks: list[int]) -> None:
    real, calls = pkgutil.resolve_name(name), []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 1 and rank in on_ranks:
            previous = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            finally:
                signal.signal(signal.SIGINT, previous)
        return real(*args, **kwargs)

    def train(model: nn.Module) -> list[Tensor | None]:
        loss = model(_rows(0))
        loss.backward()
        return [loss, *gradients(model)]

    def interrupted(model: nn.Module) -> list[Tensor | None]:
        start = time.monotonic()
        with mock.patch(name, interrupt), pytest.raises((KeyboardInterrupt, PeerError)) as caught:
            model(_rows(0))
        if rank not in on_ranks:
            assert re.search(r"rank 0 makes a program of Net .*failed: KeyboardInterrupt", str(caught.value)), caught
        assert time.monotonic() - start < 30  # of capture; the others know within seconds
        check_modes()
        return train(model)

    build = functools.partial(Net, lambda: nn.Linear(4, 4))
    assert_equal(on_graphshard(build, interrupted), on_plain_torch(build, train))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        _TRACE,
        "graphshard.frontend._joint_graph.aot_export_joint_with_descriptors",
        _BIND,
    ],
    ids=["trace", "joint graph", "binding"],
)
@pytest.mark.quick_cases("trace-1", "joint graph-2")
def test_an_interrupt_while_capturing(ranks: Ranks, name: str, world_size: int) -> None:
    """Ctrl-C in the first call of a notebook: the next call works."""
    ranks(world_size).run(_interrupted, name, list(range(world_size)))


@pytest.mark.parametrize("name", [_TRACE, _BIND], ids=["trace", "binding"])
def test_an_interrupt_of_one_rank(ranks: Ranks, name: str) -> None:
    """The other ranks get an error, also when all have agreed on the program; the next call works on all."""
    ranks(2).run(_interrupted, name, [0])


_CELL = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return torch.tanh(self.linear(x)) + ADDED

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if DECIDES:
            x = -x
        return x.square().mean()
"""


def _run_cell(added: str, decides: str, *, source: bool) -> Callable[[], nn.Module]:
    text = _CELL.replace("ADDED", added).replace("DECIDES", decides)
    file = f"/tmp/ipykernel_1/{abs(hash((added, decides)))}.py" if source else "<string>"
    if source:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = sys.modules.setdefault("notebook", types.ModuleType("notebook")).__dict__
    names |= {"nn": nn, "torch": torch}
    exec(compile(text, file, "exec"), names)
    return names["Cell"]


def _cells(rank: int, world_size: int, source: bool) -> None:
    def train(model: nn.Module) -> list[Tensor | None]:
        return _train(_adamw(), model)

    for added, decides in (("0", "False"), ("1", "False"), ("1", "x.sum() > 0")):
        cell = _run_cell(added, decides, source=source)
        assert_equal(on_graphshard(cell, train), on_plain_torch(cell, train))
    refused = graphshard.compile(cell(), world_mesh(), backend="eager", fullgraph=True)
    where = r"ipykernel_1/\d+\.py:\d+\n? *.*if x\.sum\(\) > 0" if source else r"Data-dependent|data-dependent"
    with pytest.raises(graphshard.errors.CaptureError, match=where):
        refused(_rows(0))


@pytest.mark.parametrize("source", [False, True], ids=["no source", "notebook"])
def test_cells_that_are_run_again(ranks: Ranks, source: bool) -> None:
    """Classes of one name, each time with another forward, from `exec` or a notebook's cell."""
    ranks(1).run(_cells, source)
