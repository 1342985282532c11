"""User errors are found before anything changes, and the message names cause and remedy."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import graphshard
from graphshard.errors import ArgumentError, CaptureError, DivergenceError, InputError, MaterializationError, PeerError
from tests.distributed.twins import world_mesh
from tests.ranks import FakeWorld, Ranks


class _Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).sum()


class _Branching(_Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.layers[0](x).sum() > 0:  # the culprit
            return super().forward(x)
        return x.sum()


class _Numbering(_Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.layers[0].weight[0, 0].item())):  # the culprit
            x = x + 1
        return super().forward(x)


def _hooked() -> nn.Module:
    model = _Net()
    model.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    model.layers[1].weight.requires_grad_(False)
    return model


def _state(model: Any) -> Any:
    """Return all state of a module that an error must not change, by identity."""
    if not isinstance(model, nn.Module):
        return None
    hooks = [name for name in vars(model) if name.endswith("_hooks")]
    return {
        name: (
            type(sub),
            {key: (id(param), param.requires_grad, param.data_ptr()) for key, param in sub._parameters.items()},
            {key: id(buffer) for key, buffer in sub._buffers.items()},
            {hook: [*getattr(sub, hook).items()] for hook in hooks},
            sorted(vars(sub)),
            sub.training,
        )
        for name, sub in model.named_modules()
    }


# --- compile ------------------------------------------------------------------------------------------------


def _compile(model: Any, mesh: Any = None, **options: Any) -> Any:
    return graphshard.compile(model, world_mesh() if mesh is None else mesh, backend="eager", **options)


def _compile_twice() -> Any:
    return _compile(_Net())


def _with_compiled_part() -> nn.Module:
    model = nn.Sequential(_Net(), nn.Linear(4, 4))
    _compile(model[0])
    return model


def _distributed() -> nn.Module:
    model = _Net()
    weight = model.layers[0].weight
    model.layers[0].weight = nn.Parameter(distribute_tensor(weight.detach(), world_mesh(), [Shard(0)]))
    return model


# Arguments of compile, and the message.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]], str]] = {
    "not a module": (
        lambda: lambda x: x,
        dict,
        r"model must be an nn\.Module, got function\.",
    ),
    "container": (
        lambda: nn.ModuleList([nn.Linear(2, 2)]),
        dict,
        r"ModuleList has no forward, so there is nothing to compile\. Compile the module that calls it, or give it",
    ),
    "compiled": (
        _compile_twice,
        dict,
        r"_Net cannot be compiled: it is already compiled\. Compile the root module, once\.",
    ),
    "submodule compiled": (
        _with_compiled_part,
        dict,
        r"Sequential cannot be compiled: its submodule '0' is already compiled\. Compile the root module, once\.",
    ),
    "DTensor parameters": (
        _distributed,
        dict,
        r"parameter layers\.0\.weight is a DTensor already \(fully_shard or .* was applied\)\. Compile the plain",
    ),
    "mesh is a shape": (
        _hooked,
        lambda: {"mesh": (2,)},
        r"mesh must be a torch\.distributed DeviceMesh, got \(2,\)\. Make one with .*init_device_mesh\('cuda', \(world",
    ),
    "mesh is a device": (
        _hooked,
        lambda: {"mesh": "cpu"},
        r"mesh must be a torch\.distributed DeviceMesh, got 'cpu'\. Make one with",
    ),
    "two axes without names": (
        _hooked,
        lambda: {"mesh": init_device_mesh("cpu", (1, 2))},
        r"mesh has two axes without names\. Name them, as in init_device_mesh\('cuda', \(2, 4\), mesh_dim_names=\("
        r"'replicate', 'shard'\)\)",
    ),
    "three named axes": (
        _hooked,
        lambda: {"mesh": init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pipeline", "replicate", "shard"))},
        r"mesh \('pipeline', 'replicate', 'shard'\): the name of the axis 'pipeline' does not say what it is for\. "
        r"Data axes are 'dp', 'data', .*Rename it, pass the data axes alone, such as mesh\['dp'\]",
    ),
    "mesh of meta devices": (
        _hooked,
        lambda: {"mesh": DeviceMesh("meta", [0, 1], _init_backend=False, _rank=dist.get_rank())},
        r"mesh must be of 'cpu' or 'cuda' devices, got 'meta'\.",
    ),
    "mesh of GPUs": (
        _hooked,
        lambda: {"mesh": DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=dist.get_rank())},
        r"mesh is of 'cuda' devices, but torch\.cuda\.is_available\(\) is False here\. Use a 'cpu' mesh",
    ),
    "mesh without this rank": (
        _hooked,
        lambda: {"mesh": DeviceMesh("cpu", [1 - dist.get_rank()], _init_backend=False, _rank=dist.get_rank())},
        r"mesh does not contain this rank\. Call compile on the ranks of the mesh only\.",
    ),
    "reshard over some ranks": (
        _hooked,
        lambda: {"reshard_after_forward": 3},
        r"reshard_after_forward=3 must divide the number of ranks that parameters are sharded over, 2\. Give one of 1",
    ),
    "policy": (
        _hooked,
        lambda: {"mp_policy": torch.bfloat16},
        r"mp_policy must be a .*MixedPrecisionPolicy\(param_dtype=torch.bfloat16\), got torch\.bfloat16",
    ),
    "backend": (
        _hooked,
        lambda: {"backend": "cudagraphs"},
        r"backend must be one of 'inductor', 'eager', got 'cudagraphs'\.",
    ),
    "no captures": (
        _hooked,
        lambda: {"max_captures": 0},
        r"max_captures must be a positive int, got 0\.",
    ),
    "text for a number": (
        _hooked,
        lambda: {"max_captures": "8"},
        r"max_captures must be a positive int, got '8'\.",
    ),
    "unknown units": (
        _hooked,
        lambda: {"units": ["layers.*", "blocks.*"]},
        r"units: the pattern 'blocks\.\*' matches no submodule with parameters of _Net\. Use names as in "
        r"named_modules\(\), such as \['layers', 'layers\.0', 'layers\.1'\]\.",
    ),
    "units is one string": (
        _hooked,
        lambda: {"units": "layers.*"},
        r"units must be a sequence .*\['layers\.\*'\]",
    ),
    "example_inputs is a tensor": (
        _hooked,
        lambda: {"example_inputs": torch.ones(2, 4)},
        r"example_inputs must be .*, got Tensor",
    ),
    "example_kwargs is a tuple": (
        _hooked,
        lambda: {"example_kwargs": (torch.ones(2, 4),)},
        r"example_kwargs must be .*, got tuple",
    ),
    "example on another device": (
        _hooked,
        lambda: {"example_kwargs": {"x": torch.ones(2, 4, device="meta")}},
        r"input x is on meta, the model's mesh is on cpu\. Move it there before the call\.",
    ),
}


def _rejected(rank: int, world_size: int, name: str) -> tuple[str, bool]:
    make_model, make_options, _ = CASES[name]
    model, options = make_model(), make_options()
    before = _state(model)
    try:
        graphshard.compile(model, **{"mesh": world_mesh(), "backend": "eager", **options})
    except ValueError as error:  # both ArgumentError and InputError
        return str(error), _state(model) == before
    return "no error", True


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick_cases(
    "container",
    "compiled",
    "submodule compiled",
    "DTensor parameters",
    "mesh is a shape",
    "mesh is a device",
    "two axes without names",
    "three named axes",
    "mesh of meta devices",
    "mesh of GPUs",
    "mesh without this rank",
    "reshard over some ranks",
    "policy",
    "backend",
    "no captures",
    "text for a number",
    "unknown units",
    "units is one string",
    "example_inputs is a tensor",
    "example_kwargs is a tuple",
    "example on another device",
)
def test_compile_rejects(ranks: Ranks, name: str) -> None:
    """The message says what to do, and nothing changes."""
    for message, unchanged in ranks(2).run(_rejected, name):
        assert re.search(CASES[name][2], message), message
        assert unchanged


def _not_capturable(rank: int, world_size: int, cls: type[nn.Module]) -> list[str]:
    messages = []
    model = cls()
    before = _state(model)
    try:
        graphshard.compile(model, world_mesh(), backend="eager", fullgraph=True, example_inputs=(torch.ones(2, 4),))
    except CaptureError as error:
        messages.append(str(error))
    assert _state(model) == before
    graphshard.compile(model, world_mesh(), backend="eager", fullgraph=True)
    before = _state(model)
    try:
        model(torch.ones(2, 4))
    except CaptureError as error:
        messages.append(str(error))
    assert _state(model) == before
    return messages


@pytest.mark.parametrize(
    ("cls", "remedy"), [(_Branching, r"torch\.where"), (_Numbering, r"Compute with tensors")], ids=["if", "item"]
)
def test_code_that_cannot_be_captured(ranks: Ranks, cls: type[nn.Module], remedy: str) -> None:
    """The message points at the user's line, from compile and from the first call."""
    lines, start = inspect.getsourcelines(cls)
    (number, source) = next((start + i, line) for i, line in enumerate(lines) if "# the culprit" in line)
    messages = ranks(2).run(_not_capturable, cls)[0]
    assert len(messages) == 2
    for message in messages:
        assert f"graphshard cannot capture {cls.__name__}.forward at {__file__}:{number}" in message
        assert source.strip() in message
        assert re.search(remedy, message)


def test_programs_of_a_plain_module() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"^model: a _Net is not compiled\. Call graphshard\.compile\(model, mesh\) first\.$",
    ):
        graphshard.programs(_Net())


# --- calls --------------------------------------------------------------------------------------------------


def _bad_calls(rank: int, world_size: int) -> list[str]:
    good = torch.ones(2, 4)
    model = graphshard.compile(_hooked(), world_mesh(), backend="eager")
    messages = []
    for known in (False, True):
        before = _state(model)
        for args, kwargs in (
            ((good.to("meta"),), {}),
            ((), {"x": {"a": [good, good.to("meta")]}}),
        ):
            try:
                model(*args, **kwargs)
            except InputError as error:
                messages.append(str(error))
        assert _state(model) == before
        if not known:
            model(good).backward()
    return messages


def test_rejects_invalid_inputs(ranks: Ranks) -> None:
    messages = ranks(2).run(_bad_calls)[0]
    assert messages[:2] == messages[2:]
    assert messages[:2] == [
        "input args[0] is on meta, the model's mesh is on cpu. Move it there before the call.",
        "input x['a'][1] is on meta, the model's mesh is on cpu. Move it there before the call.",
    ]


def _on_meta(rank: int, world_size: int) -> str:
    with torch.device("meta"):
        model = _Net()
    graphshard.compile(model, world_mesh(), backend="eager")
    before = _state(model)
    with pytest.raises(MaterializationError) as caught:
        model(torch.ones(2, 4))
    assert _state(model) == before
    return str(caught.value)


def test_parameters_on_the_meta_device(ranks: Ranks) -> None:
    assert ranks(2).run(_on_meta)[1] == (
        "5 parameters or buffers of _Net are on the meta device: layers.0.weight, layers.0.bias, "
        "layers.1.weight, layers.1.bias, scale. Allocate them with model.to_empty(device=...) and initialize or load "
        "them before the first call."
    )


# --- different programs on ranks ----------------------------------------------------------------------------


def _diverge(rank: int, world_size: int, how: str) -> tuple[str, float]:
    odd = rank == 1
    model = _Net(layers=3 if odd and how == "extra layer" else 2)
    if odd and how == "other width":
        model.layers = nn.ModuleList([nn.Linear(4, 24), nn.Linear(24, 4)])
    if odd and how == "frozen parameter":
        model.layers[0].bias.requires_grad_(False)
    options = {"reshard_after_forward": False} if odd and how == "other option" else {}
    start = time.monotonic()
    try:
        graphshard.compile(model, world_mesh(), backend="eager", **options)(torch.ones(2, 4))
    except DivergenceError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize(
    ("how", "where", "ours", "theirs"),
    [
        ("extra layer", r"parameter layers\.2\.weight", r"\(nothing\)", r"f32\[4, 4\] in 3 shards along dim 0"),
        ("other width", r"parameter layers\.0\.weight", r"f32\[4, 4\] in .*", r"f32\[24, 4\] in 3 shards along dim 0"),
        ("frozen parameter", r"collective \d+", r"backward: .*layers\.0\.weight.*", r"backward: .*layers\.0\.weight.*"),
        ("other option", r"collective \d+", r"backward: gather layers\..*", r"backward: reduce layers\.1\..*"),
    ],
    ids=["extra-layer", "other-width", "frozen-parameter", "other-option"],
)
@pytest.mark.quick_cases("other-option")
def test_rank_with_a_different_program(ranks: Ranks, how: str, where: str, ours: str, theirs: str) -> None:
    """Rank 1 of 3 differs: the others do not hang, but name it and the first difference."""
    results = ranks(3).run(_diverge, how)
    assert len({message for message, _ in results}) == 1
    message = results[0][0]
    found = re.fullmatch(
        r"rank (\d) made a different program than rank (\d); they first differ at (.*):\n"
        r"  rank (\d): (.*)\n  rank (\d): (.*)\n"
        r"Give every rank the same model, the same requires_grad flags and the same arguments of compile\.",
        message,
    )
    assert found, message
    odd, first, place, one, its, other, others = found.groups()
    assert (one, other) == (first, odd)
    assert "1" in (odd, first)  # the others are compared with the first arrival
    assert re.fullmatch(where, place)
    says = {one: its, other: others}
    assert re.fullmatch(theirs, says.pop("1")), message
    assert re.fullmatch(ours, *says.values()), message
    assert max(seconds for _, seconds in results) < 60


def _absent(rank: int, world_size: int) -> tuple[str, float]:
    with mock.patch.dict(os.environ, {"GRAPHSHARD_PATIENCE": "2"}):
        model = graphshard.compile(_Net(), world_mesh(), backend="eager")
    model(torch.ones(2, 4)).backward()
    model.eval().requires_grad_(False)
    if rank == 1:
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        model(torch.ones(2, 4))
    assert caught.value.rank == 1
    return str(caught.value), time.monotonic() - start


def test_rank_that_never_compiles_the_program(ranks: Ranks) -> None:
    message, seconds = ranks(2).run(_absent)[0]
    assert re.fullmatch(
        r"rank 0 makes a program of _Net \(train\(\) or eval\(\) was called, dtype or requires_grad of a parameter "
        r"changed\) and has waited 2 s for rank 1: rank 1 is in the user's program at .*ranks.py:\d+, after 2 steps\. "
        r"All ranks must make the same sequence of calls, with the same requires_grad flags and the same switches: .*",
        message,
    ), message
    assert 2 < seconds < 60


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GRAPHSHARD_CHECK", "step", "GRAPHSHARD_CHECK must be 'steps' or not set, got 'step'."),
        ("GRAPHSHARD_PATIENCE", "-1", "GRAPHSHARD_PATIENCE must be a number of seconds, got '-1'."),
    ],
)
def test_rejects_invalid_environment_variables(fake_world: FakeWorld, variable: str, value: str, message: str) -> None:
    fake_world(2)
    with (
        mock.patch.dict(os.environ, {variable: value}),
        pytest.raises(ArgumentError, match=re.escape(message)),
    ):
        graphshard.compile(_Net(), world_mesh(), backend="eager")
