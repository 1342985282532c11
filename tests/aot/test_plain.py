"""Inference on one rank in PyTorch's export format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.export import Dim

import graphshard
from graphshard.errors import ArgumentError
from tests.exported import Net, batch
from tests.helpers import Blocks


def test_runs_without_graphshard(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().train()
    path = graphshard.export(model, (1,), tmp_path / "net.pt2", example_inputs=batch()[:1], mode="inference")
    assert model.training
    code = (
        "import sys, torch; program = torch.export.load(sys.argv[1]).module();"
        "torch.save([program(torch.load(sys.argv[2])), dict(program.state_dict())], sys.argv[3]);"
        "assert 'graphshard' not in sys.modules"
    )
    files = [str(path), str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    torch.save(batch(3)[0], files[1])
    subprocess.run([sys.executable, "-c", code, *files], check=True, cwd=tmp_path)
    logits, state = torch.load(files[2])
    assert torch.equal(logits, model.eval()(batch(3)[0]))
    assert set(state) >= {"embed.weight", "layers.0.linear.weight"}


def test_precision_and_dynamic_sizes(tmp_path: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = Blocks(2)
    path = graphshard.export(
        model,
        (1,),
        tmp_path / "blocks.pt2",
        example_inputs=(torch.zeros(3, 4),),
        mode="inference",
        mp_policy=policy,
        dynamic_shapes=({0: Dim("batch")},),
    )
    program = torch.export.load(path).module()
    x = torch.randn(5, 4)
    assert torch.equal(program(x), Blocks.forward(model.bfloat16(), x.bfloat16()))
    assert program.layers.get_parameter("0.weight").dtype == torch.float32


@pytest.mark.parametrize(
    "given", [{"mesh": (2,)}, {"mode": "training"}, {"calls": [graphshard.Call((torch.zeros(2, 4),))]}]
)
def test_only_one_forward_of_one_rank(tmp_path: Path, given: dict) -> None:
    options = {"mesh": (1,), "mode": "inference", **given}
    with pytest.raises(ArgumentError, match=r"b\.pt2: a \.pt2 file holds one program for one rank"):
        graphshard.export(Blocks(1), path=tmp_path / "b.pt2", example_inputs=(torch.zeros(2, 4),), **options)


def test_weights_are_needed(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Blocks(1)
    with pytest.raises(ArgumentError, match=r"layers\.0\.weight is on the meta device"):
        graphshard.export(model, (1,), tmp_path / "b.pt2", example_inputs=(torch.zeros(2, 4),), mode="inference")
