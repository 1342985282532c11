"""State that Dynamo does not guard: changed between steps, with plain PyTorch's results in every step."""

from __future__ import annotations

import functools
import os
import random
import warnings
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.frontend.compared import Net, batch, verdict


class Block(nn.Module):
    """A unit whose class is changed."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Helper:
    """A plain object, not a module."""

    def act(self, x: Tensor) -> Tensor:
        return x * 2


FIRST: dict[tuple[Any, str], Any] = {
    (owner, name): getattr(owner, name)
    for owner, name in ((Block, "forward"), (Block, "scale"), (Helper, "act"), (nn.Linear, "forward"), (F, "gelu"))
}
_HOOKS: list[Any] = []


def _reset() -> None:
    for (owner, name), value in FIRST.items():
        setattr(owner, name, value)
    if "relu" in vars(torch.Tensor):
        del torch.Tensor.relu
    for hook in _HOOKS:
        hook.remove()
    _HOOKS.clear()
    os.environ["GRAPHSHARD_TEST_SCALE"] = "1"
    os.environ.pop("GRAPHSHARD_TEST_ON", None)
    np.random.seed(0)


class Base(Net):
    """Two units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.helper = nn.ModuleList([Block(), Block()]), Helper()

    @classmethod
    def reset(cls) -> None:
        _reset()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ClassForward(Base):
    def change(self, step: int) -> None:
        Block.forward = (lambda self, x: self.linear(x) + 1) if step == 2 else FIRST[Block, "forward"]


class ClassAttribute(Base):
    def change(self, step: int) -> None:
        Block.scale = 3.0 if step == 2 else 1.0


class LibraryForward(Base):
    def change(self, step: int) -> None:
        nn.Linear.forward = (lambda self, x: F.linear(x, self.weight)) if step == 2 else FIRST[nn.Linear, "forward"]


class HelperMethod(Base):
    def change(self, step: int) -> None:
        Helper.act = (lambda self, x: x * 5) if step == 2 else FIRST[Helper, "act"]

    def forward(self, x: Tensor) -> Tensor:
        return self.helper.act(super().forward(x))


class TensorMethod(Base):
    def change(self, step: int) -> None:
        if step == 2:
            torch.Tensor.relu = lambda x: x * 3
        elif step == 3:
            del torch.Tensor.relu

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Function(Base):
    def change(self, step: int) -> None:
        F.gelu = (lambda x: x * 3) if step == 2 else FIRST[F, "gelu"]

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class AllModulesHook(Base):
    def change(self, step: int) -> None:
        if step == 1:
            double = nn.modules.module.register_module_forward_hook
            _HOOKS.append(double(lambda module, args, result: result * 2 if type(module) is nn.Linear else None))
        elif step == 3:
            _HOOKS.pop().remove()


class _WithClosure(Base):
    def __init__(self) -> None:
        super().__init__()
        scale = 1.0

        def call(x: Tensor) -> Tensor:
            nonlocal scale
            scale += self.step
            return x * scale

        self.call, self.step = call, 1.0

    def __deepcopy__(self, memo: Any) -> Any:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.call(super().forward(x))


class Environment(Base):
    def change(self, step: int) -> None:
        os.environ["GRAPHSHARD_TEST_SCALE"] = str(step)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(os.getenv("GRAPHSHARD_TEST_SCALE", "7"))


class EnvironmentHas(Base):
    def change(self, step: int) -> None:
        os.environ.pop("GRAPHSHARD_TEST_ON", None)
        if step % 2:
            os.environ["GRAPHSHARD_TEST_ON"] = "1"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if "GRAPHSHARD_TEST_ON" in os.environ else 3)


class Order(Base):
    def __init__(self) -> None:
        super().__init__()
        self.rates = OrderedDict(a=1.0, b=2.0)

    def change(self, step: int) -> None:
        self.rates.move_to_end("a" if step % 2 else "b")

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for rate in self.rates.values():
            x = (x + rate) * rate
        return x


class Zeros(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 0.0

    def change(self, step: int) -> None:
        self.gain = -0.0 if step % 2 else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class AllAttributes(Base):
    def change(self, step: int) -> None:
        self.extra = step

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self)["extra"]


class OwnDict(AllAttributes):
    def forward(self, x: Tensor) -> Tensor:
        return Base.forward(self, x) * self.__dict__.get("extra", 5)


class ClassCounter(Base):
    calls = 0

    @classmethod
    def reset(cls) -> None:
        _reset()
        ClassCounter.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        ClassCounter.calls += 1
        return super().forward(x) * self.calls


class Remembered(Base):
    @functools.lru_cache  # noqa: B019 - that is the test
    def draw(self, size: int) -> Tensor:
        return torch.rand(size)

    @classmethod
    def reset(cls) -> None:
        _reset()
        Remembered.draw.cache_clear()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.draw(4)


class Last(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = deque([1, 2, 3], maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(self.last[0] + 3)
        return super().forward(x) * sum(self.last)


_IDS = [0]


class Identity(Base):
    def inputs(self, step: int) -> tuple[Any, ...]:
        x = batch(step)
        _IDS[0] = id(x) if step % 2 else 0
        return (x,)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if id(x) == _IDS[0] else 3)


class RandomInt(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.randint(1, 100)


class NumpyDraw(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.from_numpy(np.random.rand(4)).float()


class NumpySum(Base):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.numpy().sum()


class NumpyConstant(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / np.sqrt(x.shape[-1])


class Prints(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        print("width", x.shape[-1])
        print(f"call {self.calls}")
        if self.calls == 1:
            warnings.warn("the first call", FutureWarning, stacklevel=2)
        return super().forward(x)


class PrintsWithKeywords(Base):
    def forward(self, x: Tensor) -> Tensor:
        print("a", "b", sep="-")
        return super().forward(x)


WHOLE = [
    ClassForward,
    ClassAttribute,
    LibraryForward,
    HelperMethod,
    TensorMethod,
    Function,
    AllModulesHook,
    _WithClosure,
    Environment,
    EnvironmentHas,
    Order,
    Zeros,
    NumpyConstant,
    Prints,
]
SPLIT = [
    AllAttributes,
    OwnDict,
    ClassCounter,
    Remembered,
    Last,
    Identity,
    RandomInt,
    NumpyDraw,
    NumpySum,
    PrintsWithKeywords,
]


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    _reset()
    os.environ.pop("GRAPHSHARD_TEST_SCALE", None)


@pytest.mark.parametrize("net", WHOLE, ids=lambda net: net.__name__.strip("_"))
@pytest.mark.quick_cases(
    "ClassForward",
    "ClassAttribute",
    "LibraryForward",
    "HelperMethod",
    "TensorMethod",
    "Function",
    "AllModulesHook",
    "WithClosure",
    "EnvironmentHas",
    "Order",
    "Zeros",
    "NumpyConstant",
    "Prints",
)
def test_captures_again(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, net: type[Net]) -> None:
    assert verdict(net, mesh) == "equal"
    assert "is split" not in caplog.text


@pytest.mark.parametrize("net", SPLIT, ids=lambda net: net.__name__)
@pytest.mark.quick_cases(
    "OwnDict",
    "ClassCounter",
    "Remembered",
    "Last",
    "Identity",
    "RandomInt",
    "NumpyDraw",
    "NumpySum",
    "PrintsWithKeywords",
)
def test_falls_back_to_python(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, net: type[Net]) -> None:
    assert verdict(net, mesh) == "equal"
    assert "is split" in caplog.text
