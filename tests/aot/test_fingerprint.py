"""A mismatch in each field of an artifact's fingerprint is rejected with its name, both values and the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.export import Dim
from torch.torch_version import TorchVersion

import graphshard
from graphshard.errors import ArgumentError, ArtifactError, CaptureError
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import named_parameters
from graphshard.module.compiled_module import make_tracer
from graphshard.options.mesh_axes import MeshAxes
from graphshard.options.options import Options
from graphshard.options.resolve import request_for
from graphshard.options.validate import ModelContents
from graphshard.store.artifact_manifest import MeshEntry
from graphshard.store.fingerprint import (
    check_same_options,
    describe_options,
    differences,
    environment,
    restored_options,
)
from tests.aot.test_artifact import load_error
from tests.distributed.twins import assert_same, grads_of
from tests.exported import Layer, Net, batch, export_net, nothing_is_compiled, rewritten
from tests.ranks import FakeWorld

KINDS = {"torch": "torch", "graphshard": "graphshard"}


@pytest.fixture(scope="module")
def net_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_net(tmp_path_factory.mktemp("net") / "net.gshard", [(2,), (4,)])


@pytest.fixture
def mesh(fake_world: FakeWorld) -> DeviceMesh:
    fake_world(2)
    return init_device_mesh("cpu", (2,))


def in_facts(section: str, field: str, value: Any) -> Callable[[dict[str, Any], Any], None]:
    def change(facts: dict[str, Any], _: Any) -> None:
        facts[section][field] = value

    return change


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("graphshard", "0.0.9", "Install that version, or export again with this one"),
        ("torch", "2.10.0", "Install that version, or export again with this one"),
        ("device", "cuda", "Load it on a mesh of such devices, or export again for these"),
        ("capability", [9, 0], "export again on this one"),
        ("cpu", {"machine": "riscv64"}, "export again on a machine like this one"),
        ("threads", 96, "call torch.set_num_threads, set OMP_NUM_THREADS, or export with threads="),
        ("matmul_precision", "high", "Call torch.set_float32_matmul_precision"),
        ("deterministic", True, "Call torch.use_deterministic_algorithms accordingly"),
    ],
)
@pytest.mark.quick_cases(
    "torch-2.10.0-Install that version, or export again with this one",
    "device-cuda-Load it on a mesh of such devices, or export again for these",
    "capability-value3-export again on this one",
    "cpu-value4-export again on a machine like this one",
    "threads-96-call torch.set_num_threads, set OMP_NUM_THREADS, or export with threads=",
    "matmul_precision-high-Call torch.set_float32_matmul_precision",
    "deterministic-True-Call torch.use_deterministic_algorithms accordingly",
)
def test_versions_and_machine(net_file: Path, mesh: DeviceMesh, field: str, value: Any, remedy: str) -> None:
    error = load_error(rewritten(net_file, in_facts("environment", field, value)), mesh)
    assert error.field == field
    assert f"{field} was {value} when it was exported and is " in str(error)
    assert remedy in str(error)


def test_fields_of_compiled_regions_are_compared_only_with_compiled_regions() -> None:
    device = torch.device("cpu")
    operators, native = environment(device, native=False), environment(device, native=True)
    for field in ("cpu", "threads", "matmul_precision", "deterministic"):
        assert getattr(operators, field) is None
        assert getattr(native, field) is not None
    with mock.patch("torch.get_num_threads", return_value=77), mock.patch("torch.__version__", "2.99.0+rocm"):
        changed = environment(device, native=True)
        assert environment(device, native=False).torch == "2.99.0"
    assert {field for field, *_ in differences(native, changed)} == {"threads", "torch"}
    with mock.patch("torch.backends.cpu.get_cpu_capability", return_value="AVX9"):
        (found,) = differences(native, environment(device, native=True))
    assert (found[0], found[1], found[3]) == ("cpu", "vectors", "AVX9")


def test_mesh_shape(net_file: Path, fake_world: FakeWorld) -> None:
    fake_world(3)
    error = load_error(net_file, init_device_mesh("cpu", (3,)))
    assert error.field == "mesh"
    assert "mesh was {'shard': 2} or {'shard': 4} when it was exported and is {'shard': 3} here" in str(error)
    assert "Export again with this mesh in the list" in str(error)


def test_mesh_axis_names(net_file: Path, fake_world: FakeWorld) -> None:
    fake_world(2)
    error = load_error(net_file, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    assert "and is {'dp': 2} here" in str(error)


class Renamed(Net):
    """Another class with the same parameters."""


def _untied() -> Net:
    model = Net()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _frozen() -> Net:
    model = Net()
    model.layers[0].linear.bias.requires_grad_(False)
    return model


def _transposed() -> Net:
    model = Net()
    model.layers[0].linear.weight = nn.Parameter(torch.zeros(6, 6).t())
    return model


def _more_buffers() -> Net:
    model = Net()
    model.register_buffer("extra", torch.zeros(3))
    return model


@pytest.mark.parametrize(
    ("make", "field", "texts"),
    [
        (Renamed, "model", ["was Net when", "is Renamed here", "Load it into that class"]),
        (_untied, "parameter names", ["embed.weight = head.weight when", "is embed.weight here", "tied alike"]),
        (lambda: Net(width=8), "parameter shape", ["of embed.weight", "[10, 6]", "[10, 8]"]),
        (lambda: Net().double(), "parameter dtype", ["of embed.weight", "float32", "float64", "Convert the model"]),
        (_frozen, "requires_grad", ["of layers.0.linear.bias was True", "is False here", "Freeze and unfreeze"]),
        (_transposed, "memory layout", ["of layers.0.linear.weight", "[1, 0]"]),
        (_more_buffers, "buffers", ["of extra was None", "float32[3]"]),
    ],
)
def test_model(net_file: Path, mesh: DeviceMesh, make: Callable[[], Net], field: str, texts: list[str]) -> None:
    error = load_error(net_file, mesh, make())
    assert error.field == field
    assert all(text in str(error) for text in texts), error


def test_code_of_the_model(net_file: Path, mesh: DeviceMesh) -> None:
    def forward(self: Layer, x: torch.Tensor) -> torch.Tensor:
        return x

    with mock.patch.object(Layer, "forward", forward):
        model = graphshard.load(net_file, Net(), mesh)
        with pytest.raises(ArtifactError, match=r"of the model: forward computes something else: .* now has"):
            model(*batch())


@pytest.mark.slow
def test_equivalent_code(net_file: Path, mesh: DeviceMesh) -> None:
    def forward(self: Layer, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        normed = self.norm(x)
        return torch.add(x, nn.functional.dropout(self.linear(normed).tanh(), self.p, self.training))

    with mock.patch.object(Layer, "forward", forward), nothing_is_compiled():
        model = graphshard.load(net_file, Net(), mesh)
        model(*batch())["loss"].backward()


@pytest.mark.slow
def test_attributes_of_the_model(net_file: Path, mesh: DeviceMesh) -> None:
    model = graphshard.load(net_file, Net(p=0.5), mesh)
    with pytest.raises(ArtifactError, match=r"had the line .*0\.8\).* and now has .*0\.5\)"):
        model(*batch())


def test_a_graph_break_of_the_model(net_file: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Export names it, and so does the first call of a model that was exported without it."""

    def forward(self: Layer, x: torch.Tensor) -> torch.Tensor:
        return x * len(str(vars(self)))

    with mock.patch.object(Layer, "forward", forward):
        with pytest.raises(CaptureError, match=r"cannot capture .*test_fingerprint\.py:\d+"):
            export_net(tmp_path / "n.gshard", (2,), [graphshard.Call(batch())])
        model = graphshard.load(net_file, Net(), mesh)
        with pytest.raises(ArtifactError, match=r"has a graph break\. .*test_fingerprint\.py:\d+"):
            model(*batch())


@pytest.mark.parametrize(
    ("options", "field", "texts"),
    [
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "mp_policy", ["of param_dtype", "bfloat16"]),
        ({"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)}, "mp_policy", ["of output_dtype", "float64"]),
        ({"units": ["layers.0"]}, "units", ["['layers.0', 'layers.1']", "['layers.0']"]),
        ({"shard_placement_fn": lambda p: Shard(p.dim() - 1)}, "shard_placement_fn", ["of embed.weight was 0", "is 1"]),
        ({"reshard_after_forward": False}, "reshard_after_forward", ["was True", "is False", "Give the option"]),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "offload_policy", ["was None", "pin_memory"]),
        ({"backend": "inductor"}, "backend", ["was eager", "is inductor"]),
        ({"passes": graphshard.Pipeline().disable("reorder")}, "passes", ["of reorder was {}", "is None"]),
        ({"activation": "full"}, "passes", ["of activation-checkpointing was None", "full"]),
        ({"dynamic_shapes": ({0: torch.export.Dim("n")}, None)}, "dynamic_shapes", ["was None", '"n", 0']),
    ],
)
def test_options(net_file: Path, mesh: DeviceMesh, options: dict[str, Any], field: str, texts: list[str]) -> None:
    error = load_error(net_file, mesh, **options)
    assert error.field == field
    assert all(text in str(error) for text in texts), error


def test_ignored_params(net_file: Path, mesh: DeviceMesh) -> None:
    model = Net()
    error = load_error(net_file, mesh, model, ignored_params=[model.layers[0].linear.bias])
    assert error.field == "ignored_params"
    assert "of layers.0.linear.bias was False" in str(error)


def test_plan_options(net_file: Path, mesh: DeviceMesh) -> None:
    planner = graphshard.schedule.fsdp2_order.PlanByUnit(pack_gathers_below=1)
    error = load_error(
        net_file, mesh, passes=graphshard.Pipeline().replace("plan", graphshard.passes.MakePlan(planner))
    )
    assert error.field == "passes"
    assert "passes of plan was" in str(error)


@pytest.mark.slow
def test_the_options_of_the_export_may_be_given(net_file: Path, mesh: DeviceMesh) -> None:
    model = graphshard.load(
        net_file, Net(), mesh, backend="eager", mp_policy=MixedPrecisionPolicy(), units=["layers.*"]
    )
    model(*batch())["loss"].backward()
    with pytest.raises(ArgumentError, match=r"load\(\) got an unexpected keyword argument 'colour'"):
        graphshard.load(net_file, Net(), mesh, colour="red")


@pytest.mark.slow
def test_options_of_the_plan(tmp_path: Path, mesh: DeviceMesh) -> None:
    """They may be omitted; given options that affect the plan must be equal."""
    options: dict[str, Any] = {"memory_limit": 10**9, "hardware": "h100"}
    path = export_net(tmp_path / "n.gshard", (2,), [graphshard.Call(batch())], **options)
    for given in ({}, options, {"max_captures": 1, "verify": "off"}):
        model = graphshard.load(path, Net(), mesh, **given)
        model(*batch())
        assert graphshard.programs(model)[0].plan.prediction.profile == "h100"
    for other in ({"memory_limit": 10**8, "hardware": "h100"}, {"hardware": "a100"}, {"memory_limit": 10**9}):
        error = load_error(path, mesh, **other)
        assert error.field == "passes"
        assert "passes of plan was" in str(error)


def test_every_public_option_is_restored(tmp_path: Path, mesh: DeviceMesh) -> None:
    """The options in a file reproduce the options of the export, field by field."""
    model = Net()
    options: dict[str, Any] = {
        "mp_policy": {"": MixedPrecisionPolicy(), "layers.1*": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "reshard_after_forward": True,
        "shard_placement_fn": lambda param: Shard(param.dim() - 1),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "units": ["layers.0", ("layers.1", "head")],
        "ignored_params": [model.layers[0].norm.bias],
        "reduce": "exchange",
    }
    contents, axes, device = ModelContents.of(model), MeshAxes(Mesh.of_shape(2)), torch.device("cpu")
    here = make_tracer(request_for(contents, axes, Options(**options, backend="eager"), device))
    again = restored_options(describe_options(here), named_parameters(model), here.spec.params)
    assert again.keys() == {*options, "backend"}
    there = make_tracer(request_for(contents, axes, Options(**again), device))
    assert there.spec.params.rows == here.spec.params.rows
    assert (there.spec.units, there.storage) == (here.spec.units, here.storage)
    entry = MeshEntry(axes.mesh, {"shard": 2}, None, describe_options(here), here.spec.params, [])
    check_same_options(tmp_path, entry, there, given=options)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: m(batch()[0][:1], batch()[1][:1]), r"args\[0\] was int64\[2, 3\] and is int64\[1, 3\]"),
        (lambda m: m(batch()[0].int(), batch()[1]), r"args\[0\] was int64\[2, 3\] and is int32\[2, 3\]"),
        (lambda m: m(batch()[0].T.contiguous().T, batch()[1]), r"with strides \[3, 1\] and is .* strides \[1, 2\]"),
        (lambda m: m(batch()[0]), r"not passed any more: args\[1\]"),
        (lambda m: m.eval()(*batch()), r"train\(\) or eval\(\) was called"),
        (lambda m: torch.no_grad()(m)(*batch()), "gradients are off"),
        (lambda m: torch.autocast("cpu")(m)(*batch()), "autocast changed"),
        (lambda m: m.requires_grad_(False)(*batch()), "requires_grad of a parameter changed"),
    ],
)
@pytest.mark.quick_cases("<lambda>-requires_grad of a parameter changed")
def test_inputs_and_modes_of_a_call(net_file: Path, mesh: DeviceMesh, call: Callable[[Net], Any], text: str) -> None:
    model = graphshard.load(net_file, Net(), mesh)
    with pytest.raises(ArtifactError, match=text) as caught:
        call(model)
    assert caught.value.field == "inputs"
    assert "Export it with calls=[graphshard.Call(...)]" in str(caught.value)


@pytest.mark.slow
def test_equivalent_calls(net_file: Path, mesh: DeviceMesh) -> None:
    """Keyword inputs are traced, and served by the file's program."""
    model, (tokens, targets) = graphshard.load(net_file, Net(), mesh), batch()
    with nothing_is_compiled():
        for _ in range(2):
            model(tokens, targets=targets)["loss"].backward()
            model(tokens=tokens, targets=targets)["loss"].backward()
    assert len(graphshard.programs(model)) == 1


@pytest.mark.slow
def test_gradients_that_were_not_exported(tmp_path: Path, mesh: DeviceMesh) -> None:
    path = graphshard.export(Net(), (2,), tmp_path / "n.gshard", example_inputs=batch(), backend="eager")
    model = graphshard.load(path, Net(), mesh)
    with pytest.raises(ArtifactError, match=r"no backward for gradients through outputs 1 .*gradients=\[\(1,"):
        model(*batch())["logits"].sum().backward()


# --- compile(..., artifact=) ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compile_loads_a_matching_file(net_file: Path, mesh: DeviceMesh) -> None:
    with nothing_is_compiled():
        model = graphshard.compile(Net(), mesh, backend="eager", artifact=net_file, example_inputs=batch())
        model(*batch())["loss"].backward()
    model(batch()[0]).sum().backward()  # without targets: not in the file, so captured
    assert graphshard.programs(model)[-1].reason.startswith("not passed any more: args[1]")


def test_compile_logs_why_it_compiles(net_file: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = graphshard.compile(Net(), mesh, backend="eager", artifact=net_file, reshard_after_forward=False)
    assert "compiling instead of loading" in caplog.text
    assert "reshard_after_forward of layers.0.norm.weight was True" in caplog.text
    model(*batch())["loss"].backward()
    graphshard.compile(Net(), mesh, backend="eager", artifact=net_file.with_name("none.gshard"))
    assert "none.gshard cannot be read: No such file" in caplog.text


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="fake process groups of torch 2.12 do not write what they reduce"
)
def test_compile_adds_missing_backwards(tmp_path: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """Also on dynamic sizes; the passes before the partition do not run again."""
    options: dict[str, Any] = {"backend": "eager", "dynamic_shapes": ({0: Dim("batch")}, {0: Dim("batch")})}
    path = graphshard.export(Net(p=0.0), (2,), tmp_path / "n.gshard", example_inputs=batch(), **options)
    torch.manual_seed(0)
    model = Net(p=0.0)
    twin = graphshard.compile(copy.deepcopy(model), mesh, **options)
    with mock.patch("graphshard.module.tracer.run_pipeline", side_effect=AssertionError("passes run")):
        graphshard.compile(model, mesh, artifact=path, **options)
        for size in (2, 3):
            inputs = [torch.cat([tensor, tensor])[:size] for tensor in batch()]
            model(*inputs)["logits"].square().mean().backward()
    assert caplog.text.count("compiling instead of loading: ") == 1  # the compiled backward serves both sizes
    assert "n.gshard has no backward for gradients through outputs 1 of the model" in caplog.text
    for size in (2, 3):
        twin(*(torch.cat([tensor, tensor])[:size] for tensor in batch()))["logits"].square().mean().backward()
    assert_same(grads_of(model), grads_of(twin), "gradients")
