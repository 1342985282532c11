"""Constructs of forwards and of training loops match plain PyTorch in every step, or raise an error with the remedy."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.distributed.random_pieces import Saving
from tests.frontend.compared import Net, batch, verdict


class Base(Net):
    """Two units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def _leaf(step: int) -> Tensor:
    return batch(step).requires_grad_()


# --- tensor queries --------------------------------------------------------------------------------------------------


class AsksGrad(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.grad is None else 3)

    def inputs(self, step: int) -> tuple[Any, ...]:
        return (_leaf(step),)


class AsksGradOfParameter(AsksGrad):
    def forward(self, x: Tensor) -> Tensor:
        return Base.forward(self, x) * (2 if self.layers[0][0].weight.grad is None else 3)


class AsksLeaf(AsksGrad):
    def forward(self, x: Tensor) -> Tensor:
        return Base.forward(self, x) * (2 if x.is_leaf else 3)


class AsksPlace(AsksGrad):
    def forward(self, x: Tensor) -> Tensor:
        return Base.forward(self, x) * (2 if x.output_nr == 0 else 3)


class SetsData(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.data = x.data * 2
        return super().forward(x)


class LeavesGradientsOff(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch.set_grad_enabled(False)
        return x


class SetsDtype(Base):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float32)
        return super().forward(x)


class HookWrites(Base):
    def hook(self, grad: Tensor) -> None:
        self.seen.add_(grad)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(self.hook)
        return y * 1


# --- aliased tensors -------------------------------------------------------------------------------------------------


class HoldsParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.held = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.held[0]


class HoldsOtherParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.held[0]


class WritesInput(Base):
    """The input is the buffer itself in odd steps."""

    def inputs(self, step: int) -> tuple[Any, ...]:
        return (self.seen if step % 2 else batch(step),)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return super().forward(x + self.seen)


class WritesViewOfBuffer(WritesInput):
    def inputs(self, step: int) -> tuple[Any, ...]:
        return (self.seen[:] if step % 2 else batch(step),)


class Tagged(Tensor):
    """A tensor of a class of the user."""


class WritesPartOfInput(Base):
    """The inputs share memory in odd steps."""

    def inputs(self, step: int) -> tuple[Any, ...]:
        rows = torch.cat([batch(step), batch(step)])
        return rows[:3], (rows[1:4] if step % 2 else rows[3:]).as_subclass(Tagged)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return super().forward(x + y)


class HoldsViewOfBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.view = self.seen[:1]

    def __deepcopy__(self, memo: Any) -> Any:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: Tensor) -> Tensor:
        self.view.add_(1)
        return super().forward(x + self.seen)


class WritesItem(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.t()[1] = 3
        return super().forward(x)


# --- checkpoints -----------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A unit that counts its calls in a checkpoint, which is a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class SplitCheckpoint(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Checkpointed() for _ in range(2))

    forward = Base.forward


class GivenTwice(Base):
    """A reentrant region gets a tensor twice: the gradients of both are added."""

    def region(self, a: Tensor, b: Tensor) -> Tensor:
        return a.sin() * b + a.exp() + b.cos() * a + a.tanh() * b.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return checkpoint(self.region, x, x, use_reentrant=True)


class FunctionGivenTwice(Base):
    """Torch 2.11 loses one of the gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        a, b = Saving.apply(x, x)
        return a + b


class HooksOfTensors(Base):
    """Two hooks on one tensor, of which one reads another tensor; torch 2.11 traces them in no fixed order."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad / (1 + grad.norm()))
            y.register_hook(lambda grad: grad + x.detach())
        return y.tanh()


class NormInCheckpoint(AsksGrad):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(functools.partial(Base.forward, self), x, use_reentrant=False)


class NormInCheckpointedUnit(NormInCheckpoint):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            composable_checkpoint(layer)

    forward = Base.forward


# --- eager semantics ----------------------------------------------------------------------------------------------


class HooksComeAndGo(Base):
    def change(self, step: int) -> None:
        if step == 1:
            self.hooks = [
                self.layers[0].register_forward_hook(lambda module, args, result: result * 2),
                self.layers[1][0].register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
                self.register_forward_hook(lambda module, args, result: result + 1),
            ]
        elif step == 3:
            for hook in self.hooks:
                hook.remove()


class Modes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.batch_norm = nn.Dropout(0.5), nn.BatchNorm1d(4)

    def change(self, step: int) -> None:
        self.train(step != 1)
        self.drop.p = 0.1 * step
        self.layers[0].requires_grad_(step != 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(self.drop(super().forward(x)))


class Penalty(AsksGrad):
    """torch.autograd.grad does not read `.grad`."""

    def forward(self, x: Tensor) -> Any:
        y = Base.forward(self, x)
        return y, torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]


class AsksHistory(Base):
    """Of what is computed, and of a parameter, Dynamo knows it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (2 if y.grad_fn is None else 3) * (1 if self.layers[0][0].weight.grad_fn is None else 2)


class Functional(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.func.grad(lambda z: (z**3).sum())(x)


class Cache(Base):
    """The forward extends a dict of the caller."""

    def inputs(self, step: int) -> tuple[Any, ...]:
        if step == 0:
            _CACHE.clear()
        return batch(step), _CACHE

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        key = self.linear(x)
        cache["key"] = torch.cat([cache["key"], key]).detach() if "key" in cache else key.detach()
        return super().forward(x) + cache["key"].sum(0) + key


class Sizes(Base):
    """Empty batches and batches of one."""

    def inputs(self, step: int) -> tuple[Any, ...]:
        return (batch(step, [2, 0, 1, 5][step]),)


class Raises(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if x.shape[0] == 2:
            raise KeyError("two rows")
        return super().forward(x)

    def inputs(self, step: int) -> tuple[Any, ...]:
        return (batch(step, 3 if step != 1 else 2)[:, :4],)

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.seen.sum()


_CACHE: dict[str, Tensor] = {}
EQUAL = [
    SetsDtype,
    HookWrites,
    LeavesGradientsOff,
    SplitCheckpoint,
    HooksOfTensors,
    GivenTwice,
    FunctionGivenTwice,
    NormInCheckpoint,
    NormInCheckpointedUnit,
    HoldsOtherParameter,
    WritesInput,
    WritesItem,
    HooksComeAndGo,
    Modes,
    Penalty,
    AsksHistory,
    Functional,
    Cache,
    Sizes,
    Raises,
]
ERRORS = {
    AsksGrad: "(2 if x.grad is None else 3)\nIt asks for grad, which does not belong to the value of a tensor",
    AsksGradOfParameter: "It asks for grad, which does not belong to the value of a tensor",
    AsksLeaf: "It asks for is_leaf, which does not belong to the value of a tensor",
    AsksPlace: "It asks for output_nr, which does not belong to the value of a tensor",
    SetsData: "sets `.data` of a tensor that it is given",
    HoldsParameter: "reads the parameter linear.weight from a list, dict or closure",
    WritesViewOfBuffer: "args[0] and seen of WritesViewOfBuffer share memory, and forward writes to args[0]",
    WritesPartOfInput: "args[0] and args[1] of WritesPartOfInput share memory, and forward writes to args[0]",
    HoldsViewOfBuffer: "HoldsViewOfBuffer.view and seen of HoldsViewOfBuffer share memory, and forward writes to "
    "HoldsViewOfBuffer.view",
}


@pytest.fixture(autouse=True)
def _gradients_on() -> Any:
    yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("net", EQUAL, ids=lambda net: net.__name__)
@pytest.mark.quick_cases(
    "SetsDtype",
    "HookWrites",
    "LeavesGradientsOff",
    "SplitCheckpoint",
    "HooksOfTensors",
    "GivenTwice",
    "FunctionGivenTwice",
    "NormInCheckpointedUnit",
    "HoldsOtherParameter",
    "WritesInput",
    "WritesItem",
    "AsksHistory",
    "Functional",
    "Cache",
)
def test_matches_eager_mode(mesh: DeviceMesh, net: type[Net]) -> None:
    assert verdict(net, mesh) == "equal"


@pytest.mark.parametrize("net", ERRORS, ids=lambda net: net.__name__)
@pytest.mark.quick_cases(
    "AsksLeaf", "SetsData", "HoldsParameter", "WritesViewOfBuffer", "WritesPartOfInput", "HoldsViewOfBuffer"
)
def test_errors_name_the_remedy(mesh: DeviceMesh, net: type[Net]) -> None:
    found = verdict(net, mesh)
    assert found.startswith("error: ")
    assert ERRORS[net] in found
