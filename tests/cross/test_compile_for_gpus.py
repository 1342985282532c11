"""Regions compiled to GPU kernels without a GPU: files, results under Triton's interpreter, and errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.torch_version import TorchVersion

import graphshard
from graphshard.aot.load import _check_place
from graphshard.cli.main import main
from graphshard.cross.gpu_kernels import GpuRegion, OnGpu, check_code, read_cubin
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.ir.gpus import CAPABILITIES
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Program, Region
from graphshard.lower.regions import Compiled, RegionCall, lower
from graphshard.pipeline.rules import Made
from graphshard.predict import study
from graphshard.store.artifact_file import read_artifact
from graphshard.store.artifact_manifest import cubin_file, gpu_file
from graphshard.store.program_library import read_region
from tests.exported import rewritten
from tests.helpers import Blocks
from tests.ranks import FakeWorld

pytest.importorskip("cffi")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU"),
]

CUDA = torch.device("cuda", 0)


class Net(nn.Module):
    """A norm, a gated layer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 8), nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return F.cross_entropy(x.float(), tokens)


GIVEN: dict[str, Any] = {"example_inputs": (torch.zeros(6, dtype=torch.int64),), "device": "cuda"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export for three kinds of GPU."""
    path = tmp_path_factory.mktemp("cross") / "net.gshard"
    return graphshard.export(Net(), (2,), path, **GIVEN, capability=CAPABILITIES)


@pytest.fixture
def mesh(fake_world: FakeWorld) -> DeviceMesh:
    fake_world(2)
    return init_device_mesh("cpu", (2,))


@pytest.mark.slow
def test_a_file_holds_cubins_for_each_kind_of_gpu(file: Path) -> None:
    artifact = read_artifact(file)
    assert artifact.manifest.capabilities == [(8, 0), (9, 0), (10, 0)]
    regions = {key: row for key, row in artifact.manifest.regions.items() if row.gpus}
    assert len(regions) >= 2
    assert {row.code for row in regions.values()} == {"gpu"}
    seen = 0
    for key, row in regions.items():
        for capability in artifact.manifest.capabilities:
            kernels = row.gpus[f"{capability[0]}.{capability[1]}"]
            code = artifact.gpu_code(key, capability, CUDA)
            assert len(code.kernels) == len(kernels) > 0
            for kernel in kernels:
                content = artifact.archive.members[cubin_file(kernel.cubin)]
                assert content.startswith(b"\x7fELF")
                found = read_cubin(kernel.name, content)
                assert found.capability == capability
                resources = found.kernels[kernel.name]
                assert (resources.registers, resources.spills) == (kernel.registers, kernel.spills)
                assert 0 < kernel.registers <= 255
                seen += 1
    assert seen >= 12


@pytest.mark.slow
def test_registers_match_cuobjdump(file: Path, tmp_path: Path) -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this release of Triton comes without cuobjdump")
    artifact = read_artifact(file)
    for name, content in artifact.archive.members.items():
        if name.endswith(".cubin"):
            path = tmp_path / "k.cubin"
            path.write_bytes(content)
            text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
            ((kernel, resources),) = read_cubin(name, content).kernels.items()
            assert f"Function {kernel}:" in text
            assert f"REG:{resources.registers} STACK:{resources.spills} " in text


def test_code_runs_on_operators_of_aten_and_kernels(file: Path) -> None:
    artifact = read_artifact(file)
    targets = set()
    for key, row in artifact.manifest.regions.items():
        if row.gpus:
            code = artifact.gpu_code(key, (9, 0), CUDA)
            targets |= {str(node.target) for node in code.graph.nodes if node.op == "call_function"}
            assert "cpu" not in code.text
            assert all(
                f"# {name} is {kernel.name}: {kernel.registers} " in code.text for name, kernel in code.kernels.items()
            )
    assert "aten.empty_strided.default" in targets
    assert {name.partition(".")[0] for name in targets} <= {"aten", "<built-in function getitem>"}


@pytest.mark.slow
def test_kernels_match_operators(file: Path, tmp_path: Path) -> None:
    """Triton's interpreter runs each kernel of the file on the CPU."""
    assert_kernels_compute(file, tmp_path)


def assert_kernels_compute(file: Path, directory: Path) -> None:
    """Check that kernels are as close to float64 as operators are, up to rounding.

    Args:
        directory: for the sources of kernels.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.cross.interpreted", str(file), str(directory)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    regions = read_artifact(file).manifest.regions
    assert {row["region"] for row in found} == {key for key, row in regions.items() if row.code == "gpu"}
    wrong = [row for row in found if not row["kernels"] <= 2 * row["operators"] + 2 * row["eps"]]
    assert not wrong


@triton.jit  # type: ignore[untyped-decorator]
def _scale(x, w, out, n, m, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * tl.load(w + at % m, mask=at < n), mask=at < n)


_tuned = triton.autotune([triton.Config({"BLOCK": size}) for size in (16, 32)], key=["n"])(_scale)


def _scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out, size = torch.empty_like(x), x.numel()
    _scale[(triton.cdiv(size, 16),)](x, weight, out, size, weight.numel(), BLOCK=16)
    return out


class _Scale(torch.autograd.Function):
    """Launches kernels, as Liger's and unsloth's functions do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _scaled(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        out, size = torch.empty_like(x), x.numel()
        _tuned[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](grad.contiguous(), weight, out, size, weight.numel())
        return out, (grad * x).sum(0)


@torch.library.triton_op("graphshard_tests::scale", mutates_args={})
def _scale_op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out, size = torch.empty_like(x), x.numel()
    torch.library.wrap_triton(_scale)[(triton.cdiv(size, 16),)](x, weight, out, size, weight.numel(), BLOCK=16)
    return out


def _scale_op_backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return _scale_op(grad.contiguous(), weight), (grad * x).sum(0)


_scale_op.register_autograd(
    _scale_op_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class _WithKernels(nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight, self.kernel = nn.Parameter(torch.ones(8)), kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.kernel(self.kernel(self.a(x), self.weight), self.weight)).square().mean()


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(
            _Scale.apply,
            id="autograd.Function",
            marks=pytest.mark.skipif(
                TorchVersion(torch.__version__) < "2.12", reason="Dynamo of torch 2.11 fails in its backward"
            ),
        ),
        pytest.param(_scale_op, id="triton_op"),
    ],
)
def test_kernels_of_the_model(kernel: Any, tmp_path: Path) -> None:
    """They are part of the program: launched with their arguments and grid, and in the file as cubins."""
    example = (torch.zeros(12, 8),)
    given: dict[str, Any] = {"example_inputs": example, "device": "cuda", "capability": [(9, 0)]}
    path = graphshard.export(_WithKernels(kernel), (2,), tmp_path / "net.gshard", **given)
    artifact = read_artifact(path)
    codes = [artifact.gpu_code(key, (9, 0), CUDA) for key, row in artifact.manifest.regions.items() if row.gpus]
    calls = [(code, node) for code in codes for node in code.graph.find_nodes(op="call_module")]
    own = [node.args for code, node in calls if "def _scale(" in code.kernels[str(node.target)].source]
    numbers = [[each for each in args if type(each) is int] + grid for args, grid in own]
    assert numbers == [[96, 8, 6, 1, 1]] * 4
    text = artifact.archive.members["programs/0.txt"].decode()
    assert re.search(r"kernel_idx=tests.cross.test_compile_for_gpus._scale [0-9a-f]{16}, constant_args_idx={", text)


def test_show_and_verify(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file)]) == 0
    text = capsys.readouterr().out
    assert "device     cuda, compute capability 8.0 and 9.0 and 10.0\n" in text
    assert " compiled to kernels" in text
    assert ", compute capability 9.0: " in text
    assert " registers, no spills, " in text
    assert " bytes of shared memory, " in text
    assert main(["verify", str(file)]) == 0
    assert "native code: trust it as you would a program" in capsys.readouterr().out
    assert main(["finish", str(file)]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_dump_shows_resources_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the files of its regions, in the report, and in the output of `show`."""
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path / "dump"))
    path = tmp_path / "blocks.gshard"
    capabilities = [(8, 0), (9, 0)]
    example = torch.zeros(2, 4)
    graphshard.export(Blocks(1), (2,), path, example_inputs=(example,), device="cuda", capability=capabilities)
    facts = read_artifact(path).manifest.regions
    dump = tmp_path / "dump" / "rank0" / "Blocks-0"
    texts = [file.read_text() for file in (dump / "regions").glob("*.kernels.py")]
    assert len(texts) == sum(row.code == "gpu" for row in facts.values()) > 0
    kernels = {kernel.name: kernel for row in facts.values() for kernel in row.gpus["9.0"]}
    for name, kernel in kernels.items():
        taken = f"is {name}: {kernel.registers} registers, no spills, {kernel.shared} bytes of shared memory"
        assert any(taken in text.partition("# compute capability 9.0")[2] for text in texts)
    capsys.readouterr()
    assert main(["show", str(dump)]) == 0
    shown = capsys.readouterr().out
    most = max(kernel.registers for kernel in next(row for row in facts.values() if row.gpus).gpus["9.0"])
    assert re.search(
        rf"region_\d+, compute capability 9\.0: \d+ kernels?, at most {most} registers, no spills, ", shown
    )
    assert "compute capability 8.0: " in shown
    report = (dump / "index.html").read_text()
    assert f"at most {most} registers, no spills" in report
    assert "compute capability 8.0: " in report


def test_equal_exports_are_equal_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.gshard", tmp_path / "b.gshard"]
    for path in paths:
        graphshard.export(Blocks(1), (2,), path, example_inputs=(torch.zeros(2, 4),), device="cuda", capability=(9, 0))
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(("here", "fits"), [((8, 0), True), ((10, 0), True), ((8, 6), False), ((12, 0), False)])
def test_rejects_a_gpu_that_was_not_compiled_for(file: Path, here: tuple[int, int], fits: bool) -> None:
    artifact, mesh = read_artifact(file), Mesh.of_shape(2)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=here):
        if fits:
            assert _check_place(artifact, CUDA, mesh, mesh.shape, 0) is artifact.manifest.meshes[0]
            return
        with pytest.raises(ArtifactError) as caught:
            _check_place(artifact, CUDA, mesh, mesh.shape, 0)
    assert caught.value.field == "capability"
    assert "compiled for compute capability 8.0 and 9.0 and 10.0, and the GPU here has" in str(caught.value)
    remedy = "without capability=: then regions are compiled where the file is loaded"  # export would reject these two
    assert f"Export again {remedy}" in str(caught.value)


def test_a_file_for_an_h100_on_an_a100(tmp_path: Path) -> None:
    file = graphshard.export(Blocks(1), (2,), tmp_path / "x.gshard", example_inputs=(torch.zeros(2, 4),), **_FOR_H100)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        pytest.raises(
            ArtifactError, match=r"capability 9\.0, and the GPU here has 8\.0.*Export again with capability=\(8, 0\);"
        ) as caught,
    ):
        _check_place(read_artifact(file), CUDA, mesh := Mesh.of_shape(2), mesh.shape, 0)
    assert caught.value.field == "capability"


def test_compiled_and_predicted_programs_have_the_same_regions(file: Path, tmp_path: Path) -> None:
    """Compiling on the target, and predicting for a GPU: kernels and measurements are found by key."""
    keys = set(read_artifact(file).manifest.regions)
    later = graphshard.export(Net(), (2,), tmp_path / "later.gshard", **GIVEN)
    assert set(read_artifact(later).manifest.regions) == keys
    explained = graphshard.explain(Net(), (2,), example_inputs=GIVEN["example_inputs"], device="cuda")
    assert {row.key for row in explained.regions} == keys
    key = explained.regions[0].key
    known = graphshard.explain(Net(), (2,), example_inputs=GIVEN["example_inputs"], device="cuda", measured={key: 1.0})
    assert [round(row.seconds, 9) for row in known.regions if row.measured] == [1.0]
    with pytest.raises(ArgumentError, match="which is no region of this program"):
        graphshard.explain(Net(), (2,), example_inputs=GIVEN["example_inputs"], measured={key: 1.0})


@pytest.mark.parametrize("here", CAPABILITIES)
@pytest.mark.quick_cases("here2")
def test_a_program_captured_on_the_target_uses_the_files_code(
    file: Path, here: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `compile(artifact=)`: code is found by the region's key and the local GPU."""
    artifact = read_artifact(file)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=here):
        compiled = {
            key: RegionCall(read_region(artifact, key, "inductor", CUDA, Made())[0])
            for key in artifact.manifest.regions
        }
    missing: list[str] = []
    executors: list[Any] = []

    def lowered(program: Program, *_: Any) -> None:
        def compile_all(regions: dict[str, Region], _: Any) -> Compiled:
            missing.extend(regions)
            yield from ()

        lower(program, compile_all, dict(compiled))
        executors.extend(phase.module for phase in program.phases.values())

    monkeypatch.setattr(study, "lower", lowered)
    graphshard.explain(Net(), (2,), example_inputs=GIVEN["example_inputs"], device="cuda")
    assert not missing
    calls = [call for executor in executors for call in vars(executor).values() if isinstance(call, RegionCall)]
    assert sum(isinstance(call.fn, GpuRegion) for call in calls) == sum(
        row.code == "gpu" for row in artifact.manifest.regions.values()
    )
    assert {code.capability for call in calls for code in call.codes} == {here}


def test_rejects_a_cpu_mesh(file: Path, mesh: DeviceMesh) -> None:
    with pytest.raises(ArtifactError, match="device was cuda when it was exported and is cpu here"):
        graphshard.load(file, Net(), mesh)


def test_rejects_damaged_cubins(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    at = len(whole) // 2  # kernels are most of the file
    damaged = tmp_path / "damaged.gshard"
    for offset in (at, at + 1000):
        damaged.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with pytest.raises(ArtifactError):
            read_artifact(damaged)


def test_rejects_mislabeled_code(file: Path) -> None:
    artifact = read_artifact(file)
    key = next(key for key, row in artifact.manifest.regions.items() if row.gpus)
    code = artifact.gpu_code(key, (9, 0), CUDA)
    inputs = code.graph.find_nodes(op="placeholder")
    (output,) = code.graph.find_nodes(op="output")
    check_code("r", code, inputs, output.args[0])
    with pytest.raises(ArtifactError, match=r"is for compute capability 9\.0 and has triton_.* to be for 8\.0"):
        check_code("r", replace(code, capability=(8, 0)), inputs, output.args[0])
    with pytest.raises(ArtifactError, match="takes other inputs"):
        check_code("r", code, inputs[1:], output.args[0])
    other = {name: replace(kernel, types=kernel.types + "i") for name, kernel in code.kernels.items()}
    with pytest.raises(ArtifactError, match="is called with"):
        check_code("r", replace(code, kernels=other), inputs, output.args[0])
    broken = {name: replace(kernel, cubin=b"MZ" + kernel.cubin[2:]) for name, kernel in code.kernels.items()}
    with pytest.raises(ArtifactError, match="is no cubin"):
        check_code("r", replace(code, kernels=broken), inputs, output.args[0])


def test_rejects_forged_code(file: Path) -> None:
    """With correct checksums."""
    artifact = read_artifact(file)
    key = next(key for key, row in artifact.manifest.regions.items() if row.gpus)
    member = gpu_file(key, "9.0")

    def forge(_: dict[str, Any], members: dict[str, bytes]) -> None:
        data = json.loads(members[member])
        data["graph"][-2]["target"] = "os.system"
        members[member] = json.dumps(data).encode()

    path = rewritten(file, forge)
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_artifact(path).gpu_code(key, (9, 0), CUDA)


def test_a_kernel_cannot_be_loaded_here(file: Path) -> None:
    artifact = read_artifact(file)
    key = next(key for key, row in artifact.manifest.regions.items() if row.gpus)
    kernel = next(iter(artifact.gpu_code(key, (9, 0), CUDA).kernels.values()))
    with pytest.raises(ArtifactError, match=f"kernel {kernel.name} cannot be loaded here.* torch built for CUDA"):
        OnGpu(kernel, 0)([], [1, 1, 1])


@pytest.mark.slow
def test_code_is_made_ready_without_a_compiler(file: Path) -> None:
    """Neither Triton nor Inductor is imported, and PATH is empty."""
    command = [sys.executable, "-W", "ignore", "-c", _READY, str(file)]
    environment = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    regions = read_artifact(file).manifest.regions.values()
    assert int(done.stdout) == sum(row.code == "gpu" for row in regions) > 0


_READY = """
import sys
sys.modules["triton"] = sys.modules["torch._inductor.compile_fx"] = None
import torch
from graphshard.store.artifact_file import read_artifact
from graphshard.cross.gpu_kernels import GpuRegion
artifact, device = read_artifact(sys.argv[1]), torch.device("cuda", 0)
rows = artifact.manifest.regions
print(sum(bool(GpuRegion(artifact.gpu_code(key, (9, 0), device), device).codes)
          for key in rows if rows[key].gpus))
"""


def test_misaligned_inputs_are_copied(file: Path) -> None:
    seen = []
    region = object.__new__(GpuRegion)
    region._switches = False
    region._run = lambda inputs: seen.extend(inputs)
    whole = torch.arange(64.0)
    assert whole.data_ptr() % 16 == 0
    piece = whole[1:49].view(6, 8).t()
    region([piece, 3, whole])
    assert seen[0].data_ptr() % 16 == 0
    assert seen[0].stride() == piece.stride()
    assert torch.equal(seen[0], piece)
    assert seen[1:] == [3, whole] or seen[2] is whole


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capability": (7, 5)}, "capability must be one of (8, 0), (9, 0), (10, 0), or a list of them, got (7, 5)"),
        ({"capability": [(9, 0), (1, 2)]}, "got (1, 2)"),
        ({"capability": "9.0"}, "capability must be one of"),
        ({"capability": []}, "capability is an empty list"),
        ({"capability": (9, 0), "device": "cpu"}, "device is 'cpu'. Leave it out"),
        ({"capability": (9, 0), "device": None}, "device is 'cpu'. Leave it out"),
    ],
)
def test_wrong_capabilities(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        graphshard.export(Net(), (2,), tmp_path / "x.gshard", **{**GIVEN, **given})
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_triton_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ArgumentError) as caught:
        graphshard.export(Net(), (2,), tmp_path / "x.gshard", **GIVEN, capability=(9, 0))
    assert "code for CUDA is made by the package triton, which is not installed" in str(caught.value)
    assert "pip install 'graphshard[cross]'" in str(caught.value)


def test_a_region_that_inductor_cannot_compile_runs_as_operators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.gshard"
    with mock.patch("graphshard.cross.compile_for_gpus._code", side_effect=NotImplementedError("a call of nothing")):
        graphshard.export(Blocks(1), (2,), path, example_inputs=(torch.zeros(2, 4),), device="cuda", capability=(9, 0))
    assert "runs as ATen operators: NotImplementedError: a call of nothing" in caplog.text
    assert main(["show", str(path)]) == 0
    assert "Inductor cannot compile it for CUDA. NotImplementedError: a call of nothing" in capsys.readouterr().out


@pytest.mark.slow
def test_compiling_for_the_cpu_afterwards(tmp_path: Path) -> None:
    """torch's cached device properties are not the GPU's."""
    graphshard.export(Blocks(1), (2,), tmp_path / "x.gshard", example_inputs=(torch.zeros(2, 4),), **_FOR_H100)
    compiled = torch.compile(lambda x: F.silu(x) * x)
    x = torch.randn(8)
    torch.testing.assert_close(compiled(x), F.silu(x) * x)


_FOR_H100: dict[str, Any] = {"device": "cuda", "capability": (9, 0)}
