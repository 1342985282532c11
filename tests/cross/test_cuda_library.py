"""Tracing for CUDA on a CPU build of torch uses the operators and layouts of a CUDA build."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils._python_dispatch import autograd_would_have_decomposed

from graphshard.cross import driver
from graphshard.cross.driver import KERNELS, as_built_for_cuda, hooks_functions, stand_in, virtual_functions
from graphshard.errors import ArgumentError
from graphshard.ir.kernel_shapes import new_tracing_mode
from graphshard.ir.program import Program
from graphshard.torch_compat.fake_tensors import fake_tensor
from tests import helpers

pytest.importorskip("cffi")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU"),
]


@pytest.fixture
def h100() -> Iterator[None]:
    with stand_in((9, 0)):
        yield


def native_functions() -> dict[str, dict[str, Any]]:
    """Return ATen's operators by name and overload, from the spec that torch is generated from."""
    spec = importlib.util.find_spec("torchgen")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {each["func"].partition("(")[0]: each for each in yaml.load(path.read_text(), loader)}


def registered(function: Mapping[str, Any]) -> set[str]:
    """Return the dispatch keys that a function has kernels for."""
    return {key.strip() for keys in function.get("dispatch") or {} for key in keys.split(",")}


def with_kernels_for_cuda() -> dict[str, torch._ops.OpOverload]:
    """Return ATen's operators with a CUDA kernel in torch's CUDA builds."""
    functions = native_functions()
    found = {}
    for name, function in functions.items():
        keys = registered(function) | registered(functions.get(function.get("structured_delegate"), {}))
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if "CUDA" in keys and op is not None:
            found[name] = op
    return found


@pytest.mark.slow
def test_operators_with_a_cuda_kernel_are_not_decomposed(h100: None) -> None:
    operators = with_kernels_for_cuda()
    assert len(operators) > 1000
    on_cuda = fake_tensor(new_tracing_mode(), [2], [1], torch.float32, torch.device("cuda", 0))
    whole = {name for name, op in operators.items() if op._can_decompose()}
    assert whole == set(KERNELS)
    assert not [name for name in whole if autograd_would_have_decomposed(operators[name], [on_cuda])]


def test_the_patch_is_removed() -> None:
    def known() -> list[bool]:
        return [getattr(torch.ops.aten, name).default.has_kernel_for_dispatch_key(CUDA) for name in KERNELS]

    CUDA = torch._C.DispatchKey.CUDA
    before = known()
    for _ in range(2):
        with as_built_for_cuda(), as_built_for_cuda():
            assert all(known())
        assert known() == before
    with pytest.raises(KeyError), as_built_for_cuda():
        raise KeyError
    assert known() == before


def traced(module: nn.Module, *args: torch.Tensor, dtype: torch.dtype | None = None) -> Program:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    return helpers.captured(module, args, mp_policy=policy, device=torch.device("cuda", 0))


def found(program: Program) -> dict[str, Any]:
    """Return the operators of a program, with the value of the last call of each."""
    nodes = [node for node in program.phases["joint"].module.graph.nodes if node.op == "call_function"]
    return {str(node.target).removeprefix("aten."): node.meta.get("val") for node in nodes}


class Scaled(nn.Module):
    """A function of a scaled parameter."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale, *rest).sum()


SEQUENCE, IMAGES = torch.zeros(2, 3, 4), torch.zeros(2, 8, 10, 10)
TARGETS = torch.ones(2, 4, dtype=torch.int64)
LENGTHS = torch.full((2,), 12), torch.full((2,), 4)

# Operators with a CUDA kernel, and their backwards.
WHOLE: dict[str, tuple[Any, tuple[torch.Tensor, ...], str, str]] = {
    "silu": (F.silu, (SEQUENCE,), "silu", "silu_backward"),
    "mish": (F.mish, (SEQUENCE,), "mish", "mish_backward"),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), (SEQUENCE,), "_fused_rms_norm", "_fused_rms_norm_backward"),
    "nearest": (
        lambda x: F.interpolate(x, scale_factor=2),
        (IMAGES,),
        *("upsample_nearest2d", "upsample_nearest2d_backward"),
    ),
    "nearest-exact": (
        lambda x: F.interpolate(x, size=(5, 4), mode="nearest-exact"),
        (IMAGES,),
        *("_upsample_nearest_exact2d", "_upsample_nearest_exact2d_backward"),
    ),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=True),
        (IMAGES, torch.zeros(2, 5, 4, 2)),
        *("cudnn_grid_sampler", "cudnn_grid_sampler_backward"),
    ),
    "ctc_loss": (
        lambda x, *rest: F.ctc_loss(x.log_softmax(-1), *rest),
        (torch.zeros(12, 2, 5), TARGETS, *LENGTHS),
        *("_ctc_loss", "_ctc_loss_backward"),
    ),
}
# Operators of the test itself, and views.
BESIDE = {"mul", "sum", "expand", "_to_copy", "t", "detach", "<built-in function getitem>"}
BESIDE |= {"_log_softmax", "_log_softmax_backward_data", "mean", "div", "clamp_min", "where", "eq", "zeros_like"}


@pytest.mark.parametrize(("function", "given", "forward", "backward"), WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_operators_of_one_kernel(
    h100: None,
    function: Any,
    given: tuple[torch.Tensor, ...],
    forward: str,
    backward: str,
    dtype: torch.dtype | None,
) -> None:
    if forward == "cudnn_grid_sampler" and dtype is not None:
        pytest.skip("cuDNN has none of half precision, and torch takes its own")
    names = {name.partition(".")[0] for name in found(traced(Scaled(function), *given, dtype=dtype))}
    assert {forward, backward} <= names
    assert names - BESIDE == {forward, backward}


def test_cells(h100: None) -> None:
    """Gates of recurrent cells are one kernel on a GPU, with a GPU's workspace size."""
    values = found(traced(Cell(nn.GRUCell(16, 8)), torch.zeros(4, 16)))
    assert [list(each.shape) for each in values["_thnn_fused_gru_cell.default"]] == [[4, 8], [4, 40]]
    shapes = [list(each.shape) for each in values["_thnn_fused_gru_cell_backward.default"]]
    assert shapes == [[4, 24], [4, 24], [4, 8], [24], [24]]
    assert "_thnn_fused_lstm_cell.default" in found(traced(Cell(nn.LSTMCell(16, 8)), torch.zeros(4, 16)))


class Cell(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(x)
        return (state[0] if isinstance(state, tuple) else state).sum()


def test_a_cpu_decomposes_them() -> None:
    names = set(found(helpers.captured(Scaled(lambda x: F.rms_norm(x, (4,))), (torch.zeros(2, 4),))))
    assert "rsqrt.default" in names
    assert "_fused_rms_norm.default" not in names


class Convolution(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().sum()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 16, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 3, dilation=2), nn.ConvTranspose2d(8, 16, 3)],
    ids=["plain", "depthwise", "dilated", "transposed"],
)
@pytest.mark.quick_cases("plain-fp32", "depthwise-fp32", "dilated-bf16", "transposed-fp32")
def test_convolutions_leave_channels_last_as_cudnn_does(
    h100: None, layer: nn.Module, dtype: torch.dtype | None
) -> None:
    """If the input or the weights are; in float64 cuDNN does not."""
    last, first = torch.channels_last, torch.contiguous_format
    x = torch.zeros(2, 8, 10, 10)
    for given, expected in ((x, first), (x.to(memory_format=last), last)):
        values = found(traced(Convolution(layer), given, dtype=dtype))
        assert values["convolution.default"].is_contiguous(memory_format=expected)
        (_, weight, _) = values["convolution_backward.default"]
        assert weight.is_contiguous(memory_format=expected)
    double = found(traced(Convolution(layer.double()), x.double().to(memory_format=last)))
    layer.float()
    assert double["convolution.default"].is_contiguous(memory_format=first)


def test_functions_of_headers() -> None:
    """In order; a destructor has two slots."""
    names = hooks_functions()
    assert len(names) == len(set(names)) + 1
    assert names[:2] == ["~AcceleratorHooksInterface"] * 2
    assert names.index("hasCUDA") < names.index("compiledWithCuDNN") < names.index("versionCuDNN")
    assert "getStream" in virtual_functions("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")


def test_another_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the hooks differ, there is an error instead of the CPU's decisions."""
    monkeypatch.setattr(driver, "_CUDNN", {"hasCuDNN": (ctypes.c_bool, True)})
    monkeypatch.setattr(driver, "_VERSIONS", {})
    with pytest.raises(ArgumentError, match=r"does not ask CUDA's hooks for cuDNN\. Export where there is a GPU"):
        as_built_for_cuda().__enter__()
    monkeypatch.setattr(driver, "_CUDNN", {"hasNothing": (ctypes.c_bool, True)})
    with pytest.raises(ArgumentError, match="its hooks have no hasNothing"):
        as_built_for_cuda().__enter__()
    monkeypatch.undo()
    with as_built_for_cuda():
        pass
