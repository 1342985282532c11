"""`graphshard explain` on the command line."""

from __future__ import annotations

import json
import re
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.cli import _explain_command
from graphshard.cli.main import main
from graphshard.predict import study
from graphshard.predict._capture_target import standing_in
from graphshard.predict.study import Study

MM = torch.ops.aten.mm.default
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


FACTORY = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).sum()

def with_inputs():
    return Small(), (torch.zeros(2, 8, dtype=torch.long),)

def broken():
    return None

def failing():
    raise ValueError("no config")
"""


@pytest.fixture
def factory(tmp_path):
    """Write a file with factories."""
    path = tmp_path / "small_factory.py"
    path.write_text(FACTORY)
    return path


def test_command(factory, tmp_path, capsys):
    """A single prediction with all output files."""
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "trace")}
    written = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    options = ["--mesh", "8", "--batch", "2,8", "--param-dtype", "bfloat16", *written]
    assert main(["explain", f"{factory}:Small", *options]) == 0
    out, err = capsys.readouterr()
    assert "Small, 16 tokens per rank" in out
    assert "graphshard explain" not in out
    assert json.loads(files["json"].read_text())["mesh"] == {"shard": 8}
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert "<html" in files["html"].read_text()
    phases = [re.sub(r"^graphshard explain: +\d+\.\d s  ", "", line) for line in err.splitlines()]
    assert phases[:4] == ["import", "make the model", "capture", "8 ranks: insert-collectives"]
    assert phases[-4:] == ["8 ranks: reorder", "8 ranks: lower", "8 ranks, h100: predict", "in all"]


@pytest.mark.slow
def test_command_with_a_grid(factory, capsys, monkeypatch):
    """Several values of each option give a table; a module's name works like a file's."""
    monkeypatch.chdir(factory.parent)
    options = ["--mesh", "8", "shard=64", "--batch", "2,8", "4,8", "--network", "isolated", "in-training"]
    assert main(["explain", "small_factory:Small", *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 8
    assert main(["explain", "small_factory:with_inputs", "--mesh", "8"]) == 0


def test_flags_are_options(factory, tmp_path, capsys):
    """Flags show in the program: policies, units, saved values, dynamic sizes."""
    seen = []
    real = Study.explain

    def explained(study, *args, **kwargs):
        seen.append(real(study, *args, **kwargs))
        seen.append(study.options)
        return seen[0]

    flags = ["--reshard", "4", "--units", "embed", "head", "--activation", "aten.addmm.default,aten.mm.default"]
    flags += ["--offload", "--backend", "eager", "--dynamic", "0"]
    with mock.patch.object(Study, "explain", explained):
        assert main(["explain", f"{factory}:Small", "--mesh", "8", "--batch", "2,8", *flags]) == 0
    found, options = seen
    assert options.activation == (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    assert (options.reshard_after_forward, options.units, options.backend) == (4, ["embed", "head"], "eager")
    assert found._program.mesh.regather.size == 4
    assert [size.source for size in found._program.sizes] == [(0, 0)]
    assert "host" in found.busy
    assert main(["explain", f"{factory}:Small", "--mesh", "2", "4", "--batch", "2,8", "--activation", "0.5"]) == 2
    assert "activation=0.5 is about the units of Small, and none were found" in capsys.readouterr().err


def test_training_options(factory, tmp_path, capsys):
    """Microbatches, clipping, optimizer, tokens and price are in the prediction."""
    flags = ["--accumulate", "4", "--foreach", "--clip-norm", "1", "--tokens", "1e9", "--price", "2.5"]
    json_file = str(tmp_path / "x.json")
    assert main(["explain", f"{factory}:Small", "--mesh", "8", "--batch", "2,8", "--json", json_file, *flags]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["microbatches"] == 4
    assert found["cost"]["money"] == pytest.approx(2.5 * found["cost"]["gpu_hours"])
    assert "1e+09 tokens in 1,953,125 steps" in capsys.readouterr().out


def test_what_if(factory, tmp_path, capsys):
    """Tables on stdout, progress on stderr, the page, and the timeline next to it."""
    files = ["--html", str(tmp_path / "plan.html"), "--json", str(tmp_path / "plan.json")]
    options = [
        "--mesh",
        "16",
        "--batch",
        "2,8",
        "--what-if",
        "accumulate",
        "network",
        "--ranks",
        "32",
        "--tokens",
        "1e9",
    ]
    assert main(["explain", f"{factory}:Small", *options, *files, "--trace", str(tmp_path / "trace.json")]) == 0
    out, err = capsys.readouterr()
    assert "accumulate 4 microbatches" in out
    assert "network in-training" in out
    assert "shard 32" in out
    assert "network in-training, 16 ranks, h100: predict" in err
    assert "scaling, 32 ranks: lower" in err
    assert "Timeline for engineers" in (tmp_path / "plan.html").read_text()
    assert "<html" in (tmp_path / "plan.timeline.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    changes = json.loads((tmp_path / "plan.json").read_text())["changes"]
    assert {change["about"] for change in changes} == {"accumulate", "network"}


@pytest.mark.slow
def test_a_program_for_gpus(factory, tmp_path, capsys, monkeypatch):
    """Regions of a GPU program are captured without a GPU, so that measured times match by key."""
    pytest.importorskip("cffi")
    options = ["explain", f"{factory}:Small", "--mesh", "8", "--batch", "2,8"]
    files = {name: tmp_path / f"{name}.json" for name in ("estimated", "times", "measured")}
    assert main([*options, "--device", "cuda", "--json", str(files["estimated"])]) == 0
    key = json.loads(files["estimated"].read_text())["regions"][0]["key"]
    files["times"].write_text(json.dumps({key: 1.0}))
    measured = ["--measured", str(files["times"]), "--json", str(files["measured"])]
    assert main([*options, "--device", "cuda", *measured]) == 0
    regions = json.loads(files["measured"].read_text())["regions"]
    assert [(row["key"], row["seconds"]) for row in regions if row["measured"]] == [(key, pytest.approx(1.0))]
    assert main([*options, *measured]) == 2
    assert "which is no region of this program" in capsys.readouterr().err
    captured = []
    monkeypatch.setattr(study, "standing_in", lambda device: captured.append(device.type) or standing_in(device))
    for several in (["--reduce-dtype", "float32", "--network", "isolated", "in-training"], ["--what-if", "batch"]):
        assert main([*options, "--device", "cuda", *several]) == 0
        assert len(captured) > 1
        assert {*captured} == {"cuda"}
        captured.clear()


@pytest.mark.parametrize(
    ("text", "value"), [(None, None), ("full", "full"), ("0.25", 0.25), ("1", 1.0), ("aten.mm.default", (MM,))]
)
def test_activation(text, value):
    assert _explain_command._activation(text) == value


def test_command_with_two_axes(factory, tmp_path):
    """Unnamed axes replicate and shard; names are the user's."""
    options = ["--mesh", "2,4", "dp=2,fsdp=4", "--batch", "2,8"]
    assert main(["explain", f"{factory}:Small", *options, "--json", str(tmp_path / "x.json")]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())
    assert [row["mesh"] for row in rows] == [{"replicate": 2, "shard": 4}, {"dp": 2, "fsdp": 4}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FILE:Small", "--mesh", "8"], "give --batch, or let"),
        (["FILE:with_inputs", "--mesh", "8", "--batch", "1,2"], "returns its inputs; leave --batch out"),
        (["FILE:Missing", "--mesh", "8", "--batch", "1,2"], "has no function or class Missing"),
        (["FILE:broken", "--mesh", "8", "--batch", "1,2"], "must return an nn.Module"),
        (["FILE:failing", "--mesh", "8", "--batch", "1,2"], "failed on the meta device with ValueError: no config"),
        (["nowhere:x", "--mesh", "8", "--batch", "1,2"], "factory: cannot import 'nowhere': No module named 'nowhere'"),
        (["nowhere.py:x", "--mesh", "8", "--batch", "1,2"], "there is no file 'nowhere.py'"),
        (["FILE", "--mesh", "8", "--batch", "1,2"], "factory must be module:name"),
        (["FILE:Small", "--mesh", "x", "--batch", "1,2"], "--mesh must have positive sizes such as 8, got 'x'"),
        (
            ["FILE:Small", "--mesh", "2,2,2", "--batch", "1,2"],
            "or two (to replicate and to shard over), got 3: [2",
        ),
        (["FILE:Small", "--mesh", "shard=2,shard=2", "--batch", "1,2"], "--mesh must name each axis, with a name of"),
        (["FILE:Small", "--mesh", "shard=2,4", "--batch", "1,2"], "its own, or none, got 'shard=2,4'"),
        (["FILE:Small", "--mesh", "8", "--batch", "1,0"], "--batch must have positive sizes such as 1,4096"),
        (["FILE:Small", "--mesh", "8", "--batch", "1,2", "--param-dtype", "bf17"], "torch has no dtype 'bf17'"),
        (
            ["FILE:Small", "--mesh", "8", "--batch", "1,2", "--reshard", "some"],
            "--reshard must be default, always, never",
        ),
        (
            ["FILE:Small", "--mesh", "8", "--batch", "1,2", "--activation", "all"],
            "--activation must be full, auto, a share",
        ),
        (
            ["FILE:Small", "--mesh", "8", "--batch", "1,2", "--activation", "aten.mm"],
            "as aten.mm.default, got 'aten.mm'",
        ),
        (["FILE:Small", "--mesh", "8", "--batch", "1,2", "--activation", "2"], "share of memory from 0 to 1 that"),
        (
            ["FILE:Small", "--mesh", "8", "--batch", "1,2", "--activation", "none", "full", "--html", "x"],
            "and activation",
        ),
        (["FILE:Small", "--mesh", "8", "--degrees", "pp=16", "--batch", "1,2"], "none divides [8] ranks"),
        (["FILE:Small", "--mesh", "8", "16", "--batch", "1,2", "--html", "x"], "need one mesh, machine"),
        (["FILE:Small", "--mesh", "8", "--batch", "1,2", "--hardware", "tpu"], "hardware 'tpu' is neither"),
        (
            ["FILE:Small", "--mesh", "8", "--batch", "1,2", "--what-if", "bach"],
            "--what-if has 'bach', which is no kind",
        ),
        (["FILE:Small", "--mesh", "8", "16", "--batch", "1,2", "--what-if"], "--what-if needs one mesh, machine"),
        (["FILE:Small", "--mesh", "8", "--batch", "1,2", "--what-if", "--symbols", "b=0"], "--what-if makes several"),
        (
            ["FILE:Small", "--mesh", "8", "--batch", "1,2", "--ranks", "16"],
            "--ranks are those that --what-if scales to",
        ),
        (
            ["FILE:Small", "--mesh", "8", "--batch", "1,2", "--what-if", "--ranks", "0"],
            "ranks must be a positive number",
        ),
        (["FILE:Small", "--mesh", "8", "--batch", "1,2", "--tokens", "-1"], "tokens must be a positive number such as"),
        (["FILE:Small", "--mesh", "8", "--batch", "1,2", "--price", "2"], "price=2.0 is of a GPU hour, and tokens,"),
        (["FILE:Small", "--mesh", "8", "--batch", "1,2", "--accumulate", "0"], "accumulate must be a positive number"),
    ],
)
def test_wrong_commands(factory, capsys, arguments, message):
    """One line on stderr, after the lines of phases, and exit status 2."""
    arguments = [a.replace("FILE", str(factory)) for a in arguments]
    assert main(["explain", *arguments]) == 2
    *phases, error = capsys.readouterr().err.splitlines()
    assert message in error
    assert all(re.fullmatch(r"graphshard explain: +\d+\.\d s  [\w ]+", line) for line in phases)


PARALLEL = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, tokens):
        return self.down(self.up(self.embed(tokens))).sum()

def tp(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""


def test_meshes_with_a_tensor_axis(tmp_path, capsys):
    """With the function that builds the model for a mesh, microbatches, and a ranking."""
    file = tmp_path / "parallel.py"
    file.write_text(PARALLEL)
    options = ["explain", f"{file}:Two", "--parallelize", f"{file}:tp", "--batch", "1,8", "--global-batch", "8"]
    assert main([*options, "--mesh", "dp=4,tp=2", "dp=2,tp=2", "dp=16,tp=2", "--best", "1"]) == 0
    out = capsys.readouterr().out
    assert "is best, because" in out
    assert "left out: mesh dp 16, tp 2 is larger than the batch: 16 ranks with inputs of their own, 1 each" in out
    assert main([*options, "--mesh", "dp=4,tp=2", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["mesh"], found["microbatches"], found["data_ranks"]) == ({"dp": 4, "tp": 2}, 2, 4)
    assert "reduced over tp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--mesh", "dp=4,tp=2,pp=2", "--parallelize", "FILE:tp"],
            "mesh has a pipeline axis, and Two has no nn.ModuleList",
        ),
        (["--mesh", "dp=4,tp=2"], "is made for them by parallelize=, a function of (model, mesh)"),
        (["--mesh", "dp=4,dp=2", "--parallelize", "FILE:tp"], "--mesh must name each axis, with a name of its own"),
        (["--mesh", "dp=4,tp=2", "--parallelize", "FILE:no"], "has no function or class no"),
        (["--mesh", "dp=4,tp=2", "--parallelize", "tp"], "--parallelize must be module:name or file.py:name, got 'tp'"),
        (["--mesh", "dp=3,tp=2", "--parallelize", "FILE:tp", "--global-batch", "8"], "does not divide the batch"),
        (["--mesh", "8", "--best", "0"], "--best"),
    ],
)
@pytest.mark.quick_cases(
    "options1-is made for them by parallelize=, a function of (model, mesh)",
    "options2---mesh must name each axis, with a name of its own",
    "options3-has no function or class no",
    "options4---parallelize must be module:name or file.py:name, got 'tp'",
    "options5-does not divide the batch",
    "options6---best",
)
def test_wrong_axes(tmp_path, capsys, options, message):
    """An error in one line."""
    file = tmp_path / "parallel.py"
    file.write_text(PARALLEL)
    given = [text.replace("FILE", str(file)) for text in options]
    assert main(["explain", f"{file}:Two", "--batch", "1,8", *given]) == 2
    assert message in capsys.readouterr().err
