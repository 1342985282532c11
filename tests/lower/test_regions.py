"""Regions, and the executor that calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import graphshard.lower.inductor
from graphshard.ir.graph import is_view
from graphshard.ir.kernel_shapes import new_tracing_mode
from graphshard.ir.program import Program, Region
from graphshard.lower.backends import compiler_for
from graphshard.lower.eager import compile_eager
from graphshard.lower.regions import Boxed, RegionCall, cut, extract, lower
from tests.helpers import Blocks, Scales, assert_gradients, captured, copied, step, through
from tests.lower.small_regions import compile_inductor

BATCH = (torch.ones(3, 4),)


@functools.cache
def _scheduled(depth: int) -> Program:
    return through(captured(Blocks(depth, bias=True), BATCH), "reorder")


def _lowered(program: Program) -> Program:
    program = copied(program)
    lower(program, compiler_for("eager"), {})
    return program


@pytest.fixture(scope="module")
def program() -> Program:
    return _lowered(_scheduled(4))


def _region(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Region:
    """Trace a function and return its region."""
    graph = make_fx(compute, tracing_mode="fake")(*inputs).graph
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return extract(calls, graph.find_nodes(op="placeholder"), calls[-1:]).as_region()


@pytest.mark.slow
def test_distinct_regions_do_not_grow_with_depth(program: Program) -> None:
    deep = _lowered(_scheduled(8))
    assert deep.num_regions == program.num_regions + 4 * 2
    assert deep.num_distinct_regions == program.num_distinct_regions < program.num_regions
    assert deep.regions.keys() == program.regions.keys()


def test_equal_regions_are_compiled_once() -> None:
    """Also across programs that share compiled regions."""
    compiled: dict[str, RegionCall] = {}
    shown: list[list[str]] = []

    def compiler(regions: dict[str, Region], _: Callable[[str], None]) -> Iterator[tuple[str, Boxed]]:
        shown.append(list(regions))
        return ((name, compile_eager(region)) for name, region in regions.items())

    for depth in (4, 8):
        program = copied(_scheduled(depth))
        lower(program, compiler, compiled)
    assert shown[1] == []
    assert len(shown[0]) == len(compiled) == program.num_distinct_regions


def test_regions_of_dynamic_sizes_belong_to_one_program() -> None:
    """Facts about sizes found by one compilation hold for later ones of the program, but not for other programs."""

    def compiler(regions: dict[str, Region], _: Callable[[str], None]) -> Iterator[tuple[str, Boxed]]:
        return ((name, compile_eager(region)) for name, region in regions.items())

    compiled: dict[str, RegionCall] = {}
    for size in (5, 7):
        model, shapes = Blocks(2, bias=True), ({0: Dim("batch")},)
        args = (torch.ones(size, 4),)
        program = copied(through(captured(model, args, dynamic_shapes=shapes), "reorder"))
        before = dict(compiled)
        lower(program, compiler, compiled)
        assert program.regions.keys() == compiled.keys()
        assert not any(compiled[key] is call for key, call in before.items())


def test_names_and_modules_are_not_part_of_a_region() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    class Renamed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    renamed = through(captured(Renamed(Layer(), Layer()), BATCH), "reorder")
    plain = through(captured(Blocks(2), BATCH), "reorder")
    assert _lowered(renamed).regions.keys() == _lowered(plain).regions.keys()


def test_a_region_in_canonical_form() -> None:
    region = _region(lambda x, w: (x @ w.t()).relu(), torch.ones(3, 4), torch.ones(5, 4))
    assert_expected_inline(
        region.text,
        """\
  %0: f32[3, 4] = f32[3, 4] (4, 1) cpu
  %1: f32[5, 4] = f32[5, 4] (4, 1) cpu
  %2: f32[4, 5] = t(%1)
  %3: f32[3, 5] = mm(%0, %2)
  %4: f32[3, 5] = relu(%3)
  return %4
""",
    )
    assert region.key == _region(lambda a, b: (a @ b.t()).relu(), torch.ones(3, 4), torch.ones(5, 4)).key


@pytest.mark.parametrize(
    ("compute", "x"),
    [
        (torch.sin, torch.ones(4, 3)),
        (torch.sin, torch.ones(4, 3).t()),
        (torch.sin, torch.ones(3, 4, dtype=torch.float64)),
        (torch.cos, torch.ones(3, 4)),
        (lambda x: x.sin().sin(), torch.ones(3, 4)),
    ],
    ids=["shape", "strides", "dtype", "operator", "twice"],
)
def test_different_regions(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    assert _region(compute, x).key != _region(torch.sin, torch.ones(3, 4)).key


def test_views_do_not_leave_a_region() -> None:
    """Users of a view recompute it from its base."""
    for phase in _scheduled(4).phases.values():
        for call in cut(phase):
            assert not any(is_view(node) for node in (*call.inputs, *call.outputs))


def test_the_executor_calls_regions_and_collectives(program: Program) -> None:
    """It only computes views itself."""
    for phase in program.phases.values():
        assert {n.target for n in phase.module.graph.nodes if n.op == "call_module"} <= {
            f"region_{i}" for i in range(program.num_distinct_regions)
        }
        others = [n for n in phase.module.graph.nodes if n.op == "call_function"]
        aten = [n for n in others if getattr(n.target, "namespace", "") == "aten"]
        assert all(is_view(n) or n.target is torch.ops.aten.reshape.default for n in aten)


def test_a_region_empties_its_inputs() -> None:
    region = _region(lambda x, y: (x * y).sin(), torch.ones(4), torch.ones(4))
    inputs = [torch.full((4,), 2.0), torch.full((4,), 3.0)]
    (value,) = RegionCall(compile_eager(region))(inputs)
    assert inputs == []
    assert torch.equal(value, torch.full((4,), 6.0).sin())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_do_not_depend_on_lowering(world_size: int) -> None:
    torch.manual_seed(0)
    model, batches = Blocks(3, bias=True), [(torch.randn(3, 4),) for _ in range(world_size)]
    program = through(captured(model, batches[0], world_size=world_size), "reorder")
    expected = step(program, model, batches)
    lower(program, compiler_for("eager"), {})
    for found, wanted in zip(step(program, model, batches), expected, strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted if not name.startswith("param:"))
    assert_gradients(program, model, batches)


def test_a_phase_without_compute() -> None:
    """The gradient of `x + w` is the tangent: backward is one reduction and calls no region."""

    class Shift(Scales):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layers[0].w

    batches = [(torch.randn(4),) for _ in range(2)]
    program = through(captured(Shift(1), batches[0]), "reorder")
    lower(program, compiler_for("eager"), {})
    assert program.num_regions == 1
    assert_gradients(program, Shift(1), batches)


def test_falls_back_to_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(graphshard.lower.inductor, "compile_fx_inner", fail)
    region = _region(lambda x: x.t().sin().cos(), torch.ones(3, 4))
    message = rf"Inductor cannot compile region_7 \({region.key}\); it runs as plain ATen operators. "
    with pytest.warns(UserWarning, match=message + "NotImplementedError: no such kernel"):
        run = compile_inductor(region, "region_7")
    x = torch.randn(3, 4)
    inputs = [x]
    (value,) = run(inputs)
    assert inputs == []
    assert torch.equal(value, x.t().sin().cos())
    assert value.stride() == (1, 4)


@pytest.mark.slow
def test_inductor() -> None:
    """Compile a region for real: values of eager mode, strides of the trace."""
    region = _region(lambda x, w: (x @ w).t().softmax(0).sin(), torch.ones(3, 4), torch.ones(4, 5))
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    inputs = [x, w]
    (value,) = RegionCall(compile_inductor(region, "region_0"))(inputs)
    (traced,) = region.module.graph.output_node().args[0]
    torch.testing.assert_close(value, (x @ w).t().softmax(0).sin())
    assert value.stride() == traced.meta["val"].stride()
    assert inputs == []


@pytest.mark.slow
def test_a_decomposition_with_other_strides() -> None:
    """In batch norm's backward the kernel's result is contiguous, the decomposition's has its input's strides."""

    def backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        mean, scale = torch.zeros(4), torch.ones(4)
        mask = [True, True, True]
        return torch.ops.aten.native_batch_norm_backward(grad.mT, x.mT, w, None, None, mean, scale, True, 1e-5, mask)[0]

    inputs = [torch.randn(2, 5, 4), torch.randn(2, 5, 4), torch.ones(4)]
    with new_tracing_mode() as mode:
        fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
        graph = make_fx(backward, tracing_mode="real")(*fakes).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    outputs = list(graph.output_node().all_input_nodes)
    region = extract(nodes, graph.find_nodes(op="placeholder"), outputs).as_region()
    expected = backward(*inputs)
    (value,) = compile_inductor(region, "region_0")(inputs)
    assert value.stride() == expected.stride() == (20, 5, 1)
    torch.testing.assert_close(value, expected)


def test_inputs_that_share_a_fake_value_stay_separate() -> None:
    """For example a buffer before and after forward: make_fx identifies inputs by these objects."""
    before, after = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])
    region = _region(lambda a, b: (a - b).sin() + b, before, after)
    first, second = region.module.graph.find_nodes(op="placeholder")
    second.meta["val"] = first.meta["val"]
    (value,) = compile_inductor(region, "region_0")([before, after])
    torch.testing.assert_close(value, (before - after).sin() + after)
