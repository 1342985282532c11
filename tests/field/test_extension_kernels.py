"""Modules whose kernels are pybind functions of a C++ extension, as TransformerEngine's: opaque calls of one program.

The extension does not use the dispatcher: it takes tensors, `None`, numbers and an enum, reads raw memory,
allocates results, and writes into a given one. No tracer can look into it.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.field.trials import assert_equal, full, gradients, on_fsdp2, on_graphshard, on_plain_torch, parameters
from tests.ranks import Ranks

_SOURCE = r"""
#include <torch/extension.h>
enum class Layout { NN, TN };
// out = a @ b, or a^T @ b; into a given tensor it is added.
using Objects = std::vector<py::object>;
Objects gemm(const at::Tensor& a, const at::Tensor& b, Layout layout, py::object into, py::object bias) {
  TORCH_CHECK(a.is_contiguous() && b.is_contiguous() && a.scalar_type() == at::kFloat);
  const bool t = layout == Layout::TN;
  const int64_t n = t ? a.size(1) : a.size(0), k = t ? a.size(0) : a.size(1), m = b.size(1);
  const bool add = !into.is_none();
  at::Tensor out = add ? py::cast<at::Tensor>(into) : at::empty({n, m}, a.options());
  const float *x = a.data_ptr<float>(), *y = b.data_ptr<float>();
  float* z = out.data_ptr<float>();
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < m; ++j) {
      float sum = bias.is_none() ? 0.f : py::cast<at::Tensor>(bias).data_ptr<float>()[j];
      for (int64_t l = 0; l < k; ++l) sum += (t ? x[l * n + i] : x[i * k + l]) * y[l * m + j];
      z[i * m + j] = add ? z[i * m + j] + sum : sum;
    }
  return {py::cast(out), py::none()};
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::enum_<Layout>(m, "Layout").value("NN", Layout::NN).value("TN", Layout::TN);
  m.def("gemm", &gemm, py::arg("a"), py::arg("b"), py::arg("layout"), py::arg("into"), py::arg("bias"));
}
"""
_NAME = "graphshard_test_extension"
_tex: Any = None


class _Recipe:
    """Options in an object that is no tensor, as TransformerEngine's recipes and quantizers."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, recipe: _Recipe) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        (out, nothing) = _tex.gemm(flat, weight.t().contiguous(), _tex.Layout.NN, None, bias)
        assert nothing is None
        ctx.save_for_backward(flat, weight)
        ctx.recipe, ctx.shape, ctx.biased = recipe, x.shape, bias is not None
        return (out * recipe.scale).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).contiguous() * ctx.recipe.scale
        (dx, _) = _tex.gemm(grad, weight.contiguous(), _tex.Layout.NN, None, None)
        dweight = torch.zeros_like(weight)
        _tex.gemm(grad, x, _tex.Layout.TN, dweight, None)  # into a buffer, as fused weight gradients are
        return dweight, dx.view(ctx.shape), grad.sum(0) if ctx.biased else None, None


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8) / 4), nn.Parameter(torch.randn(8))
        self.recipe = _Recipe(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Gemm.apply(self.weight, x, self.bias, self.recipe)
        return out


class _Hidden(_Linear):
    """A layer whose forward is hidden from Dynamo, as TransformerEngine's `no_torch_dynamo` does."""

    forward = torch.compiler.disable(_Linear.forward)


class _Net(nn.Module):
    def __init__(self, kind: type[_Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), kind(), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the extension; return its file."""
    if not (shutil.which("ninja") and shutil.which("c++")):
        pytest.skip("building an extension needs ninja and a C++ compiler")
    load_inline = pytest.importorskip("torch.utils.cpp_extension").load_inline
    built = load_inline(
        _NAME, _SOURCE, build_directory=str(tmp_path_factory.mktemp("ext")), extra_cflags=["-O0", "-ffp-contract=off"]
    )
    return str(Path(built.__file__))


def _steps(model: nn.Module) -> list[Tensor | None]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor | None]()
    for step in range(4):
        loss = model(torch.randn(2, 3 + step, 8))
        loss.backward()
        found += [loss, *(grad if grad is None else full(grad) for grad in gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *parameters(model)]


def _trial(rank: int, world_size: int, file: str) -> list[list[str]]:
    global _tex
    spec = importlib.util.spec_from_file_location(_NAME, file)
    assert spec is not None
    assert spec.loader is not None
    _tex = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_tex)
    programs: list[list[str]] = []
    for kind in (_Linear, _Hidden):
        made: list[nn.Module] = []

        def build(kind: type[_Linear] = kind, made: list[nn.Module] = made) -> nn.Module:
            made.append(_Net(kind))
            return made[-1]

        expected = on_plain_torch(build, _steps)
        assert_equal(on_fsdp2(build, _steps), expected)
        assert_equal(on_graphshard(build, _steps), expected)
        programs.append([program.model for program in graphshard.programs(made[-1])])
    return programs


@pytest.mark.slow
def test_pybind_kernels_of_an_extension(ranks: Ranks, extension: str) -> None:
    """A hidden forward is in one program for one length, and in one for all others.

    Where Dynamo sees the call, the object among its arguments splits the module, with the same numbers.
    """
    for split, hidden in ranks(2).run(_trial, extension):
        assert "_Net" not in split
        assert hidden == ["_Net", "_Net"]
