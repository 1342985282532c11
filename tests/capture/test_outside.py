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
from pathlib import Path
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import initial_seed, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.ir.errors import ArgumentError, CaptureError
from graphshard.ir.printer import print_program
from graphshard.options.options import Options
from tests.helpers import captured
from tests.ranks import FakeWorld

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


def _length(net: Any) -> float:
    with open(__file__) as file:
        return float(len(file.read()))


OF_FILES = {
    "a file": (_length, "io"),
    "a path": (lambda net: float(len(Path(__file__).read_text())), "io"),
    "whether there is a file": (lambda net: 2.0 if os.path.exists(__file__) else 1.0, "os"),
    "whether there is a path": (lambda net: 2.0 if Path(__file__).is_file() else 1.0, "os"),
    "what is in a folder": (lambda net: float(len(os.listdir("."))), "os"),
}


@pytest.mark.parametrize("case", OF_FILES)
def test_files_are_an_error_that_names_the_line(case: str) -> None:
    """Each call would see what the capture saw, silently."""
    draw, source = OF_FILES[case]
    with pytest.raises(CaptureError, match=re.escape(f"_Net.forward at {__file__}:")) as caught:
        captured(_Net(draw), (X,))
    assert f"{source}." in str(caught.value)
    assert "A program neither reads nor writes files" in str(caught.value)


@pytest.mark.parametrize("case", OF_FILES)
def test_files_that_are_allowed(case: str) -> None:
    captured(_Net(OF_FILES[case][0]), (X,), allow=("io", "os"))


def _forked(net: Any) -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.rand(())


SEEDS: dict[str, Callable[[Any], Any]] = {
    "manual_seed": lambda net: torch.manual_seed(3).initial_seed(),
    "initial_seed": lambda net: initial_seed(),
    "get_rng_state": lambda net: torch.get_rng_state().numel(),
    "set_rng_state": lambda net: torch.set_rng_state(net.state) or 1.0,
    "fork_rng": _forked,
    "manual_seed_all": lambda net: torch.cuda.manual_seed_all(3) or 1.0,
    "default_generator": lambda net: torch.default_generator.manual_seed(3).initial_seed(),
}


@pytest.mark.parametrize("case", SEEDS)
def test_seeds_are_an_error(case: str) -> None:
    """They were set at the capture, and at no call."""
    net = _Net(SEEDS[case])
    torch.manual_seed(5)
    net.state = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"A program draws from torch's generators") as caught:
        captured(net, (X,))
    assert case in str(caught.value)
    if case not in ("fork_rng", "default_generator"):
        assert f"{__file__}:{SEEDS[case].__code__.co_firstlineno}\n" in str(caught.value)


def test_what_is_imported_by_name_and_not_called(fake_world: FakeWorld) -> None:
    """Such a model was captured at each call: the name was another function while it was."""
    fake_world(1)
    net = _Net(lambda net: uniform(0, 1) if net.training is None else 2.0)
    model = graphshard.compile(net, init_device_mesh("cpu", (1,)), backend="eager")
    for _ in range(3):
        model(X)
    assert len(graphshard.programs(model)) == 1


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
