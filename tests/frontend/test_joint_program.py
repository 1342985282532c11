"""A captured program as an `ExportedProgram`: its signature and numbers, and training it."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Interpreter

import graphshard
from graphshard.errors import ArgumentError, InputError, UnsupportedError
from tests.distributed.twins import BF16, FP32, assert_same, example_llama, fsdp2, grads_of, params_of, world_mesh
from tests.frontend.programs import Net, Wide, batch, rows
from tests.helpers import Blocks
from tests.ranks import FakeWorld, Ranks


def _captured(model: nn.Module, mesh: DeviceMesh, inputs: dict[str, Any], **options: Any) -> ExportedProgram:
    model = graphshard.compile(model, mesh, backend="eager", example_kwargs=inputs, **options)
    return graphshard.programs(model)[0].exported


# --- the program --------------------------------------------------------------------------------------------


def test_signature(mesh: DeviceMesh) -> None:
    exported = _captured(Net(), mesh, batch())
    inputs, outputs = exported.graph_signature.input_specs, exported.graph_signature.output_specs
    by_kind = {kind: [spec.target for spec in outputs if spec.kind is kind] for kind in OutputKind}
    assert "blocks.0.norm.running_mean" in by_kind[OutputKind.BUFFER_MUTATION]
    assert by_kind[OutputKind.USER_OUTPUT] == [None]
    trainable = [name for name, param in Net().named_parameters() if param.requires_grad and "unused" not in name]
    assert by_kind[OutputKind.GRADIENT_TO_PARAMETER] == trainable
    assert {spec.target for spec in inputs if spec.kind is InputKind.PARAMETER} == dict(Net().named_parameters()).keys()
    assert sum(spec.kind is InputKind.USER_INPUT for spec in inputs) == 3, (
        "tokens, targets, and the tangent of the loss"
    )
    assert all(tensor.is_meta for tensor in exported.state_dict.values())
    assert exported.state_dict["head.weight"] is exported.state_dict["embed.weight"]


@pytest.mark.slow
def test_gradients_of_inputs_and_no_gradients(mesh: DeviceMesh) -> None:
    model = graphshard.compile(Wide(), mesh, backend="eager")
    model(torch.randn(3, 4, requires_grad=True)).backward()
    with torch.no_grad():
        model(torch.randn(3, 4))
    joint, forward = (program.exported for program in graphshard.programs(model))
    found = [spec for spec in joint.graph_signature.output_specs if spec.kind is OutputKind.GRADIENT_TO_USER_INPUT]
    assert [spec.target for spec in found] == ["input_0"]
    assert [spec.kind for spec in forward.graph_signature.output_specs] == [OutputKind.USER_OUTPUT]


def test_numbers(mesh: DeviceMesh) -> None:
    """The graph computes eager mode's loss and gradients."""
    model, inputs = Wide(), rows()
    loss = model(**inputs)
    loss.backward()
    exported = _captured(copy.deepcopy(model), mesh, inputs)
    state: dict[str, Tensor] = dict(model.named_parameters())
    given = iter([inputs["x"], torch.ones(())])
    specs = exported.graph_signature.input_specs
    args = [state[spec.target].detach() if spec.target in state else next(given) for spec in specs]
    results = Interpreter(exported.graph_module).run(*args)
    for value, spec in zip(results, exported.graph_signature.output_specs, strict=True):
        expected = loss if spec.kind is OutputKind.USER_OUTPUT else state[str(spec.target)].grad
        assert torch.equal(value, expected)


def test_contains_all_blocks_although_few_are_captured(fake_world: FakeWorld) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    model = graphshard.compile(Deep(), mesh, backend="eager", example_inputs=(torch.ones(3, 4),))
    (program,) = graphshard.programs(model)
    assert any(stage.name == "stamp" for stage in program.history), "five blocks stand for nine"
    grads = [s.target for s in program.exported.graph_signature.output_specs if "GRADIENT" in s.kind.name]
    assert grads == [name for name, _ in model.named_parameters()]


def test_passes_do_not_change_it(mesh: DeviceMesh) -> None:
    model = graphshard.compile(Blocks(2), mesh, backend="eager", example_inputs=(torch.ones(3, 4),))
    (program,) = graphshard.programs(model)
    assert not any("all_gather" in str(node.target) for node in program.exported.graph.nodes)
    assert program.exported is program.exported


def test_a_program_of_the_cache_is_captured_for_it(mesh: DeviceMesh, tmp_path: Path) -> None:
    options: Any = {"backend": "eager", "example_inputs": (torch.ones(3, 4),), "cache": tmp_path}
    texts = []
    for _ in range(2):
        model = graphshard.compile(Blocks(2), mesh, **options)
        (program,) = graphshard.programs(model)
        texts.append(program.exported.graph_module.code)
    assert texts[0] == texts[1]
    other = graphshard.compile(Blocks(2), mesh, **options)
    other.eval()
    with pytest.raises(ArgumentError, match=r"Blocks is captured again .* is in another mode .* Set it back\."):
        _ = graphshard.programs(other)[0].exported


@pytest.mark.slow
def test_a_program_of_an_artifact_is_captured_again(mesh: DeviceMesh, tmp_path: Path) -> None:
    inputs: Any = {"example_inputs": (torch.ones(3, 4),), "backend": "eager"}
    path = graphshard.export(Blocks(2), (1,), tmp_path / "blocks.gshard", device="cpu", **inputs)
    model = graphshard.load(path, Blocks(2), mesh)
    model(torch.ones(3, 4)).backward()
    compiled = graphshard.compile(Blocks(2), mesh, **inputs)
    texts = [graphshard.programs(each)[0].exported.graph_module.code for each in (model, compiled)]
    assert texts[0] == texts[1]


class Deep(nn.Module):
    """More equal blocks than are captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


# --- training ---------------------------------------------------------------------------------------------------


def _model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return (Net(), batch()) if name == "net" else (example_llama()[0], example_llama()[1]())


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a joint program takes from a module."""
    return {**model.state_dict(), **dict(model.named_buffers())}


def _save(rank: int, world_size: int, name: str, policy: Any, path: str) -> None:
    model, inputs = _model(name)
    exported = _captured(model, world_mesh(), inputs, mp_policy=policy)
    if rank == 0:
        torch.export.save(exported, path)


def _train(rank: int, world_size: int, name: str, policy: Any, path: str) -> None:
    model, inputs = _model(name)
    theirs = fsdp2(copy.deepcopy(model), world_mesh(), mp_policy=policy)
    ours = graphshard.compile(path, world_mesh(), backend="eager", mp_policy=policy).to_empty(device="cpu")
    assert not ours.load_state_dict(_weights(model), strict=False).missing_keys
    assert list(params_of(ours)) == list(params_of(theirs))
    optims = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (ours, theirs)]
    for step in range(3):
        for optim, call in zip(optims, (lambda: ours(*inputs.values()), lambda: theirs(**inputs))):
            torch.manual_seed(step * world_size + rank)  # for dropout
            optim.zero_grad()
            call().backward()
        grads = [{name: g for name, g in grads_of(each).items() if g is not None} for each in (ours, theirs)]
        assert_same(*grads, f"gradients of step {step}")
        for optim in optims:
            optim.step()
        assert_same(params_of(ours), params_of(theirs), f"parameters after step {step}")
        buffers = dict(theirs.named_buffers())
        assert_same({name: ours.get_buffer(name) for name in buffers}, buffers, f"buffers after step {step}")


@pytest.mark.parametrize(("name", "policy"), [("net", FP32), ("llama", BF16)], ids=["net", "llama-bf16"])
@pytest.mark.quick_cases("llama-bf16")
def test_a_saved_joint_program_trains(ranks: Ranks, tmp_path: Path, name: str, policy: Any) -> None:
    path = str(tmp_path / "joint.pt2")
    ranks(2).run(_save, name, policy, path)
    ranks(2).run(_train, name, policy, path)


@pytest.mark.slow
def test_it_loads_and_prints_with_torch_only(mesh: DeviceMesh, tmp_path: Path) -> None:
    path = tmp_path / "joint.pt2"
    torch.export.save(_captured(Wide(), mesh, rows()), path)
    code = f"import torch; print(torch.export.load({str(path)!r}).graph_signature)"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    assert "GRADIENT_TO_PARAMETER target='head.weight'" in found.stdout


def test_explain_accepts_it(mesh: DeviceMesh) -> None:
    exported, inputs = _captured(Wide(), mesh, rows()), rows()
    found = graphshard.explain(exported, (4,), example_inputs=(inputs["x"],))
    assert found.step_time_s == graphshard.explain(Wide(), (4,), example_kwargs=inputs).step_time_s


# --- errors -------------------------------------------------------------------------------------------------


def test_calls_that_were_not_captured(mesh: DeviceMesh) -> None:
    model = graphshard.compile(_captured(Wide(), mesh, rows()), mesh, backend="eager").to_empty(device="cpu")
    for inputs, said in (
        (
            torch.randn(6, 4),
            r"Wide: input 0 is torch\.float32\[6, 4\], not torch\.float32\[5, 4\], unlike the call that",
        ),
        (torch.randn(5, 4, requires_grad=True), r"input 0 has requires_grad=True"),
    ):
        with pytest.raises(InputError, match=said):
            model(inputs)
    with pytest.raises(InputError, match=r"the call is without gradients"), torch.no_grad():
        model(torch.randn(5, 4))
    with pytest.raises(UnsupportedError, match=r"keeps the mode of its capture\. Compile the module in eval"):
        model.eval()


def test_another_policy(mesh: DeviceMesh) -> None:
    model = graphshard.compile(_captured(Wide(), mesh, rows()), mesh, backend="eager", mp_policy=BF16)
    expected = r"parameter stem\.weight is used in torch\.float32 in the joint program, and in torch\.bfloat16 by these"
    with pytest.raises(ArgumentError, match=expected):
        model.to_empty(device="cpu")(torch.randn(5, 4))


def test_dynamic_sizes(mesh: DeviceMesh) -> None:
    exported = _captured(Wide(), mesh, rows(), dynamic_shapes={"x": {0: Dim("rows", max=64)}})
    assert "s" in str(exported.graph)
    with pytest.raises(ArgumentError, match=r"the joint program cannot be compiled from: it has dynamic size"):
        graphshard.compile(exported, mesh)


def test_rejects_a_changed_graph(mesh: DeviceMesh) -> None:
    exported = _captured(Wide(), mesh, rows())
    node = next(node for node in exported.graph.nodes if any(isinstance(arg, (int, float)) for arg in node.args))
    node.args = tuple(arg + 1 if isinstance(arg, (int, float)) else arg for arg in node.args)
    model = graphshard.compile(exported, mesh, backend="eager").to_empty(device="cpu")
    with pytest.raises(ArgumentError, match=r"the joint program cannot be read: .* its graph was changed"):
        model(torch.randn(5, 4))


def test_rejects_joint_programs_of_other_tools(mesh: DeviceMesh) -> None:
    exported = _captured(Wide(), mesh, rows())
    exported.graph_module.meta.clear()
    with pytest.raises(ArgumentError, match=r"a joint graph, with gradients among its results, and not one "):
        graphshard.compile(exported, mesh)
