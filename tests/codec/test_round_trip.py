"""Every field of stored classes survives a round trip.

Values are generated from the types of fields, without defaults: a lost field would come back as its default. A new
field of one of these classes is tested automatically; a type that cannot be stored fails.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch.export import Dim
from torch.fx import GraphModule

from graphshard.codec.converter import PASSES, decode_pass, encode_pass, read, write
from graphshard.codec.graph_format import Decoder, encode_graph, to_json
from graphshard.codec.program_format import (
    decode_lowered,
    decode_partitioned,
    decode_region,
    encode_lowered,
    encode_partitioned,
    encode_region,
    program_from_json,
    program_to_json,
)
from graphshard.cost.costs import Costs
from graphshard.cost.profile import Profile, load_profile
from graphshard.errors import ArtifactError
from graphshard.frontend.inputs import leaf_key
from graphshard.frontend.signature import Signature
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamSpec, ParamTable
from graphshard.ir.plan import Bucket, Event, Plan, Prediction
from graphshard.ir.program import EagerForward, Phase, Planner, Program, Region, Size, Slot, Stage, UnitMemory
from graphshard.ir.sizes import size_inputs
from graphshard.lower.eager import compile_operators
from graphshard.lower.regions import lower
from graphshard.pipeline.pipeline import Partitioned, Pipeline
from graphshard.schedule.build_problem import Constraints
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from graphshard.torch_compat.fake_tensors import new_fake_mode
from graphshard.torch_compat.symbolic_sizes import new_size
from graphshard.torch_compat.torch_ops import OpOverload, pytree
from tests.helpers import Blocks, captured, through

# Fields that are blank after loading: times, objects of another process, and texts of earlier stages, which have
# separate files.
BLANK = {
    (Program, "lowering_seconds"): 0.0,
    (Program, "region_seconds"): {},
    (Program, "trace"): None,
    (Program, "eager"): None,
    (Program, "returned"): None,
    (Stage, "seconds"): 0.0,
    (Stage, "text"): "",
}
# Types that are stored as a whole, not by field.
WHOLE = (torch.Tensor, torch.SymInt, GraphModule, pytree.TreeSpec, Profile, Phase)
NAMES = iter(f"x{index}" for index in range(10**6))


@cache
def dynamic_program() -> Program:
    """Build a partitioned program with a dynamic size."""
    batch = ({0: Dim("batch", min=2, max=64)},)
    return through(captured(Blocks(2), (torch.ones(3, 4),), dynamic_shapes=batch), "reorder")


def sample(kind: Any) -> Any:
    """Return a value of a type that is not the default of a field."""
    origin, args = get_origin(kind), get_args(kind)
    if kind == Planner:
        return sample(PlanByCost)
    if origin is Literal:
        return args[-1]
    if origin in (Union, UnionType):
        return sample(next(arg for arg in args if arg is not NoneType))
    if origin is Callable:
        return print
    if origin is tuple and Ellipsis not in args:
        return tuple(map(sample, args))
    if origin is Mapping or origin is dict:
        return {sample(args[0]): sample(args[1])}
    if origin is not None:
        return {tuple: tuple, list: list, set: set, frozenset: frozenset}.get(origin, list)([sample(args[0])])
    if kind in LEAVES:
        return LEAVES[kind]()
    return filled(kind)


def filled(kind: type) -> Any:
    """Build an instance of a dataclass without defaults."""
    hints = get_type_hints(kind)
    return kind(**{each.name: other(kind, each, hints[each.name]) for each in fields(kind)})


def other(kind: type, each: Field[Any], hint: Any) -> Any:
    """Return a value that is not the default of a field."""
    if (kind, each.name) in SPECIAL:
        return SPECIAL[kind, each.name]()
    return not each.default if isinstance(each.default, bool) else sample(hint)


LEAVES: dict[Any, Callable[[], Any]] = {
    bool: lambda: True,
    int: lambda: 7,
    float: lambda: 2.5,
    str: lambda: next(NAMES),
    Any: lambda: next(NAMES),
    torch.dtype: lambda: torch.bfloat16,
    torch.device: lambda: torch.device("cuda"),
    torch.Tensor: lambda: torch.empty_strided((2, 3), (1, 2), dtype=torch.bfloat16),
    torch.SymInt: lambda: dynamic_program().sizes[0].value,
    OpOverload: lambda: torch.ops.aten.mm.default,
    GraphModule: lambda: dynamic_program().forward,
    pytree.TreeSpec: lambda: pytree.tree_structure({"a": [1, (2,)]}),
    Profile: lambda: load_profile("a100"),
    Phase: lambda: dynamic_program().phases["forward"],
}
SPECIAL: dict[tuple[type, str], Callable[[], Any]] = {
    (Program, "phases"): lambda: dynamic_program().phases,  # phase names have a meaning
    (Program, "sizes"): lambda: dynamic_program().sizes,
    (Mesh, "axes"): lambda: Mesh.of_shape({"outer": 2, "inner": 4}).with_regather(2).axes,
    (Signature, "inputs"): lambda: (leaf_key(torch.ones(2, 3)), leaf_key(3), leaf_key(None)),
    (Signature, "autocast"): lambda: (True, torch.bfloat16),
    (Partitioned, "rest"): lambda: Pipeline().passes[4:],
}


def comparable(value: Any) -> Any:
    """Replace everything that is not plain data by its stored form."""
    if isinstance(value, GraphModule):
        return encode_graph(value.graph, {symbol: f"n{i}" for i, symbol in enumerate(size_inputs(value.graph))})
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device
    if isinstance(value, torch.SymInt):
        return str(value.node.shape_env.var_to_range[value.node.expr]), value.node.hint
    if is_dataclass(value) and not isinstance(value, WHOLE[3:5]):
        blank = {name for kind, name in BLANK if isinstance(value, kind)}
        return {f.name: comparable(getattr(value, f.name)) for f in fields(value) if f.name not in blank}
    if isinstance(value, (tuple, list)):
        return tuple if isinstance(value, tuple) else list, [comparable(item) for item in value]
    return {key: comparable(item) for key, item in value.items()} if isinstance(value, dict) else value


def stored(value: Any) -> Any:
    """Write and read plain data."""
    return json.loads(to_json(value))


def has_no_default(kind: type) -> None:
    """Check that values made for a class reveal a lost field."""
    value = filled(kind)
    for each in fields(kind):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        assert comparable(getattr(value, each.name)) != comparable(default), f"{kind.__name__}.{each.name}"


# --- programs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> tuple[Program, Program]:
    """Build a program without defaults, and its copy from a stage's file."""
    program = filled(Program)
    return program, program_from_json(program_to_json(program))


def test_the_program_has_no_defaults() -> None:
    has_no_default(Program)


@pytest.mark.parametrize("name", [each.name for each in fields(Program)])
def test_every_field_of_a_program(pair: tuple[Program, Program], name: str) -> None:
    given, found = (getattr(program, name) for program in pair)
    if name == "regions":  # stored in separate files
        given, found = list(given), list(found)
    assert comparable(found) == comparable(BLANK.get((Program, name), given))


def test_equal_programs_are_equal_files(pair: tuple[Program, Program]) -> None:
    """Sets are unordered, and times differ between runs."""
    given, found = pair
    assert program_to_json(given) == program_to_json(found)
    names = [f"p{index}" for index in range(50)]
    first, second = (replace(given, established=set(order)) for order in (names, names[::-1]))
    assert program_to_json(first) == program_to_json(replace(second, lowering_seconds=3.0))


def test_lowered_programs_keep_every_field() -> None:
    """Compiled regions, for the executors that are rebuilt."""
    model = Blocks(2)
    program = through(captured(model, (torch.ones(3, 4),)), "reorder")
    compiled = {}
    lower(program, lambda regions, _: ((key, compile_operators(region)) for key, region in regions.items()), compiled)
    program = replace(
        program,
        trace=None,
        eager=None,
        returned=None,
        **{name: getattr(filled(Program), name) for name in ("history", "saved", "communication")},
    )
    found = decode_lowered(stored(encode_lowered(program, model)), compiled, model, torch.device("cpu"))
    for name in (
        each.name for each in fields(Program) if each.name not in ("regions", "lowering_seconds", "region_seconds")
    ):
        assert comparable(getattr(found, name)) == comparable(getattr(program, name)), name
    assert list(found.regions) == list(program.regions)


CONSTANTS = {
    "plain": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "with gaps": torch.randn(3, 4)[:, 1:3],
    "one element": torch.tensor(2.5),
    "expanded to one": torch.tensor([2.5]).as_strided((1,), (0,)),
    "expanded": torch.randn(4).expand(3, 4),
    "overlapping": torch.randn(6).as_strided((4, 3), (1, 1)),
    "empty": torch.empty(0, dtype=torch.int64),
    "without rows": torch.empty(0, 4),
}


def test_constants_keep_values_and_strides() -> None:
    model = Blocks(2)
    program = through(captured(model, (torch.ones(3, 4),)), "reorder")
    compiled = {}
    lower(program, lambda regions, _: ((key, compile_operators(region)) for key, region in regions.items()), compiled)
    program = replace(program, constants=CONSTANTS)
    data = stored(encode_lowered(program, model))
    found = decode_lowered(data, compiled, model, torch.device("cpu")).constants
    for name, constant in CONSTANTS.items():
        assert (found[name].dtype, found[name].stride()) == (constant.dtype, constant.stride()), name
        assert torch.equal(found[name], constant), name
    data["values"]["plain"]["data"] = data["values"]["one element"]["data"]
    with pytest.raises(ArtifactError, match="4 bytes are not those of a tensor of shape"):
        decode_lowered(data, compiled, model, torch.device("cpu"))


def test_every_field_of_a_region() -> None:
    region = Region("key", "text", dynamic_program().forward)
    data = stored(encode_region(region))
    found = decode_region("key", data, torch.device("cpu"))
    assert [getattr(found, f.name) for f in fields(Region) if f.name != "module"] == ["key", "text"]
    assert stored(encode_region(found)) == data


@pytest.mark.parametrize("hint", [0, 1])
def test_a_size_that_torch_makes_constant_is_an_error(hint: int) -> None:
    data = stored(encode_region(Region("key", "text", dynamic_program().forward)))
    for known in data["symbols"].values():
        known.update(hint=hint, range=[0, None])
    with pytest.raises(ArtifactError, match="region key cannot be read"):
        decode_region("key", data, torch.device("cpu"))


def test_every_field_of_another_backwards_start() -> None:
    program, pipeline = dynamic_program(), Pipeline()
    given = filled(Partitioned)
    found = decode_partitioned(stored(encode_partitioned(given, program)), program, pipeline, torch.device("cpu"))
    assert comparable(found) == comparable(given)


# --- other contents of files ---------------------------------------------------------------------------------


def parts(kind: Any, seen: dict[type, None]) -> Iterator[type]:
    """Yield the dataclasses in the types of a class's fields, recursively, with the class."""
    if is_dataclass(kind) and kind not in seen and not issubclass(kind, WHOLE):
        seen[kind] = None
        yield kind
        hints = get_type_hints(kind)
        for each in fields(kind):
            yield from parts(hints[each.name], seen)
    for arg in get_args(kind):
        yield from parts(arg, seen)


ROOTS = (Program, Signature, Partitioned, Slot, *PASSES.values(), PlanByUnit, PlanByCost)
CLASSES = [kind for root in ROOTS for kind in parts(root, {})]
ALONE = [kind for kind in dict.fromkeys(CLASSES) if kind not in (Program, Partitioned, Region, EagerForward)]


def test_stored_classes_are_found() -> None:
    """A few classes are known to be among them."""
    known = {ParamTable, ParamSpec, Plan, Bucket, Event, Prediction, Stage, Size, UnitMemory, Costs, Constraints}
    assert known <= set(ALONE)


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_every_field_of_every_class(kind: type) -> None:
    has_no_default(kind)
    value = filled(kind)
    decoder = Decoder(mode=new_fake_mode())
    decoder.sizes["s0"] = new_size(decoder.mode, "s0", 3, 2, 64)
    names = {size.symbol: size.name for size in dynamic_program().sizes}
    assert comparable(read(stored(write(value, names)), kind, decoder)) == comparable(
        replace(value, **{name: blank for (owner, name), blank in BLANK.items() if owner is kind})
    )


@pytest.mark.parametrize("kind", PASSES.values(), ids=lambda kind: kind.__name__)
def test_every_option_of_every_pass(kind: type) -> None:
    """With its class; defaults survive, too."""
    steps = [filled(kind)]
    if all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(kind)):
        steps.append(kind())
    for step in steps:
        found = decode_pass(stored(encode_pass(step)))
        assert (found.step, found.problem) == (step, "")


@dataclass(frozen=True)
class Extended(ParamSpec):
    """A class with an additional field of a storable type."""

    since: Mapping[str, tuple[torch.dtype | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Locked:
    """A class with a field that cannot be stored."""

    name: str
    lock: Any
    guard: threading.Event | None = None


def test_a_new_field_is_stored() -> None:
    row = filled(Extended)
    assert read(stored(write(row)), Extended) == row


def test_a_field_that_cannot_be_stored_is_an_error() -> None:
    """It is written, so that dumps never fail, but not read."""
    data = stored(write(Locked("x", None, threading.Event())))
    assert data == {"name": "x", "lock": None, "guard": {"unsupported": "Event"}}
    with pytest.raises(Exception, match="Event"):
        read(data, Locked)
