"""Inputs that are no tensors: each value has a program of its own."""

from __future__ import annotations

import copy
import enum
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import ArtifactError, InputError


class _Mode(enum.Enum):
    FIRST, SECOND = "first", "second"


class _Flag(enum.Flag):
    LEFT, RIGHT = 1, 2


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: Any = None) -> Any:
        y = self.linear(x)
        match given:
            case torch.dtype():
                return y.to(given)
            case slice() | range():
                return y[given] if isinstance(given, slice) else y[list(given)]
            case _Mode():
                return y * len(given.value)
            case torch.memory_format() | torch.layout() | torch.device():
                return y * len(str(given))
            case float() | np.number():
                return y.relu() * given
            case np.bool_():
                return y if given else -y
        return y * len(repr(given))


def _x() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


# Values of one kind, which are told apart.
KINDS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float64, torch.bfloat16),
    "device": (torch.device("cpu"), torch.device("meta", 1)),
    "layout": (torch.strided, torch.sparse_coo),
    "memory format": (torch.channels_last, torch.preserve_format),
    "slice": (slice(0, 2), slice(0, 3), slice(None, None, 2)),
    "complex": (1j, 1 + 1j, complex(0.0, -1.0), complex(-0.0, -1.0)),
    "enum": (_Mode.FIRST, _Mode.SECOND),
    "flag": (_Flag.LEFT, _Flag.LEFT | _Flag.RIGHT),
    "range": (range(2), range(1, 3)),
    "bytes": (b"a", b"abc"),
    "ellipsis": (...,),
    "zeros": (0.0, -0.0, 0.0),
    "nan": (math.nan, -math.nan),
    "float32 of numpy": (np.float32(3), np.float32(0.1), np.float32(-0.0), np.float32(0.0)),
    "float64 of numpy": (np.float64(3), np.float64(-0.0), np.float64(0.0), np.float64("nan")),
    "integer of numpy": (np.int64(3), np.int32(3), np.uint8(4)),
    "truth value of numpy": (np.bool_(True), np.bool_(False)),
}
IN_FILES = ("dtype", "layout", "memory format", "slice", "complex", "zeros", "nan")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and repr(one.tolist()) == repr(other.tolist())  # -0.0 and nan count


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_told_apart(mesh: DeviceMesh, kind: str) -> None:
    """Most were refused; 0.0 and -0.0 had one program, that of the first, silently."""
    plain = _Net()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for value in (*KINDS[kind], *KINDS[kind]):
        assert _same(ours(_x(), value), plain(_x(), value)), value
    assert len(graphshard.programs(ours)) == len({repr(value) for value in KINDS[kind]})


@pytest.mark.parametrize("kind", IN_FILES)
def test_files_hold_them(mesh: DeviceMesh, kind: str, tmp_path: Path) -> None:
    plain, values = _Net(), KINDS[kind]
    calls = [graphshard.Call((_x(), value), grad=False) for value in values]
    path = graphshard.export(plain, (1,), tmp_path / "net.gshard", calls=calls, backend="eager")
    loaded = graphshard.load(path, copy.deepcopy(plain), mesh)
    with torch.no_grad():
        for value in values:
            assert _same(loaded(_x(), value), plain(_x(), value)), value
    with torch.no_grad(), pytest.raises(ArtifactError, match="input"):
        loaded(_x(), "another")


@pytest.mark.parametrize("value", [_Mode.FIRST, b"a", range(2), np.float32(3), np.float64(3)])
def test_what_no_file_holds(mesh: DeviceMesh, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "net.gshard"
    what = r"an input of the call is .*, of type \w+, which no file can hold\. Pass a number"
    with pytest.raises(ArtifactError, match=what):
        graphshard.export(_Net(), (1,), path, example_inputs=(_x(), value), backend="eager")
    assert not path.exists()


def test_an_array_of_numpy(mesh: DeviceMesh) -> None:
    """The remedy was to register its class."""
    ours = graphshard.compile(_Net(), mesh, backend="eager")
    for array in (np.ones(3), np.array(3.0)):
        with pytest.raises(InputError, match=r"input args\[1\] is a ndarray, .* Pass torch\.from_numpy\(array\)"):
            ours(_x(), array)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).relu() * self.scale
        return y


def test_attributes_that_are_zeros(mesh: DeviceMesh) -> None:
    """-0.0 was taken for 0.0."""
    plain = _Scaled()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for scale in (0.0, -0.0, math.nan, math.nan, 0.0, -0.0):
        plain.scale = ours.scale = scale
        assert _same(ours(_x()), plain(_x())), scale
