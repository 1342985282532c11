"""The program of a model with many equal blocks, made of a capture of a few of them.

    capture 0 1 N-3 N-2 N-1 -> passes up to the partition -> plan of all -> other passes -> regions -> stamp

It is the program that capturing all blocks makes (`tests/module/test_few_blocks.py` compares them value by value), or
`Uneven`. Where the plan, or what is gathered at once, is not the same for each block, the partitioned program is
stamped, and all else is of all blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from graphshard.frontend.signature import CaptureSpec, check_alike
from graphshard.ir.alike import few_of
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.ir.repeats import Few, Repeats, Uneven
from graphshard.ir.stamp import backward_of_all, stamp
from graphshard.lower.regions import outline
from graphshard.options.options import Options
from graphshard.passes import MakePlan, Partition, Pass
from graphshard.pipeline.few import stamped
from graphshard.pipeline.observe import Observer
from graphshard.pipeline.pipeline import Partitioned, run_pass, run_pipeline
from graphshard.repeats.find_repeats import find_repeats
from graphshard.schedule.by_unit import PlanByUnit
from graphshard.schedule.few import folded_plan
from graphshard.schedule.known import within_one_plan

log = logging.getLogger(__name__)

# "1" captures every block.
VARIABLE = "GRAPHSHARD_EVERY_BLOCK"


def repeats_of(module: nn.Module, spec: CaptureSpec, options: Options) -> Repeats | None:
    """Equal blocks of which a few are enough; None if there are none, or if options look at the model as a whole."""
    by_budget = isinstance(options.activation, (int, float)) or options.activation == "auto"
    whole = options.passes is not None or by_budget or options.dynamic_shapes is not None
    communicates = any((spec.tensor, spec.whole, spec.experts, spec.extended))
    if whole or communicates or os.environ.get(VARIABLE) == "1":
        return None
    return find_repeats(module)


@dataclass
class Short:
    """A partitioned program of few blocks, and the passes that are left."""

    program: Program
    few: Few
    passes: tuple[Pass, ...]

    def finish(self, observer: Observer) -> tuple[Program, Partitioned | Callable[[], Partitioned] | None]:
        """Run the passes that are left; the program of all blocks, and where another backward of it begins.

        Raises:
            Uneven: a program of all cannot be made.
            GraphshardError: a pass does not like the program.
        """
        program = self.program
        program.few = self.few
        begin = replace(program, phases={name: phase.clone() for name, phase in program.phases.items()})
        begin.established, begin.history = set(program.established), list(program.history)
        plans: list[Plan] = []

        def plan(step: MakePlan, program: Program) -> Plan:
            with within_one_plan():
                plans.append((step.planner or PlanByUnit())(program))
                return folded_plan(plans[-1], program)

        def partitioned() -> Partitioned:
            return Partitioned(backward_of_all(begin), self.passes, frozenset(begin.established))

        steps = [replace(s, planner=partial(plan, s)) if isinstance(s, MakePlan) else s for s in self.passes]
        alone = replace(observer)
        try:
            for step in steps:
                run_pass(step, program, alone)
            alone.end(program)
            outline(program)
            begun = time.perf_counter()
            program = stamped(program, plans[-1] if plans else None)
        except Uneven as error:
            log.info("passes are of every block: %s", error)
            return self._long(begin, plans, observer)
        text = f"the program of all {self.few.repeats.groups} groups of blocks: see the stage lower\n"
        observer.note(program, "stamp", len(self.few.repeats.missing), time.perf_counter() - begun, text=text)
        return program, partitioned if "backward" in program.phases else None

    def _long(self, begin: Program, plans: Sequence[Plan], observer: Observer) -> tuple[Program, Partitioned | None]:
        """Stamp the partitioned program; a plan that was made is taken."""
        begun = time.perf_counter()
        program = stamp(begin, self.few.repeats, self.few.params)
        observer.after(program, "stamp", len(self.few.repeats.missing), time.perf_counter() - begun)
        planned = [
            replace(step, planner=lambda _: plans[-1]) if isinstance(step, MakePlan) else step for step in self.passes
        ]
        found = run_pipeline(planned if plans else self.passes, program, observer)
        return program, None if found is None else replace(found, rest=self.passes)


def program_of_few(
    trace: Callable[[], Program],
    spec: CaptureSpec,
    repeats: Repeats,
    passes: tuple[Pass, ...],
    observer: Observer,
    title: Callable[[Program], None],
    watching: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Short:
    """Capture few blocks, and run the passes up to the partition.

    Args:
        trace: of few blocks.
        title: gives the program its name.
        watching: is around the capture.

    Raises:
        Uneven: of them the program of all cannot be told.
        GraphshardError: capture or a pass does not like the model.
    """
    at = next((index for index, step in enumerate(passes) if isinstance(step, Partition)), None)
    if at is None:
        raise Uneven("there is no partition")
    start = time.perf_counter()
    with watching():
        program = trace_few(trace, spec, repeats)
    title(program)
    observer.after(program, "capture", 0, time.perf_counter() - start)
    for step in passes[: at + 1]:
        run_pass(step, program, observer)
    return Short(program, few_of(program, repeats, spec.params), passes[at + 1 :])


def trace_few(trace: Callable[[], Program], spec: CaptureSpec, repeats: Repeats) -> Program:
    """Trace a few of equal blocks, and check that they stand for all.

    Raises:
        Uneven: they do not.
    """
    check_alike(spec, repeats)
    program = trace()
    _check(program)
    return program


def _check(program: Program) -> None:
    """Raise Uneven for what a program has besides its graph that may differ between blocks."""
    if program.checks or program.sizes:
        raise Uneven("forward depends on numbers")
