"""Output for other tools: torch's logs, its structured trace, and the profiler."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard import Pipeline
from graphshard.lower.executor import profiler_range
from tests.helpers import Blocks
from tests.ranks import FakeWorld

SCRIPT = """
import torch, torch.distributed as dist, graphshard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
graphshard.compile(model, init_device_mesh("cpu", (2,)), backend="eager", example_inputs=(torch.ones(3, 4),))
"""
STAGES = ["capture", *(step.name for step in Pipeline()), "lower"]


def _run(script: str = SCRIPT, **environment: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stderr


def _tlparsed(folder: Path) -> Path:
    """Run tlparse on the trace in a folder."""
    tlparse = Path(sys.executable).with_name("tlparse")
    (log,) = (folder / "trace").glob("*.log")
    command = [str(tlparse), str(log), "-o", str(folder / "out"), "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # It read every line but two of torch's, for which `--strict` refuses any job: its version, which has no rank, and
    # symbols, which this release of tlparse does not know.
    assert re.search(r"^Stats \{ ok: \d+(, other_rank: 1)?(, unknown: \d+)? \}$", done.stderr, re.MULTILINE), (
        done.stderr
    )
    assert set(re.findall(r'"(\w+)"', done.stderr.partition("Unknown fields: ")[2])) <= {"create_symbol"}
    return folder / "out"


@pytest.mark.slow
def test_torch_logs() -> None:
    """`TORCH_LOGS=graphshard` logs the effect of each pass, `+graphshard` the program after it; silent otherwise."""
    assert "graphshard" not in _run()
    brief = _run(TORCH_LOGS="graphshard")
    assert "capture 0 of Sequential: first call" in brief
    assert all(f"{name}: " in brief for name in STAGES)
    assert "all_gather_into_tensor" not in brief
    assert "* %" in _run(TORCH_LOGS="+graphshard")


@pytest.mark.slow
def test_tlparse(tmp_path: Path) -> None:
    """`TORCH_TRACE=dir` and the public tlparse tool show every stage."""
    _run(TORCH_TRACE=str(tmp_path / "trace"))
    found = {path.name: path for path in _tlparsed(tmp_path).rglob("graphshard_*")}
    for index, stage in enumerate(STAGES):
        (name,) = [name for name in found if name.startswith(f"graphshard_Sequential-0_{index:02d}_{stage}")]
        assert name in (tmp_path / "out" / "index.html").read_text()
        assert found[name].read_text().startswith(("joint:", "forward:"))
        assert found[name].parent.name == "-_0_0_0", "with the compile id of the Dynamo trace"


def _ranges(model: nn.Module, batch: torch.Tensor) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        model(batch).backward()
    names = [(event.time_range.start, event.name) for event in profile.events()]
    return [name for _, name in sorted(names) if name.startswith(("region_", "start ", "wait "))]


def test_profiler_ranges(fake_world: FakeWorld) -> None:
    """A profile has starts, waits and regions by name, in order; without a profiler there are no ranges."""
    fake_world(2)
    batch = torch.ones(3, 4)
    model = graphshard.compile(Blocks(2), init_device_mesh("cpu", (2,)), backend="eager")
    model(batch).backward()
    (program,) = graphshard.programs(model)
    assert program.plan is not None
    found = _ranges(model, batch)
    planned = [f"{e.action} {e.bucket}" for phase in ("forward", "backward") for e in program.plan.events[phase]]
    assert [name for name in found if not name.startswith("region")] == planned
    regions = [name.split()[0] for name in found if name.startswith("region")]
    assert regions == [f"region_{list(program.regions).index(key)}" for key in program.region_calls]
    assert "region_0 layers.0" in found
    assert _ranges(model, batch) == found


def test_ranges_change_nothing(fake_world: FakeWorld) -> None:
    """The profiled code equals the plain code, including frees."""
    fake_world(2)
    model = graphshard.compile(
        Blocks(2), init_device_mesh("cpu", (2,)), backend="eager", example_inputs=(torch.ones(3, 4),)
    )
    (program,) = graphshard.programs(model)
    for phase in program.phases.values():
        code = inspect.getsource(phase.module.function(None, profiler_range))
        assert code != phase.module.code
        plain = [line.split("): ", 1)[1] if "record_function" in line else line.strip() for line in code.splitlines()]
        assert plain == [line.strip() for line in phase.module.code.splitlines()]


RECAPTURES = (
    SCRIPT
    + """
for rows in (4, 3, 5):
    model(torch.ones(rows, 4))
"""
)
# The batch is symbolic from its second size on, so the third is not traced.
REASON = (
    "args[0] was float32[3, 4] and is float32[4, 4] (tensor 'args[0]' size mismatch at index 0. expected 3, actual 4)"
)


@pytest.mark.slow
def test_torch_logs_and_tlparse_show_recapture_reasons(tmp_path: Path) -> None:
    printed = _run(RECAPTURES, TORCH_LOGS="recompiles", TORCH_TRACE=str(tmp_path / "trace"))
    lines = [line.partition("[__recompiles] ")[2] for line in printed.splitlines() if "[__recompiles]" in line]
    assert lines == ["Recompiling Sequential in graphshard (capture 1)", f"    - {REASON}"]
    assert "__recompiles" not in _run(RECAPTURES)
    (found,) = _tlparsed(tmp_path).rglob("recompile_reasons*.json")
    assert json.loads(found.read_text()) == [f"Sequential-1: {REASON}"]
