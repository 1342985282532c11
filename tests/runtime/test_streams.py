"""Programs bound for CUDA devices synchronize streams correctly, and the race detector finds faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard import Pipeline
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.ir import operators
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import UPLOAD
from graphshard.ir.program import Phase, Program
from graphshard.lower.executor import CallLine, Executor, Line, Start, WaitLine, _with_frees
from graphshard.lower.line_rewrites import Taken, hand_over_gradients
from graphshard.passes import MakePlan, OffloadActivations, OffloadParameters
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from tests.distributed.twins import BF16, FP32
from tests.helpers import Blocks
from tests.ranks import FakeWorld
from tests.streams import COMPUTE, CUDA, HOST, KEPT, Event, Machine, problems, run

COSTS = Costs(load_profile("h100"), mesh=Mesh.of_shape(2))
PLANNERS = {
    "by unit": PlanByUnit(),
    "coalesced": PlanByUnit(pack_gathers_below=0, pack_reductions_below=0),
    "by cost": PlanByCost(COSTS, worth=0.0),
}
SHAPES: dict[str, tuple[int, ...]] = {"plain": (2,), "HSDP": (2, 2)}


@dataclass(frozen=True)
class Bound:
    """A phase bound to process groups."""

    program: Program
    phase: Phase

    @property
    def lines(self) -> Sequence[Line]:
        executor = self.phase.module
        assert isinstance(executor, Executor)
        return executor.lines

    @property
    def inputs(self) -> list[str]:
        """Return where inputs live: the model keeps parameters and buffers, on the host if they are offloaded."""
        away = self.program.on_host
        return [HOST if s.kind == "saved" and s.name in away else self._place(s.kind) for s in self.phase.inputs]

    def _place(self, kind: str) -> str:
        home = HOST if self.program.offloaded and kind in ("param", "part") else COMPUTE
        return KEPT + home if kind in ("param", "part", "buffer", "input") else home

    def problems(self, change: Callable[[str], str] = lambda code: code, **given: Any) -> list[str]:
        return self.run(change, **given).problems

    def run(self, change: Callable[[str], str] = lambda code: code, **given: Any) -> Machine:
        outputs, away = self.phase.outputs, self.program.on_host
        given["unread"] = [place for place, s in enumerate(outputs) if s.kind == "saved" and s.name in away]
        return run(self.lines, self.inputs, change=change, offloaded=self.program.offloaded, **given)


def bound(
    world: FakeWorld,
    shape: tuple[int, ...] = (2,),
    *,
    planner: Any = PLANNERS["by unit"],
    offload: bool = False,
    cast_on_host: bool = False,
    saved_on_host: bool = False,
    setting: Callable[[Any, bool], None] | None = None,
    units: int = 4,
    **options: Any,
) -> list[Bound]:
    """Return all phases of three steps, or of three microbatches with a setting."""
    world(torch.Size(shape).numel())
    passes = Pipeline().replace("plan", MakePlan(planner))
    if offload:
        passes = passes.insert(OffloadParameters(always=True, cast_on_host=cast_on_host), before="plan")
    if saved_on_host:
        passes = passes.insert(OffloadActivations(least=1), before="plan")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options = {"backend": "eager", "hardware": "h100", **options}
    model = graphshard.compile(Blocks(units, 8, bias=True), mesh, passes=passes, **options)
    for number in range(3):
        if setting is not None:
            setting(model, number == 2)
        model(torch.ones(3, 8)).sum().backward()
    (program,) = graphshard.programs(model)
    (installed,) = model._graphshard.executables.programs
    backwards = list(installed.executable._backwards.values())
    return [Bound(program, phase) for phase in (program.phases["forward"], *backwards)]


def waits(lines: Sequence[Line]) -> Iterator[tuple[int, WaitLine, int]]:
    """Yield waits with their positions, and the starts that they wait for."""
    started = {name: place for place, line in enumerate(lines) if isinstance(line, Start) for name in line.results}
    for place, line in enumerate(lines):
        if isinstance(line, WaitLine):
            yield place, line, started[line.args[0]]


def _without(wait: WaitLine) -> Callable[[str], str]:
    """Remove a wait from the code."""
    given = re.escape(str(wait.args[0]))
    return lambda code: _changed(code, rf"torch\.ops\._c10d_functional\.wait_tensor\.default\({given}\)", wait.args[0])


def _changed(code: str, pattern: str, by: str) -> str:
    changed, count = re.subn(pattern, by, code)
    assert count == 1, (pattern, count)
    return changed


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.quick_cases("plain-by unit", "plain-coalesced", "plain-by cost", "HSDP-by unit", "HSDP-coalesced")
def test_programs(fake_world: FakeWorld, shape: tuple[int, ...], planner: Any) -> None:
    for phase in bound(fake_world, shape, planner=planner, mp_policy=BF16):
        assert list(waits(phase.lines))
        assert phase.problems() == []


def test_a_cost_based_plan_differs(fake_world: FakeWorld) -> None:
    (by_unit, _), (by_cost, _) = (bound(fake_world, planner=PLANNERS[name]) for name in ("by unit", "by cost"))
    assert by_unit.program.plan.events != by_cost.program.plan.events


@pytest.mark.parametrize("policy", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.quick_cases("plain-fp32", "HSDP-bf16", "HSDP-fp32")
def test_offloaded_programs(fake_world: FakeWorld, shape: tuple[int, ...], policy: MixedPrecisionPolicy) -> None:
    for phase in bound(fake_world, shape, offload=True, mp_policy=policy):
        assert phase.problems() == []


@pytest.mark.parametrize("setting", [None, "_no_sync"], ids=["steps", "microbatches"])
@pytest.mark.parametrize("offload", [False, True], ids=["shards on the device", "shards on the host"])
@pytest.mark.quick_cases("shards on the device-steps", "shards on the device-microbatches", "shards on the host-steps")
def test_saved_values_on_the_host(fake_world: FakeWorld, offload: bool, setting: str | None) -> None:
    phases = bound(
        fake_world, offload=offload, saved_on_host=True, setting=_no_sync if setting else None, mp_policy=BF16
    )
    for phase in phases:
        assert phase.problems() == []
    backward = phases[1]
    assert sum(where == HOST for where in backward.inputs) == len(backward.program.on_host) > 2
    arrived = r"torch\.ops\.graphshard\.arrived\.default\((\w+)\)"
    missed = backward.problems(lambda code: re.sub(arrived, r"\1", code))
    assert any(re.search("reads copy .* while copies", text) for text in missed)


@pytest.mark.parametrize("reload", [operators._reload, operators._upload])
def test_saved_values_are_complete_before_they_are_copied_back(reload: Callable[[Any, str], Any]) -> None:
    """An upload of the kind for shards would not wait for the copy to the host."""
    machine = Machine()
    with machine.copies():
        value = machine.made("saved")
        machine.writes(value, COMPUTE)
        host = operators._download(value)  # type: ignore[arg-type]
        del value
        copy = operators._arrived(reload(host, "cuda"))
        machine.reads(copy, COMPUTE)  # type: ignore[arg-type]
        operators._copies(CUDA).release()
    assert [text.split(" while ")[0] for text in machine.problems] == (
        [] if reload is operators._reload else ["copies 0 reads host 1"]
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_casts_after_reductions(fake_world: FakeWorld, shape: tuple[int, ...]) -> None:
    """They are regions on the compute stream after the wait; other compute comes before, except at the end."""
    _, backward = bound(fake_world, shape, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    last = "reduce " if len(shape) == 1 else "all_reduce "  # collective of a gradient
    found = [(*each, backward.lines) for each in waits(backward.lines) if each[1].bucket.startswith(last)]
    assert len(found) == 4
    computed = []
    for place, wait, start, lines in found:
        (reader,) = (line for line in lines[place:] if wait.results[0] in line.reads)
        assert isinstance(reader, CallLine)
        computed.append(any(isinstance(line, CallLine) for line in lines[start:place]))
        assert any("reads" in text and "while group" in text for text in backward.problems(_without(wait)))
    assert computed.count(False) <= 1
    assert backward.problems() == []


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=["one rank", "plain", "HSDP"])
def test_shards_that_are_cast_on_the_host(fake_world: FakeWorld, shape: tuple[int, ...]) -> None:
    """Each has separate pinned memory, and the host reads a shard while earlier ones are copied."""
    phases = bound(fake_world, shape, offload=True, cast_on_host=True, mp_policy=BF16)
    uploads = [line for phase in phases for line in phase.lines if getattr(line, "target", None) is UPLOAD]
    assert len(uploads) > 4
    assert {line.args[2] for line in uploads} == {torch.bfloat16}
    for phase in phases:
        assert phase.problems() == []
    arrived = r"torch\.ops\.graphshard\.arrived\.default\((\w+)\)"
    missed = phases[0].problems(lambda code: re.sub(arrived, r"\1", code))
    assert any(re.search("reads copy .* while copies", text) for text in missed)


def _no_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _no_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


@pytest.mark.parametrize(
    ("shape", "setting"), [((2,), _no_sync), ((2, 2), _no_sync), ((2, 2), _no_all_reduce)], ids=["plain", "HSDP", "one"]
)
@pytest.mark.quick_cases("plain")
def test_microbatches(fake_world: FakeWorld, shape: tuple[int, ...], setting: Callable[[Any, bool], None]) -> None:
    phases = bound(fake_world, shape, setting=setting, mp_policy=BF16)
    assert len(phases) == 5  # forward, the default backward, and three backwards of microbatches
    for phase in phases:
        assert phase.problems() == []


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_updates_in_backward(fake_world: FakeWorld, shape: tuple[int, ...]) -> None:
    """The optimizer writes shards after their other readers."""
    _, backward = bound(fake_world, shape)
    inputs = backward.phase.inputs
    taken = [
        Taken(
            place, tuple(i for i, slot in enumerate(inputs) if slot.kind in ("param", "part") and slot.name == s.name)
        )
        for place, s in enumerate(backward.phase.outputs)
        if s.kind == "grad" and s.of == "param"
    ]
    lines, groups = hand_over_gradients(backward.lines, taken)
    sources = {one.place: one.sources for one in taken}
    updates = {number: [i for place in places for i in sources[place]] for number, places in enumerate(groups)}
    assert sum(map(len, updates.values())) > 0
    freed = list(_with_frees(lines))
    assert problems(freed, backward.inputs, updates=updates) == []
    if len(shape) == 1:  # with replicas nothing arrives before all shards are gathered
        early = {
            number: [i for places in updates.values() for i in places] if number == 0 else [] for number in updates
        }
        assert any("writes input" in found for found in problems(freed, backward.inputs, updates=early))


def test_unshard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may write to them as soon as `unshard` returns."""
    for waits_for_them in (True, False):
        machine = Machine()
        if not waits_for_them:
            monkeypatch.setattr(Event, "synchronize", lambda self: None)
        with machine.copies():
            shards = [machine.made("shard", HOST) for _ in range(2)]
            copies = operators.copied_to(shards, CUDA)  # type: ignore[arg-type]
            for shard, copy in zip(shards, copies, strict=True):
                machine.reads(copy, COMPUTE)  # type: ignore[arg-type]
                machine.writes(shard, HOST)
            del copies, copy
        expected = [] if waits_for_them else [f"host writes shard {n} while copies 0 uses it" for n in (1, 2)]
        assert machine.problems == expected


# --- faults ------------------------------------------------------------------------------------------------


def _first_use(lines: Sequence[Line], wait: int) -> int:
    """Return where a wait's result, or a view of it, is first read; creating a view is not a read."""
    waited = set(lines[wait].results)
    for index, line in enumerate(lines[wait + 1 :], wait + 1):
        if waited.isdisjoint(line.reads):
            continue
        target = getattr(line, "target", None)
        schema = target._schema if isinstance(target, torch._ops.OpOverload) else None
        if schema is None or schema.is_mutable or not schema.returns[0].alias_info:
            return index
        waited.update(line.results)
    raise AssertionError("nothing reads it")


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.quick_cases("plain-coalesced", "plain-by cost", "HSDP-by unit", "HSDP-coalesced")
def test_detects_every_missing_wait(fake_world: FakeWorld, shape: tuple[int, ...], planner: Any) -> None:
    """Except waits that follow another wait of the same group for a later collective."""
    caught = 0
    for phase in bound(fake_world, shape, planner=planner):
        found = list(waits(phase.lines))
        for place, wait, start in found:
            used = _first_use(phase.lines, place)
            group = phase.lines[start].args[-1]
            covered = any(
                other != place and other < used and since >= start and phase.lines[since].args[-1] == group
                for other, _, since in found
            )
            missed = phase.problems(_without(wait))
            assert bool(missed) != covered, wait
            assert all(re.search(r"(reads .*|writes .*|is freed) while group", text) for text in missed)
            caught += bool(missed)
    assert caught


def test_detects_a_result_freed_before_its_wait(fake_world: FakeWorld) -> None:
    for phase in bound(fake_world):
        for _, wait, _ in waits(phase.lines):
            given = str(wait.args[0])
            pattern = rf"= (torch\.ops\._c10d_functional\.wait_tensor\.default\({given}\));  {given} = None"
            freed = f"= torch.ops.aten.empty.memory_format([0]);  {given} = None"
            missed = phase.problems(lambda code, p=pattern, f=freed: _changed(code, p, f))
            assert any("is freed while group" in text for text in missed), wait


def test_inputs_of_collectives_are_held_until_the_wait(fake_world: FakeWorld) -> None:
    """Packed buffers are dropped after the send, which is too early unless the process group holds them."""
    for phase in bound(fake_world, planner=PlanByUnit(pack_gathers_below=1 << 20, pack_reductions_below=1 << 20)):
        assert phase.problems() == []
        assert any("is freed while group" in text for text in phase.problems(holds=False))


def test_detects_swapped_waits(fake_world: FakeWorld) -> None:
    """With two collectives of different groups in flight, each wait is swapped for the other."""
    _, backward = bound(fake_world, (2, 2), planner=PlanByUnit(reductions_under_way=2))
    lines = backward.lines
    swapped = 0
    for place, wait, start in waits(lines):
        for other_place, other, other_start in waits(lines):
            groups = lines[start].args[-1], lines[other_start].args[-1]
            if place < other_place and other_start < place and groups[0] != groups[1]:
                first, second = (rf"wait_tensor\.default\({one.args[0]}\)" for one in (wait, other))

                def change(code: str, a: str = first, b: str = second, x: Any = wait, y: Any = other) -> str:
                    code = _changed(code, rf"torch\.ops\._c10d_functional\.{a}", _waits_for(y, x))
                    return _changed(code, rf"torch\.ops\._c10d_functional\.{b}(?!, )", _waits_for(x, y))

                assert backward.problems(change), (wait, other)
                swapped += 1
    assert swapped


def _waits_for(one: WaitLine, other: WaitLine) -> str:
    """Wait for one collective, if it is in flight, and continue with the result of another."""
    given = one.args[0]
    return f"[{given} and torch.ops._c10d_functional.wait_tensor.default({given}), {other.args[0]}][1]"


def test_detects_values_that_are_not_held_while_they_are_copied(
    fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the host; a shard that is copied to the device has a reader."""
    _, backward = bound(fake_world, offload=True)
    held = property(lambda self: [], lambda self, value: None)
    monkeypatch.setattr(operators._Copies, "held", held, raising=False)
    assert any("is freed while copies" in text for text in backward.problems())


@pytest.mark.parametrize("offload", [False, True], ids=["saved values", "shards and saved values"])
def test_memory_of_copies_is_bounded_however_far_ahead_the_host_is(fake_world: FakeWorld, offload: bool) -> None:
    """Two more units need memory for their shards in forward, and for their gradients in backward, and for no more."""

    def blocks(units: int) -> list[int]:
        phases = bound(fake_world, units=units, offload=offload, saved_on_host=True, mp_policy=BF16)
        return [phase.run().blocks.total() - phase.run().blocks[HOST] for phase in phases[:2]]

    parameters = 0 if offload else 2 * 2
    assert [many - few for few, many in zip(blocks(6), blocks(8))] == [parameters, parameters]


def test_uploads_do_not_wait_for_downloads() -> None:
    """They have separate streams; compute waits for the downloads of an earlier group."""
    machine = Machine()
    with machine.copies():
        copies = operators._copies(CUDA)
        for first in (True, False, True):
            value = machine.made("gradient")
            machine.writes(value, COMPUTE)
            operators._download(value, first)  # type: ignore[arg-type]
        downloads = machine._clock(copies.down.name)[copies.down.name]  # type: ignore[attr-defined]
        operators._upload(machine.made("shard", HOST), "cuda")  # type: ignore[arg-type]
        seen = {name: machine._clock(name)[copies.down.name] for name in (copies.up.name, COMPUTE)}  # type: ignore[attr-defined]
    assert seen == {copies.up.name: downloads - 2, COMPUTE: downloads - 2}  # type: ignore[attr-defined]


def test_detects_missing_waits_for_copies(fake_world: FakeWorld) -> None:
    forward, backward = bound(fake_world, offload=True)
    arrived = r"torch\.ops\.graphshard\.arrived\.default\((\w+)\)"
    missed = forward.problems(lambda code: re.sub(arrived, r"\1", code))
    assert any(re.search("reads copy .* while copies", text) for text in missed)
    for phase in (forward, backward):
        assert phase.problems() == []
        assert any(re.search("host writes input .* while copies", text) for text in phase.problems(finishes=False))
    assert any(re.search("host reads host .* while copies", text) for text in backward.problems(finishes=False))
