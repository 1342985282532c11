"""`tests/gpu/run.sh`: running parts, reporting their rows, and a small version of everything on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.gpu import artifact, command, delays, many, offload, steps, tests, workers
from benchmarks.gpu.parts import Part, run_parts
from benchmarks.gpu.settings import Setup, world
from benchmarks.gpu.table import Row, appending, markdown, rows_in
from benchmarks.gpu.variants import names, variants
from tests.ranks import WAY, RankError, nccl_environment

ROOT = Path(__file__).parents[2]


def part(name: str, code: str, share: float = 1.0) -> Part:
    """Build a part that runs code, which can use `emit` and `limit`."""
    start = (
        "import os, sys, time, pathlib; from benchmarks.gpu.table import Row, appending;"
        "emit = appending(pathlib.Path(sys.argv[2])); limit = float(sys.argv[4])\n"
    )
    return Part(name, share, (sys.executable, "-c", start + code))


@pytest.fixture
def ran(tmp_path: Path) -> Callable[..., tuple[list[Row], list[str]]]:
    """Return a function that runs parts and returns rows and output."""

    def run(*parts: Part, seconds: float = 60.0) -> tuple[list[Row], list[str]]:
        shown: list[str] = []
        return run_parts(parts, seconds, tmp_path, shown.append, ROOT), shown

    return run


def test_one_table_of_all_rows() -> None:
    rows = [
        Row("steps", "large, one rank", "FSDP2", step=0.2, peak=3 << 30, first=12.34, kernels=1200),
        Row("steps", "large, one rank", "graphshard", step=0.15, peak=2 << 30, first=40.0, kernels=700),
        Row("steps", "large, rank 0 of 8", "graphshard", failed=True, note="ValueError: a | b\nmore"),
        Row("predicted", "large", "step", step=0.1, predicted=0.09, predicted_peak=1 << 30),
    ]
    assert (
        markdown(rows)
        == """\
| part | setting | what | step ms | to FSDP2 | predicted ms | peak GiB | predicted GiB | first step s | kernels |  |
|--|--|--|--:|--:|--:|--:|--:|--:|--:|--|
| steps | large, one rank | FSDP2 | 200.00 | 1.00 |  | 3.00 |  | 12.3 | 1200 |  |
| steps | large, one rank | graphshard | 150.00 | 0.75 |  | 2.00 |  | 40.0 | 700 |  |
| steps | large, rank 0 of 8 | graphshard |  |  |  |  |  |  |  | **failed**: ValueError: a \\| b more |
| predicted | large | step | 100.00 |  | 90.00 |  | 1.00 |  |  |  |"""
    )


def test_skips_a_truncated_line(tmp_path: Path) -> None:
    emit = appending(tmp_path / "rows")
    emit(Row("a", step=1.5, note="é"))
    with (tmp_path / "rows").open("a") as file:
        file.write('{"part": "b", "st')
    assert rows_in(tmp_path / "rows") == [Row("a", step=1.5, note="é")]
    assert rows_in(tmp_path / "none") == []


def test_a_failed_part_does_not_stop_others(ran) -> None:
    rows, shown = ran(
        part("raises", "emit(Row('raises', note='before')); raise ValueError('what is wrong')"),
        part("dies", "os.kill(os.getpid(), 9)"),
        part("says", "emit(Row('says', failed=True, note='known')); sys.exit(1)"),
        part("works", "print('fine'); emit(Row('works'))"),
    )
    assert [(row.part, row.failed) for row in rows] == [
        *(("raises", False), ("raises", True), ("dies", True)),
        *(("says", True), ("works", False)),
    ]
    assert rows[1].note.endswith("ValueError: what is wrong")
    assert rows[2].note.startswith("exit status -9")
    assert rows[3].note == "known"
    assert "[works] fine" in shown


@pytest.mark.slow
def test_a_part_over_its_share_is_killed_with_its_children(ran, tmp_path: Path) -> None:
    """Its rows count, and its unused time goes to later parts."""
    child = f"import time; time.sleep(4); open({str(tmp_path / 'lived')!r}, 'w')"
    code = f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    began = time.monotonic()
    rows, _ = ran(
        part("quick", "emit(Row('quick', step=limit))"),
        part("slow", code + "emit(Row('slow', step=limit)); time.sleep(300)", share=0.05),
        part("last", "emit(Row('last', step=limit))", share=0.95),
        seconds=40.0,
    )
    assert time.monotonic() - began < 40
    by_name = {row.part: row for row in rows if not row.failed}
    assert by_name["quick"].step == pytest.approx(40 / 2, abs=1)
    assert by_name["last"].step > by_name["quick"].step
    (ended,) = (row for row in rows if row.failed)
    assert (ended.part, ended.note.split(",")[1]) == ("slow", " its share; what it had found counts")
    time.sleep(4.5)
    assert not (tmp_path / "lived").exists()


def test_the_exit_status_reports_failures(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "machine", lambda: dict.fromkeys(("device", "torch", "python", "date"), "x"))
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "GRAPHSHARD_CACHE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv(WAY, "")
    for failed in (False, True):
        monkeypatch.setattr(command, "run_parts", lambda *args, f=failed: args[-1]("steps", [Row("steps", failed=f)]))
        assert command.main(["--out", str(tmp_path), "--parts", "steps", "--again"]) == failed
        assert json.loads((tmp_path / "found.json").read_text())["rows"][0]["failed"] == failed
        assert (tmp_path / "table.md").read_text() in capsys.readouterr().out


def test_the_next_call_goes_on(tmp_path: Path, monkeypatch, capsys) -> None:
    """Parts that are done keep their rows, failed ones come last, and what does not fit is left and named."""
    monkeypatch.setattr(command, "machine", lambda: dict.fromkeys(("device", "torch", "python", "date"), "x"))
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "GRAPHSHARD_CACHE", WAY):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    ran: list[str] = []
    broken = {"races"}

    def run_parts(parts: list[Part], *rest: Any) -> None:
        for part in parts:
            if part.name == "offload" and broken:
                raise SystemExit(1)  # as when the machine is taken away
            ran.append(part.name)
            how = " on one GPU by NCCL_MULTI_RANK_GPU_ENABLE" if part.name == "nccl" else ""
            rest[-1](part.name, [Row(part.name, variant=f"{part.name}{how}", failed=part.name in broken)])

    monkeypatch.setattr(command, "run_parts", run_parts)
    words = ["--out", str(tmp_path), "--parts", "nccl", "races", "offload", "delays", "faults", "--budget"]
    with pytest.raises(SystemExit):
        command.main([*words, "500"])
    assert ran == ["nccl", "races"]
    broken.clear()
    assert command.main([*words, "120"]) == 1
    assert ran == ["nccl", "races", "offload", "delays"]
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["part"], row["failed"], row["note"]) for row in rows] == [
        ("nccl", False, ""),
        ("races", True, ""),
        ("offload", False, ""),
        ("delays", False, ""),
        ("faults", False, "left for the next call: no time"),
    ]
    assert os.environ[WAY] == "NCCL_MULTI_RANK_GPU_ENABLE"
    assert command.main([*words, "500"]) == 0
    assert ran[4:] == ["faults", "races"]
    assert "done before, in " in capsys.readouterr().err
    assert command.main([*words, "900", "--again"]) == 0
    assert ran[6:] == ["nccl", "races", "offload", "delays", "faults"]


def test_all_parts_take_less_than_a_quarter_of_an_hour() -> None:
    for parts in (command.ONE, command.SEVERAL):
        assert sum(parts.values()) <= 860
        assert max(parts.values()) < 580, "the budget of one call"
    assert next(iter(command.ONE)) == next(iter(command.SEVERAL)) == "nccl"
    _, left = command.choose(list(command.ONE), {}, 580)
    assert command.choose(left, {}, 580) == (left, [])
    assert command.choose(["nccl", "races"], {}, 30) == (["nccl"], ["races"])


def test_delays_of_launches() -> None:
    """From the launch, or from the end of the kernel before it on the same stream, to the start."""

    def event(cat: str, name: str, number: int, ts: float, dur: float = 1.0, stream: int = 20) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": number, "stream": stream}}

    events = [
        {"ph": "M", "name": "process_name", "args": {}},
        *(event("cuda_runtime", "cudaLaunchKernelExC", number, number) for number in (1, 2, 3)),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 1, 11.0, 10.0),
        event("kernel", "ncclDevKernel_ReduceScatter", 2, 23.0, 5.0),
        event("kernel", "triton_poi_fused_0", 3, 100.0, stream=7),
        event("kernel", "ncclDevKernel_AllReduce", 99, 40.0),
    ]
    assert delays.launch_delays(events) == pytest.approx([10e-6, 2e-6])
    row = delays.summary([10e-6, 2e-6], Row("delays"), on_cpu=False)
    assert (row.step, row.note) == (6e-6, "median delay of 2 kernels of NCCL, at most 0.01 ms")
    assert delays.summary([], Row("delays"), on_cpu=False).failed
    assert not delays.summary([], Row("delays"), on_cpu=True).failed


def test_peaks_beyond_the_prediction_fail() -> None:
    gib = 2**30
    row = offload.compared(3 * gib, 2 * gib, 3 * gib, Row("offload"))
    assert (row.peak, row.predicted_peak, row.failed) == (3 * gib, 3 * gib, False)
    assert row.note == "2.00 GiB if the host is not ahead"
    assert offload.compared(4 * gib, 2 * gib, 3 * gib, row).failed


def test_rows_of_bench() -> None:
    found = {"error": "", "tokens_per_s": 81920.4, "exposed_s": 0.0123, "losses_differ_by": 2e-6}
    found |= {"step_s": 0.4, "peak_bytes": 7 << 30, "first_step_s": 30.0}
    row = many.bench_row("graphshard", found, "llama_8b, 8 ranks")
    assert (row.step, row.peak, row.first, row.failed) == (0.4, 7 << 30, 30.0, False)
    assert row.note == "81,920 tokens/s, 12.3 ms exposed, losses differ from FSDP2's by 2.0e-06 at most"
    assert many.bench_row("FSDP2", {"error": "out of memory"}, "").failed


def test_missing_tools_are_named_in_one_line(monkeypatch) -> None:
    assert command.missing_packages() == ""
    monkeypatch.setitem(command.NEEDED, "no_such_package", "a test")
    assert command.missing_packages() == "missing: no_such_package (a test). --wheels DIR takes wheels of them"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (["--budget", "0"], "--budget must be seconds, got 0"),
        (["--artifact", "none.gshard"], "--artifact must be a file that --export made, got none.gshard"),
        (["--wheels", "none"], "--wheels must be a folder with wheels, got none"),
        (["--parts", "all"], "invalid choice: 'all'"),
    ],
)
def test_wrong_arguments(argument: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        command.main(argument)
    assert message in capsys.readouterr().err


def test_the_way_to_several_ranks_on_one_gpu(monkeypatch) -> None:
    """The first that works; what does not work is in the note, and nothing else runs if none does."""
    ran: list[list[str]] = []
    refusing: set[str] = set()

    class Pool:
        __enter__ = world = lambda self, *_: self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, *_: object, **__: object) -> list[int]:
            if os.environ[WAY] in refusing:
                raise RankError("rank 1 of 2: Duplicate GPU detected\n---- rank 1")
            return [3, 3]

    monkeypatch.setenv(WAY, "")
    monkeypatch.setattr(tests, "RankPool", Pool)
    monkeypatch.setattr(tests, "_run", lambda part, emit, chosen: ran.append(chosen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 4))
    for way in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        rows: list[Row] = []
        tests.measure_nccl(rows.append, dry=False)
        assert (rows[0].variant, rows[0].failed) == (f"nccl on one GPU by {way}", False)
        assert os.environ[WAY] == way, "the tests take it, too"
        assert rows[0].note.startswith("NCCL 2.30.4")
        refusing.add(way)
    assert rows[0].note == "NCCL 2.30.4; NCCL_HOSTID: rank 1 of 2: Duplicate GPU detected"
    assert [chosen[:4] for chosen in ran] == [["-m", "gpu", "-k", "nccl"]] * 2
    tests.measure_nccl(rows.append, dry=False)
    assert (rows[-1].failed, len(ran)) == (True, 2)


def test_ranks_of_nccl_on_one_gpu_have_different_hosts(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(WAY, raising=False)
    for count, alone in ((1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        names = [nccl_environment(rank, 2).get("NCCL_HOSTID") for rank in range(2)]
        assert names == (["0", "1"] if alone else [None, None])


def test_covers_all_test_files() -> None:
    others = {"test_run.py", "test_races.py", *(file for file, *_ in tests.OTHERS.values())}
    assert {*tests.FILES} | others == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}


def test_export_without_the_gpu_fails(tmp_path: Path, monkeypatch) -> None:
    """As with torch 2.11: it is reported, and the rest uses a file exported with the GPU."""
    made = []

    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(2, "export")

    monkeypatch.setattr(artifact, "_export_without_gpu", fail)
    monkeypatch.setattr(artifact, "export", lambda setup, path, capability: made.append(capability))
    monkeypatch.setattr(artifact, "_compared", lambda setup, path, row: row)
    rows: list[Row] = []
    artifact.measure(Setup.of(dry=True), rows.append, tmp_path, None)
    assert made == [None]
    assert [row.failed for row in rows] == [True, False]
    assert rows[0].note.startswith("export without a GPU ended with 2")


def test_different_losses() -> None:
    losses, row = torch.tensor([2.0, 1.0]), Row("artifact")
    assert artifact.compared(losses, losses, row).note == "2 losses as of compile, bit for bit"
    near = artifact.compared(losses * 1.001, losses, row)
    assert (near.failed, near.note) == (False, "2 losses differ from those of compile by 1.0e-03 at most")
    assert artifact.compared(losses * 1.1, losses, row).failed
    assert artifact.compared(losses * torch.nan, losses, row).failed


def test_kernels_are_counted_without_copies() -> None:
    names = ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "triton_poi_fused_0", "nvjet_tst_64x8"]
    events = [SimpleNamespace(name=name, device_type=DeviceType.CUDA) for name in names]
    assert workers.num_kernels([*events, SimpleNamespace(name="aten::mm", device_type=DeviceType.CPU)]) == 2


def test_skips_settings_without_time(monkeypatch) -> None:
    monkeypatch.setattr(steps, "_setting", lambda *_, **__: time.sleep(0.2))
    rows: list[Row] = []
    steps.measure(Setup.of(dry=True), rows.append, seconds=0.3)
    assert [row.note for row in rows] == ["left out: no time"] * 2
    assert [row.setting[-12:] for row in rows] == ["; rank 0 of 8"[-12:], " rank 0 of 64"[-12:]]


@pytest.mark.slow
def test_a_failed_variant_does_not_stop_others(monkeypatch) -> None:
    """One that cannot start, and one whose process died, which restarts for the next setting."""
    lost: list[workers.Worker] = []

    class Worker(workers.Worker):
        def answer(self, end: float) -> object:
            if self.process.name == "DDP" and not lost:
                lost.append(self)
                self.process.kill()
                self.process.join()
            return super().answer(end)

    monkeypatch.setattr(steps, "Worker", Worker)
    monkeypatch.setattr(steps, "names", lambda num_ranks: ["FSDP2", "no such variant", "DDP"])
    sizes = list(steps.settings(Setup.of(dry=True)))[:2]
    monkeypatch.setattr(steps, "settings", lambda setup: sizes)
    rows: list[Row] = []
    steps.measure(Setup.of(dry=True), rows.append, seconds=120.0)
    failed = [(row.variant, row.note) for row in rows if row.failed]
    unknown = ("no such variant", "KeyError: 'no such variant'")
    assert failed == [unknown, ("DDP", "its process ended with -9"), unknown]
    assert [row.variant for row in rows if row.step is not None] == ["FSDP2", "FSDP2", "DDP"]


def test_kills_an_unresponsive_process() -> None:
    worker = workers.Worker(Setup.of(dry=True), "FSDP2")
    with pytest.raises(workers.FailedError, match="ended: no time is left"):
        worker.answer(time.monotonic() + 0.1)
    assert worker.process.exitcode == -9


def test_each_variant_is_measured_somewhere() -> None:
    """The variants that are compared most are measured in every world."""
    everywhere = {"FSDP2", "FSDP2, compiled blocks", "graphshard", "graphshard, compile_step", "DDP"}
    assert set(names(64)) == everywhere
    assert set(names(1)) == everywhere | {"torch.compile, not sharded"}
    assert set(names(8)) | set(names(1)) == set(variants(Setup.of(dry=True)))


@pytest.mark.parametrize("variant", ["FSDP2", "graphshard", "DDP"])
@pytest.mark.quick_cases("FSDP2", "DDP")
def test_variants_train_as_a_rank_of_eight(variant: str) -> None:
    """With collectives of any torch release's names; none has an effect."""
    setup = Setup.of(dry=True)
    size = setup.sizes()[0]
    with world(setup, 8) as mesh:
        step = variants(setup)[variant](size.model("cpu"), mesh, size.tokens("cpu"))
        assert step().shape == ()


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_everything_on_a_cpu(tmp_path: Path) -> None:
    """Every part reports rows, and nothing fails."""
    run = [str(ROOT / "tests/gpu/run.sh"), "--dry", "--budget", "2400", "--out", str(tmp_path)]
    done = subprocess.run(run, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    rows = [Row(**row) for row in found["rows"]]
    assert {row.part for row in rows} == {*command.ONE, *command.SEVERAL}
    measured = {row.variant for row in rows if row.part == "steps" and row.step}
    assert measured == set(variants(Setup.of(dry=True)))
    assert {row.setting.rpartition(", ")[2] for row in rows if row.part == "steps"} == {
        *("one rank", "rank 0 of 8", "rank 0 of 64")
    }
    assert any(row.predicted and row.step for row in rows if row.part == "predicted")
    (loaded,) = (row for row in rows if row.variant == "load and train")
    assert loaded.note == "5 losses as of compile, bit for bit"
    (all_tests,) = (row for row in rows if row.part == "tests")
    assert all_tests.note == "9 passed"
    (joined,) = (row for row in rows if row.part == "nccl")
    assert joined.variant == "gloo on a CPU"
    assert found["machine"]["torch"] == str(torch.__version__)
    assert "| tests |" in done.stdout
