"""What forward asks of inputs, parameters and buffers besides shapes and values, and what it sets on them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError


class _Net(nn.Module):
    def __init__(self, ask: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        factor = 3 if self.ask(self, x) else 2
        y: Tensor = self.linear(x) * factor
        return y


def _x(*, requires_grad: bool = False) -> Tensor:
    return torch.arange(8.0).view(2, 4).requires_grad_(requires_grad)


def _tagged(**attributes: Any) -> Tensor:
    x = _x()
    for name, value in attributes.items():
        setattr(x, name, value)
    return x


def _bump(tensor: Tensor, name: str) -> bool:
    setattr(tensor, name, 3)
    return True


# What is asked of an input, and of which.
REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], Tensor]]] = {
    "grad": (lambda net, x: x.grad is None, _x),
    "_version": (lambda net, x: x._version == 0, _x),
    "is_leaf": (lambda net, x: x.is_leaf, lambda: _x(requires_grad=True)),
    "grad_fn": (lambda net, x: x.grad_fn is None, lambda: _x(requires_grad=True)),
    "retains_grad": (lambda net, x: x.retains_grad, lambda: _x(requires_grad=True) * 1),
    "retain_grad": (lambda net, x: x.retain_grad(), lambda: _x(requires_grad=True) * 1),
    "output_nr": (lambda net, x: x.output_nr, lambda: _x(requires_grad=True) * 1),
    "_base": (lambda net, x: x._base is None, _x),
    "_is_view": (lambda net, x: x._is_view(), _x),
    "storage_offset": (lambda net, x: x.storage_offset(), _x),
    "storage_offset, of a view": (lambda net, x: x[1:].storage_offset(), _x),
    "untyped_storage": (lambda net, x: x.untyped_storage().nbytes() > 16, _x),
    "is_shared": (lambda net, x: x.is_shared(), _x),
    "is_pinned": (lambda net, x: x.is_pinned(), _x),
    "attribute mask": (lambda net, x: hasattr(x, "mask"), lambda: _tagged(mask=torch.ones(4))),
    "attribute tag": (lambda net, x: getattr(x, "tag", 0), lambda: _tagged(tag=1)),
    "data is set": (lambda net, x: _replace(x), _x),
    "grad is set": (lambda net, x: _grade(x), _x),
    "id": (lambda net, x: id(x) in {1}, _x),
    "tag is set": (lambda net, x: _bump(x, "tag"), _x),
    "tag is set, of a parameter": (lambda net, x: _bump(net.linear.weight, "tag"), _x),
    "tag is set, of a buffer": (lambda net, x: _bump(net.scale, "tag"), _x),
}


def _replace(x: Tensor) -> bool:
    x.data = x.data * 2
    return True


def _grade(x: Tensor) -> bool:
    x.grad = torch.ones_like(x)
    return True


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_line(mesh: DeviceMesh, name: str) -> None:
    """Each was answered as at the capture, or lost, silently."""
    ask, make = REFUSED[name]
    model = graphshard.compile(_Net(ask), mesh, backend="eager")
    line = ask.__code__.co_firstlineno
    what = re.escape(name.partition(",")[0])
    where = r"\d+" if name in ("data is set", "grad is set") or name.startswith("tag is set") else str(line)
    with pytest.raises(
        CaptureError, match=rf"_Net.forward at {re.escape(__file__)}:{where}\n(.*\n)+.*{what}"
    ) as caught:
        model(make())
    assert "pass the answer into it as an argument" in str(caught.value)


ANSWERED: dict[str, Callable[..., Any]] = {
    "no gradient is required": lambda net, x: x.is_leaf and x.grad_fn is None,
    "of what forward makes": lambda net, x: net.linear(x).grad_fn is not None and not net.linear(x).is_leaf,
    "attributes that are not there": lambda net, x: hasattr(x, "mask"),
    "what forward sets on what it makes": lambda net, x: _bump(net.linear(x), "tag"),
    "type of a tensor": lambda net, x: type(x) is torch.Tensor,
    "type of what forward makes": lambda net, x: type(net.linear(x)) == torch.Tensor,  # noqa: E721
    "type of a parameter": lambda net, x: type(net.linear.weight) is nn.Parameter,
    "types of others": lambda net, x: isinstance(type(net), type) and type(net) is _Net and issubclass(type, type),
    "a type": lambda net, x: isinstance(int, type) and type is type and type(type) is type,
    "a type that is made": lambda net, x: type("Made", (), {"a": 1}).a,  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", ANSWERED)
def test_answered_as_in_eager_mode(mesh: DeviceMesh, name: str) -> None:
    plain = _Net(ANSWERED[name])
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for _ in range(2):
        assert torch.equal(ours(_x()), plain(_x()))


def test_a_parameter_is_one(mesh: DeviceMesh) -> None:
    """Of inputs that require no gradient; FSDP2 gives forward views of others, which are none."""
    plain = _Net(lambda net, x: isinstance(x, nn.Parameter))
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for x in (_x(), nn.Parameter(_x(), requires_grad=False), _x()):
        assert torch.equal(ours(x), plain(x))


def test_an_attribute_that_is_set_later(mesh: DeviceMesh) -> None:
    """A tensor with other attributes than that of the capture is captured anew; who does not ask is not disturbed."""
    asks = graphshard.compile(_Net(lambda net, x: getattr(x, "tag", 0)), mesh, backend="eager")
    asks(_x())
    with pytest.raises(CaptureError, match="the attribute tag"):
        asks(_tagged(tag=1))
    silent = _Net(lambda net, x: 0)
    ours = graphshard.compile(copy.deepcopy(silent), mesh, backend="eager")
    for x in (_x(), _tagged(tag=1), _tagged(tag=2)):
        assert torch.equal(ours(x), silent(x))
    assert [program.reason for program in graphshard.programs(ours)] == [
        "first call",
        "attributes were set on inputs, or an input is an nn.Parameter and was none",
    ]


@pytest.mark.parametrize(
    "reshape",
    [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(1, 4)],
    ids=["t_", "unsqueeze_", "resize_"],
)
def test_an_input_that_is_reshaped_in_place(mesh: DeviceMesh, reshape: Callable[[Tensor], Tensor]) -> None:
    """It was an error of the first call's end, or lost."""
    model = graphshard.compile(_Net(lambda net, x: reshape(x) is None), mesh, backend="eager")
    with pytest.raises(CaptureError, match="it changes the shape or strides of input 0 in place"):
        model(torch.ones(4, 4))


def test_a_view_that_is_reshaped_in_place(mesh: DeviceMesh) -> None:
    plain = _Net(lambda net, x: x[:1].unsqueeze_(0).shape[0] == 1)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    assert torch.equal(ours(_x()), plain(_x()))


def test_hooks_may_be_registered(mesh: DeviceMesh) -> None:
    """Torch sets attributes for that."""
    plain = _Net(lambda net, x: x.register_hook(lambda grad: grad * 5) is None)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    grads = []
    for model in (plain, ours):
        x = _x(requires_grad=True)
        model(x).sum().backward()
        grads.append(x.grad)
    assert grads[0] is not None
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", ["scale", "linear.weight", "freqs"])
def test_an_attribute_that_somebody_sets_later(mesh: DeviceMesh, name: str) -> None:
    """It was not noticed that a tensor of a module has one, and forward went on without."""
    owner, _, key = name.rpartition(".")
    model = _Net(lambda net, x: hasattr(getattr(net.get_submodule(owner), key), "tag"))
    model.freqs = torch.ones(4)
    ours = graphshard.compile(model, mesh, backend="eager")
    ours(_x())
    ours(_x())
    assert len(graphshard.programs(ours)) == 1
    getattr(ours.get_submodule(owner), key).tag = 1
    with pytest.raises(CaptureError, match=r"\(the attribute tag\)"):
        ours(_x())


def test_an_attribute_of_a_buffer_that_is_exchanged(mesh: DeviceMesh) -> None:
    ours = graphshard.compile(_Net(lambda net, x: hasattr(net.scale, "tag")), mesh, backend="eager")
    ours(_x())
    ours.scale = torch.ones(4)
    ours(_x())
    assert len(graphshard.programs(ours)) == 1
    ours.scale.tag = 1
    with pytest.raises(CaptureError, match=r"\(the attribute tag\)"):
        ours(_x())


def test_ids_of_parameters_and_buffers(mesh: DeviceMesh) -> None:
    """They are those that are seen outside of the call."""
    ours = graphshard.compile(
        _Net(lambda net, x: {id(net.scale), id(net.linear.weight)} == net.known), mesh, backend="eager"
    )
    ours.known = {id(ours.scale), id(ours.linear.weight)}
    plain = _Net(lambda net, x: True)
    plain.linear.load_state_dict({name: t.full_tensor() for name, t in ours.linear.state_dict().items()})
    assert torch.equal(ours(_x()), plain(_x()))
