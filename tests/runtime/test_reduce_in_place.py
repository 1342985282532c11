"""All-reduces that write over what they are given: where nothing reads it any more."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

import graphshard
from graphshard.ir.graph import ALL_REDUCES, WAIT, aten, c10d, emit
from graphshard.ir.program import Phase, Program
from graphshard.runtime.gloo import as_planned, reduce_in_place
from tests.helpers import Blocks
from tests.ranks import FakeWorld

IN_PLACE = (c10d.all_reduce_.default, c10d.all_reduce_coalesced_.default)


@pytest.fixture(params=[(2, 2), (4, 1)], ids=["sharded and replicated", "replicated"])
def program(request: pytest.FixtureRequest, fake_world: FakeWorld) -> Program:
    """A program that is bound, of two units with two parameters each."""
    fake_world(4)
    mesh = init_device_mesh("cpu", request.param, mesh_dim_names=("replicate", "shard"))
    model = graphshard.compile(Blocks(2, bias=True), mesh, backend="eager", example_inputs=(torch.ones(3, 4),))
    (found,) = graphshard.programs(model)
    return found


def targets(phase: Phase) -> list[object]:
    """What reduces over replicas."""
    return [node.target for node in phase.module.graph.nodes if node.target in {*ALL_REDUCES, *IN_PLACE}]


def test_all_of_a_step_write_over_what_they_reduce(program: Program) -> None:
    """What reduce-scatters made, or the gradients themselves, which nobody else reads."""
    found = targets(program.phases["backward"])
    assert len(found) > 1
    assert set(found) <= set(IN_PLACE)
    assert "all_reduce_" in program.backward.code


def test_predictions_are_of_what_was_planned(program: Program) -> None:
    planned = targets(as_planned(program).phases["backward"])
    assert planned
    assert set(planned) <= ALL_REDUCES
    assert set(targets(program.phases["backward"])) <= set(IN_PLACE)  # it was a copy


def _reduced(read_before: bool, read_later: bool, view: bool, *, transposed: bool = False) -> object:
    """What becomes of the all-reduce of something that a reduction has made."""
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
def test_what_is_read_later_is_copied(view: bool, read_before: bool) -> None:
    assert _reduced(read_before, False, view) == c10d.all_reduce_.default
    assert _reduced(read_before, True, view) == c10d.all_reduce.default


def test_what_does_not_lie_in_order_is_copied() -> None:
    """The functional all-reduce makes a copy that does."""
    assert _reduced(False, False, False, transposed=True) == c10d.all_reduce.default
