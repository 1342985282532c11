"""Inductor regions with data-dependent sizes."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.ir.graph import aten, emit
from graphshard.ir.kernel_shapes import new_tracing_mode
from graphshard.lower.inductor_rewrites import sums_as_sizes, unknown_in
from graphshard.lower.regions import extract
from graphshard.torch_compat.fake_tensors import FakeTensorMode
from graphshard.torch_compat.symbolic_sizes import new_size, new_unknown_size
from tests.lower.small_regions import compile_inductor


def _input(graph: Graph, value: torch.Tensor) -> Node:
    node = graph.placeholder(f"x{len(graph.nodes)}")
    node.meta["val"] = value
    return node


@pytest.fixture
def mode() -> FakeTensorMode:
    return new_tracing_mode()


def _module(mode: FakeTensorMode, *, sizes_given: bool) -> tuple[Graph, list[Node], list[Node]]:
    """Build 2 * silu(x) with the sum of two sizes as length; with `sizes_given`, these sizes are inputs, too."""
    graph, first, second = Graph(), new_unknown_size(mode), new_unknown_size(mode)
    with mode:
        inputs = [_input(graph, torch.empty(first + second, 8))]
        if sizes_given:
            inputs += [_input(graph, torch.empty(first)), _input(graph, torch.empty(second))]
    silu = emit(graph, aten.silu.default, inputs[0], like=inputs[0])
    return graph, inputs, [silu, emit(graph, aten.mul.Tensor, silu, 2, like=silu)]


@pytest.mark.parametrize("sizes_given", [False, True])
def test_a_sum_becomes_a_separate_size(mode: FakeTensorMode, sizes_given: bool) -> None:
    """Unless the inputs have its terms."""
    graph, _, calls = _module(mode, sizes_given=sizes_given)
    graph.output((calls[-1],))
    module = GraphModule({}, graph)
    found = sums_as_sizes(module)
    assert (found is module) == sizes_given
    (length,) = {str(n.meta["val"].shape[0]) for n in found.graph.nodes if n.target in (aten.silu.default, "x0")}
    assert ("+" in length) == sizes_given


def test_inductor_compiles_it(mode: FakeTensorMode) -> None:
    """One region for all lengths; without the symbol it would run as operators, with a warning."""
    _, inputs, calls = _module(mode, sizes_given=False)
    run = compile_inductor(extract(calls, inputs, calls[-1:]).as_region(), "region")
    for length in (5, 0, 9):
        x = torch.randn(length, 8)
        torch.testing.assert_close(run([x])[0], 2 * torch.nn.functional.silu(x))


def test_names_that_code_reads_without_defining() -> None:
    """Such code was stored, and failed with a NameError when it ran."""
    assert unknown_in("def call(args):\n    u1 = args[0]\n    u2 = u1 + 1\n    return u2") == set()
    assert unknown_in("def call(args, u0):\n    return u0 + u3") == {"u3"}
    assert unknown_in("def call(args):\n    return 'u4'") == set()
    # Torch 2.11 writes a slice before the number of its end.
    assert unknown_in("class Runner:\n    def call(self, args):\n        u2 = u1 + 1\n        u1 = args[0]") == {"u1"}
    assert unknown_in("def first(u1):\n    return u1\n\ndef second(args):\n    return u1") == {"u1"}
    assert unknown_in("def get_args():\n    return [u5]\n\ndef call(args):\n    return args") == set()


def test_sizes_of_inputs_keep_their_relations() -> None:
    """Only data-dependent sizes get new symbols: equality of s0*s1 and s2*s3 may be known."""
    mode, graph = new_tracing_mode(), Graph()
    first, second = (new_size(mode, f"s{n}", 4 + n, None, None) for n in range(2))
    with mode:
        x = _input(graph, torch.empty(first * second, 8))
    for size in (first, second):
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = size
    graph.output((emit(graph, aten.silu.default, x, like=x),))
    module = GraphModule({}, graph)
    assert sums_as_sizes(module) is module
