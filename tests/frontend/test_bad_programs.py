"""Programs and files that cannot be compiled raise an error that names the cause and the remedy."""

from __future__ import annotations

import io
import json
import operator
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim

import graphshard
from graphshard.errors import ArgumentError, InputError, UnsupportedError
from graphshard.exported.exported_program import module_of
from tests.distributed.twins import BF16, example_llama
from tests.frontend.programs import Net, Wide, batch, exported, rows

# --- files --------------------------------------------------------------------------------------------------


def _saved(tmp_path: Path, **options: Any) -> Path:
    path = tmp_path / "wide.pt2"
    torch.export.save(exported(Wide(), rows, **options), path)
    return path


def _changed(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Copy a file with other members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    copied = path.with_name("changed.pt2")
    with zipfile.ZipFile(copied, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return copied


def _graph(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, bytes]], None]:
    def apply(members: dict[str, bytes]) -> None:
        name = next(name for name in members if name.endswith("models/model.json"))
        program = json.loads(members[name])
        change(program)
        members[name] = json.dumps(program).encode()

    return apply


def test_a_path_that_does_not_exist(mesh: DeviceMesh) -> None:
    with pytest.raises(ArgumentError, match=r"model: there is no file 'gone\.pt2'\. Give a module, an "):
        graphshard.compile("gone.pt2", mesh)
    with pytest.raises(ArgumentError, match=r"model: there is no file"):
        graphshard.explain(Path("gone.pt2"), (2,), example_inputs=())


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04"])
def test_rejects_a_file_other_than_pt2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.pt2"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"text\.pt2' is not a \.pt2 file\. Give a file that torch\.exp"):
        module_of(path)


def test_rejects_a_checkpoint(tmp_path: Path) -> None:
    torch.save(Wide().state_dict(), tmp_path / "wide.pt")
    with pytest.raises(ArgumentError, match=r"is not a \.pt2 file of torch\.export\.save: it holds \["):
        module_of(tmp_path / "wide.pt")


def test_a_package_of_aotinductor(tmp_path: Path) -> None:
    path = _changed(_saved(tmp_path), lambda members: members.update({"wide/data/aotinductor/model/a.so": b""}))
    with pytest.raises(ArgumentError, match=r"was made by AOTInductor: it holds compiled code for inference"):
        module_of(path)


def test_a_file_of_graphshard_export_is_for_inference(tmp_path: Path) -> None:
    path = graphshard.export(Wide(), (1,), tmp_path / "a.pt2", example_kwargs=rows(), mode="inference", backend="eager")
    with pytest.raises(ArgumentError, match=r"was written by graphshard\.export for inference"):
        module_of(path)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from torch's copy of a pytree
def test_a_program_that_was_decomposed(mesh: DeviceMesh) -> None:
    program = exported(Wide(), rows).run_decompositions()
    with pytest.raises(ArgumentError, match=r"dialect ATEN, for inference: run_decompositions\(\) has taken"):
        graphshard.compile(program, mesh)


def test_a_file_of_another_torch(tmp_path: Path) -> None:
    def newer(program: dict[str, Any]) -> None:
        program["schema_version"]["major"] += 1
        program["torch_version"] = "9.9.0"

    path = _changed(_saved(tmp_path), _graph(newer))
    expected = (
        r"cannot be loaded with torch .* \(it was saved with torch 9\.9\.0\): .*ersion.*Export the module with this"
    )
    with pytest.raises(ArgumentError, match=expected):
        module_of(path)


def test_a_file_with_an_unknown_operator(tmp_path: Path) -> None:
    path = _changed(_saved(tmp_path), _graph(lambda program: _rename(program, "torch.ops.mine.gelu.default")))
    with pytest.raises(ArgumentError, match=r"cannot be loaded with torch .*: .*mine\.gelu"):
        module_of(path)


def _rename(program: dict[str, Any], target: str) -> None:
    for node in program["graph_module"]["graph"]["nodes"]:
        if node["target"] == "torch.ops.aten.gelu.default":
            node["target"] = target


def test_rejects_a_truncated_file(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ArgumentError, match=r"wide\.pt2' is not a \.pt2 file"):
        module_of(path)


@pytest.mark.parametrize("graph", [b"[]", b"null", b"{", b"[" * 100_000, b'{"guards_code": 1}'])
def test_rejects_a_graph_of_other_contents(tmp_path: Path, graph: bytes) -> None:
    def replace(members: dict[str, bytes]) -> None:
        members[next(name for name in members if name.endswith("models/model.json"))] = graph

    with pytest.raises(ArgumentError, match=r"changed\.pt2' is damaged"):
        module_of(_changed(_saved(tmp_path), replace))


# --- files that contain code --------------------------------------------------------------------------------


class _Evil:
    def __reduce__(self) -> Any:
        return operator.truediv, (1, 0)  # would raise a ZeroDivisionError


def _pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save(_Evil(), buffer, pickle_module=pickle)
    return buffer.getvalue()


def test_sample_inputs_that_run_code(tmp_path: Path) -> None:
    path = _changed(_saved(tmp_path), lambda m: m.update({n: _pickled() for n in m if "sample_inputs" in n}))
    with pytest.raises(ArgumentError, match=r"holds data/sample_inputs/model\.pt, a pickle of more than ten"):
        module_of(path)


def test_weights_that_run_code(tmp_path: Path) -> None:
    def pickled(members: dict[str, bytes]) -> None:
        config = next(name for name in members if name.endswith("model_weights_config.json"))
        entries = json.loads(members[config])
        for entry in entries["config"].values():
            entry["use_pickle"] = True
        members[config] = json.dumps(entries).encode()
        members[next(name for name in members if name.endswith("weights/weight_0"))] = _pickled()

    with pytest.raises(ArgumentError, match=r"holds data/weights/weight_0, a pickle of more than tensors"):
        module_of(_changed(_saved(tmp_path), pickled))


def test_objects_that_run_code(tmp_path: Path) -> None:
    add = {"wide/data/constants/opaque_obj_0": pickle.dumps(_Evil())}
    with pytest.raises(ArgumentError, match=r"holds the pickled object data/constants/opaque_obj_0, which"):
        module_of(_changed(_saved(tmp_path), lambda members: members.update(add)))


DYNAMIC = {"x": {0: Dim("rows", max=64)}}
CODE = [
    "__import__('os').getcwd()",
    "(1).__class__",
    "Symbol('s0').func('1')",
    "lambdify('x', 'x')",
    "'text of code()'",
]


@pytest.mark.parametrize("text", CODE)
def test_sizes_that_run_code(tmp_path: Path, text: str) -> None:
    def change(value: Any) -> None:
        for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            change(child)
        if isinstance(value, dict) and "expr_str" in value:
            value["expr_str"] = text

    path = _changed(_saved(tmp_path, dynamic_shapes=DYNAMIC), _graph(change))
    with pytest.raises(ArgumentError, match=r"holds the size .*, which loading would run as code\. If you tr"):
        module_of(path)


@pytest.mark.parametrize("text", [*CODE[:2], "open('x')", "[x for x in ()]", "(lambda: 0)()", "L['x'].data"])
def test_guards_that_run_code(tmp_path: Path, text: str) -> None:
    path = _changed(
        _saved(tmp_path, dynamic_shapes=DYNAMIC), _graph(lambda program: program.update(guards_code=[text]))
    )
    with pytest.raises(ArgumentError, match=r"holds the condition .*, which loading would run as code"):
        module_of(path)


@pytest.mark.slow
def test_rejects_functions_other_than_operators(tmp_path: Path) -> None:
    path = _changed(_saved(tmp_path), _graph(lambda program: _rename(program, "torch.os.getcwd")))
    with pytest.raises(ArgumentError, match=r"cannot be loaded|which is not an operator"):
        module_of(path)


# --- programs -----------------------------------------------------------------------------------------------


def test_a_state_dict_of_other_shapes(mesh: DeviceMesh) -> None:
    program = exported(Wide(), rows)
    program.state_dict["head.weight"] = nn.Parameter(torch.zeros(3, 9))
    expected = r"parameter head\.weight has shape \[3, 9\] .* in the program's state_dict, and \[3, 8\] .* in its graph"
    with pytest.raises(ArgumentError, match=expected):
        graphshard.compile(program, mesh)


def test_a_state_dict_without_a_parameter(mesh: DeviceMesh) -> None:
    program = exported(Wide(), rows)
    del program.state_dict["head.weight"]
    with pytest.raises(ArgumentError, match=r"parameter head\.weight is not in the program's state_dict"):
        graphshard.compile(program, mesh)


def test_inputs_that_the_program_was_not_exported_for(mesh: DeviceMesh) -> None:
    model = graphshard.compile(exported(Net(), batch), mesh, backend="eager")
    tokens = torch.zeros(6, dtype=torch.int64)
    for tokens_, targets, said in (
        (tokens[:4], tokens[:4], r"Net: input tokens has size 4|Net: input tokens has size n in dim 0"),
        (tokens.float(), tokens, r"Net: input tokens must be of torch\.int64, as at export, got torch\.float32"),
        (tokens[None], tokens, r"Net: input tokens must be a tensor of 1 dims, as at export, got a tensor of 2 dims"),
        ([tokens], tokens, r"Net: the inputs have another structure than those that the program was exported for"),
        (None, tokens, r"Net: "),
    ):
        with pytest.raises(InputError, match=said):
            model(tokens=tokens_, targets=targets)
    model(tokens=tokens, targets=tokens).backward()


class _Compares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, double: bool = False) -> Tensor:
        x, y = self.linear(x), self.linear(y)
        return (x.sum() + y.mean() if x.shape[0] > y.shape[0] else y.sum()) * (2 if double else 1)


def test_a_condition_between_sizes(mesh: DeviceMesh) -> None:
    auto = {0: Dim.AUTO}
    program = torch.export.export(_Compares(), (torch.randn(6, 2), torch.randn(4, 2)), dynamic_shapes=(auto, auto))
    model = graphshard.compile(program, mesh, backend="eager")
    model(torch.randn(9, 2), torch.randn(8, 2)).backward()
    with pytest.raises(InputError, match=r"_Compares: the inputs break a condition that the program was exp"):
        model(torch.randn(5, 2), torch.randn(8, 2))


def test_a_constant_of_the_call(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 2)
    model = graphshard.compile(torch.export.export(_Compares(), (x, x, True)), mesh, backend="eager")
    model(x, x, True).backward()
    with pytest.raises(InputError, match=r"input double must be True, which was fixed at export, got False"):
        model(x, x, False)


def test_a_mode_that_the_program_was_not_exported_in(mesh: DeviceMesh) -> None:
    model = graphshard.compile(exported(Net(), batch), mesh, backend="eager")
    assert model.training
    model.train()
    with pytest.raises(UnsupportedError, match=r"Net was exported in train\(\) mode, which is fixed in the"):
        model.eval()
    evaluated = module_of(exported(Net().eval(), batch))
    assert not evaluated.training
    with pytest.raises(UnsupportedError, match=r"Export the module in train\(\) mode as another program"):
        evaluated.train()
    assert not module_of(exported(Wide(), rows)).eval().training, "nothing in it depends on the mode"


def test_a_cast_that_a_policy_may_change(mesh: DeviceMesh) -> None:
    """`wide.to(x.dtype)` in RMSNorm: the program contains float32."""
    model, inputs = example_llama()
    expected = (
        r"mp_policy: the program names torch\.float32 in aten\.to.* at .*llama\.py:\d+: .*Export a copy of the module"
    )
    with pytest.raises(UnsupportedError, match=expected):
        graphshard.compile(exported(model, inputs), mesh, mp_policy=BF16)


class _Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x * 2, (x,)).sum()


def test_an_operator_that_a_module_cannot_call(mesh: DeviceMesh) -> None:
    program = torch.export.export(_Conditional(), (torch.randn(2, 2),))
    with pytest.raises(UnsupportedError, match=r"the program has the operator cond.*, which graphshard cannot"):
        graphshard.compile(program, mesh)
