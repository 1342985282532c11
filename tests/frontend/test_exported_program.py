"""Programs of torch.export train bitwise like the module under FSDP2, or are rejected."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim

import graphshard
from graphshard.errors import InputError
from graphshard.exported.exported_program import module_of
from graphshard.ir.units import find_units
from tests.distributed.twins import BF16, FP32, Batch, example_llama, fsdp2, train_side_by_side, world_mesh
from tests.frontend.programs import Net, Wide, batch, exported, narrowed, rows
from tests.ranks import Ranks

# --- equal to FSDP2 -----------------------------------------------------------------------------------------


def _model(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    if name == "llama":
        return example_llama()
    return (Net(), batch) if name == "net" else (Wide(), rows)


def _train_program(rank: int, world_size: int, name: str, strict: bool) -> None:
    model, inputs = _model(name)
    theirs = fsdp2(copy.deepcopy(model), world_mesh())
    ours = graphshard.compile(exported(model, inputs, strict=strict), world_mesh(), backend="eager")
    train_side_by_side((ours, theirs), inputs, steps=4)
    assert ours._graphshard.tracer.spec.units == find_units(model)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", ["net", "llama"])
@pytest.mark.slow
def test_training_equals_fsdp2_on_the_module(ranks: Ranks, name: str, strict: bool) -> None:
    """`Net` has BatchNorm's buffers, tied weights, dropout, a block that runs twice, constants and `no_grad`."""
    ranks(2).run(_train_program, name, strict)


class _Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = kind(4, 4, num_layers=3, dropout=0.5, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, last = self.layers(x)
        states = last if isinstance(last, tuple) else (last,)
        return y.square().sum() + sum(state.sin().sum() for state in states)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's, of the layers' lists of parameters
def test_recurrent_layers_with_dropout(mesh: DeviceMesh, kind: Any) -> None:
    """Torch's function for tracing leaves dropout between the layers out."""
    model, x = _Recurrent(kind), torch.randn(3, 5, 4)
    compiled = graphshard.compile(torch.export.export(model, (x,), strict=False), mesh, backend="eager")
    for each in (model, compiled):
        torch.manual_seed(1)
        each(x).backward()
    for name, param in compiled.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), model.get_parameter(name).grad)


def _train_in_bfloat16(rank: int, world_size: int) -> None:
    model, inputs = _model("wide")
    theirs = fsdp2(copy.deepcopy(model), world_mesh(), mp_policy=BF16)
    ours = graphshard.compile(exported(model, inputs), world_mesh(), backend="eager", mp_policy=BF16)
    train_side_by_side((ours, theirs), inputs, steps=4)


@pytest.mark.slow
def test_mixed_precision_equals_fsdp2(ranks: Ranks) -> None:
    """Units cast their inputs, so the program must contain their calls."""
    ranks(2).run(_train_in_bfloat16)


def _train_what_was_exported_in_bfloat16(rank: int, world_size: int) -> None:
    model, inputs = _model("llama")
    theirs = fsdp2(copy.deepcopy(model), world_mesh(), mp_policy=BF16)
    program = exported(narrowed(model, torch.bfloat16), inputs)
    ours = graphshard.compile(program, world_mesh(), backend="eager", mp_policy=BF16).to(torch.float32)
    ours.load_state_dict(model.state_dict())
    train_side_by_side((ours, theirs), inputs, steps=4)


def test_a_program_in_the_compute_dtype_trains_with_parameters_in_float32(ranks: Ranks) -> None:
    """The remedy of `test_a_cast_that_a_policy_may_change`."""
    ranks(2).run(_train_what_was_exported_in_bfloat16)


def _train_file(rank: int, world_size: int, path: str) -> None:
    torch.manual_seed(0)
    theirs = fsdp2(Net(), world_mesh(), mp_policy=FP32)
    train_side_by_side((graphshard.compile(path, world_mesh(), backend="eager"), theirs), batch, steps=4)


@pytest.mark.slow
def test_a_file_of_another_process_trains(ranks: Ranks, tmp_path: Path) -> None:
    """The process that writes it has only torch."""
    path = tmp_path / "net.pt2"
    subprocess.run([sys.executable, "-m", "tests.frontend.programs", str(path)], check=True)
    ranks(2).run(_train_file, str(path))


# --- the module of a program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True], ids=["program", "file"])
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.quick_cases("non-strict-program")
def test_the_module_has_the_names_and_ties_of_the_original(tmp_path: Path, strict: bool, file: bool) -> None:
    model = Net()
    program: Any = exported(model, batch, strict=strict)
    if file:
        torch.export.save(program, tmp_path / "net.pt2")
        program = tmp_path / "net.pt2"
    made = module_of(program)
    assert type(made).__name__ == "Net"
    assert list(made.state_dict()) == list(model.state_dict())
    assert [n for n, _ in made.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in made.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert [n for n, _ in made.named_modules()] == [n for n, _ in model.named_modules()]
    assert made.head.weight is made.embed.weight
    assert not made.frozen.requires_grad
    assert find_units(made) == find_units(model)


def test_equal_blocks_have_one_class() -> None:
    """Capture then knows that they are equal, and captures few of them."""
    made = module_of(exported(Net(), batch))
    assert type(made.blocks[1]) is type(made.blocks[2])
    assert type(made.blocks[0]) is not type(made.blocks[1]), "the first runs twice"


@pytest.mark.slow
def test_training_does_not_change_the_program(mesh: DeviceMesh) -> None:
    program = exported(Net(), batch)
    before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    model = graphshard.compile(program, mesh, backend="eager")
    model(**batch()).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.state_dict.items())
    assert not torch.equal(model.blocks[0].norm.running_mean, before["blocks.0.norm.running_mean"])


def test_a_declared_size_is_one_program(mesh: DeviceMesh) -> None:
    program = exported(Wide(), rows, dynamic_shapes={"x": {0: Dim("rows", max=64)}})
    model = graphshard.compile(program, mesh, backend="eager")
    for count in (3, 9, 64):
        model(**rows(count)).backward()
    assert len(graphshard.programs(model)) == 1
    with pytest.raises(InputError, match=r"input x has size 65 in dim 0 .* to 64"):
        model(**rows(65))


# --- explain and export -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_explain_takes_a_program_and_its_example_inputs(tmp_path: Path) -> None:
    program = exported(Wide(), rows)
    torch.export.save(program, tmp_path / "wide.pt2")
    of_module = graphshard.explain(Wide(), (4,), example_kwargs=rows())
    for model in (program, str(tmp_path / "wide.pt2")):
        found = graphshard.explain(model, (4,))
        assert found.step_time_s == of_module.step_time_s
    assert graphshard.explain_grid(program, [(2,), (4,)]).rows[1].step_time_s == of_module.step_time_s


def _train_artifact(rank: int, world_size: int, path: str) -> None:
    torch.manual_seed(0)
    theirs = fsdp2(Wide(), world_mesh())
    torch.manual_seed(0)
    model = graphshard.load(path, exported(Wide(), rows), world_mesh())
    train_side_by_side((model, theirs), rows, steps=3)


def test_export_takes_a_program(ranks: Ranks, tmp_path: Path) -> None:
    path = graphshard.export(exported(Wide(), rows), (2,), tmp_path / "wide.gshard", backend="eager", device="cpu")
    ranks(2).run(_train_artifact, str(path))
