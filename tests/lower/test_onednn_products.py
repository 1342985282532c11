"""Large float32 matmuls use oneDNN unless the processor is Intel's: generated and cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from graphshard.ir.program import Region
from graphshard.lower import inductor, region_store
from graphshard.lower.backends import compiler_for
from graphshard.lower.region_store import KeptRegion
from graphshard.lower.regions import Boxed
from tests.lower.small_regions import region_of

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()), reason="torch without both"
)
_LINEAR = "mkldnn._linear_pointwise"


@pytest.fixture(autouse=True)
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.MagicMock]:
    """Let tests set the processor's vendor, with an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with mock.patch.object(inductor, "vendor", return_value="AuthenticAMD") as found:
        yield found


def _layer(
    size: int, dtype: torch.dtype = torch.float32
) -> tuple[Callable[..., list[torch.Tensor]], list[torch.Tensor]]:
    """Return forward and backward of a linear layer with `size` features and rows; its input, weight and gradient."""

    def function(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        return [torch.mm(x, w.t()).relu(), torch.mm(g, w), torch.mm(g.t(), x)]

    generator = torch.Generator().manual_seed(0)
    return function, [torch.randn(size, size, generator=generator, dtype=dtype) for _ in range(3)]


def _compiled(region: Region) -> Boxed:
    ((_, fn),) = compiler_for("inductor")({"region_0": region}, lambda told: None)
    return fn


@pytest.mark.slow
def test_forward_and_input_gradient_use_onednn() -> None:
    """The weight's gradient does not use it, because oneDNN would copy the operands."""
    function, inputs = _layer(256)
    fn = _compiled(region_of(function, inputs))
    source = fn.source_code  # type: ignore[attr-defined]
    assert source.count(f"torch.ops.{_LINEAR}.default(") == 2
    assert source.count("extern_kernels.mm(") == 1
    exact = function(*(value.double() for value in inputs))
    for made, expected in zip(fn(list(inputs)), exact, strict=True):
        assert made.dtype == torch.float32
        assert (made - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("made_by", ["GenuineIntel", ""])
def test_intel_processors_use_mkl(made_by: str, vendor: mock.MagicMock) -> None:
    vendor.return_value = made_by
    assert _LINEAR not in _compiled(region_of(*_layer(256))).source_code  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:TF32")  # torch warns whenever flags are set
def test_respects_disabled_onednn() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert _LINEAR not in _compiled(region_of(*_layer(256))).source_code  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("size", "dtype", "mode"),
    [
        pytest.param(255, torch.float32, "fake", id="small"),
        pytest.param(256, torch.float64, "fake", id="double"),
        pytest.param(256, torch.float32, "symbolic", id="dynamic"),
    ],
)
@pytest.mark.quick_cases("dynamic")
def test_other_matmuls_do_not_change(size: int, dtype: torch.dtype, mode: str) -> None:
    region = region_of(*_layer(size, dtype), mode)
    products = region.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) == 3
    assert not any(map(inductor._suits, products))
    if mode == "fake":
        assert _LINEAR not in _compiled(region).source_code  # type: ignore[attr-defined]


def test_slices_do_not_change() -> None:
    """oneDNN would copy it."""
    region = region_of(lambda x, w, g: [x[:, :192] @ w[:192], x @ w[:, :192], g @ w.t()], _layer(512)[1])
    products = region.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert [inductor._suits(node) for node in products] == [False, False, True]


def test_inductors_choice_takes_precedence() -> None:
    config = inductor.inductor_config
    with config.patch(max_autotune_gemm=True, max_autotune_gemm_backends="ATEN"):
        assert _LINEAR not in _compiled(region_of(*_layer(256))).source_code  # type: ignore[attr-defined]


def test_inductors_lowering_is_restored() -> None:
    lowerings, mm = inductor.lowerings, torch.ops.aten.mm.default
    before = lowerings[mm]
    with inductor.products():
        assert lowerings[mm] is not before
    assert lowerings[mm] is before


def test_cached_code_depends_on_the_processor() -> None:
    function, inputs = _layer(256)
    region = region_of(function, inputs)
    first = _compiled(region)
    with mock.patch.object(inductor, "generate") as generate:
        second = _compiled(region)
    assert not generate.called
    assert isinstance(second, KeptRegion)
    for one, other in zip(first(list(inputs)), second(list(inputs)), strict=True):
        assert torch.equal(one, other)
    with mock.patch.object(region_store, "vendor", return_value="another"):
        assert region_store.store_here().find(region) is None
