"""In-place all-reduces, where their input has no later reader."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

import graphshard
from graphshard.ir.graph import ALL_REDUCES, WAIT, aten, c10d, emit
from graphshard.ir.program import Phase, Program
from graphshard.runtime.collective_launches import as_planned, reduce_in_place
from tests.helpers import Blocks
from tests.ranks import FakeWorld

IN_PLACE = (c10d.all_reduce_.default, c10d.all_reduce_coalesced_.default)


@pytest.fixture(params=[(2, 2), (4, 1)], ids=["sharded and replicated", "replicated"])
def program(request: pytest.FixtureRequest, fake_world: FakeWorld) -> Program:
    """Compile a program of two units with two parameters each, bound to process groups."""
    fake_world(4)
    mesh = init_device_mesh("cpu", request.param, mesh_dim_names=("replicate", "shard"))
    model = graphshard.compile(Blocks(2, bias=True), mesh, backend="eager", example_inputs=(torch.ones(3, 4),))
    (found,) = graphshard.programs(model)
    return found


def targets(phase: Phase) -> list[object]:
    """Return the operators that reduce over replicas."""
    return [node.target for node in phase.module.graph.nodes if node.target in {*ALL_REDUCES, *IN_PLACE}]


def test_all_reduces_of_a_step_are_in_place(program: Program) -> None:
    """Results of reduce-scatters, or the gradients themselves, have no other reader."""
    found = targets(program.phases["backward"])
    assert len(found) > 1
    assert set(found) <= set(IN_PLACE)
    assert "all_reduce_" in program.backward.code


def test_predictions_use_the_planned_program(program: Program) -> None:
    planned = targets(as_planned(program).phases["backward"])
    assert planned
    assert set(planned) <= ALL_REDUCES
    assert set(targets(program.phases["backward"])) <= set(IN_PLACE)  # a copy


def _reduced(read_before: bool, read_later: bool, view: bool, *, transposed: bool = False) -> object:
    """Build an all-reduce of a reduction's result and return its operator after the pass."""
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = torch.zeros(4, 4, device="meta")
    launch = emit(graph, c10d.reduce_scatter_tensor.default, given, "sum", 1, "shard")
    made = emit(graph, WAIT, launch)
    value = emit(graph, aten.view.default, made, [16]) if view else made
    value = emit(graph, aten.t.default, value) if transposed else value
    results = [emit(graph, aten.sin.default, made)] if read_before else []
    launch = emit(graph, c10d.all_reduce.default, value, "sum", "replicate")
    results += [emit(graph, aten.cos.default, made)] if read_later else []
    results.append(emit(graph, WAIT, launch))
    graph.output(tuple(results))
    phase = Phase(GraphModule({}, graph), (), ())
    reduce_in_place(phase)
    return launch.target


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("read_before", [False, True])
def test_copies_values_with_later_readers(view: bool, read_before: bool) -> None:
    assert _reduced(read_before, False, view) == c10d.all_reduce_.default
    assert _reduced(read_before, True, view) == c10d.all_reduce.default


def test_copies_non_contiguous_values() -> None:
    """The functional all-reduce makes a contiguous copy."""
    assert _reduced(False, False, False, transposed=True) == c10d.all_reduce.default
