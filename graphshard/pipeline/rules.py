"""What must be true of a program between passes, one function for each rule.

A rule is named after its function, and its docstring says it. `ALWAYS` and `REMEMBERING` hold from capture on, the
latter told what was right at earlier stages. A rule of `ESTABLISHED` holds from the pass on that names it in
`establishes`, and `LOWERED` holds of the executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from graphshard.ir.program import Program
from graphshard.lower.executor import Executor
from graphshard.lower.executor_lines import print_line
from graphshard.pipeline.frees import faults
from graphshard.pipeline.graph_rules import (
    Checked,
    computed_before_use,
    consistent_values,
    no_rank,
    read_after_wait,
    saved_is_returned,
    slots_match,
    waited_once,
)
from graphshard.pipeline.sharding_rules import (
    live_memory,
    planned_buckets,
    planned_order,
    reduced_once,
    sharded_inputs,
    stored_dtypes,
)
from graphshard.pipeline.violations import Rule, Violation


def freed_at_last_use(program: Program, phase_name: str) -> Iterator[Violation]:
    """The executor frees every value at its last use and reads none that is freed."""
    executor = program.phases[phase_name].module
    assert isinstance(executor, Executor)
    for message, index in faults(executor.lines):
        shown = range(max(0, index - 3), min(len(executor.lines), index + 4))
        rows = ((i, row) for i in shown for row in print_line(executor.lines[i]))
        yield Violation(message, excerpt="".join(f"\n{'-->' if i == index else '   '} {row}" for i, row in rows))


RememberingRule = Callable[[Program, str, Checked | None], Iterator[Violation]]

ALWAYS: tuple[Rule, ...] = (
    computed_before_use,
    slots_match,
    saved_is_returned,
    waited_once,
    read_after_wait,
    no_rank,
)
REMEMBERING: tuple[RememberingRule, ...] = (consistent_values,)
_LATER: tuple[Rule, ...] = (sharded_inputs, stored_dtypes, reduced_once, planned_buckets, planned_order, live_memory)
ESTABLISHED: dict[str, Rule] = {rule.__name__: rule for rule in _LATER}
# What must hold before a program is lowered, whichever passes made it.
REQUIRED = ("sharded_inputs", "stored_dtypes", "reduced_once")
LOWERED: tuple[Rule, ...] = (
    computed_before_use,
    slots_match,
    waited_once,
    read_after_wait,
    planned_order,
    freed_at_last_use,
)
