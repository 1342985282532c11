"""Check the rules of `graphshard.pipeline.rules` and say what is wrong, where, and whose pass did it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from graphshard.errors import PassError
from graphshard.ir.printer import print_nodes_around
from graphshard.ir.program import Program
from graphshard.pipeline.graph_rules import Checked
from graphshard.pipeline.rules import ALWAYS, ESTABLISHED, LOWERED, REMEMBERING, REQUIRED, RememberingRule
from graphshard.pipeline.violations import Rule, Violation


def verify(program: Program, author: str, *, complete: bool = False, checked: Checked | None = None) -> None:
    """Check every rule that holds at this stage.

    Args:
        author: the pass that made the program what it is.
        complete: no pass follows, so that every rule a program needs to be lowered must hold.
        checked: calls that were found right at earlier stages of this program, which are not made again.

    Raises:
        PassError: names the first rule that is broken, the pass, and the nodes around the fault.
    """
    later = program.established | set(REQUIRED if complete else ())
    told = (_told(rule, checked) for rule in REMEMBERING)
    _check(program, author, [*ALWAYS, *told, *(rule for name, rule in ESTABLISHED.items() if name in later)])
    for name, phase in program.phases.items():
        try:
            phase.module.graph.lint()
        except RuntimeError as error:
            raise PassError(f"{author} left a broken {name} graph: {error}") from error


def verify_lowered(program: Program) -> None:
    """Check the executors, which run; raises `PassError` as `verify` does."""
    _check(program, "lower", LOWERED)


def _told(rule: RememberingRule, checked: Checked | None) -> Rule:
    """A rule that knows what was right at earlier stages."""

    @functools.wraps(rule)
    def knowing(program: Program, phase_name: str) -> Iterator[Violation]:
        return rule(program, phase_name, checked)

    return knowing


def _check(program: Program, author: str, rules: Iterable[Rule]) -> None:
    for rule in rules:
        for phase_name, phase in program.phases.items():
            for violation in rule(program, phase_name):
                around = f"\n{print_nodes_around(phase, violation.node)}" if violation.node is not None else ""
                raise PassError(
                    f"{author} broke the rule {rule.__name__} in {phase_name}: {violation.message}\n"
                    f"{rule.__name__}: {rule.__doc__}{around}{violation.excerpt}",
                    rule=rule.__name__,
                    author=author,
                )
