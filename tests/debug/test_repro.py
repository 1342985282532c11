"""`graphshard repro` runs one pass on one dumped stage, with the same result or fault, and no other files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphshard.cli.main import main as command
from graphshard.codec.converter import PASSES
from graphshard.codec.program_format import program_to_json
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.debug._dump_summary import DumpSummary, StageSummary
from graphshard.debug.show import StageFile
from graphshard.ir.collapse_repeats import fold
from graphshard.ir.mesh import Mesh
from graphshard.options.resolve import with_regather
from graphshard.passes import (
    AccumulateGradients,
    ActivationCheckpointing,
    AsyncTensorParallel,
    ChunkedLoss,
    ChunkedReduceScatter,
    EmbeddingRowExchange,
    Float8AllGather,
    KeepGathered,
    MakePlan,
    OffloadActivations,
    OffloadParameters,
    Pass,
    RegatherInSubgroup,
    ToDevice,
    VocabShardedLoss,
)
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import Pipeline, run_pass
from graphshard.schedule.build_problem import Constraints
from graphshard.schedule.planner import PlanByCost
from graphshard.utils.json_dataclasses import write
from tests.helpers import COALESCED, PACKED, Blocks, captured

STAGES = ("capture", *(step.name for step in Pipeline()))
TWO_RANKS = Mesh.of_shape(2)


def write_dump(directory: Path, pipeline: Pipeline, mesh: Mesh = TWO_RANKS) -> Path:
    """Write the files of a dump: NN-name.txt, NN-name.json and summary.json."""
    directory.mkdir(parents=True)
    program = replace(captured(Blocks(4, bias=True), (torch.randn(2, 4),), world_size=mesh.shard.size), mesh=mesh)
    observer = Observer("off")
    observer.after(program, "capture", 0, 0.5)
    steps = (None, *pipeline)
    for index, (step, following) in enumerate(zip(steps, (*pipeline, None), strict=True)):
        if step is not None:
            run_pass(step, program, observer)
        stem = directory / f"{index:02d}-{program.history[-1].name}"
        stem.with_suffix(".txt").write_text(fold(program.history[-1].text))
        stem.with_suffix(".json").write_text(program_to_json(program, next_pass=following))
    stages = tuple(StageSummary(s.name, s.rewrites, s.seconds, s.num_nodes, s.exact, "") for s in program.history)
    summary = DumpSummary(title="Blocks-0", reason="first call", axes={"shard": 2}, stages=stages)
    (directory / "summary.json").write_text(json.dumps(write(summary)))
    return directory


def main(arguments: list[str]) -> int:
    """Run `graphshard repro`."""
    return command(["repro", *arguments])


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dump(tmp_path_factory.mktemp("dumps") / "Blocks-0", Pipeline())


@pytest.fixture(scope="module")
def regathered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump a program of 4 ranks with gathers among 2 ranks in backward."""
    mesh = Mesh.of_shape(4).with_regather(2)
    return write_dump(tmp_path_factory.mktemp("dumps") / "Blocks-0", with_regather(Pipeline()), mesh)


def edit(path: Path, **values: Any) -> None:
    """Change values of a stage by key."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def copy_stage(dump: Path, stem: str, to: Path) -> Path:
    copied = to / f"{stem}.json"
    copied.write_text((dump / f"{stem}.json").read_text())
    return copied


@pytest.mark.parametrize("index", range(len(STAGES) - 1), ids=STAGES[:-1])
def test_every_pass_is_reproduced(dump: Path, capsys: pytest.CaptureFixture[str], index: int):
    """Each stage gives the next one, verified, without a process group."""
    assert not dist.is_initialized()
    assert main([str(dump / f"{index:02d}-{STAGES[index]}.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{STAGES[index + 1]} (as it ran) on {dump}")
    assert "rules: all hold, before and after the pass\n" in out
    assert f"{index + 1:02d}-{STAGES[index + 1]}.txt: the same\n" in out


@pytest.mark.parametrize("stage", ["08-regather-in-subgroup", "09-plan", "10-bucket"])
def test_collectives_among_neighbors(regathered: Path, capsys: pytest.CaptureFixture[str], stage: str):
    """The stage contains their axis, so verification succeeds."""
    assert main([str(regathered / f"{stage}.json")]) == 0
    out = capsys.readouterr().out
    assert "rules: all hold, before and after the pass\n" in out
    assert ".txt: the same\n" in out


WEIGHTS = frozenset({"layers.0.weight", "layers.1.weight"})
KEEPS = PlanByCost(Costs(load_profile("h100")), 1 << 40, Constraints(keep=True), exact_reductions=False)
# Passes outside of the default pipeline, their position, and other requirements of the pipeline.
OTHERS: dict[str, tuple[Pass, Pipeline]] = {
    step.name: (step, pipeline.insert(step, **place))
    for step, pipeline, place in (
        (ActivationCheckpointing("full"), Pipeline(), {"before": "insert-collectives"}),
        (ToDevice("cuda"), Pipeline(), {"before": "insert-collectives"}),
        (AccumulateGradients(unsynced=WEIGHTS, accumulated=WEIGHTS), Pipeline(), {"after": "partition"}),
        (OffloadParameters(always=True), Pipeline(), {"before": "plan"}),
        (OffloadActivations(1.0, least=1), Pipeline(), {"before": "plan"}),
        (RegatherInSubgroup(), Pipeline(), {"before": "plan"}),
        (Float8AllGather(("layers.*.weight",)), Pipeline(), {"before": "plan"}),
        (KeepGathered(), Pipeline().replace("plan", MakePlan(KEEPS)), {"after": "plan"}),
    )
}


def test_the_table_has_all_other_passes():
    """All passes that the default pipeline lacks and that change these blocks on data axes."""
    default = {type(step) for step in Pipeline()} | {
        ChunkedLoss,
        EmbeddingRowExchange,
        VocabShardedLoss,
        AsyncTensorParallel,
        ChunkedReduceScatter,
    }
    assert {type(step) for step, _ in OTHERS.values()} == {*PASSES.values()} - default


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.quick_cases(
    "activation-checkpointing", "to-device", "accumulate-gradients", "regather-in-subgroup", "float8-all-gather"
)
def test_every_other_pass_is_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    """With its options, from the stage before it; the next pass from its stage."""
    step, pipeline = OTHERS[name]
    index = pipeline.passes.index(step)
    mesh = Mesh.of_shape(4).with_regather(2) if isinstance(step, RegatherInSubgroup) else TWO_RANKS
    directory = write_dump(tmp_path / "Blocks-0", pipeline, mesh)
    following = pipeline.passes[index + 1]
    for number, expected in ((index, step), (index + 1, following)):
        assert main([str(directory / f"{number:02d}")]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{expected.name} (as it ran) on {directory}")
        assert f"{number + 1:02d}-{expected.name}.txt: the same\n" in out
    before, after = (json.loads(StageFile.at(directory / f"{n:02d}").json()) for n in (index, index + 1))
    assert (before["phases"], before["device"]) != (after["phases"], after["device"])


def test_the_difference_is_printed(dump: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(dump / "00")]) == 0
    out = capsys.readouterr().out
    assert "--- 00-capture\n+++ after insert-collectives\n" in out
    assert "\n+* %" in out
    assert "... layers.1 to layers.3" in out
    main([str(dump / "00"), "--full"])
    assert "... layers.1 to layers.3" not in capsys.readouterr().out


def test_accepts_a_text_for_its_json(dump: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(dump / "08-plan.txt")]) == 0
    assert capsys.readouterr().out.startswith("bucket (as it ran)")


class Coalesced(MakePlan):
    """A different planner in the default pass."""

    def __init__(self) -> None:
        super().__init__(COALESCED)


def test_uses_the_recorded_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A planner with other options packs what the default one would not."""
    directory = write_dump(tmp_path / "packed", Pipeline().replace("plan", MakePlan(PACKED)))
    stage = str(directory / "07")
    assert main([stage, "--verify", "off"]) == 0
    out = capsys.readouterr().out
    assert "rules: not checked\n" in out
    assert "08-plan.txt: the same\n" in out
    assert main([stage, "--pass", "tests.debug.test_repro:Coalesced"]) == 0
    assert "08-plan.txt: the same text, but another plan than the pass made here\n" in capsys.readouterr().out


def test_another_pass_can_be_selected(dump: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(dump / "05"), "--pass", "plan"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan (with default options)")
    assert "the dump holds no stage of plan to compare with" in out


def test_reports_a_difference_from_the_dump(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stage = copy_stage(dump, "00-capture", tmp_path)
    (tmp_path / "01-insert-collectives.txt").write_text("joint:\n")
    assert main([str(stage)]) == 0
    assert "01-insert-collectives.txt: another text than the pass made here" in capsys.readouterr().out


def test_a_stage_without_options_uses_the_default(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stage = copy_stage(dump, "01-insert-collectives", tmp_path)
    edit(stage, next=None)
    assert main([str(stage)]) == 0
    assert capsys.readouterr().out.startswith("mixed-precision (with default options)")


# A user's pass.

MY_PASSES = """
from dataclasses import dataclass
from typing import ClassVar

import graphshard


@dataclass(frozen=True)
class Rename(graphshard.Pass):
    name: ClassVar[str] = "rename"
    count: int = 0

    def rewrite(self, program):
        return self.count


@dataclass(frozen=True)
class Drop(graphshard.Pass):
    name: ClassVar[str] = "drop-wait"

    def rewrite(self, program):
        graph = program.phases["joint"].module.graph
        (wait, *_) = [node for node in graph.nodes if "wait" in str(node.target)]
        wait.replace_all_uses_with(wait.args[0])
        graph.erase_node(wait)
        return 1


@dataclass(frozen=True)
class Needs(graphshard.Pass):
    option: int
"""


@pytest.fixture
def my_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file in the current directory, which a console script does not have on its path."""
    (tmp_path / "repro_passes.py").write_text(MY_PASSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "repro_passes", raising=False)


@pytest.mark.usefixtures("my_passes")
def test_a_users_pass(dump: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(dump / "01"), "--pass", "repro_passes:Rename"]) == 0
    assert capsys.readouterr().out.startswith("rename (given) on ")


@pytest.mark.usefixtures("my_passes")
def test_a_pass_that_breaks_a_rule(dump: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(dump / "01"), "--pass", "repro_passes:Drop"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"drop-wait on {dump}")
    assert "drop-wait broke the rule waited_once in joint" in out


@pytest.mark.usefixtures("my_passes")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("repro_passes:Nothing", "repro_passes has no pass 'Nothing'; a pass derives from graphshard.Pass"),
        ("repro_passes:dataclass", "repro_passes has no pass 'dataclass'"),
        ("repro_passes:Needs", "repro_passes:Needs cannot be made without arguments"),
        ("no_such_module:Drop", "--pass: cannot import 'no_such_module'"),
        ("reordr", "the default pipeline has no 'reordr', it has insert-collectives,"),
        ("reordr", "Did you mean 'reorder'?"),
    ],
)
def test_rejects_objects_other_than_passes(dump: Path, capsys: pytest.CaptureFixture[str], name: str, message: str):
    assert main([str(dump / "01"), "--pass", name]) == 2
    assert message in capsys.readouterr().err


def test_asks_for_a_pass_that_cannot_be_rebuilt(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stage = copy_stage(dump, "01-insert-collectives", tmp_path)
    edit(stage, next={"name": "mine", "class": "my_passes:Mine", "options": {}})
    assert main([str(stage)]) == 2
    err = capsys.readouterr().err
    assert "the next pass, 'mine', cannot be made again: my_passes:Mine is not graphshard's own" in err
    assert "Give --pass my_passes:Mine" in err


# Faults.


def test_a_pass_whose_precondition_fails(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stage = copy_stage(dump, "08-plan", tmp_path)
    edit(stage, plan=None)
    assert main([str(stage)]) == 1
    assert "bucket: the program has no plan; run a planner first" in capsys.readouterr().out


def test_a_stage_that_breaks_a_rule(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stage = copy_stage(dump, "01-insert-collectives", tmp_path)
    content = json.loads(stage.read_text())
    node = next(n for n in content["phases"]["joint"]["nodes"] if n["target"] == "aten.relu.default")
    node["val"]["tensor"][0] = "float64"
    stage.write_text(json.dumps(content))
    assert main([str(stage)]) == 1
    out = capsys.readouterr().out
    assert "the stage itself breaks a rule, before the pass runs" in out
    assert "broke the rule consistent_values" in out


def test_a_stage_the_rules_cannot_read(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stage = copy_stage(dump, "01-insert-collectives", tmp_path)
    content = json.loads(stage.read_text())
    node = next(n for n in content["phases"]["joint"]["nodes"] if "all_gather" in n["target"])
    del node["val"]
    stage.write_text(json.dumps(content))
    assert main([str(stage)]) == 1
    assert "the stage cannot be checked: KeyError: 'val'" in capsys.readouterr().out


@pytest.mark.slow
def test_rejects_the_last_stage(dump: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(dump / "10")]) == 2
    assert "no pass follows 'reorder'. Give --pass, one of insert-collectives" in capsys.readouterr().err


def test_a_text_alone_is_not_enough(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "09-bucket.txt"
    text.write_text((dump / text.name).read_text())
    assert main([str(text)]) == 2
    assert "has no 09-bucket.json next to it to make the program again" in capsys.readouterr().err


def test_an_unknown_operator_needs_its_library(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """--import registers it; a file cannot cause an import."""
    library = "import torch\nlib = torch.library.Library('repro_lib', 'DEF')\n"
    library += "lib.define('relu(Tensor x) -> Tensor')\nlib.impl('relu', torch.relu, 'CompositeExplicitAutograd')\n"
    (tmp_path / "repro_library.py").write_text(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    stage = copy_stage(dump, "00-capture", tmp_path)
    stage.write_text(stage.read_text().replace("aten.relu.default", "repro_lib.relu.default"))
    assert main([str(stage)]) == 2
    assert "unknown operator repro_lib.relu.default: import the library that registers it" in capsys.readouterr().err
    assert main([str(stage), "--import", "repro_library"]) == 0
