"""Programs as JSON: everything that passes read is kept, and reading a file has no side effects."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict, namedtuple
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Node

from examples.llama import Llama, LlamaConfig
from graphshard.codec.converter import UnknownOutput, decode_structure
from graphshard.codec.program_format import next_pass_of, program_from_json, program_to_json
from graphshard.codec.stage_format import plan_of
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.ir.mesh import Mesh
from graphshard.ir.printer import print_program
from graphshard.ir.program import Program
from graphshard.options.resolve import with_regather
from graphshard.passes import Bucketing, DropUnusedTangents, MakePlan, Pass
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import Pipeline, run_pass
from graphshard.pipeline.rules import verify
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.torch_compat.torch_ops import pytree
from tests.helpers import PACKED, Affine, Blocks, Tied, captured

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STAGES = ("capture", *(step.name for step in Pipeline()))


class Noisy(nn.Module):
    """Dropout, and a batch norm whose statistics change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.drop(self.norm(self.linear(x)))
        return {"loss": y.sum(), "y": y}


def llama() -> Program:
    model = Llama(LlamaConfig(layers=1, dim=16, heads=2, vocab=16, seq=4))
    return captured(model, (torch.randint(0, 16, (2, 4)),), mp_policy=BF16)


PROGRAMS = {
    "blocks": lambda: captured(Blocks(2, bias=True), (torch.randn(2, 4),)),
    "tied": lambda: captured(Tied(), (torch.tensor([1, 2]),)),
    "uneven": lambda: captured(Affine(4), (torch.randn(4, 2),), world_size=3),
    "llama": llama,
    "noisy": lambda: captured(Noisy(), (torch.randn(2, 4),)),
    "inference": lambda: captured(Blocks(2), (torch.randn(2, 4),), grad=False),
}


@dataclass(frozen=True)
class Saved:
    """A program after a pass, as text and as JSON."""

    stage: str
    text: str
    json: str


@pytest.fixture(scope="module", params=PROGRAMS)
def saved(request: pytest.FixtureRequest) -> list[Saved]:
    """Return every stage of a program."""
    return stages_of(PROGRAMS[request.param]())


@pytest.fixture(scope="module")
def blocks() -> list[Saved]:
    return stages_of(captured(Blocks(1), (torch.randn(2, 4),)))


@pytest.fixture
def loaded(blocks: list[Saved]) -> Program:
    """Load a program that a test may change."""
    return program_from_json(blocks[0].json)


def first_call(program: Program) -> Node:
    return next(node for node in program.phases["joint"].module.graph.nodes if node.op == "call_function")


def stages_of(program: Program) -> list[Saved]:
    saved = [Saved("capture", print_program(program), program_to_json(program, next_pass=Pipeline().passes[0]))]
    for step, after in zip(Pipeline(), (*Pipeline().passes[1:], None)):
        run_pass(step, program, Observer("off"))
        saved.append(Saved(step.name, print_program(program), program_to_json(program, next_pass=after)))
    return saved


def edited(text: str, *path: Any, value: Any) -> str:
    """Return the JSON with another value at a path; `del` removes it."""
    data = json.loads(text)
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is del_:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data)


del_ = object()


def first(text: str, op: str = "call_function", phase: str = "joint") -> int:
    """Return the index of the first node of a kind."""
    return next(i for i, node in enumerate(json.loads(text)["phases"][phase]["nodes"]) if node["op"] == op)


@pytest.mark.quick_cases("blocks", "tied", "uneven", "noisy", "inference")
def test_every_stage_survives_a_round_trip(saved: list[Saved]):
    """Text and JSON are equal, and the same rules hold."""
    for stage in saved:
        program = program_from_json(stage.json)
        assert print_program(program) == stage.text, stage.stage
        verify(program, stage.stage)
        step = next_pass_of(stage.json)
        assert program_to_json(program, next_pass=step and step.step) == stage.json


@pytest.mark.parametrize("start", range(len(STAGES) - 1), ids=STAGES[:-1])
@pytest.mark.quick_cases(
    "blocks-capture",
    "blocks-insert-collectives",
    "blocks-mixed-precision",
    "blocks-reshard-after-forward",
    "blocks-partition",
    "blocks-drop-unused-tangents",
    "blocks-overlap-model-collectives",
    "blocks-coalesce-model-collectives",
    "blocks-plan",
    "blocks-bucket",
    "tied-capture",
    "tied-insert-collectives",
    "tied-mixed-precision",
    "tied-reshard-after-forward",
    "tied-partition",
    "tied-drop-unused-tangents",
    "tied-overlap-model-collectives",
    "tied-coalesce-model-collectives",
    "tied-plan",
    "tied-bucket",
    "uneven-capture",
    "uneven-insert-collectives",
    "uneven-mixed-precision",
    "uneven-reshard-after-forward",
    "uneven-partition",
    "uneven-drop-unused-tangents",
    "uneven-overlap-model-collectives",
    "uneven-coalesce-model-collectives",
    "uneven-plan",
    "uneven-bucket",
    "llama-insert-collectives",
    "llama-mixed-precision",
    "llama-reshard-after-forward",
    "llama-partition",
    "llama-overlap-model-collectives",
    "llama-coalesce-model-collectives",
    "llama-plan",
    "llama-bucket",
    "noisy-capture",
    "noisy-insert-collectives",
    "noisy-mixed-precision",
    "noisy-reshard-after-forward",
    "noisy-partition",
    "noisy-drop-unused-tangents",
    "noisy-overlap-model-collectives",
    "noisy-coalesce-model-collectives",
    "noisy-plan",
    "noisy-bucket",
    "inference-capture",
    "inference-insert-collectives",
    "inference-mixed-precision",
    "inference-reshard-after-forward",
    "inference-partition",
    "inference-drop-unused-tangents",
    "inference-overlap-model-collectives",
    "inference-coalesce-model-collectives",
    "inference-plan",
    "inference-bucket",
)
def test_passes_have_the_same_effect_on_a_reloaded_program(saved: list[Saved], start: int):
    """From any stage on, partitioner, planner and passes find all their inputs."""
    program = program_from_json(saved[start].json)
    for step, expected in zip(Pipeline().passes[start:], saved[start + 1 :], strict=True):
        run_pass(step, program, Observer("off"))
        assert print_program(program) == expected.text, f"{step.name}, reloaded after {saved[start].stage}"
        assert plan_of(program_to_json(program)) == plan_of(expected.json)


def test_everything_except_graphs_survives_a_round_trip():
    program = captured(Noisy(), (torch.randn(2, 4),))
    program.reason, program.capture = 'x: "f32[2, 4]"\n', 3
    program.established.add("reduced_once")
    loaded = program_from_json(program_to_json(program))
    for name in ("params", "mesh", "device", "tangents", "established", "differentiated", "model", "out_spec"):
        assert getattr(loaded, name) == getattr(program, name), name
    assert (loaded.title, loaded.reason, loaded.next_number) == (program.title, program.reason, program.next_number)


@pytest.mark.parametrize("mesh", [Mesh.of_shape({"dp": 2, "fsdp": 4}), Mesh.of_shape(4).with_regather(2)], ids=str)
@pytest.mark.quick_cases("shard 4")
def test_every_mesh_axis_survives_a_round_trip(mesh: Mesh):
    """After every pass the rules hold, which check axes of communication."""
    program = replace(captured(Blocks(2), (torch.randn(2, 4),), world_size=4), mesh=mesh)
    for step in with_regather(Pipeline()) if mesh.regather else Pipeline():
        run_pass(step, program, Observer("off"))
        loaded = program_from_json(program_to_json(program))
        assert loaded.mesh == mesh
        verify(loaded, step.name)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ([], "mesh has no axis with the role 'shard'"),
        (
            [{"name": "shard", "size": 2, "role": "cut"}],
            "mesh.axes[0].role: 'cut' is none of replicate, shard, regather",
        ),
        ([{"name": "shard", "size": "2", "role": "shard"}], "'2' is no int"),
        ([{"name": "shard", "size": 2}], "'role' is missing"),
        ([2], "not a stage that can be read"),
    ],
)
def test_rejects_invalid_meshes(blocks: list[Saved], axes: Any, message: str):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        program_from_json(edited(blocks[0].json, "mesh", "axes", value=axes))


def test_nodes_keep_their_names(saved: list[Saved]):
    """Saved values are named after nodes."""
    stage = saved[STAGES.index("partition")].json
    names = {name: [n["name"] for n in phase["nodes"]] for name, phase in json.loads(stage)["phases"].items()}
    phases = program_from_json(stage).phases
    assert names == {name: [n.name for n in phase.module.graph.nodes] for name, phase in phases.items()}


def test_a_parameter_named_like_a_builtin(loaded: Program):
    """Partition names inputs after parameters, while generated names avoid builtins."""
    node = loaded.phases["joint"].placeholders[0]
    node.name = node.target = "id"
    again = program_from_json(program_to_json(loaded))
    assert again.phases["joint"].placeholders[0].name == "id"


def test_values_have_strides_and_a_device():
    program = captured(Tied(), (torch.tensor([1, 2]),))
    (phase,) = program_from_json(program_to_json(program)).phases.values()
    for before, after in zip(program.phases["joint"].module.graph.nodes, phase.module.graph.nodes, strict=True):
        if before.op != "output":
            a, b = before.meta["val"], after.meta["val"]
            assert (a.stride(), a.device, a.dtype) == (b.stride(), b.device, b.dtype)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            -0.0,
            float("inf"),
            float("-inf"),
            "text",
            [1, [2.5]],
            (1, (None,)),
            1 + 2j,
            slice(0, None, 2),
        ),
        *(torch.bfloat16, torch.strided, torch.channels_last, torch.device("cpu"), torch.device("cuda:3")),
    ],
    ids=repr,
)
def test_arguments_survive_a_round_trip(loaded: Program, value: Any):
    first_call(loaded).kwargs = {"extra": value}
    again = program_from_json(program_to_json(loaded))
    assert repr(first_call(again).kwargs["extra"]) == repr(value)


def test_nan_is_not_json(loaded: Program):
    first_call(loaded).kwargs = {"alpha": float("nan")}
    text = program_to_json(loaded)
    json.loads(text, parse_constant=pytest.fail)
    assert math.isnan(first_call(program_from_json(text)).kwargs["alpha"])


def test_constants_are_stored_without_values():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w * torch.tensor([1.0, 0.0, 1.0, 0.0])

    program = captured(Masked(), (torch.randn(4),))
    (constant,) = program_from_json(program_to_json(program)).constants.values()
    assert (constant.shape, constant.dtype, type(constant).__name__) == ((4,), torch.float32, "FakeTensor")


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize("output", [Point(1, 2), defaultdict(list, a=1)], ids=["namedtuple", "defaultdict"])
def test_an_output_of_another_class_stays_text(loaded: Program, output: Any):
    text = program_to_json(replace(loaded, out_spec=pytree.tree_structure(output)))
    again = program_from_json(text)
    assert again.out_spec.type is UnknownOutput
    assert program_to_json(again) == text


def test_a_cuda_program_loads_without_cuda(blocks: list[Saved]):
    """A laptop can read a GPU cluster's dump."""
    program = program_from_json(blocks[0].json.replace('"cpu"]', '"cuda:0"]').replace('"cpu"', '"cuda"'))
    for step in Pipeline():
        run_pass(step, program, Observer("each"))
    assert program.device.type == "cuda"


def test_a_dump_never_fails(loaded: Program):
    """Values that cannot be stored are marked; reading names them."""
    first_call(loaded).kwargs = {"extra": object()}
    first_call(loaded).meta["recompute"] = object()
    with pytest.raises(ArgumentError, match="a value of type object, which a file cannot hold"):
        program_from_json(program_to_json(loaded))


def test_rejects_a_lowered_program(blocks: list[Saved]):
    text = edited(blocks[0].json, "phases", "joint", "nodes", first(blocks[0].json), "op", value="call_module")
    with pytest.raises(ArgumentError, match="lowered, take a stage before"):
        program_from_json(text)


# The next pass.


@pytest.mark.parametrize(
    "step",
    [
        *Pipeline(),
        DropUnusedTangents(used=frozenset({"1", "0"})),
        MakePlan(PACKED),
        MakePlan(PlanByUnit(pack_reductions_below=None)),
    ],
    ids=lambda step: step.name,
)
def test_the_next_pass_is_stored_with_its_options(loaded: Program, step: Pass):
    found = next_pass_of(program_to_json(loaded, next_pass=step))
    assert found is not None
    assert (found.step, found.name, found.problem) == (step, step.name, "")


@dataclass(frozen=True)
class Mine(Pass):
    name: ClassVar[str] = "mine"


def test_a_pass_of_the_user_is_named_but_not_imported(loaded: Program):
    found = next_pass_of(program_to_json(loaded, next_pass=Mine()))
    assert found is not None
    assert (found.step, found.name, found.class_name) == (None, "mine", "tests.codec.test_stage:Mine")
    assert found.problem == "tests.codec.test_stage:Mine is not graphshard's own"


def test_an_option_that_cannot_be_stored_is_named(loaded: Program):
    step = MakePlan(lambda program: PlanByUnit()(program))
    found = next_pass_of(program_to_json(loaded, next_pass=step))
    assert found is not None
    assert (found.step, found.problem) == (None, "its option planner is a function, which a file cannot hold")


def test_no_next_pass(blocks: list[Saved]):
    assert next_pass_of(blocks[-1].json) is None
    with pytest.raises(ArgumentError, match='"next" is no pass'):
        next_pass_of(edited(blocks[0].json, "next", value=3))


def test_options_of_another_version_are_a_problem_not_an_error(blocks: list[Saved]):
    text = edited(
        program_to_json(program_from_json(blocks[0].json), next_pass=Bucketing()), "next", "options", "x", value=1
    )
    found = next_pass_of(text)
    assert found is not None
    assert found.problem == "'x' is no field of Bucketing"


# Malformed files.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON, cut off perhaps"),
        ("[" * 100_000, "not JSON"),
        ("[]", 'has no "format"'),
        ('{"format": 1}', "format 1 is not 8"),
        ('{"format": 8}', "'phases' is missing"),
    ],
    ids=["empty", "deep", "list", "format", "bare"],
)
def test_rejects_files_other_than_stages(text: str, message: str):
    with pytest.raises(ArgumentError, match=message):
        program_from_json(text)


def test_a_truncated_file(blocks: list[Saved]):
    with pytest.raises(ArgumentError, match="not JSON, cut off perhaps"):
        program_from_json(blocks[0].json[:-100])


NODE = ("phases", "joint", "nodes")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target", "nolib.mm.default", "unknown operator nolib.mm.default: import the library that registers it"),
        ("target", "aten.save.default", "unknown operator"),  # TorchScript's, which writes a file
        ("target", "import_module.os.path", "unknown operator"),
        ("target", "aten.__class__.mro", "unknown operator"),
        ("name", "x): pass\nimport this\ndef f(", "no identifier"),
        ("name", "lambda", "no identifier"),
        ("kwargs", {"x=print()": 1}, "no identifier"),
        ("args", [{"node": "later"}], "'later' is used before it is computed"),
        ("args", [{"dtype": "ops"}], "torch has no dtype 'ops'"),
        ("args", [{"eval": "1"}], "is no value"),
        ("val", {"tensor": ["float32", [-1], [1], "cpu"]}, "cannot be made"),
        ("val", {"tensor": ["float32", [1], [1], "nowhere"]}, "nowhere"),
        ("meta", {"val": 3}, "'val' is no mark"),
        ("meta", {"recompute": "SOMETIMES"}, "SOMETIMES"),
        ("modules", 3, "'3' is no dict"),
        ("modules", {"L__self__": 3}, "'3' is no str"),
        ("op", "get_attr", "is a get_attr"),
    ],
)
def test_rejects_invalid_nodes(blocks: list[Saved], field: str, value: Any, message: str):
    text = edited(blocks[0].json, *NODE, first(blocks[0].json), field, value=value)
    with pytest.raises(ArgumentError, match=message):
        program_from_json(text)


def test_names_of_inputs_are_not_executed(blocks: list[Saved]):
    """torch.fx writes it to the signature of the generated source."""
    text = edited(blocks[0].json, *NODE, 0, "target", value="x=print('run')")
    with pytest.raises(ArgumentError, match="no identifier"):
        program_from_json(text)


@pytest.mark.parametrize(
    "spec",
    [
        {
            "type": "collections.defaultdict",
            "context": {"default_factory_module": "this", "default_factory_name": "s", "dict_context": []},
        },
        {"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "this:s", "name": "x"}]'},
    ],
    ids=["factory", "enum"],
)
def test_an_output_structure_imports_nothing(blocks: list[Saved], spec: dict[str, Any]):
    """pytree imports modules named by some structures."""
    assert "this" not in sys.modules
    text = edited(blocks[0].json, "out_spec", value=json.dumps([1, {**spec, "children_spec": []}]))
    assert program_from_json(text).out_spec.type is UnknownOutput
    assert "this" not in sys.modules


ESCAPED = (
    '[1, {"type": "builtins.dict", "context": "[{\\"__\\\\u0065num__\\": 1, \\"fqn\\": \\"this:s\\"}]",'
    ' "children_spec": []}]'
)
FACTORY = (
    '[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "this", "default_factory_name": "s",'
    ' "dict_context": []}, "children_spec": []}]'
)


@pytest.mark.parametrize("text", [ESCAPED, FACTORY], ids=["enum", "factory"])
def test_the_structure_of_a_lowered_program_imports_nothing(text: str):
    with pytest.raises(ArtifactError, match="names a module to import"):
        decode_structure(text, "outputs")
    assert "this" not in sys.modules


def test_rejects_different_numbers_of_slots_and_values(blocks: list[Saved]):
    text = edited(blocks[0].json, "phases", "joint", "inputs", 0, value=del_)
    with pytest.raises(ArgumentError, match="not one slot for each input and output"):
        program_from_json(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.sampled_from(["", "mul", "grad"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["node", "tuple", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_corruption_raises_only_argument_errors(blocks: list[Saved], data: st.DataObject):
    """One value of the file is changed or missing: the file is rejected, or the program can be printed."""
    content = json.loads(data.draw(st.sampled_from([blocks[0], blocks[-1]])).json)
    at: Any = content
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.integers(0, 5)) == 0:
            break
        at = at[key]
    if data.draw(st.booleans()):
        at[key] = data.draw(JSON_VALUES)
    else:
        del at[key]
    try:
        program = program_from_json(json.dumps(content))
    except ArgumentError:
        return
    print_program(program)
    program_to_json(program)


@settings(max_examples=50, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_truncation_raises_only_argument_errors(blocks: list[Saved], cut: float):
    text = blocks[-1].json.rstrip()
    with pytest.raises(ArgumentError):
        program_from_json(text[: int(cut * len(text))])
