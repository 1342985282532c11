"""Random numbers and clocks that are not torch's are an error that names the line."""

from __future__ import annotations

import datetime as dt
import os
import random
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphshard.ir.errors import ArgumentError, CaptureError
from graphshard.ir.printer import print_program
from graphshard.options.options import Options
from tests.helpers import captured

X = torch.ones(4)


class _Net(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.draw = draw
        self.system = random.SystemRandom()
        self.rng, self.numpys = random.Random(0), np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * self.draw(self)


ASKING = {
    "random": lambda net: random.random(),
    "a method of random": lambda net: random.choice([1.0, 2.0]),
    "by name": lambda net: uniform(0, 1),
    "numpy": lambda net: float(np.random.rand()),
    "clock": lambda net: time.perf_counter(),
    "urandom": lambda net: os.urandom(1)[0],
    "the system's random numbers": lambda net: random.SystemRandom().random(),
    "a generator of the system's": lambda net: net.system.choice([1.0, 2.0]),
    "secrets": lambda net: secrets.randbelow(7),
    "nanoseconds": lambda net: time.time_ns() % 7,
    "now": lambda net: datetime.now().microsecond,
    "now by module": lambda net: dt.datetime.now().microsecond,
    "today": lambda net: float(dt.date.today().day),
    "uuid": lambda net: uuid.uuid4().int % 7,
}


@pytest.mark.parametrize("case", ASKING)
def test_asking_is_an_error_that_names_the_line(case: str) -> None:
    line = ASKING[case].__code__.co_firstlineno
    with pytest.raises(CaptureError, match=re.escape(f"_Net.forward at {__file__}:{line}\n")) as caught:
        captured(_Net(ASKING[case]), (X,))
    assert "each call would see the value of the capture. Draw with torch's generator" in str(caught.value)
    assert "compile with allow=(" in str(caught.value)


@pytest.mark.parametrize(
    ("draw", "source"),
    [(lambda net: net.rng.random(), "random"), (lambda net: net.numpys.random(), "numpy.random")],
    ids=["random", "numpy"],
)
def test_a_generator_of_the_model_is_seen_by_its_state(draw: Any, source: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(f"allow=({source!r},)")):
        captured(_Net(draw), (X,))


def test_what_is_allowed_is_a_constant_of_the_program() -> None:
    for source, case in (("random", "random"), ("numpy.random", "numpy"), ("time", "clock"), ("os", "urandom")):
        captured(_Net(ASKING[case]), (X,), allow=(source,))
        with pytest.raises(CaptureError):
            captured(_Net(ASKING[case]), (X,), allow=("uuid",))


def test_dates_that_are_no_clocks_are_what_they_are() -> None:
    """A date may be made, asked for its class and computed with while a forward is traced."""
    before = datetime(2020, 1, 1)

    def draw(net: Any) -> float:
        day = datetime(2020, 1, 2) + dt.timedelta(days=1)
        assert type(day) is type(before)
        assert isinstance(day, datetime)
        assert issubclass(type(day), dt.date)
        return float((day - before).days)

    program = captured(_Net(draw), (X,))
    assert "mul.Tensor(%2, 2.0)" in print_program(program)
    assert datetime is type(before)


def test_everything_is_put_back() -> None:
    before = random.random, time.time, uniform
    with pytest.raises(CaptureError):
        captured(_Net(ASKING["by name"]), (X,))
    assert before == (random.random, time.time, uniform)
    random.seed(3)
    state = random.getstate()
    captured(_Net(lambda net: torch.rand(()).detach()), (X,))
    assert random.getstate() == state


@pytest.mark.parametrize("value", ["random", ("dice",), 3])
def test_allow_names_sources(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"allow must be a tuple of some of 'random', 'numpy.random', 'time', 'os'"):
        Options(allow=value)


def test_other_threads_are_answered() -> None:
    """What runs beside a capture, such as a loader of data or a compiler of kernels, asks the clock as always."""
    stop, failed, asked = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            try:
                asked.append(time.perf_counter())
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        before = len(asked)
        captured(_Net(lambda net: 2.0), (X,))
    finally:
        stop.set()
        thread.join()
    assert not failed
    assert len(asked) > before
