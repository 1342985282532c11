"""Regions with Python float inputs."""

from __future__ import annotations

import torch
from torch.fx import Graph

from graphshard.ir.graph import aten, emit
from graphshard.ir.kernel_shapes import new_tracing_mode
from graphshard.ir.program import Region
from graphshard.lower.inductor_rewrites import float_inputs, floats_as_tensors
from graphshard.lower.regions import extract
from graphshard.torch_compat.symbolic_sizes import new_unknown_float
from tests.lower.small_regions import compile_inductor


def _region(*, swapped: bool = False) -> Region:
    """Build the region (sigmoid(x * f) + f)."""
    graph, mode = Graph(), new_tracing_mode()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    number.meta["val"] = new_unknown_float(mode)
    with mode:
        x.meta["val"] = torch.empty(4, 6)
    times = emit(graph, aten.mul.Tensor, x, number, like=x)
    squashed = emit(graph, aten.sigmoid.default, times, like=x)
    plus = emit(graph, aten.add.Tensor, squashed, number, like=x)
    return extract([times, squashed, plus], [number, x] if swapped else [x, number], [plus]).as_region()


def test_a_float_is_read_of_a_tensor() -> None:
    region = _region()
    assert float_inputs(region.module) == [1]
    found = floats_as_tensors(region.module)
    assert [node.target for node in found.graph.nodes][2] is aten._local_scalar_dense.default
    number = found.graph.find_nodes(op="placeholder")[1].meta["val"]
    assert (number.dtype, number.dim(), number.device.type) == (torch.float64, 0, "cpu")


def test_without_floats_it_is_the_same() -> None:
    found = floats_as_tensors(_region().module)
    assert floats_as_tensors(found) is found


def test_inductor_compiles_one_region_for_all_values() -> None:
    """The code used an undeclared number, and g++ rejected it."""
    run = compile_inductor(_region(swapped=True), "region")
    x = torch.randn(4, 6)
    for number in (0.1, -3.0, 1e-3):
        (found,) = run([number, x])
        assert found.dtype is torch.float32  # as with a Python float
        torch.testing.assert_close(found, (x * number).sigmoid() + number)


def test_keys_distinguish_floats_and_sizes() -> None:
    """Regions are shared by their text, and code for a size does not accept a float."""
    assert "= float" in _region().text
