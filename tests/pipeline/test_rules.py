"""Every rule detects its corruption of a program, and names the location and the pass."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.collective_regions import CollectiveRegions, collectives
from graphshard.ir.graph import WAIT, aten, emit, fake, is_collective
from graphshard.ir.program import Phase, Program, Slot
from graphshard.lower.backends import compiler_for
from graphshard.lower.executor import CallLine, Executor, Line, Start, Take, WaitLine
from graphshard.lower.regions import RegionCall, lower
from graphshard.passes import MakePlan, Pass
from graphshard.pipeline.instrumentation import Level, Observer
from graphshard.pipeline.pipeline import Pipeline, run_pipeline
from graphshard.pipeline.rules import ALWAYS, ESTABLISHED, LOWERED, Made, verify, verify_lowered, wrong_frees
from tests.helpers import COALESCED, PACKED, Blocks, calls, captured, copied, through

BATCH = (torch.ones(3, 4),)


@functools.cache
def _scheduled() -> Program:
    program = through(captured(Blocks(3, bias=True), BATCH), "reorder")
    verify(program, "nobody", complete=True)
    return program


@functools.cache
def _partitioned() -> Program:
    return through(captured(Blocks(3, bias=True), BATCH), "partition")


def _launches(phase: Phase) -> list[Node]:
    return [node for node in phase.module.graph.nodes if is_collective(node)]


def _waits(phase: Phase) -> list[Node]:
    return calls(phase, "wait_tensor")


# Corruptions of a scheduled program by the rule that must detect them.


def _use_before(program: Program) -> None:
    graph = program.phases["forward"].module.graph
    first, *_, last = (node for node in graph.nodes if node.op == "call_function")
    first.prepend(last)


def _use_before_wait_moves(program: Program) -> None:
    """Move a wait after its user."""
    wait = _waits(program.phases["forward"])[0]
    max(wait.users).append(wait)


def _forgotten_slot(program: Program) -> None:
    phase = program.phases["forward"]
    phase.outputs = phase.outputs[:-1]


def _unsaved(program: Program) -> None:
    phase = program.phases["backward"]
    phase.inputs = (Slot("saved", "nowhere"), *phase.inputs[1:])


def _dropped_wait(program: Program) -> None:
    wait = _waits(program.phases["forward"])[0]
    wait.replace_all_uses_with(wait.all_input_nodes[0])
    wait.graph.erase_node(wait)


def _second_wait(program: Program) -> None:
    wait = _waits(program.phases["backward"])[0]
    with wait.graph.inserting_after(wait):
        emit(wait.graph, WAIT, wait.all_input_nodes[0])


def _dropped_part(program: Program) -> None:
    wait = _waits(program.phases["forward"])[0]
    part = wait.all_input_nodes[0]
    assert part.target is operator.getitem
    wait.replace_all_uses_with(program.phases["forward"].placeholders[0])
    wait.graph.erase_node(wait)
    part.graph.erase_node(part)


def _peek(program: Program) -> None:
    wait = _waits(program.phases["forward"])[0]
    user = next(iter(wait.users))
    user.replace_input_with(wait, wait.all_input_nodes[0])


def _own_group(program: Program) -> None:
    launch = _launches(program.phases["backward"])[0]
    launch.args = (*launch.args[:-1], "3")


def _rank_as_object(program: Program) -> None:
    node = calls(program.phases["forward"], "relu")[0]
    node.kwargs = {"rank": torch.Generator()}


def _tensor_in_the_module(program: Program) -> None:
    phase = program.phases["forward"]
    phase.module.register_buffer("rank", torch.tensor(0))
    with phase.module.graph.inserting_before(phase.placeholders[0]):
        phase.module.graph.get_attr("rank")


def _wrong_shape(program: Program) -> None:
    node = calls(program.phases["forward"], "relu")[1]
    node.meta["val"] = fake(node).new_empty(7)


def _wrong_dtype(program: Program) -> None:
    node = calls(program.phases["backward"], "wait_tensor")[0]
    node.meta["val"] = fake(node).double()


def _impossible(program: Program) -> None:
    node = calls(program.phases["backward"], "sum")[0]
    node.args = (node.args[0], [5])


def _full_input(program: Program) -> None:
    node = program.phases["backward"].placeholders[0]
    phase = program.phases["backward"]
    with phase.module.graph.inserting_after(node):
        full = phase.module.graph.placeholder("full")
    full.meta["val"] = fake(node).new_empty(9, 9)
    phase.inputs = (phase.inputs[0], Slot("param", "layers.0.weight"), *phase.inputs[1:])


def _half_gradient(program: Program) -> None:
    phase = program.phases["backward"]
    results = phase.results
    with phase.module.graph.inserting_before(phase.module.graph.output_node()):
        results[0] = emit(phase.module.graph, aten._to_copy.default, results[0], dtype=torch.bfloat16)
    phase.set_results(results)


def _unreduced(program: Program) -> None:
    phase = program.phases["backward"]
    results = phase.results
    with phase.module.graph.inserting_before(phase.module.graph.output_node()):
        full = _launches(phase)[-1].all_input_nodes[0]
        results[0] = emit(phase.module.graph, aten.slice.Tensor, full, 0, 0, 2)
    phase.set_results(results)


def _twice_reduced(program: Program) -> None:
    phase = program.phases["backward"]
    results = phase.results
    with phase.module.graph.inserting_before(phase.module.graph.output_node()):
        results[0] = emit(phase.module.graph, aten.add.Tensor, results[0], results[2])
    phase.set_results(results)


def _lost_gradient(program: Program) -> None:
    phase = program.phases["backward"]
    phase.set_results([None, *phase.results[1:]])


def _shared_reduction(program: Program) -> None:
    phase = program.phases["backward"]
    results = phase.results
    results[0] = results[2]
    phase.set_results(results)


def _other_bucket(program: Program) -> None:
    phase = program.phases["backward"]
    results = phase.results
    results[0], results[2] = results[2], results[0]
    phase.set_results(results)


def _unplanned(program: Program) -> None:
    assert program.plan is not None
    program.plan = replace(program.plan, buckets=program.plan.buckets[:-1])


def _swapped(program: Program) -> None:
    """Move a reduction, with its operators, after the next one."""
    phase = program.phases["backward"]
    layout = CollectiveRegions.of(phase)
    first, second, *_ = [c for c in collectives(phase) if c.kind == "reduce"]
    anchor = layout.after[second.waits[-1]][-1] if layout.after[second.waits[-1]] else second.waits[-1]
    moved = [first.node, *first.node.users, *(n for wait in first.waits for n in (wait, *layout.after[wait]))]
    for node in dict.fromkeys(moved):
        anchor.append(node)
        anchor = node


def _forgotten_event(program: Program) -> None:
    assert program.plan is not None
    events = program.plan.events
    program.plan = replace(program.plan, events={**events, "forward": events["forward"][:-1]})


def _early_gather(program: Program) -> None:
    """Start all gathers of forward at once, in order: only memory is wrong."""
    phase = program.phases["forward"]
    assert program.plan is not None
    anchor = phase.placeholders[-1]
    for launch in _launches(phase):
        for node in (launch, *launch.users):
            anchor.append(node)
            anchor = node
    events = sorted(program.plan.events["forward"], key=lambda event: event.action)
    program.plan = replace(program.plan, events={**program.plan.events, "forward": tuple(events)})


CORRUPTIONS: list[tuple[str, Callable[[Program], None], str]] = [
    ("computed_before_use", _use_before, r".* is used before it is computed"),
    ("computed_before_use", _use_before_wait_moves, r"wait_tensor\w* is used before it is computed"),
    ("slots_match", _forgotten_slot, r"the graph has \d+ outputs, the phase gives a meaning to \d+"),
    ("saved_is_returned", _unsaved, "backward reads saved:nowhere, which forward does not return"),
    ("waited_once", _dropped_wait, r"f32\[4, 4\] is waited for 0 times"),
    ("waited_once", _second_wait, "is waited for 2 times"),
    ("waited_once", _dropped_part, "2 tensors travel, 1 are picked up"),
    ("read_after_wait", _peek, r"getitem\w* is read while it is in flight"),
    ("no_rank", _own_group, "runs over 2 ranks of '3', not 2 ranks of axis 'shard'"),
    ("no_rank", _rank_as_object, "a Generator is written into the graph"),
    ("no_rank", _tensor_in_the_module, "rank is read from the module"),
    ("consistent_values", _wrong_shape, r"relu\w* is said to be f32\[7\], its operator makes f32\[3, 4\]"),
    ("consistent_values", _wrong_dtype, r"is said to be f64\[4, 4\], its operator makes f32\[4, 4\]"),
    ("consistent_values", _impossible, "its operator makes IndexError: Dimension out of range"),
    ("sharded_inputs", _full_input, r"layers.0.weight has shape \[9, 9\], its padded shard has \[2, 4\]"),
    ("stored_dtypes", _half_gradient, r"grad:layers.0.weight is bf16, the stored parameter is f32"),
    ("reduced_once", _unreduced, "grad:layers.0.weight is not reduced"),
    ("reduced_once", _twice_reduced, "grad:layers.0.weight comes out of 2 reductions"),
    ("reduced_once", _lost_gradient, "grad:layers.0.weight is None, though its parameter takes part"),
    ("reduced_once", _shared_reduction, "grad:layers.1.weight and grad:layers.0.weight come out of the same"),
    ("planned_buckets", _other_bucket, r"disagree about \['layers.\d.weight', 'layers.\d.weight'\]"),
    ("planned_buckets", _unplanned, "is no bucket of the plan, or one that was seen before"),
    (
        "planned_order",
        _swapped,
        r"where the plan has 'start' of 'reduce layers.2 in backward'",
    ),
    ("planned_order", _forgotten_event, "the graph starts and waits 6 times, the plan 5 times"),
    ("live_memory", _early_gather, r"240 bytes of gathered parameters are alive at once, the plan accounts for 160"),
]


@pytest.mark.parametrize(("rule", "corrupt", "message"), CORRUPTIONS, ids=[c[1].__name__[1:] for c in CORRUPTIONS])
def test_a_corrupted_program(rule: str, corrupt: Callable[[Program], None], message: str) -> None:
    """With and without known results of operators."""
    program, made = copied(_scheduled()), Made()
    verify(program, "nobody", complete=True, made=made)
    corrupt(program)
    for known in (None, made):
        with pytest.raises(PassError, match=message) as caught:
            verify(program, "my-pass", made=known)
        assert (caught.value.rule, caught.value.author) == (rule, "my-pass")
        assert str(caught.value).startswith(f"my-pass broke the rule {rule} in ")


def test_every_rule_is_tested() -> None:
    tested = {rule for rule, _, _ in CORRUPTIONS} | {"freed_at_last_use"}
    assert tested == {rule.__name__ for rule in (*ALWAYS, *LOWERED)} | set(ESTABLISHED)


def test_every_rule_has_a_description() -> None:
    for rule in (*ALWAYS, *LOWERED, *ESTABLISHED.values()):
        assert re.fullmatch(r"[A-Z].*\.", rule.__doc__ or ""), rule


def test_the_message() -> None:
    """The rule, the pass, and the nodes around the fault."""
    program = through(captured(Blocks(1), BATCH), "reorder")
    _dropped_wait(program)
    with pytest.raises(PassError) as caught:
        verify(program, "forget-a-wait")
    assert_expected_inline(
        str(caught.value),
        """\
forget-a-wait broke the rule waited_once in forward: f32[4, 4] is waited for 0 times
waited_once: Every tensor that a collective makes is waited for exactly once.
      %0: f32[2, 4] = param:layers.0.weight
      %1: f32[3, 4] = input:0
--> * %3: f32[4, 4] = all_gather_into_tensor(%0, 2, shard)  # layers.0 [gather layers.0 in forward]
      %5: f32[4, 4] = t(%3)  # layers.0
      %6: f32[3, 4] = mm(%1, %5)  # layers.0
      %7: f32[3, 4] = relu(%6)""",
    )


@pytest.mark.parametrize("planner", [COALESCED, PACKED], ids=["coalesced", "packed"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_correct_programs(planner: MakePlan, world_size: int) -> None:
    """The default passes violate no rule."""
    program = captured(Blocks(3, bias=True), BATCH, world_size=world_size)
    run_pipeline(Pipeline().replace("plan", MakePlan(planner)), program, Observer("each"))


# Levels.


@dataclass(frozen=True)
class _Corrupt(Pass):
    """Corrupts the program before partition and, with `repair`, fixes it in a later pass."""

    name: ClassVar[str] = "corrupt"

    def rewrite(self, program: Program) -> int:
        (wait, *_) = calls(program.phases["joint"], "wait_tensor")
        with wait.graph.inserting_after(wait):
            emit(wait.graph, WAIT, wait.all_input_nodes[0])
        return 1


@dataclass(frozen=True)
class _Repair(Pass):
    """Erases unused waits."""

    name: ClassVar[str] = "repair"

    def rewrite(self, program: Program) -> int:
        unused = [node for node in calls(program.phases["joint"], "wait_tensor") if not node.users]
        for node in unused:
            node.graph.erase_node(node)
        return len(unused)


def _run(pipeline: Pipeline, level: Level) -> None:
    run_pipeline(pipeline.replace("plan", MakePlan(COALESCED)), captured(Blocks(2), BATCH), Observer(level))


def test_levels() -> None:
    """`each` finds faults between two passes, `ends` faults at the end, `off` none."""
    mended = Pipeline().insert(_Repair(), after="insert-collectives").insert(_Corrupt(), after="insert-collectives")
    with pytest.raises(PassError, match="corrupt broke the rule waited_once in joint"):
        _run(mended, "each")
    _run(mended, "ends")
    _run(mended, "off")


@dataclass(frozen=True)
class _Scale(Pass):
    """Returns a gradient that was not reduced."""

    name: ClassVar[str] = "unreduced"

    def rewrite(self, program: Program) -> int:
        _unreduced(program)
        return 1


def test_ends_and_off() -> None:
    broken = Pipeline().insert(_Scale(), after="reorder")
    with pytest.raises(PassError, match="the last pass broke the rule reduced_once in backward"):
        _run(broken, "ends")
    _run(broken, "off")


def test_a_needed_pass_is_disabled() -> None:
    """Lowering requires the rules that it establishes."""
    with pytest.raises(PassError, match="the rule sharded_inputs in forward: param:"):
        _run(Pipeline().disable("insert-collectives"), "ends")


# The executor's lines.


def _lowered() -> Program:
    program = through(captured(Blocks(2), BATCH), "reorder")
    compiled: dict[str, RegionCall] = {}
    lower(program, compiler_for("eager"), compiled)
    return program


def _executor(program: Program, phase: str = "forward") -> Executor:
    executor = program.phases[phase].module
    assert isinstance(executor, Executor)
    return executor


def test_the_executor_frees() -> None:
    program = _lowered()
    verify_lowered(program)
    for phase in program.phases:
        assert not list(wrong_frees(_executor(program, phase).lines))


def _freed(lines: Sequence[Line], at: Callable[[Line], bool], frees: Callable[[Line], tuple[str, ...]]) -> list[Line]:
    """Return the lines with other frees on the first line that `at` selects."""
    index = next(i for i, line in enumerate(lines) if at(line))
    return [*lines[:index], replace(lines[index], frees=frees(lines[index])), *lines[index + 1 :]]


def test_a_value_that_is_never_freed() -> None:
    lines = _executor(_lowered()).lines
    (found,) = wrong_frees(_freed(lines, lambda line: isinstance(line, WaitLine), lambda line: ()))
    gather = next(line.results[0] for line in lines if isinstance(line, Start))
    assert found == (f"{gather} is never freed", next(i for i, line in enumerate(lines) if isinstance(line, WaitLine)))


def test_a_value_that_is_freed_too_early() -> None:
    lines = _executor(_lowered()).lines
    call = next(line for line in lines if isinstance(line, CallLine))
    early = _freed(lines, lambda line: isinstance(line, Take), lambda line: call.frees)
    assert (f"{call.frees[0]} is read after it was freed", lines.index(call)) in list(wrong_frees(early))


def test_a_value_that_is_freed_too_late() -> None:
    lines = _executor(_lowered()).lines
    index = next(i for i, line in enumerate(lines) if isinstance(line, WaitLine))
    (gathering,) = lines[index].frees
    late = _freed(lines, lambda line: isinstance(line, WaitLine), lambda line: ())
    late[index + 1] = replace(late[index + 1], frees=(*late[index + 1].frees, gathering))
    assert list(wrong_frees(late)) == [(f"{gathering} outlives its last use", index)]


def test_wrong_frees_are_reported() -> None:
    program = _lowered()
    executor = _executor(program)
    executor.lines = tuple(_freed(executor.lines, lambda line: isinstance(line, WaitLine), lambda line: ()))
    shown = r"(?s)rule freed_at_last_use in forward: \w+ is never freed.*\n--> wait_\w+ = torch.ops"
    with pytest.raises(PassError, match=shown):
        verify_lowered(program)
