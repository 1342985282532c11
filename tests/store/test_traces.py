"""Launches that do not trace: what was traced is the same, and any change of it is noticed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from graphshard.frontend import capture
from graphshard.guards.value_descriptions import UndescribedError, ValueDescriber, differs_by_rank
from graphshard.utils.archive import read_private, write_archive
from tests.store.launches import Launches, messages

Prepare = Callable[[Any, nn.Module], None]


@pytest.fixture
def traced(launches: Launches) -> Callable[..., bool]:
    """Return a function that runs a launch, compares its loss with Python's, and returns whether it was traced."""

    def run(prepare: Prepare = lambda module, model: None, **options: Any) -> bool:
        expected: list[Tensor] = []

        def prepare_and_run(module: Any, model: nn.Module) -> None:
            prepare(module, model)
            expected.append(model(torch.linspace(-1, 1, 8).view(2, 4)).detach())

        with mock.patch.object(capture, "trace_call", wraps=capture.trace_call) as trace:
            loss, _ = launches.run(prepare_and_run, **options)
        assert torch.equal(loss, expected[0])
        return trace.called

    return run


def test_an_equal_launch_is_not_traced(launches: Launches, traced: Callable[..., bool]) -> None:
    assert not traced()
    launches.edit("cached_helper", "def unused(x):\n    return x", "def unused(x):\n    return -x")
    launches.edit("cached_model", "SCALE = 1.5", "SCALE = 1.5  # of a comment")
    assert not traced()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("cached_model", "scaled(x) * SCALE", "scaled(x) + SCALE"),
        ("cached_model", "SCALE = 1.5", "SCALE = 1.25"),
        ("cached_model", "slope = 0.25", "slope = 0.5"),
        ("cached_model", "offset = 0.125", "offset = 0.25"),
        ("cached_model", "return x + self.offset", "return x - self.offset"),
        ("cached_model", "return x * value", "return x / value"),
        ("cached_model", "made(3.0)", "made(5.0)"),
        ("cached_model", "most=1000.0", "most=1.0"),
        ("cached_model", "n + cached_helper.FACTOR", "n - cached_helper.FACTOR"),
        ("cached_model", "depth = 2", "depth = 1"),
        ("cached_model", '"power": 2', '"power": 3'),
        ("cached_helper", "FACTOR = 2.0", "FACTOR = -2.0"),
        ("cached_helper", '"b": [2.0, 3.0]', '"b": [4.0, 3.0]'),
        ("cached_helper", "return x + TABLE", "return x - TABLE"),
    ],
    ids=[
        *("forward", "global", "attribute of a class", "attribute of another class", "method", "inner function"),
        *("closure", "default", "cached function", "depth", "config", "global of a module", "list", "inner helper"),
    ],
)
@pytest.mark.quick_cases("attribute of a class", "inner helper")
def test_changed_source(launches: Launches, traced: Callable[..., bool], name: str, old: str, new: str) -> None:
    """In the function itself, a function that it calls, a closure, a default, a global or an attribute of a class."""
    launches.edit(name, old, new)
    assert traced()


def _config(module: Any, model: Any) -> None:
    model.config.options["power"] = 3


def _instance(module: Any, model: Any) -> None:
    model.meter.offset = 0.5


def _closure(module: Any, model: Any) -> None:
    model.apply_ = module.made(2.0)


def _global(module: Any, model: Any) -> None:
    module.scaled = lambda x: x * 3


def _method(module: Any, model: Any) -> None:
    module.Meter.__call__ = lambda self, x: x - self.offset


def _new_attribute(module: Any, model: Any) -> None:
    model.meter.__class__ = type("Meter", (module.Meter,), {"offset": 2.0})


def _hook(module: Any, model: Any) -> None:
    model.lin.register_forward_hook(lambda module, args, output: output * 2)


def _unpatched_gelu(x: Tensor) -> Tensor:
    return x * 0.5


def _unpatched_forward(self: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, self.weight, self.bias) * 2


def _unpatched_clamp(self: Tensor, max: float) -> Tensor:
    return self * max


@pytest.mark.parametrize(
    "prepare",
    [_config, _instance, _closure, _global, _method, _new_attribute, _hook],
    ids=["config", "instance", "closure", "global", "method", "class", "hook"],
)
@pytest.mark.quick_cases("config", "method")
def test_changed_objects(traced: Callable[..., bool], prepare: Prepare) -> None:
    """With equal sources, the script has set something else before `compile`."""
    assert traced(prepare)
    assert not traced()


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.nn.functional, "gelu", _unpatched_gelu),
        (nn.Linear, "forward", _unpatched_forward),
        (torch.Tensor, "clamp", _unpatched_clamp),
        (torch.version, "git_version", "another"),
    ],
    ids=["function", "class", "tensor", "version"],
)
def test_changed_torch(
    traced: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any
) -> None:
    """A script patches torch before `compile`, or it is another one."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert traced()
    assert not traced()


def test_a_changed_environment(traced: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward reads a variable."""
    monkeypatch.setenv("CACHED_NET", "more")
    assert traced()
    assert not traced()
    monkeypatch.setenv("CACHED_NET", "less")
    assert traced()


def test_a_setting_of_the_tracer(traced: Callable[..., bool]) -> None:
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=True, cache_size_limit=17):
        assert traced()


def test_a_damaged_record(launches: Launches, traced: Callable[..., bool], caplog: pytest.LogCaptureFixture) -> None:
    """The launch traces, and the program is found; with right checksums and other contents, too."""
    caplog.set_level(logging.INFO, "graphshard.cache")
    (path,) = launches.cache.glob("*.gstrace")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert traced()
    assert not launches.compiled
    assert "is not whole, or was changed" in messages(caplog)
    path.write_bytes(content)
    record = json.loads(read_private(path).members["trace.json"])
    record["trace"]["guards"] = [[10**6, "TYPE_MATCH", {}]]
    write_archive(path, {}, {"trace.json": json.dumps(record).encode()})
    assert traced()
    assert not launches.compiled


def test_what_cannot_be_described() -> None:
    """Each launch traces then."""
    describer = ValueDescriber()
    describer.exact(torch.compiler.assume_constant_result(lambda: 2.0))
    assert describer.constant, "Dynamo takes its result for a constant, wherever it comes from"
    with pytest.raises(UndescribedError, match="object cannot be compared with another process's"):
        describer.exact(object())
    assert differs_by_rank(torch.distributed.get_rank)
    assert not differs_by_rank(torch.nn.functional.linear)


LAUNCH = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import graphshard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
graphshard.compile(model, init_device_mesh("cpu", (1,)), cache=sys.argv[1])
called = []
def count(name):
    for key, module in list(sys.modules.items()):
        if key.startswith("graphshard.frontend") and hasattr(module, name):
            run = getattr(module, name)
            setattr(module, name, lambda *a, run=run, **k: called.append(name) or run(*a, **k))
count("trace_call"); count("joint_graph")
loss = model(torch.ones(2, 4)).sum()
loss.backward()
with torch.no_grad():
    model(torch.ones(2, 4))
print(called, "torch._inductor.compile_fx" in sys.modules, loss.item())
"""


@pytest.mark.slow
def test_a_warm_launch_neither_traces_nor_imports_inductor(tmp_path: Path) -> None:
    """Counted in new processes, for training and evaluation."""
    said = []
    for _ in range(2):
        command = [sys.executable, "-c", LAUNCH, str(tmp_path)]
        said.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    cold, warm = said
    assert cold.startswith("['trace_call', 'joint_graph', 'trace_call', 'joint_graph'] True")
    assert warm.startswith("[] False")
    assert cold.split()[-1] == warm.split()[-1]
