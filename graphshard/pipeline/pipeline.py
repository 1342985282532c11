"""The order of compilation, on one screen, and how users change it."""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from graphshard.errors import ArgumentError, GraphshardError, PassError
from graphshard.ir.program import Phase, Program
from graphshard.ir.repeats import BlocksDifferError
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
from graphshard.utils.progress import check_cancelled
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
        raise ArgumentError(
            f"{argument}: {_name(new)} is not a pass: derive a frozen dataclass from graphshard.Pass and give it "
            "a name."
        )
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
    return text.strip().splitlines()[0] if text.strip() else ""


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

    Returns:
        the start of other backwards; None if the program has no backward.
    """
    partitioned, left = None, tuple(passes)
    while True:
        if partitioned is None and "backward" in program.phases:
            partitioned = Partitioned(program.phases["backward"].clone(), left, frozenset(program.established))
        if not left:
            break
        if isinstance(left[0], ActivationCheckpointing):
            auto = left[0].policy == "auto"
            left = decided(left, program, observer.show) if auto else same_share(left, program)
        run_pass(left[0], program, observer)
        left = left[1:]
    observer.end(program)
    return partitioned


def decided(passes: tuple[Pass, ...], program: Program, show: Callable[[str], None]) -> tuple[Pass, ...]:
    """Replace the first pass, `ActivationCheckpointing("auto")`, by the best policy, see `decide`.

    Args:
        show: called with a name of the step.
    """

    def run(steps: tuple[Pass, ...], candidate: Program) -> None:
        quiet = Observer("off", most=0)
        for step in steps:
            run_pass(step, candidate, quiet)

    show("decide what is saved")
    return decide(passes, program, run)


def run_pass(step: Pass, program: Program, observer: Observer | None = None) -> None:
    """Run requires -> rewrite -> rules -> ensures of a pass; the observer verifies and records.

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
