"""Tensors that forward makes of numbers on a GPU that is not here are constants of the program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphshard
from graphshard.artifact.members import read_artifact
from graphshard.ir.driver_internals import stand_in
from graphshard.ir.printer import print_program
from tests import helpers

pytest.importorskip("cffi")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU"),
]

Function = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.ones(4)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.w).sum()


def _twice(x: torch.Tensor) -> torch.Tensor:
    made = torch.tensor([1.0, 2, 3, 4], device=x.device)
    return x * made + made


MAKING: dict[str, tuple[Function, list[Any]]] = {
    "indices": (lambda x: x[torch.tensor([0, 2], device=x.device)], [0, 2]),
    "of another dtype": (lambda x: x * torch.tensor([1, 2, 3, 4], device=x.device, dtype=torch.float16), [1, 2, 3, 4]),
    "as_tensor": (lambda x: x * torch.as_tensor([4.0, 3, 2, 1], device=x.device), [4, 3, 2, 1]),
    "new_tensor": (lambda x: x * x.new_tensor([4, 3, 2, 1]), [4, 3, 2, 1]),
    "read twice": (_twice, [1, 2, 3, 4]),
    "written": (lambda x: torch.tensor([1.0, 2, 3, 4], device=x.device).add_(1) * x, [1, 2, 3, 4]),
}


@pytest.mark.parametrize(("function", "values"), MAKING.values(), ids=MAKING)
def test_as_where_the_device_is(function: Function, values: list[Any]) -> None:
    """The program is the one that a CPU has, which has memory to make such a tensor in."""
    on_cpu = helpers.captured(Model(function), (torch.zeros(4),))
    with stand_in((9, 0)):
        program = helpers.captured(Model(function), (torch.zeros(4),), device=torch.device("cuda", 0))
    assert print_program(program).replace("cuda:0", "cpu").replace("cuda", "cpu") == print_program(on_cpu)
    (constant,) = program.constants.values()
    assert constant.tolist() == values
    devices = {node.meta["val"].device.type for node in program.phases["joint"].placeholders}
    assert devices == {"cuda"}


def test_what_is_made_of_traced_tensors_is_none() -> None:
    """`torch.tensor` of a value asks for the value, which is said as ever."""
    with stand_in((9, 0)), pytest.raises(graphshard.CaptureError, match="A tensor's value"):
        helpers.captured(Model(lambda x: x * torch.tensor([x.sum().detach()], device=x.device)), (torch.zeros(4),))


def test_a_file_has_the_values(tmp_path: Path) -> None:
    function, _ = MAKING["of another dtype"]
    given: dict[str, Any] = {"example_inputs": (torch.zeros(4),), "device": "cuda", "backend": "eager"}
    path = graphshard.export(Model(function), (2,), tmp_path / "x.gshard", **given)
    members = read_artifact(path).archive.members
    assert any(b'"dtype":"float16"' in code.replace(b" ", b"") for code in members.values())
