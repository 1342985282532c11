"""`graphshard bench`: models next to FSDP2 on two gloo ranks, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh

from graphshard.cli import _bench_command
from graphshard.cli.main import _parser, main
from tests.ranks import Ranks

NET = """
import os

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

def with_inputs():
    return Net(), (torch.randint(32, (2, 8)),)

class NoLoss(Net):
    def forward(self, tokens):
        return self.embed(tokens)

class OneRankDies(Net):
    def __init__(self):
        super().__init__()
        if os.environ.get("RANK") == "1":
            os._exit(7)
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "bench_net.py"
    path.write_text(NET)
    return path


def _turns(rank: int, world_size: int, words: list[str]) -> dict[str, Any]:
    args = _parser().parse_args(["bench", *words])
    mesh = init_device_mesh("cpu", (world_size,))
    return _bench_command._steps(args, ["FSDP2", "graphshard"], mesh, lambda _: None)


def test_turns(ranks: Ranks, net: Path) -> None:
    """FSDP2's bits with dropout, the same times on all ranks, and numbers that are known."""
    options = ["--batch", "2,8", "--steps", "4", "--backend", "eager", "--device", "cpu"]
    found = ranks(2).run(_turns, [f"{net}:Net", *options])
    for name, row in found[0]["rows"].items():
        assert row["error"] == ""
        assert row["step_times_s"] == found[1]["rows"][name]["step_times_s"]
        assert len(row["step_times_s"]) == 4
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 8 / row["step_s"])
        assert row["peak_bytes"] > 3 * 4 * 16 * 32 / 2  # at least half of the head, with both states
        assert row["losses_differ_by"] == 0
    assert found[0]["rows"]["graphshard"]["exposed_s"] > 0


ENDS = """
import json, os, sys, time
rank = int(os.environ["RANK"])
print("a line of the user")
if sys.argv[1] == "dies" and rank == 1:
    os._exit(7)
if sys.argv[1] == "dies":
    time.sleep(300)
print(json.dumps({"rank": rank}))
"""


def test_processes_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line counts; ranks that a failed one leaves waiting are ended."""
    monkeypatch.setattr(_bench_command, "_GRACE", 0.2)
    environments = {rank: {**os.environ, "RANK": str(rank)} for rank in range(2)}
    assert _bench_command.run_ranks(["-c", ENDS, "works"], environments) == [{"rank": 0}, {"rank": 1}]
    found = _bench_command.run_ranks(["-c", ENDS, "dies"], environments)
    assert found == [{"error": "rank 0 ended with exit status -9"}, {"error": "rank 1 ended with exit status 7"}]


@pytest.mark.slow
def test_two_ranks(net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bits of FSDP2, numbers in the table and in the file, first steps, and a line for each phase."""
    options = ["--batch", "2,8", "--ranks", "2", "--device", "cpu", "--steps", "4", "--backend", "eager"]
    assert main(["bench", f"{net}:Net", *options, "--json", str(tmp_path / "out.json")]) == 0
    out, err = capfd.readouterr()
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["ranks"], found["device"], found["torch"]) == (2, "cpu", torch.__version__)
    assert list(found["rows"]) == ["FSDP2", "FSDP2, compiled blocks", "graphshard"]
    assert all(row["first_step_s"] > 0 for row in found["rows"].values())
    assert found["rows"]["FSDP2"]["to_base"] == 1
    lines = out.splitlines()
    assert lines[0] == f"{net}:Net on 2 ranks, cpu, torch {torch.__version__}"
    assert lines[2].startswith("|  | step ms | quartiles | to FSDP2 | tokens/s | peak memory | exposed ms | first ")
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| FSDP2", "| FSDP2, compiled blocks", "| graphshard"]
    assert lines[6].endswith("| equal bits |")
    for phase in ("first step of FSDP2, compiled blocks", "make graphshard, and train 3 steps", "4 steps of each"):
        assert f" s  {phase}" in err


@pytest.mark.slow
def test_under_torchrun(net: Path, tmp_path: Path) -> None:
    """Its ranks agree on ports, and rank 0 prints once; a factory may return the inputs."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--device", "cpu", "--steps", "2", "--backend", "eager", "--also", "compile-step", "eager"]
    command = [*launch, "-m", "graphshard", "bench", f"{net}:with_inputs", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| graphshard")]
    names = ("graphshard", "graphshard, compile_step", "graphshard, eager")
    assert [(row.split(" | ")[0], row.split(" | ")[-1]) for row in rows] == [(f"| {n}", "equal bits |") for n in names]
    assert all(float(row.split(" | ")[7]) > 0 for row in rows)


@pytest.mark.slow
def test_of_hugging_face(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    transformers.LlamaConfig(num_attention_heads=2, **sizes).save_pretrained(tmp_path)
    options = ["--batch", "2,8", "--device", "cpu", "--steps", "2", "--backend", "eager", "--no-first"]
    assert main(["bench", "--hf", str(tmp_path), *options]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith("| equal bits |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give what makes the model, as module:factory or file.py:factory, or --hf config.json"),
        (["{net}:Net", "--hf", "x"], "give what makes the model, as module:factory"),
        (["--hf", "config.json"], "--hf needs --batch, the shape of the tokens of one rank, such as 1,4096"),
        (["{net}:Net", "--batch", "2,x"], "--batch must have positive sizes such as 1,4096, got '2,x'"),
        (["{net}:Net", "--steps", "1"], "--steps must be a int, got 1"),
        (["{net}:Net", "--ranks", "0"], "--ranks must be a positive int, got 0"),
        (["{net}:Net", "--param-dtype", "half16"], "torch has no dtype 'half16'"),
        (["{net}:Net", "--reshard", "soon"], "--reshard must be default, always, never or a number of ranks"),
        (["{net}:Other"], "has no function or class Other"),
        (["none.py:Net"], "factory: there is no file 'none.py'"),
        (["{net}:Net", "--json", "."], "--json must be a file to write, got the directory"),
    ],
)
def test_bad_input(net: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """One line, before any rank starts."""
    given = [argument.format(net=net) for argument in arguments]
    assert main(["bench", "--device", "cpu", *given]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("NoLoss", ["--batch", "2,8"], "let forward return the loss, or an object with .loss"),
        ("OneRankDies", ["--batch", "2,8"], "rank 1 ended with exit status 7"),
        ("Net", [], "bench_net.py:Net returns no inputs; give --batch"),
        ("with_inputs", ["--batch", "2,8"], "bench_net.py:with_inputs returns its inputs; leave --batch out"),
    ],
)
@pytest.mark.slow
def test_bad_models(
    net: Path, capfd: pytest.CaptureFixture[str], factory: str, options: list[str], message: str
) -> None:
    assert main(["bench", f"{net}:{factory}", "--device", "cpu", "--no-first", *options]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("graphshard bench: ")
    assert message in last


def test_a_variant_that_fails_has_a_row() -> None:
    row = {"step_s": 0.02, "step_times_s": [0.01, 0.02, 0.03], "to_base": 0.5, "tokens_per_s": 4096.0, "error": ""}
    row |= {"peak_bytes": 3 << 30, "exposed_s": None, "losses_differ_by": 1.25e-7}
    lines = _bench_command.table({"graphshard": row, "FSDP2": {"error": "out of | memory"}}).splitlines()
    assert lines[2:] == [
        "| graphshard | 20.0 | 10.0 to 30.0 | 0.50 | 4,096 | 3.00 GiB |  |  | differ by 1.2e-07 at most |",
        "| FSDP2 |  |  |  |  |  |  |  | **failed**: out of \\| memory |",
    ]


def test_exposed_communication_of_a_trace() -> None:
    """NCCL's kernels count where no other kernel runs; annotations are not kernels."""

    def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("ncclDevKernel_AllGather_RING_LL", 0, 10),
        event("triton_poi_fused_0", 4, 6),
        event("nvjet_tst_64x8", 5, 7),
        event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 9, 15),
        event("nccl:_all_gather_base", 0, 100),
        event("aten::mm", 0, 100, DeviceType.CPU),
    ]
    assert _bench_command.exposed_seconds(events) == pytest.approx(12e-6)


def test_units_inside_units_are_sharded_first() -> None:
    order: list[nn.Module] = []
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_bench_command, "fully_shard", lambda module, **_: order.append(module))
        _bench_command.with_fsdp2(model, None, units=["0", "0.0"])  # type: ignore[arg-type]
    assert order == [model[0][0], model[0], model]
    assert os.environ.get("RANK") is None
