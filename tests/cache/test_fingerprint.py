"""What a program was made of is another: it is not found. A stale hit would be a wrong result that nobody sees."""

from __future__ import annotations

import gc
import importlib
import logging
import re
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.cache import surroundings, watching
from tests.cache.launches import Launches, messages

Prepare = Callable[[Any, nn.Module], None]


def _same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(one[0], other[0]) and all(map(torch.equal, one[1], other[1]))


def test_the_second_launch_captures_nothing(empty: Launches) -> None:
    first = empty.run()
    assert empty.captured
    assert len(empty.files()) == 1
    second = empty.run()
    assert not empty.captured
    assert _same(first, second)
    empty.edit("cached_model", "SCALE = 1.5", "SCALE = 1.25")
    other = empty.run()
    assert empty.captured
    assert not _same(first, other)
    assert _same(empty.run(), other)
    assert not empty.captured
    empty.edit("cached_model", "SCALE = 1.25", "SCALE = 1.5")
    assert _same(empty.run(), first)
    assert not empty.captured
    assert len(empty.files()) == 2


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        pytest.param("cached_model", "(x * 1.0)", "(x * 1.5)", id="number in forward"),
        pytest.param("cached_helper", "x + TABLE", "x - TABLE", id="function that a function in another file calls"),
        pytest.param("cached_helper", "FACTOR = 2.0", "FACTOR = 2.5", id="global of another file"),
        pytest.param("cached_helper", "[2.0, 3.0]", "[2.25, 3.0]", id="list in a dict that is a global"),
        pytest.param("cached_model", "SCALE = 1.5", "SCALE = 1.25", id="global"),
        pytest.param("cached_model", "most=1000.0", "most=9.0", id="default"),
        pytest.param("cached_model", "made(3.0)", "made(3.5)", id="value that a function closes over"),
        pytest.param("cached_model", "return x * value", "return x / value", id="function within a function"),
        pytest.param("cached_model", '{"power": 2}', '{"power": 3}', id="attribute of a configuration"),
        pytest.param("cached_model", "slope = 0.25", "slope = 0.5", id="attribute of the class of a configuration"),
        pytest.param("cached_model", "offset = 0.125", "offset = 0.5", id="attribute of the class of an object"),
        pytest.param("cached_model", "x + self.offset", "x - self.offset", id="method of an object"),
        pytest.param("cached_model", "depth = 2", "depth = 3", id="attribute of the class of the model"),
        pytest.param("cached_model", "return n + cached", "return n - cached", id="function whose result is cached"),
        pytest.param("cached_model", "self.bias = True", "self.bias = False", id="parameters"),
        pytest.param("cached_model", "torch.ones(4)", "torch.ones(2, 4)", id="shape of a buffer"),
        pytest.param("cached_model", "from cached_helper import scaled", "from cached_helper import inner as scaled",
                     id="another function under a name"),
        pytest.param("cached_model", "F.gelu(", "F.relu(", id="function of torch"),
    ],
)  # fmt: skip
def test_source(launches: Launches, name: str, old: str, new: str) -> None:
    launches.edit(name, old, new)
    launches.run()
    assert launches.captured


def _hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def _other_forward(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias) + 1


def _set(name: str, value: Any) -> Prepare:
    def prepare(module: Any, model: nn.Module) -> None:
        owner: Any = model
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        setattr(owner, name.split(".")[-1], value)

    return prepare


CHANGES: dict[str, Prepare] = {
    "hook": lambda module, model: model.lin.register_forward_hook(_hook) and None,
    "method of an instance": lambda module, model: setattr(
        model.lin, "forward", types.MethodType(_other_forward, model.lin)
    ),
    "method of a class": lambda module, model: setattr(module.Meter, "__call__", lambda self, x: x - 1),
    "exchanged global": lambda module, model: setattr(module, "scaled", lambda x: x),
    "exchanged global of another module": lambda module, model: setattr(module.cached_helper, "inner", lambda x: x),
    "attribute": _set("config.slope", 0.75),
    "attribute of an item": _set("config.options", {"power": 3}),
    "attribute that was not there": _set("config.other", 1),
    "training": lambda module, model: model.eval() and None,
    "frozen parameter": lambda module, model: model.lin.weight.__setattr__("requires_grad", False),
    "dtype": lambda module, model: model.double() and None,
    "tied parameters": lambda module, model: setattr(model, "again", model.lin),
    "plain tensor": _set("table", torch.arange(4.0) + 1),
    "subclass": lambda module, model: setattr(model, "__class__", type("Sub", (type(model),), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_objects(launches: Launches, change: str) -> None:
    x = torch.linspace(-1, 1, 8).view(2, 4).double() if change == "dtype" else None
    launches.run(CHANGES[change], x=x)
    assert launches.captured


def test_values_of_buffers_and_parameters_are_inputs(launches: Launches) -> None:
    """They need not be the same: a trace does not know them."""

    def other(module: Any, model: nn.Module) -> None:
        with torch.no_grad():
            model.mask.fill_(2.0)
            model.lin.weight.mul_(3.0)

    kept = launches.run(other)
    assert not launches.captured
    fresh = launches.run(other, cache=False)
    assert launches.captured
    assert _same(kept, fresh)


def test_environment_variable_that_forward_reads(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    before = launches.run()
    monkeypatch.setenv("CACHED_NET", "more")
    after = launches.run()
    assert launches.captured
    assert not _same(before, after)
    monkeypatch.setenv("CACHED_NET_OTHER", "x")
    monkeypatch.delenv("CACHED_NET")
    assert _same(launches.run(), before)


def test_comments_are_nothing(launches: Launches) -> None:
    launches.edit("cached_model", "class Net", "# The model.\nclass Net")
    launches.edit("cached_helper", "def unused(x):\n    return x\n", "def unused(x):\n    return x + 1\n")
    launches.run()
    assert not launches.captured


SETTINGS: dict[str, Callable[[], Any]] = {
    "settings of torch": lambda: mock.patch.object(surroundings, "settings", return_value="other"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "variable of torch": lambda: mock.patch.dict("os.environ", {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    "graphshard's source": lambda: mock.patch.object(surroundings, "own_files", return_value="other"),
    "torch's build": lambda: mock.patch.object(torch.version, "git_version", "other"),
    "processor": lambda: mock.patch.object(surroundings, "instruction_set", return_value={"avx9": "yes"}),
    "threads": lambda: mock.patch.object(torch, "get_num_threads", return_value=77),
    "version of a library": lambda: mock.patch.object(importlib.import_module("sympy"), "__version__", "0.1"),
    "edited file of torch": lambda: mock.patch("graphshard.cache.kept.files_of", return_value="other"),
    "function put into torch": lambda: mock.patch.object(F, "gelu", _gelu),
    "function put into a class of torch": lambda: mock.patch.object(nn.GELU, "forward", _other_forward),
    "another function of torch's under a name": lambda: mock.patch.object(F, "softplus", F.relu),
}


def _gelu(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("setting", SETTINGS)
def test_surroundings(launches: Launches, setting: str) -> None:
    with SETTINGS[setting]():
        launches.run()
        assert launches.captured


def test_default_dtype(launches: Launches) -> None:
    launches.run()
    torch.set_default_dtype(torch.float64)
    try:
        launches.run(x=torch.ones(2, 4, dtype=torch.float64))
        assert launches.captured
    finally:
        torch.set_default_dtype(torch.float32)


OPTIONS: list[dict[str, Any]] = [
    {"units": ["lin"]},
    {"passes": graphshard.Pipeline().disable("reorder")},
    {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_options(launches: Launches, options: dict[str, Any]) -> None:
    launches.run(**options)
    assert launches.captured
    launches.run(**options)
    assert not launches.captured


def test_inputs(launches: Launches) -> None:
    launches.run(x=torch.ones(3, 4))
    assert launches.captured
    launches.run(x=torch.ones(3, 4))
    assert not launches.captured


# --- what is not kept --------------------------------------------------------------------------------------------

REFUSED = {
    "a file": ("x = clipped(", "zipfile.is_zipfile(__file__); x = clipped(", "reads the file"),
    "anything": ("x = clipped(", "x = x * eval('SCALE'); x = clipped(", "code that it makes|may reach anything"),
    "a rank": ("x = clipped(", "x = x + torch.distributed.get_rank(); x = clipped(", "get_rank"),
    "the file system": ("x = clipped(", "x = x + bool(shutil.which('x')); x = clipped(", "shutil.which"),
    "an import": ("x = clipped(", "import cached_other; x = clipped(", "imports cached_other"),
    "an iterator": ("self.meter = Meter()", "self.meter = Meter(); self.each = iter([1.0])", "each"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_not_kept(empty: Launches, name: str, caplog: pytest.LogCaptureFixture) -> None:
    old, new, why = REFUSED[name]
    empty.edit("cached_model", old, new)
    empty.edit("cached_model", "import os", "import os\nimport shutil\nimport zipfile")
    empty.write("cached_other", "X = 1")
    if name == "an iterator":
        empty.edit("cached_model", "x = clipped(", "x = x + float(self.each is None); x = clipped(")
    with caplog.at_level(logging.INFO, "graphshard.cache"):
        empty.run()
    assert empty.captured
    assert not empty.files()
    assert re.search(f"is not kept: .*({why})", messages(caplog))


def test_values_of_this_launch_are_not_kept(empty: Launches, caplog: pytest.LogCaptureFixture) -> None:
    empty.edit("cached_model", "import os", "import os\nimport random")
    empty.edit("cached_model", "(x * 1.0)", "(x * random.random())")
    with caplog.at_level(logging.INFO, "graphshard.cache"):
        empty.run(allow=("random",))
    assert not empty.files()
    assert "allow=('random',) keeps values of this launch" in messages(caplog)


def test_an_object_of_no_stable_contents_in_a_closure(empty: Launches, caplog: pytest.LogCaptureFixture) -> None:
    empty.edit("cached_model", "made(3.0)", "made_of(iter([3.0]))")
    maker = "def made_of(it):\n    return lambda x: x if it is None else x * 2\n\n"
    empty.edit("cached_model", "class Net(", f"{maker}class Net(")
    with caplog.at_level(logging.INFO, "graphshard.cache"):
        empty.run()
    assert not empty.files()
    assert "it holds a builtins.list_iterator, which cannot be compared" in messages(caplog)


def test_what_is_unreadable_and_unused_does_not_matter(empty: Launches) -> None:
    empty.edit("cached_model", "self.meter = Meter()", "self.meter = Meter(); self.never_named = iter([1.0])")
    empty.run()
    empty.run()
    assert not empty.captured


def test_no_number_is_left_for_a_tool(
    empty: Launches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python 3.12 tells a few tools only of what runs: without it nothing is kept, and all else is as always."""
    taken: list[int] = []
    if sys.version_info >= (3, 12):
        monitoring: Any = sys.monitoring
        taken += [number for number in range(6) if monitoring.get_tool(number) is None]
        for number in taken:
            monitoring.use_tool_id(number, "another")
    else:
        monkeypatch.setattr(watching, "free_tool", lambda: None)
    try:
        with caplog.at_level(logging.INFO, "graphshard.cache"):
            empty.run()
    finally:
        for number in taken:
            monitoring.free_tool_id(number)
    assert empty.captured
    assert not empty.files()
    assert "is not kept: other tools have all numbers of sys.monitoring" in messages(caplog)


_COLLECTIONS = 0


def _count_collections(phase: str, info: dict[str, int]) -> None:
    global _COLLECTIONS
    _COLLECTIONS += 1


def test_what_the_garbage_collector_calls_is_no_part_of_forward(empty: Launches) -> None:
    gc.callbacks.append(_count_collections)
    try:
        empty.run()
    finally:
        gc.callbacks.remove(_count_collections)
    assert _COLLECTIONS
    empty.run()
    assert not empty.captured


def test_the_log_says_what_is_another(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    launches.edit("cached_helper", "FACTOR = 2.0", "FACTOR = 2.5")
    with caplog.at_level(logging.INFO, "graphshard.cache"):
        launches.run()
    assert "function cached_helper.scaled is another than when it was compiled" in messages(caplog)
    caplog.clear()
    with caplog.at_level(logging.INFO, "graphshard.cache"):
        launches.run(units=["lin"])
    assert "options" in messages(caplog)
