"""Settings of torch that forward asks for, or that attention goes by, are part of what a program was captured for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import flash_sdp_enabled
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphshard
from graphshard.ir.errors import CaptureError


class _Net(nn.Module):
    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * len(str(self.ask()))
        return y


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).view(2, 64, 4, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)


# What asks, what changes the answer, and what changes it back.
Change = Callable[[], Any]
ASKED: dict[str, tuple[Callable[[], Any], Change, Change]] = {
    "deterministic": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "precision": (
        lambda: torch.get_float32_matmul_precision(),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "attention, by name": (
        lambda: flash_sdp_enabled(),
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
    "fast path": (
        lambda: torch.backends.mha.get_fastpath_enabled(),
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        lambda: torch.backends.mha.set_fastpath_enabled(True),
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_change_takes_effect_and_going_back_finds_the_program(mesh: DeviceMesh, name: str) -> None:
    ask, change, back = ASKED[name]
    plain = _Net(ask)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x, numbers = torch.randn(2, 4), []
    try:
        for step in (back, change, back):
            step()
            numbers.append(plain(x).sum().item())
            assert torch.equal(ours(x), plain(x))
    finally:
        back()
    assert len(set(numbers)) == 2
    assert len(graphshard.programs(ours)) == 2
    assert "torch." in graphshard.programs(ours)[1].reason


def _bits(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    grad = next(model.parameters()).grad
    return y, grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def test_attention_of_another_kernel(mesh: DeviceMesh) -> None:
    """The kernel of the first call was every call's, with other bits."""
    torch.manual_seed(0)
    plain = _Attention()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = torch.randn(2, 64, 16)
    first = _bits(plain, x)
    assert all(map(torch.equal, _bits(ours, x), first))  # type: ignore[arg-type]
    with sdpa_kernel([SDPBackend.MATH]):
        expected = _bits(plain, x)
        assert not torch.equal(expected[0], first[0])
        assert all(map(torch.equal, _bits(ours, x), expected))  # type: ignore[arg-type]
    assert all(map(torch.equal, _bits(ours, x), first))  # type: ignore[arg-type]
    programs = graphshard.programs(ours)
    assert len(programs) == 2
    assert "the kernels of attention was" in programs[1].reason


def test_a_file_has_the_kernel_of_its_export(mesh: DeviceMesh, tmp_path: Path) -> None:
    """It runs where others may be chosen, and a call that chooses others is told."""
    torch.manual_seed(0)
    model, x = _Attention(), torch.randn(2, 64, 16)
    path = tmp_path / "model.gshard"
    with sdpa_kernel([SDPBackend.MATH]):
        expected = model(x)
        graphshard.export(copy.deepcopy(model), (1,), path, example_inputs=(x,), backend="eager")
    loaded = graphshard.load(path, copy.deepcopy(model), mesh)
    assert torch.equal(loaded(x), expected)


SETS: dict[str, Callable[[], Any]] = {
    "set_num_threads": lambda: torch.set_num_threads(torch.get_num_threads()),
    "use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(False),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("highest"),
    "set_default_dtype": lambda: torch.set_default_dtype(torch.float32),
}


@pytest.mark.parametrize("name", SETS)
def test_setting_one_is_an_error_that_names_the_line(mesh: DeviceMesh, name: str) -> None:
    """The capture set it, and no call."""
    model = graphshard.compile(_Net(SETS[name]), mesh, backend="eager")
    line = SETS[name].__code__.co_firstlineno
    with pytest.raises(CaptureError, match=rf"test_torch_settings.py:{line}\n(.*\n)+.*torch.{name}"):
        model(torch.ones(2, 4))


# What forward leaves on or off, and around which call that is another state.
LEFT: dict[str, tuple[Callable[[], Any], bool]] = {
    "gradients off": (lambda: torch.set_grad_enabled(False), True),
    "gradients on": (lambda: torch.set_grad_enabled(True), False),
    "autocast of cpu on": (lambda: torch.set_autocast_enabled("cpu", True), True),
}


@pytest.mark.parametrize("name", LEFT)
def test_modes_that_forward_leaves(mesh: DeviceMesh, name: str) -> None:
    """Calls behind the first found gradients as they were before, silently."""
    switch, grad = LEFT[name]
    ours = graphshard.compile(_Net(switch), mesh, backend="eager")
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(CaptureError, match=f"_Net.forward: it leaves {name}, which only the capture would. Switch in a"),
    ):
        ours(torch.ones(2, 4))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_modes_that_forward_switches_back(mesh: DeviceMesh) -> None:
    def switch() -> str:
        with torch.no_grad(), torch.autocast("cpu"):
            inner = torch.is_grad_enabled()
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        torch.set_grad_enabled(before)
        return f"{inner} {before}"

    plain = _Net(switch)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    assert torch.equal(ours(torch.ones(2, 4)), plain(torch.ones(2, 4)))
