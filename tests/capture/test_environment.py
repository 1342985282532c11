"""Environment variables that forward reads are part of what a program was captured for."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from os import environ, getenv

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.capture.environment import watched_environment
from graphshard.ir.errors import CaptureError
from graphshard.ir.state import MISSING
from tests.helpers import captured
from tests.ranks import FakeWorld

NAME = "A_VARIABLE_OF_THIS_TEST"


class _Net(nn.Module):
    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * self.read()


def _set() -> float:
    return 2.0 if NAME in os.environ else 3.0


READS: dict[str, Callable[[], float]] = {
    "by name": lambda: float(os.environ.get(NAME, "5")),
    "os.getenv": lambda: float(getenv(NAME) or 5),
    "imported": lambda: float(environ.get(NAME, 7)),
    "whether it is set": _set,
    "a copy of all": lambda: float(os.environ.copy().get(NAME, 4)),
}


@pytest.mark.parametrize("case", READS)
def test_a_change_takes_effect_and_going_back_finds_the_program(
    fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A variable that is not set is different from one that is."""
    fake_world(1)
    plain = _Net(READS[case])
    ours = graphshard.compile(copy.deepcopy(plain), init_device_mesh("cpu", (1,)), backend="eager")
    x = torch.randn(2, 4)
    for value in (None, "2.0", None, "2.0"):
        monkeypatch.delenv(NAME, raising=False)
        if value is not None:
            monkeypatch.setenv(NAME, value)
        assert torch.equal(ours(x), plain(x))
    _, second = (program.reason for program in graphshard.programs(ours))
    if case == "a copy of all":
        assert second.startswith("os.environ was (")
    else:
        assert second == f"os.environ['{NAME}'] was missing and is '2.0'"


def test_variables_that_only_torch_reads_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "3")
    (read,) = (
        r for r in captured(_Net(READS["by name"]), (torch.ones(2, 4),)).state.reads if "environ" in str(r.place)
    )
    assert (str(read.place), read.text) == (f"os.environ['{NAME}']", "'3'")


def test_the_class_of_the_environment_is_left_alone() -> None:
    """What Python 3.13 remembers of a class can be wrong when that was changed a thousand times."""
    kind, seen = type(os.environ), []
    before = dict(vars(kind))
    for _ in range(2):  # one within the other
        with watched_environment(lambda *noted: seen.append(noted)), watched_environment(lambda *_: None):
            assert vars(kind) == before
            assert "A_VARIABLE_THAT_NOBODY_SETS" not in os.environ
    assert type(os.environ) is kind
    assert seen == [("A_VARIABLE_THAT_NOBODY_SETS", MISSING)] * 2


SETS: dict[str, Callable[[], object]] = {
    "set": lambda: os.environ.update({NAME: "1"}),
    "by name": lambda: environ.__setitem__(NAME, "1"),
    "a default": lambda: os.environ.setdefault(NAME, "1"),
    "taken away": lambda: os.environ.pop(NAME),
}


@pytest.mark.parametrize("case", SETS)
def test_setting_a_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """It was set by each run of the capture, and by no call."""
    monkeypatch.delenv(NAME, raising=False)
    if case == "taken away":
        monkeypatch.setenv(NAME, "3")
    net = _Net(lambda: len(str(SETS[case]())))
    with pytest.raises(CaptureError, match=rf"sets neither settings of torch nor environment variables(.*\n)+.*{NAME}"):
        captured(net, (torch.ones(2, 4),))
    assert os.environ.get(NAME) == ("3" if case == "taken away" else None)
