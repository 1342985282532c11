"""Sizes that depend on values and are found out where they are used: counts beside scores, a slice of known length."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import graphshard
from graphshard.ir.errors import InputError, PassError
from graphshard.ir.graph import aten
from graphshard.pipeline.verify import verify
from tests.helpers import captured

Forward = Callable[[Tensor, Tensor], Tensor]


class _Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = forward

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return self.then(self.linear(x), numbers)


def _ctc(y: Tensor, numbers: Tensor) -> Tensor:
    scores = y.reshape(6, 1, 4).log_softmax(-1)
    return F.ctc_loss(scores, torch.tensor([[1, 2]]), torch.tensor([6]), numbers[:1].clamp(1, 2))


NETS: dict[str, Forward] = {
    "bincount": lambda y, n: y * torch.bincount(n.abs(), minlength=4),
    "narrow": lambda y, n: y.narrow(0, n[0], 2),
    "narrow by a number": lambda y, n: y.narrow(0, n[0].item(), 2) * torch.ones(2, 1),
    "slice": lambda y, n: y[: n[0].item()] * torch.ones(2, 1),
    "slice from": lambda y, n: y[n[0].item() : n[0].item() + 2] * torch.ones(2, 1),
    "index": lambda y, n: y[:3][n != n[1]] * torch.ones(2, 1),
    "two": lambda y, n: y[:3][n != n[0]] + y[:3][n != n[1]],
    "matrix times vector": lambda y, n: y[:3][n != n[0]] @ torch.ones(4),
    "ctc_loss": _ctc,
}
# Of each, numbers that are right, and some that are errors in eager mode, or broadcast.
RIGHT: dict[str, tuple[list[int], ...]] = {
    "bincount": ([0, 1, 3], [0, 0, 0]),
    "narrow": ([0, 0, 0], [4, 0, 0], [-6, 0, 0]),
    "narrow by a number": ([0, 0, 0], [4, 0, 0], [-2, 0, 0]),
    "slice": ([2, 0, 0], [-4, 0, 0]),
    "slice from": ([1, 0, 0], [-3, 0, 0]),
    "index": ([0, 1, 2], [0, 1, 0]),
    "two": ([1, 2, 3], [1, 1, 3]),
    "matrix times vector": ([0, 1, 2], [0, 1, 0], [0, 0, 0]),
    "ctc_loss": ([2, 0, 0], [1, 0, 0]),
}
WRONG = {
    "narrow": [5, 0, 0],
    "narrow by a number": [-7, 0, 0],
    "slice": [1, 0, 0],
    "slice from": [5, 0, 0],
    "index": [0, 0, 1],
}


def _step(model: nn.Module, x: Tensor, numbers: list[int]) -> tuple[Tensor, Any]:
    y = model(x, torch.tensor(numbers))
    y.square().sum().backward()
    grad: Any = model.get_parameter("linear.weight").grad
    return y, getattr(grad, "full_tensor", lambda: grad)()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.filterwarnings("ignore:Inductor cannot compile")
def test_as_in_eager_mode(mesh: DeviceMesh, name: str, backend: Any) -> None:
    """Most were errors of graphshard's own rules: another run of the operator does not know the size.

    That of the product was the partitioner's: backward reads the size of a tangent.
    """
    torch.manual_seed(0)
    plain = _Net(NETS[name])
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend=backend)
    exactly = {"rtol": 0.0, "atol": 0.0} if backend == "eager" else {}
    for numbers in RIGHT[name]:
        x = torch.randn(6, 4)
        torch.testing.assert_close(_step(ours, x, numbers), _step(plain, x, numbers), **exactly)
    assert len(graphshard.programs(ours)) == 1


@pytest.mark.parametrize("name", WRONG)
def test_other_sizes(mesh: DeviceMesh, name: str) -> None:
    """They were computed with, where a program was made, with a shorter slice or other memory."""
    ours = graphshard.compile(_Net(NETS[name]), mesh, backend="eager")
    ours(torch.ones(6, 4), torch.tensor(RIGHT[name][0]))
    what = (
        "forward raises an exception"
        if name.startswith("narrow")
        else "what is made has another size than where it is used"
    )
    with pytest.raises(InputError, match=rf"{what}.* for these inputs at .*test_found_sizes.py:\d+: "):
        ours(torch.ones(6, 4), torch.tensor(WRONG[name]))


def test_what_contradicts_an_operator() -> None:
    """Sizes that no run of it could have are still found."""
    program = captured(_Net(NETS["bincount"]), (torch.ones(6, 4), torch.tensor([0, 1, 3])))
    (count,) = program.phases["joint"].module.graph.find_nodes(op="call_function", target=aten.bincount.default)
    for wrong in (count.meta["val"].float(), count.meta["val"].reshape(2, 2)):
        count.meta["val"] = wrong
        with pytest.raises(PassError, match=r"bincount is said to be .*, its operator makes i64\[u\d+\]"):
            verify(program, "my-pass")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore:Inductor cannot compile")
def test_one_hot_without_a_number_of_classes(mesh: DeviceMesh, backend: Any) -> None:
    """The advice was to say something with torch._check, which changed nothing."""
    torch.manual_seed(0)
    plain = _Net(lambda y, n: y[:3, : F.one_hot(n).shape[1]] * F.one_hot(n)[:, :4])
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend=backend)
    for numbers in ([0, 1, 3], [1, 0, 1], [2, 2, 0]):
        x = torch.randn(6, 4)
        torch.testing.assert_close(_step(ours, x, numbers), _step(plain, x, numbers))
    with pytest.raises(
        InputError, match=r"forward raises an exception for these inputs at .*test_found_sizes.py:\d+: "
    ):
        ours(torch.ones(6, 4), torch.tensor([-1, 0, 2]))
