"""Process exit with gathers in flight that the last step started ahead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TRAINS = """
import torch
from torch.distributed.device_mesh import init_device_mesh
import graphshard
from graphshard.torch_compat.dtensor import fake_world

with fake_world(2):
    model = torch.nn.Linear(4, 4)
    graphshard.compile(model, init_device_mesh("cpu", (2,)), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphshard.compile_step(model, optimizer, lambda model, x: model(x).sum(), gather_ahead=True)
    step(torch.ones(2, 4))
    assert any(gather.under_way for gather in model._graphshard.accumulation.prefetch._gathers)
"""


@pytest.mark.slow
def test_torch_does_not_warn_about_an_unwaited_collective() -> None:
    """It did at the end of every training with `gather_ahead`."""
    done = subprocess.run([sys.executable, "-c", _TRAINS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "unwaited" not in done.stderr
