"""`Options` has the common arguments of public functions; errors are found at once."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import graphshard
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import Mesh
from graphshard.options.mesh_axes import MeshAxes
from graphshard.options.options import CompileArguments, OptionArguments, Options
from graphshard.options.resolve import capture_spec, profile_here
from graphshard.options.validate import ModelContents
from graphshard.passes import MakePlan
from graphshard.pipeline.pipeline import Pipeline
from graphshard.predict.training_config import ExplainArguments
from graphshard.store.fingerprint import FACTS, NOT_COMPARED, ROWS
from tests.helpers import Blocks

EXPLAINING = (graphshard.explain, graphshard.explain_grid, graphshard.what_if)
FUNCTIONS = (graphshard.compile, *EXPLAINING, graphshard.export, graphshard.load)
NAMES = {field.name for field in fields(Options)}

# Arguments with another meaning and a separate description in some function.
OF_ITS_OWN = {(function.__name__, "hardware") for function in EXPLAINING}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_function_takes_every_option(function: Callable[..., Any]) -> None:
    """By keyword, with the same name, default and annotation."""
    shown = inspect.signature(function).parameters
    for field in fields(Options):
        if (function.__name__, field.name) not in OF_ITS_OWN:
            parameter = shown[field.name]
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert (parameter.default, parameter.annotation) == (field.default, field.type)
    assert "hardware" in shown
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in shown.values())


def test_type_annotations_match_the_fields() -> None:
    """The keys of unpacked arguments are the fields of `Options`, with equal types."""
    known = typing.get_type_hints(Options)
    assert typing.get_type_hints(CompileArguments) == {name: known[name] for name in NAMES}
    assert typing.get_type_hints(OptionArguments).keys() == NAMES - {"hardware"}
    for function in FUNCTIONS:
        unpacked = ExplainArguments if function in EXPLAINING else CompileArguments
        assert function.__annotations__["options"] == f"Unpack[{unpacked.__name__}]"


def test_every_option_is_documented() -> None:
    """In the docstring of `compile`, to which the others refer."""
    (arguments,) = re.findall(r"Args:\n(.*?)\n\n", inspect.getdoc(graphshard.compile) or "", re.DOTALL)
    described = {name for names in re.findall(r"^ {4}(\w+(?:, \w+)*):", arguments, re.M) for name in names.split(", ")}
    assert described == inspect.signature(graphshard.compile).parameters.keys()


def test_every_option_is_compared_with_a_file() -> None:
    """By rows, by a fact, or not at all with a reason; there are no other entries."""
    compared = {*ROWS.values(), *(name for options in FACTS.values() for name in options)}
    assert compared | NOT_COMPARED.keys() == NAMES
    assert not compared & NOT_COMPARED.keys()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("unit", "Did you mean 'units'?"),
        ("reshard", "Did you mean 'reshard_after_forward'?"),
        ("activations", "Did you mean 'activation'?"),
        ("colour", "It takes model, mesh"),
    ],
)
def test_misspelled_arguments(function: Callable[..., Any], name: str, hint: str) -> None:
    """The message suggests the correct name, before anything else is checked."""
    given = [None] * len([p for p in inspect.signature(function).parameters.values() if p.default is p.empty])
    hint = hint.replace("model, mesh", ", ".join(list(inspect.signature(function).parameters)[:2]))
    with pytest.raises(ArgumentError) as caught:
        function(*given, **{name: None})
    assert str(caught.value).startswith(f"{function.__name__}() got an unexpected keyword argument {name!r}. {hint}")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"reshard_after_forward": 0.5}, r"reshard_after_forward must be True, False, None, or a number of ranks .* 0\.5"),
    ({"shard_placement_fn": 1}, r"shard_placement_fn must be a function from a parameter to Shard\(dim\) or None, got"),
    ({"mp_policy": "bf16"}, r"mp_policy must be a .*MixedPrecisionPolicy, such as .*, got 'bf16'"),
    ({"mp_policy": {"": None}}, r"mp_policy\[''\] must be a .*MixedPrecisionPolicy, such as .*, got None"),
    (
        {"offload_policy": True},
        r"offload_policy must be a torch\.distributed\.fsdp\.CPUOffloadPolicy or None, got bool",
    ),
    ({"ignored_params": nn.Parameter(torch.ones(1))}, "ignored_params must be a set .* got a Parameter"),
    ({"ignored_params": 3}, "ignored_params must be a set of the model's parameters, got a int"),
    ({"units": "layers.*"}, r"units must be a sequence .*, got one string\. Pass \['layers\.\*'\]"),
    ({"reduce": "ring"}, "reduce must be None, 'exchange' or 'auto', got 'ring'"),
    ({"backend": "cudagraphs"}, "backend must be one of 'inductor', 'eager', got 'cudagraphs'"),
    ({"activation": "some"}, "activation must be None, 'full', 'auto', a list of operators to save, or .* got 'some'"),
    ({"memory_limit": 0}, r"memory_limit must be a positive whole number of bytes, such as 70 \* 10\*\*9, got 0"),
    ({"memory_limit": True}, r"memory_limit must be a positive whole number of bytes, such as 70 \* 10\*\*9, got True"),
    ({"dynamic_shapes": "auto"}, "dynamic_shapes must be a tuple with an entry for each input, or a dict .* got str"),
    ({"max_captures": 0}, "max_captures must be a positive int, got 0"),
    ({"passes": []}, r"passes must be a graphshard\.Pipeline, got list\. Start from graphshard\.Pipeline\(\)"),
    ({"fullgraph": 1}, "fullgraph must be True or False, got 1"),
    ({"verify": "always"}, "verify must be one of 'off', 'ends', 'each', got 'always'"),
]


@pytest.mark.parametrize(
    ("option", "message"), WRONG, ids=lambda value: next(iter(value)) if type(value) is dict else ""
)
def test_rejects_invalid_options(option: dict[str, Any], message: str) -> None:
    """Found when options are created, in any function."""
    with pytest.raises(ArgumentError, match=message):
        Options(**option)
    for function in (graphshard.compile, graphshard.explain, graphshard.explain_grid):
        with pytest.raises(ArgumentError, match=message):
            function(Blocks(1), [(2,)], example_inputs=(), **option)


def test_every_option_is_checked() -> None:
    """Individually, as above; `hardware` is checked when its file is read."""
    assert {name for option, _ in WRONG for name in option} == NAMES - {"hardware"}
    with pytest.raises(ArgumentError, match="hardware 'tpu' is neither"):
        profile_here(torch.device("cpu"), Options(hardware="tpu").hardware)


@pytest.mark.parametrize(
    ("option", "mesh", "message"),
    [
        (
            {"mp_policy": {"x": MixedPrecisionPolicy()}},
            None,
            r"mp_policy: 'x' names no unit; there are ''",
        ),
        ({"units": ["blocks.*"]}, None, r"units: the pattern 'blocks\.\*' matches no submodule with parameters"),
        ({"reshard_after_forward": 3}, None, r"reshard_after_forward=3 must divide .* 4\. Give one of 1, 2, 4; 1 is"),
        ({"activation": "full", "units": []}, None, r"activation='full' is about the units of Blocks, and none were"),
        (
            {"ignored_params": [nn.Parameter(torch.ones(3))]},
            None,
            r"ignored_params holds a tensor of shape \[3\], which",
        ),
        ({"shard_placement_fn": lambda _: 1}, None, r"shard_placement_fn returned 1 for parameter layers\.0"),
    ],
)
def test_rejects_options_that_do_not_fit_the_model(
    option: dict[str, Any], mesh: tuple[int, ...] | None, message: str
) -> None:
    """Found in combination with the model and the mesh."""
    axes = MeshAxes(Mesh.of_shape(mesh or 4))
    with pytest.raises(ArgumentError, match=message):
        capture_spec(ModelContents.of(Blocks(2)), axes, Options(**option), torch.device("cpu"))


def test_level_of_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument, the environment, or both ends."""
    monkeypatch.delenv("GRAPHSHARD_VERIFY", raising=False)
    assert Options().level == "ends"
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "each")
    assert (Options().level, Options(verify="off").level) == ("each", "off")
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "never")
    with pytest.raises(ArgumentError, match="GRAPHSHARD_VERIFY must be one of 'off', 'ends', 'each', got 'never'"):
        Options()


def test_iterators_are_read_once() -> None:
    """`ignored_params=(p for p in ...)` serves every mesh."""
    model = Blocks(2)
    options = Options(ignored_params=(param for param in [next(model.parameters())]))
    for size in (2, 4):
        axes = MeshAxes(Mesh.of_shape(size))
        table = capture_spec(ModelContents.of(model), axes, options, torch.device("cpu")).params
        assert [row.ignored for row in table] == [True, False]


def test_options_are_immutable() -> None:
    with pytest.raises(AttributeError):
        Options().units = ["layers.*"]  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options(["layers.*"])  # type: ignore[misc]


def test_settings_of_a_grid() -> None:
    """Common settings, replaced by each one's; hardware is not a setting, because there is a list."""
    inputs = (torch.zeros(3, 4),)
    found = graphshard.explain_grid(
        Blocks(2),
        [(2,)],
        example_inputs=inputs,
        optimizer_states=0,
        passes=Pipeline().replace("plan", MakePlan(graphshard.PlanByUnit())),
        settings={"shared": {}, "own": {"optimizer_states": 1, "offload_policy": CPUOffloadPolicy()}},
    )
    shared, own = found.rows
    assert shared.memory["optimizer state"] == 0 < shared.memory["shards"]
    assert own.optimizer_s > shared.optimizer_s
    assert "host" in own.busy
    with pytest.raises(ArgumentError, match=r"settings\['x'\] got an unexpected keyword argument 'hardware'"):
        graphshard.explain_grid(Blocks(2), [(2,)], example_inputs=inputs, settings={"x": {"hardware": "a100"}})
