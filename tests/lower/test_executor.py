"""Lines of an executor and their code."""

from __future__ import annotations

import gc
import linecache
import operator
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.fx import Graph

from graphshard.ir.graph import WAIT, aten, c10d
from graphshard.ir.program import Program
from graphshard.lower.backends import compiler_for
from graphshard.lower.executor import (
    CallLine,
    Executor,
    Operator,
    Return,
    Start,
    Take,
    WaitLine,
    lines_of,
    print_lines,
    profiler_range,
)
from graphshard.lower.regions import RegionCall, executor, lower
from tests.helpers import PACKED, Blocks, captured, through

BATCH = (torch.ones(3, 4),)


def _lowered(model: nn.Module | None = None) -> Program:
    program = through(captured(model or Blocks(2), BATCH), "reorder", planner=PACKED)
    lower(program, compiler_for("eager"), {})
    return program


def _executor(program: Program, phase: str) -> Executor:
    found = program.phases[phase].module
    assert isinstance(found, Executor)
    return found


def test_the_code_of_a_phase() -> None:
    """Each gather, region and wait is a line with a comment for its bucket or modules; lists are unpacked."""
    assert_expected_inline(
        _lowered(Blocks(2, bias=True)).forward.code,
        """\
def forward(self, inputs):
    layers_0_weight, layers_0_bias, layers_1_weight, layers_1_bias, input_0 = inputs
    inputs.clear()
    inputs = [layers_0_weight, layers_0_bias];  layers_0_weight = layers_0_bias = None
    (cat_default,) = self.region_0(inputs)  # layers.0
    all_gather_into_tensor_default_4 = torch.ops._c10d_functional.all_gather_into_tensor.default(cat_default, 2, 'shard');  cat_default = None  # start gather layers.0 in forward
    wait_tensor_default_4 = torch.ops._c10d_functional.wait_tensor.default(all_gather_into_tensor_default_4);  all_gather_into_tensor_default_4 = None  # wait gather layers.0 in forward
    inputs = [wait_tensor_default_4, layers_1_weight, layers_1_bias];  wait_tensor_default_4 = layers_1_bias = None
    clone_default, clone_default_1, cat_default_1 = self.region_1(inputs)  # layers.0, layers.1
    all_gather_into_tensor_default_5 = torch.ops._c10d_functional.all_gather_into_tensor.default(cat_default_1, 2, 'shard');  cat_default_1 = None  # start gather layers.1 in forward
    inputs = [clone_default_1, input_0, clone_default];  clone_default_1 = clone_default = None
    (relu,) = self.region_2(inputs)  # layers.0
    wait_tensor_default_5 = torch.ops._c10d_functional.wait_tensor.default(all_gather_into_tensor_default_5);  all_gather_into_tensor_default_5 = None  # wait gather layers.1 in forward
    inputs = [wait_tensor_default_5, relu];  wait_tensor_default_5 = None
    relu_1, sum_1 = self.region_3(inputs)  # layers.1
    detach_1 = torch.ops.aten.detach.default(relu_1);  relu_1 = None
    detach_2 = torch.ops.aten.detach.default(detach_1);  detach_1 = None
    return (sum_1, layers_1_weight, input_0, relu, detach_2)
""",  # noqa: E501
    )


def test_kinds_of_lines() -> None:
    """The types of lines match the code."""
    first, *lines, last = _executor(_lowered(), "backward").lines
    assert isinstance(first, Take)
    assert isinstance(last, Return)
    assert {type(line) for line in lines} == {Start, CallLine, WaitLine, Operator}
    starts = [line.bucket for line in lines if isinstance(line, Start)]
    waits = [line.bucket for line in lines if isinstance(line, WaitLine)]
    assert sorted(starts) == sorted(waits)
    assert len(set(starts)) == 3
    assert {line.target for line in lines if type(line) is Operator} <= {aten.t.default, aten.reshape.default}


def test_inputs_of_a_region_are_freed_before_it_runs() -> None:
    """The list holds the last reference to an input without later uses.

    inputs = [a, b];  a = None
    (y,) = self.region_0(inputs)
    """
    for phase in ("forward", "backward"):
        lines = _executor(_lowered(), phase).lines
        calls = [(i, line) for i, line in enumerate(lines) if isinstance(line, CallLine)]
        assert any(call.frees for _, call in calls)
        for i, call in calls:
            last = {name for name in call.inputs if not any(name in later.reads for later in lines[i + 1 :])}
            assert set(call.frees) == last
            if last:
                assert call.statements()[0].startswith(f"inputs = [{', '.join(call.inputs)}];  ")


def _dies(freed: bool) -> Graph:
    """Build a graph that calls a region on its one input, and optionally returns the input."""
    graph = Graph()
    x = graph.placeholder("x")
    call = graph.call_module("region_0", ([x],))
    call.meta["val"] = (torch.empty(2),)
    y = graph.call_function(operator.getitem, (call, 0))
    graph.output((y,) if freed else (y, x))
    return graph


@pytest.mark.parametrize("freed", [True, False])
def test_a_region_is_the_last_to_hold_its_inputs(freed: bool) -> None:
    """At run time only the region holds an input without further uses."""
    alive = []

    def region(inputs: list[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = inputs
        known = weakref.ref(x)
        inputs.clear()
        del x
        alive.append(known() is not None)
        return (torch.ones(2),)

    run = executor(_dies(freed), {"region_0": RegionCall(region)})
    for code in (run.forward, run.function(None, profiler_range)):
        arguments = [torch.zeros(2)]
        values = code(arguments)
        assert arguments == []
        assert torch.equal(values[0], torch.ones(2))
    assert alive == [not freed] * 2


def test_an_unused_input_is_freed_at_once() -> None:
    graph = Graph()
    graph.placeholder("x")
    y = graph.placeholder("y")
    graph.output((y, None))
    (take, _) = lines_of(graph)
    assert take.frees == ("x",)
    assert executor(graph, {}).forward([1, 2]) == (2, None)


def test_no_inputs() -> None:
    graph = Graph()
    graph.output((None,))
    assert executor(graph, {}).forward([]) == (None,)


def test_many_inputs_are_wrapped() -> None:
    graph = Graph()
    values = [graph.placeholder(f"parameter_{i}") for i in range(20)]
    graph.output(tuple(values))
    code = print_lines(lines_of(graph))
    assert "    (\n        parameter_0,\n        parameter_1,\n" in code
    assert max(map(len, code.splitlines()[:-1])) < 30
    assert executor(graph, {}).forward(list(range(20))) == tuple(range(20))


def test_unused_results() -> None:
    """If some items of a list are unused, the list has a separate name."""
    graph = Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(aten.split.Tensor, (x, 1))
    parts.meta["val"] = [torch.empty(1)] * 3
    second = graph.call_function(operator.getitem, (parts, 1))
    graph.output((second,))
    run = executor(graph, {})
    assert "split_tensor = torch.ops.aten.split.Tensor(x, 1);  x = None" in run.code
    assert "getitem = split_tensor[1];  split_tensor = None" in run.code
    assert run.forward([torch.tensor([1.0, 2.0, 3.0])])[0].item() == 2.0


@pytest.mark.parametrize("name", ["inputs", "torch", "self", "device", "operator"])
def test_name_clashes(name: str) -> None:
    """A parameter may have the name of the regions' input list, or of a module."""
    graph = Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    x.name = name
    call = graph.call_module("region_0", ([other],))
    call.meta["val"] = (torch.empty(2),)
    y = graph.call_function(operator.getitem, (call, 0))
    total = graph.call_function(operator.add, (y, x))
    cast = graph.call_function(aten._to_copy.default, (total,), {"dtype": torch.float64, "device": torch.device("cpu")})
    graph.output((cast, x))
    run = executor(graph, {"region_0": RegionCall(lambda inputs: (inputs.pop() * 2,))})
    value, kept = run.forward([torch.ones(2), torch.ones(2)])
    assert torch.equal(value, torch.full((2,), 3.0, dtype=torch.float64))
    assert torch.equal(kept, torch.ones(2))


def test_arguments_of_all_kinds() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.full_like.default, (x, float("-inf")), {"memory_format": torch.contiguous_format})
    z = graph.call_function(aten.cat.default, ([x, y],))
    graph.output((z,))
    (value,) = executor(graph, {}).forward([torch.zeros(1)])
    assert value.tolist() == [0.0, float("-inf")]


def test_comments_are_escaped() -> None:
    """Names of buckets and modules also come from files."""
    graph = Graph()
    x = graph.placeholder("x")
    start = graph.call_function(c10d.all_gather_into_tensor.default, (x, 1, "shard"))
    wait = graph.call_function(WAIT, (start,))
    start.meta["bucket"] = wait.meta["bucket"] = "gather\nraise ValueError\r\x0craise ValueError"
    graph.output((wait,))
    for around in (None, lambda number, _: f"clock({number})"):
        rows = print_lines(lines_of(graph), around).splitlines()
        assert not any(row.strip().startswith("raise") for row in rows)
        assert sum(row.endswith(r"# start gather\nraise ValueError\r\x0craise ValueError") for row in rows) == 1


def test_rejects_a_region_without_getitems() -> None:
    graph = Graph()
    call = graph.call_module("region_0", ([],))
    call.meta["val"] = (torch.empty(2), torch.empty(2))
    graph.output((graph.call_function(operator.getitem, (call, 0)),))
    with pytest.raises(ValueError, match="the results of region_0 are not picked up one by one"):
        lines_of(graph)


def test_a_changed_graph_is_recompiled() -> None:
    """A graph is bound in place; `recompile` regenerates lines and code."""
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.neg.default, (x,))
    graph.output((y,))
    run = executor(graph, {})
    y.target = aten.abs.default
    run.recompile()
    assert "aten.abs.default(x)" in run.code
    assert run.code == print_lines(run.lines)
    assert run.forward([torch.tensor(-2.0)])[0].item() == 2.0


def _traceback(code: Callable[[list[torch.Tensor]], object]) -> str:
    try:
        code([torch.ones(2)])
    except RuntimeError:
        return traceback.format_exc()
    raise AssertionError


@pytest.mark.slow
def test_tracebacks_show_the_line() -> None:
    """The source is removed with the executor."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.view.default, (x, [3])),))
    run = executor(graph, {})
    assert "view_default = torch.ops.aten.reshape.default(x, [3]);  x = None" in _traceback(run.forward)
    file = run.forward.__code__.co_filename
    assert file in linecache.cache
    del run, graph, x
    gc.collect()
    assert file not in linecache.cache
