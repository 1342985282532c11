"""Contents of dumps: complete, never half written, and runnable."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard import Pass, Pipeline, Program
from graphshard.codec.program_format import program_from_json
from graphshard.debug.dump import Dump
from graphshard.debug.show import show_path
from graphshard.errors import ArgumentError, PassError
from graphshard.ir.collapse_repeats import fold
from graphshard.ir.plan import Plan
from graphshard.ir.printer import print_program
from graphshard.passes import MakePlan, OffloadParameters
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.utils.files import write_text
from tests.helpers import Blocks
from tests.ranks import FakeWorld

BATCH = (torch.ones(3, 4),)
STAGES = ["capture", *(step.name for step in Pipeline()), "lower"]


def compiled(world: FakeWorld, dump: Path | None, *, model: nn.Module | None = None, **options: object) -> nn.Module:
    """Compile a model on rank 0 of two, with a dump directory."""
    world(2)
    options = {"backend": "eager", "example_inputs": BATCH, **options}
    return graphshard.compile(model or Blocks(2), init_device_mesh("cpu", (2,)), dump=dump, **options)


@pytest.fixture
def dump(fake_world: FakeWorld, tmp_path: Path) -> Path:
    compiled(fake_world, tmp_path)
    return tmp_path / "rank0" / "Blocks-0"


def test_files(dump: Path) -> None:
    """Numbered texts, diffs, serialized stages, code, plan, regions and the report."""
    names = {str(path.relative_to(dump)) for path in dump.rglob("*") if path.is_file()}
    stems = [f"{i:02d}-{name}" for i, name in enumerate(STAGES)]
    wanted = {f"{stem}.txt" for stem in stems} | {f"{stem}.diff" for stem in stems[1:]}
    wanted |= {f"{stem}.json" for stem in stems[:-1]}
    wanted |= {"00-exported.pt2", "exported.txt"}
    wanted |= {"forward.py", "backward.py", "plan.json", "saved.txt", "index.html", "summary.json"}
    assert {name for name in names if not name.startswith("regions")} == wanted
    assert names - wanted == {f"regions/region_{i}.py" for i in range(len(names - wanted))}


def _order_of(dump: Path) -> str:
    found = re.search(r'id="fsdp2-summary">(.*?)</p>', (dump / "index.html").read_text())
    assert found
    return found[1]


def test_report_has_the_order_of_fsdp2(fake_world: FakeWorld, tmp_path: Path) -> None:
    """Of a compiled model, too: lanes above another plan's, and a sentence where the plan is that order."""
    for number, (step, text) in enumerate(
        (
            (MakePlan(), "The lanes on top are the same program in FSDP2's order"),
            (MakePlan(PlanByUnit()), "The plan is FSDP2's order: no other gains enough to depart from it."),
        )
    ):
        dump = tmp_path / str(number)
        compiled(fake_world, dump, passes=Pipeline().replace("plan", step))
        assert text in _order_of(dump / "rank0" / "Blocks-0")


@pytest.mark.slow
def test_contents(dump: Path, fake_world: FakeWorld, tmp_path: Path) -> None:
    """The files match the program."""
    (program,) = graphshard.programs(compiled(fake_world, tmp_path / "other"))
    for index, stage in enumerate(program.history):
        text = (dump / f"{index:02d}-{stage.name}.txt").read_text()
        assert text == stage.folded
        if stage.name != "lower":
            reloaded = program_from_json((dump / f"{index:02d}-{stage.name}.json").read_text())
            assert print_program(reloaded) == stage.text
    assert Plan.from_json((dump / "plan.json").read_text()) == program.plan
    diff = (dump / "01-insert-collectives.diff").read_text()
    assert diff.startswith("--- 00-capture.txt\n+++ 01-insert-collectives.txt\n")
    assert re.search(r"^\+\* %\d+: f32\[4, 4\] = all_gather_into_tensor", diff, re.M)
    assert (dump / "05-drop-unused-tangents.diff").read_text() == ""
    summary = json.loads((dump / "summary.json").read_text())
    assert [stage["name"] for stage in summary["stages"]] == STAGES
    assert summary["regions"] == {"calls": program.num_regions, "distinct": program.num_distinct_regions}
    assert summary["communication"] == program.communication
    assert "<title>Blocks-0" in (dump / "index.html").read_text()


@pytest.mark.slow
def test_the_code_runs(dump: Path) -> None:
    """Executors and regions are scripts: with made-up inputs they print their results."""

    def run(name: str) -> list[str]:
        done = subprocess.run([sys.executable, name], cwd=dump, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert run("forward.py")[0] == "output:0 (torch.float32, [])"
    assert run("backward.py") == [f"grad:layers.{i}.weight (torch.float32, [2, 4])" for i in (0, 1)]
    assert all(re.fullmatch(r"torch.float32 \[.*\]", line) for line in run("regions/region_0.py"))


class _Shaken(nn.Module):
    """Draws random numbers again in backward, and has a parameter with the name of the generator state."""

    def __init__(self) -> None:
        super().__init__()
        self.random_state = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def drop(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x @ self.random_state, 0.5).sin()

        return checkpoint(drop, x, use_reentrant=False).sum()


def _runs(file: Path) -> list[str]:
    done = subprocess.run([sys.executable, file.name], cwd=file.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"replicate": 2, "shard": 2}, {"gpu s": 4}])
def test_the_code_runs_on_any_mesh(fake_world: FakeWorld, tmp_path: Path, mesh: dict[str, int]) -> None:
    """Files create the process groups of all axes, including neighbor axes of backward's gathers."""
    fake_world(4)
    made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    regather = 2 if len(mesh) == 1 else None
    passes = Pipeline().insert(OffloadParameters(always=True), before="plan")
    options = {"backend": "eager", "example_inputs": BATCH, "dump": tmp_path, "passes": passes}
    graphshard.compile(Blocks(2), made, reshard_after_forward=regather, **options)
    dump = tmp_path / "rank0" / "Blocks-0"
    rows = 4 // list(mesh.values())[-1]
    assert _runs(dump / "forward.py")[0] == "output:0 (torch.float32, [])"
    assert _runs(dump / "backward.py") == [f"grad:layers.{i}.weight (torch.float32, [{rows}, 4])" for i in (0, 1)]


def test_inputs_that_are_states_of_generators(fake_world: FakeWorld, tmp_path: Path) -> None:
    compiled(fake_world, tmp_path, model=_Shaken())
    dump = tmp_path / "rank0" / "_Shaken-0"
    rows = "".join((dump / f"{name}.py").read_text() for name in ("forward", "backward")).splitlines()
    inputs = dict(reversed(row.strip().split(",  # ")) for row in rows if ",  # " in row)
    assert inputs["saved:random_state_0"] == "torch.get_rng_state()"
    assert inputs["param:random_state"].startswith("torch.empty_strided")


@pytest.mark.slow
def test_kernels(fake_world: FakeWorld, tmp_path: Path) -> None:
    """With Inductor the code of each region is stored next to its operators, and the report links to it."""
    compiled(fake_world, tmp_path, backend="inductor")
    dump = tmp_path / "rank0" / "Blocks-0"
    kernels = sorted(path.name for path in dump.glob("regions/*.kernels.py"))
    assert kernels
    assert "cpp_fused" in (dump / "regions" / kernels[0]).read_text()
    assert f"regions/{kernels[0]}" in (dump / "index.html").read_text()


@pytest.mark.slow
def test_environment(fake_world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRAPHSHARD_DUMP names the directory, GRAPHSHARD_DUMP_RANKS the ranks; the argument takes precedence."""
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path / "a"))
    compiled(fake_world, None)
    compiled(fake_world, tmp_path / "b")
    monkeypatch.setenv("GRAPHSHARD_DUMP_RANKS", "1,3")
    compiled(fake_world, tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    monkeypatch.setenv("GRAPHSHARD_DUMP_RANKS", "all")
    compiled(fake_world, tmp_path / "d")
    assert (tmp_path / "d" / "rank0" / "Blocks-0" / "index.html").exists()


@pytest.mark.parametrize(
    ("dump", "ranks", "message"),
    [
        (3, "0", "dump must be a directory, got 3"),
        ("d", "zero", "GRAPHSHARD_DUMP_RANKS must be 'all' or ranks such as '0,3', got 'zero'"),
    ],
)
def test_wrong_arguments(
    fake_world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dump: object, ranks: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHSHARD_DUMP_RANKS", ranks)
    with pytest.raises(ArgumentError, match=message):
        compiled(fake_world, dump)
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class _Crash(Pass):
    """A pass that raises."""

    name: ClassVar[str] = "crash"

    def rewrite(self, program: Program) -> int:
        raise KeyError("no such thing")


def test_a_crash_leaves_the_stages_up_to_it(fake_world: FakeWorld, tmp_path: Path) -> None:
    with pytest.raises(PassError):
        compiled(fake_world, tmp_path, passes=Pipeline().insert(_Crash(), after="partition"))
    dump = tmp_path / "rank0" / "Blocks-0"
    assert sorted(path.stem for path in dump.glob("*.txt")) == [
        *(f"{i:02d}-{name}" for i, name in enumerate(STAGES[:5])),
        "error",
        "exported",
    ]
    error = (dump / "error.txt").read_text()
    assert "KeyError: 'no such thing'" in error
    assert "in rewrite" in error
    assert json.loads((dump / "summary.json").read_text())["error"] == "crash: 'no such thing'"
    assert "no such thing" in (dump / "index.html").read_text()


def test_an_earlier_dump_is_replaced(dump: Path, fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process; a second model of the same class in this process gets a separate directory."""
    (dump / "regions" / "region_99.py").write_text("left over")
    compiled(fake_world, dump.parents[1])
    assert sorted(path.name for path in dump.parent.iterdir()) == ["Blocks-0", "Blocks-0.2"]
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    compiled(fake_world, dump.parents[1])
    assert not (dump / "regions" / "region_99.py").exists()


def test_other_files_are_kept(fake_world: FakeWorld, tmp_path: Path) -> None:
    mine = tmp_path / "rank0" / "Blocks-0" / "thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("")
    with pytest.raises(ArgumentError, match=r"dump: .*Blocks-0 holds files that are no dump"):
        compiled(fake_world, tmp_path)
    assert mine.exists()


@pytest.mark.slow
def test_a_second_capture_and_a_second_backward(fake_world: FakeWorld, tmp_path: Path) -> None:
    """Each program has a directory, and so has a backward for non-default gradients."""

    class TwoOutputs(Blocks):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), x * self.layers[0].weight[0]

    model = compiled(fake_world, tmp_path, model=TwoOutputs(2))
    model(torch.ones(5, 4))[1].sum().backward()
    dumps = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("summary.json"))
    assert dumps == ["rank0/TwoOutputs-0", "rank0/TwoOutputs-1", "rank0/TwoOutputs-1/backward-1"]


def test_files_are_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is renamed when it is complete; an interrupt leaves only the old one."""
    path = tmp_path / "file"
    write_text(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


@pytest.mark.slow
def test_folded_text_is_dumped(fake_world: FakeWorld, tmp_path: Path) -> None:
    compiled(fake_world, tmp_path, model=Blocks(8))
    text = (tmp_path / "rank0" / "Blocks-0" / "10-reorder.txt").read_text()
    assert "times" in text
    assert fold(text) == text


def test_the_captured_program_is_an_exported_program(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 0 can be loaded, compiled and shown."""
    loaded = torch.export.load(dump / "00-exported.pt2")
    assert "GRADIENT_TO_PARAMETER" in str(loaded.graph_signature)
    assert "GRADIENT_TO_PARAMETER target='layers.0.weight'" in (dump / "exported.txt").read_text()
    show_path(dump, full=False)
    assert "captured: 00-exported.pt2, an ExportedProgram of torch" in capsys.readouterr().out
    show_path(dump / "00-exported.pt2", full=False)
    assert "GRADIENT_TO_PARAMETER target='layers.0.weight'" in capsys.readouterr().out


def test_a_program_without_an_export_signature(fake_world: FakeWorld, tmp_path: Path) -> None:
    """The file contains the reason, and compilation continues."""
    program = compiled(fake_world, None)
    dump = Dump(tmp_path / "dump")
    (made,) = graphshard.programs(program)
    made.__dict__.pop("_captured")
    dump._export(made)
    assert "# exported: the program Blocks-0 was read from a file" in (dump.directory / "exported.txt").read_text()
    assert not (dump.directory / "00-exported.pt2").exists()
