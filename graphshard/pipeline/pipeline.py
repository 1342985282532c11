"""The order of compilation, on one screen, how users change it, and other backwards of a program."""

from __future__ import annotations

import difflib
import inspect
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from types import MappingProxyType
from typing import Any

from graphshard.errors import ArgumentError, GraphshardError, PassError
from graphshard.ir.graph import fake
from graphshard.ir.instantiate_blocks import instantiate_all_blocks, instantiate_blocks
from graphshard.ir.program import Phase, Planner, Program
from graphshard.ir.repeats import BlocksDifferError
from graphshard.ir.strides import restride
from graphshard.lower.backends import compiler_for
from graphshard.lower.regions import list_calls, lower, outline
from graphshard.passes import (
    AccumulateGradients,
    ActivationCheckpointing,
    Bucketing,
    CoalesceModelCollectives,
    DropUnusedTangents,
    InsertCollectives,
    MakePlan,
    MixedPrecision,
    OverlapModelCollectives,
    Partition,
    Pass,
    Reorder,
    ReshardAfterForward,
)
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.memory_policy import decide, same_share
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.template_schedule import folded_plan
from graphshard.utils.progress import check_cancelled, collector_paused
from graphshard.utils.text import brief

DEFAULT_PASSES: tuple[Pass, ...] = (
    InsertCollectives(),  # parameters become shards
    MixedPrecision(),  # storage dtype at the edges, so that gathers carry the compute dtype
    ReshardAfterForward(),  # marks values that the partitioner must recompute or save
    Partition(),  # joint -> forward + backward
    DropUnusedTangents(),  # outputs that are not differentiated cost nothing in backward
    OverlapModelCollectives(),  # the model's own collectives overlap compute that does not need them
    CoalesceModelCollectives(),  # collectives that remain synchronous share launches
    MakePlan(),  # which collectives travel together, and when
    Bucketing(),  # merge collectives into buckets
    Reorder(),  # start and wait for them when the plan says
)


@dataclass(frozen=True)
class Pipeline:
    """The passes between capture and lowering, in order. Edits return a new pipeline; names must exist.

    passes = graphshard.Pipeline().insert(MyPass(), after="partition").disable("reorder")
    graphshard.compile(model, mesh, passes=passes)
    """

    passes: tuple[Pass, ...] = DEFAULT_PASSES

    def __post_init__(self) -> None:
        if not isinstance(self.passes, (list, tuple)):
            raise ArgumentError(f"passes of a pipeline must be a tuple of passes, got {brief(self.passes)}.")
        object.__setattr__(self, "passes", tuple(self.passes))
        for index, step in enumerate(self.passes):
            _check_new("passes", step, self.passes[:index])

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __str__(self) -> str:
        """One line per pass: name, first line of the docstring, and whether it may change numerics."""
        width = max(len(step.name) for step in self)
        return "\n".join(f"{step.name:{width}}  {_summary(step)}{'' if step.exact else '  [inexact]'}" for step in self)

    def insert(self, new: Pass, *, after: str | None = None, before: str | None = None) -> Pipeline:
        """Return a pipeline with another pass, after or before the pass with a name.

        Raises:
            ArgumentError: both or neither of `after` and `before` are given, no pass has the name, or `new` is not a
                pass or has a name that is taken.
        """
        if (after is None) == (before is None):
            given = f"got after={brief(after)} and before={brief(before)}"
            raise ArgumentError(f"insert {_name(new)}: give either after= or before=, the name of a pass; {given}.")
        _check_new("new", new, self.passes)
        index = self._index("before", before) if before is not None else self._index("after", after) + 1
        return Pipeline((*self.passes[:index], new, *self.passes[index:]))

    def replace(self, name: str, new: Pass) -> Pipeline:
        """Return a pipeline with another pass instead of the one named; raise `ArgumentError` as `insert` does."""
        index = self._index("name", name)
        first, rest = self.passes[:index], self.passes[index + 1 :]
        _check_new("new", new, (*first, *rest))
        return Pipeline((*first, new, *rest))

    def disable(self, *names: str) -> Pipeline:
        """Return a pipeline without the passes named; raise `ArgumentError` if a name is missing."""
        gone = {self._index("names", name) for name in names}
        return Pipeline(tuple(step for i, step in enumerate(self.passes) if i not in gone))

    def _index(self, argument: str, name: Any) -> int:
        names = [step.name for step in self.passes]
        if not isinstance(name, str) or name not in names:
            close = difflib.get_close_matches(name[:100], names, 1) if isinstance(name, str) else []
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ArgumentError(f"{argument}: the pipeline has no pass {brief(name)}. It has {', '.join(names)}.{hint}")
        return names.index(name)


def _check_new(argument: str, new: Any, others: tuple[Pass, ...]) -> None:
    if not isinstance(new, Pass) or not is_dataclass(new) or not getattr(type(new), "name", ""):
        advice = "derive a frozen dataclass from graphshard.Pass and give it a name."
        raise ArgumentError(f"{argument}: {_name(new)} is not a pass: {advice}")
    if new.name in {step.name for step in others}:
        raise ArgumentError(
            f"{argument}: the pipeline has a pass {new.name!r} already. Rename yours, or use replace()."
        )


def _name(value: object) -> str:
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return name[:80] if isinstance(name, str) else brief(value)


def _summary(step: Pass) -> str:
    """Return the first line of the docstring of the module of our pass, or else of its class."""
    module = inspect.getmodule(type(step))
    text = (module and module.__name__.startswith("graphshard") and module.__doc__) or type(step).__doc__ or ""
    return text.strip().partition("\n")[0]


@dataclass(frozen=True)
class Partitioned:
    """The backward graph after partition, and the passes that follow: the start of other backwards."""

    backward: Phase
    rest: tuple[Pass, ...]
    established: frozenset[str]

    def passes(self, used: frozenset[str], accumulate: AccumulateGradients | None) -> Iterator[Pass]:
        """Yield the passes of a backward for these tangents: gradients are dropped before others are accumulated.

        A single rank may need other tangents, so their backward is planned by unit: that plan depends on nothing but
        the collectives, and is the same on every rank that ever makes it.
        """
        yield from (replace(step, used=used) for step in self.rest if isinstance(step, DropUnusedTangents))
        if accumulate is not None:
            yield accumulate
        for step in self.rest:
            if isinstance(step, MakePlan) and accumulate is None and not isinstance(step.planner, PlanByUnit):
                step = replace(step, planner=PlanByUnit())
            if not isinstance(step, DropUnusedTangents):
                yield step


def run_pipeline(passes: Iterable[Pass], program: Program, observer: Observer) -> Partitioned | None:
    """Run all passes over a captured program, or the remaining ones over a partitioned one, in place.

    Return the start of other backwards; None if the program has no backward.
    """
    partitioned, left = None, tuple(passes)
    while True:
        if partitioned is None and "backward" in program.phases:
            partitioned = Partitioned(program.phases["backward"].clone(), left, frozenset(program.established))
        if not left:
            break
        if isinstance(left[0], ActivationCheckpointing) and left[0].policy == "auto":
            observer.show("decide what is saved")
            left = decide(left, program, run_quietly)
        elif isinstance(left[0], ActivationCheckpointing):
            left = same_share(left, program)
        run_pass(left[0], program, observer)
        left = left[1:]
    observer.end(program)
    return partitioned


def planned_by(planner: Planner, captured: Program, steps: Iterable[Pass]) -> Program:
    """Return a program by another planner, lowered for a prediction: nothing is compiled."""
    program = captured.clone()
    steps = [MakePlan(planner) if isinstance(step, MakePlan) else step for step in steps]
    run_pipeline(steps, program, Observer("off", most=0))
    lower(program, compiler_for("eager"), {})
    return program


def run_quietly(steps: tuple[Pass, ...], program: Program) -> None:
    """Run passes over a candidate, without checks and records."""
    quiet = Observer("off", most=0)
    for step in steps:
        run_pass(step, program, quiet)


def run_pass(step: Pass, program: Program, observer: Observer | None = None) -> None:
    """Run requires -> rewrite -> rules -> ensures of a pass; the observer verifies and records.

    A PassError is addressed to the author of the pass.

    Raises:
        PassError: addressed to the author of the pass.
    """
    check_cancelled()
    observer = observer or Observer("each")
    observer.show(step.name)
    start = time.perf_counter()
    doing = "requires"
    if isinstance(step, MakePlan) and step.planner is None:
        step = replace(step, planner=PlanByUnit())
    try:
        step.requires(program)
        doing = "rewrite"
        rewrites = step.rewrite(program)
        seconds = time.perf_counter() - start
        if not isinstance(rewrites, int):
            raise PassError(f"{step.name}: rewrite must return the number of rewrites, it returned {rewrites!r}")
        program.established |= step.establishes
        observer.after(program, step.name, rewrites, seconds, exact=step.exact)
        doing = "ensures"
        step.ensures(program)
    except BlocksDifferError:  # blocks differ: the whole program is compiled instead
        raise
    except Exception as error:
        observer.failed(program, step.name, error)
        if isinstance(error, GraphshardError):
            raise
        where = f"{type(step).__module__}.{type(step).__qualname__}.{doing}"
        raise PassError(f"{step.name}: {where} failed with {type(error).__name__}: {error}") from error


log = logging.getLogger(__name__)


@collector_paused()
def rerun_backward(
    partitioned: Partitioned,
    program: Program,
    used: frozenset[str],
    accumulate: AccumulateGradients | None,
    observer: Observer,
    strides: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Program:
    """Make the backward for gradients through other outputs than the likely ones, or for microbatches.

    Args:
        used: names of the tangents that arrive.
        strides: of tangents, if they differ from the likely ones.
    """
    phase = partitioned.backward.clone()
    # Autograd adds up gradients of inputs in their strides.
    free = {value for value, slot in zip(phase.results, phase.outputs) if (slot.kind, slot.of) == ("grad", "input")}
    for node, slot in phase.slot_of().items():
        if slot.kind == "tangent" and slot.name in strides:
            like = fake(node)
            if not restride(node, like.new_empty_strided(like.shape, strides[slot.name]), free):
                log.info("the gradient of output %s is copied to other strides: sums may be added otherwise", slot.name)
    variant = replace(
        program,
        phases={"backward": phase},
        plan=None,
        history=[],
        established=set(partitioned.established),
        differentiated=phase.differentiated,
    )
    for step in partitioned.passes(used, accumulate):
        run_pass(step, variant, observer)
    observer.end(variant)
    return variant


def finish_template(planned: Program, passes: Sequence[Pass], observer: Observer) -> Program:
    """Run the passes after the plan; of a program of few of many equal blocks, return the program of all, outlined.

    Where passes treat blocks differently, they run on all blocks. `planned` stays as it is.
    """
    if planned.few is None:
        program = planned.clone()
    else:
        num_copies = len(planned.few.repeats.missing)
        try:
            program, quiet = planned.clone(), replace(observer)
            if planned.plan is not None:
                program.plan = folded_plan(planned.plan, planned)
            for step in passes:
                run_pass(step, program, quiet)
            quiet.end(program)
            outline(program)
            start = time.perf_counter()
            program = instantiate_blocks(program, scheduled=True)
            program.plan = planned.plan
            list_calls(program)
            text = f"the program of all {planned.few.repeats.groups} groups of blocks: see the stage lower\n"
            observer.note(program, "stamp", num_copies, time.perf_counter() - start, text=text)
            return program
        except BlocksDifferError as error:
            log.info("passes are of every block: %s", error)
        start = time.perf_counter()
        program = instantiate_all_blocks(planned)
        observer.after(program, "stamp", num_copies, time.perf_counter() - start)
    for step in passes:
        run_pass(step, program, observer)
    observer.end(program)
    return program
