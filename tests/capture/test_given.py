"""What forward does to what it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError, InputError


class _Net(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self.linear, *args)


def _appends(linear: nn.Module, x: Tensor, kept: list[Tensor]) -> Tensor:
    y: Tensor = linear(x)
    kept.append(y)
    return y.sum()


def _counts(linear: nn.Module, state: dict[str, Any]) -> Tensor:
    state["calls"] += 1
    return linear(state["x"]).sum()


@pytest.mark.parametrize(
    ("body", "given"), [(_appends, (torch.ones(2, 4), [])), (_counts, ({"x": torch.ones(2, 4), "calls": 0},))]
)
def test_a_list_or_dict_that_forward_changes(
    mesh: DeviceMesh, body: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    """It was left as it was, silently."""
    model = graphshard.compile(_Net(body), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"it changes a list or dict that it is given.* Return what it adds"):
        model(*given)


def test_a_gradient_of_a_tensor_that_is_given_twice(mesh: DeviceMesh) -> None:
    plain = _Net(lambda linear, x, y: (linear(x) * y).sum())
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    grads = []
    for model in (plain, ours):
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        model(x, x).backward()
        grads.append(x.grad)
    assert grads[0] is not None
    assert torch.equal(*grads)


def _writes(linear: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    result: Tensor = linear(y).sum()
    return result


def test_inputs_that_share_memory_which_forward_writes(mesh: DeviceMesh) -> None:
    """A program reads both before it writes."""
    model = graphshard.compile(_Net(_writes), mesh, backend="eager")
    both = torch.ones(3, 4)
    for x, y in ((both[:2], both[1:]), (both[:2], both[:2])):
        with pytest.raises(InputError, match=r"inputs 0 and 1 of the call share memory, and forward writes to input 0"):
            model(x, y)
    assert both.sum() == 12


def test_parts_of_one_tensor_that_do_not_overlap(mesh: DeviceMesh) -> None:
    plain = _Net(_writes)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    batches = [torch.ones(2, 2, 4) for _ in range(2)]
    assert torch.equal(plain(*batches[0]), ours(*batches[1]))
    assert torch.equal(*batches)
    assert torch.equal(plain(torch.ones(2, 4), torch.ones(2, 4)), ours(torch.ones(2, 4), torch.ones(2, 4)))
    assert len(graphshard.programs(ours)) == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_input(mesh: DeviceMesh, layout: torch.layout) -> None:
    """It was an error of torch's about strides."""
    model = graphshard.compile(_Net(lambda linear, x: linear(x.to_dense())), mesh, backend="eager")
    with pytest.raises(InputError, match=rf"input args\[0\] has the layout {layout}, .*Pass its parts"):
        model(torch.ones(2, 4).to_sparse(layout=layout))
