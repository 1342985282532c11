"""The modes of submodules are those that `modules()` would say, whatever is done to the tree between calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from graphshard.capture.modes import Modes


class _Frozen(nn.Linear):
    """Is never in training."""

    @property
    def training(self) -> bool:
        return False

    @training.setter
    def training(self, mode: bool) -> None:
        pass


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Identity()), _Frozen(2, 2))


def _add_to_a_leaf(model: nn.Sequential) -> None:
    model[1][1].late = nn.Dropout().eval()


def _exchange(model: nn.Sequential) -> None:
    model[1][0] = nn.Dropout().eval()


def _exchange_above(model: nn.Sequential) -> None:
    model[1] = nn.Sequential(nn.Linear(2, 2).eval(), nn.Linear(2, 2))


def _remove(model: nn.Sequential) -> None:
    del model[0]


def _set(model: nn.Sequential) -> None:
    model[1][0].training = False


CHANGES: list[Callable[[nn.Sequential], object]] = [
    *(_add_to_a_leaf, _exchange, _exchange_above, _remove, _set),
    *(nn.Module.eval, lambda model: model[1].eval(), lambda model: model.append(nn.Dropout().eval())),
]


@pytest.mark.parametrize("change", CHANGES)
def test_modes_are_those_of_now(change: Callable[[nn.Sequential], object]) -> None:
    model = _model()
    modes = Modes(model)
    before = modes.now()
    assert before == tuple(module.training for module in model.modules())
    change(model)
    assert modes.now() == tuple(module.training for module in model.modules()) != before
    model.train()
    assert modes.now() == tuple(module.training for module in model.modules())


def test_tied_modules_count_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleList([shared, shared, nn.ModuleList([shared])])
    assert Modes(model).now() == (True,) * len(list(model.modules()))
