"""What happens between passes: verification, history, records. Passes and pipeline know nothing of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from graphshard.errors import PassError
from graphshard.ir.collective_regions import units_gathered
from graphshard.ir.plan import Plan
from graphshard.ir.printer import Lines, number, print_communication, print_program
from graphshard.ir.program import Program, Stage
from graphshard.lower.regions import RegionCall
from graphshard.passes import Pass
from graphshard.pipeline.few import unfold_summary
from graphshard.pipeline.graph_rules import Checked
from graphshard.pipeline.saved import saved_by_unit
from graphshard.pipeline.trace import trace_stage
from graphshard.pipeline.verify import verify, verify_lowered

log = logging.getLogger(__name__)

# off: never; ends: the captured program, and the one that is lowered; each: after every pass.
Level = Literal["off", "ends", "each"]


class Recorder(Protocol):
    """Writes down what becomes of one program."""

    def stage(self, program: Program, stage: Stage, next_pass: Pass | None) -> None:
        """A pass, or capture or lowering, is done; `next_pass` follows."""

    def failed(self, program: Program, name: str, error: Exception) -> None:
        """A pass ended with an error."""

    def finished(self, program: Program, compiled: dict[str, RegionCall]) -> None:
        """The program is lowered to these regions."""


@dataclass
class Observer:
    """Verifies a program between passes, keeps its history and has it recorded.

    Attributes:
        level: when the rules are checked.
        recorder: what writes stages down.
        passes: those that are going to run, so that a record of a stage can say what comes next.
        show: told which pass begins.
        most: operators of a program whose text the history has after each pass; None is any number. Rules that are
            checked need the text.
    """

    level: Level = "ends"
    recorder: Recorder | None = None
    passes: tuple[Pass, ...] = ()
    show: Callable[[str], None] = lambda _: None
    most: int | None = None
    _last: tuple[str, Plan | None] | None = field(default=None, init=False)
    _lines: Lines = field(default_factory=Lines, init=False)
    _checked: Checked = field(default_factory=Checked, init=False)

    def after(self, program: Program, name: str, rewrites: int, seconds: float, *, exact: bool = True) -> None:
        """A pass, or capture or lowering, has made `program` what it is."""
        stage = self.note(program, name, rewrites, seconds, exact=exact)
        if self.level == "each" or (self.level == "ends" and name == "capture"):
            verify(program, name, checked=self._checked)
        if self.level != "off":
            self._check_count(name, rewrites, (stage.text, program.plan))
        self._last = (stage.text, program.plan)

    def end(self, program: Program) -> None:
        """All passes are done; what ranks compare is written down."""
        self._lines = Lines()  # of nodes that need not stay
        if self.level != "off":
            verify(program, "the last pass", complete=True, checked=self._checked)
        self._checked = Checked()
        program.communication = print_communication(program)
        gathered = {name: units_gathered(phase, program.params) for name, phase in program.phases.items()}
        program.saved = saved_by_unit(program)
        if program.few is not None:
            unfold_summary(program, gathered)  # raises Uneven
        program.peak_gathered = {
            name: max((units for _, units in found), key=len, default=()) for name, found in gathered.items()
        }

    def lowered(self, program: Program, compiled: dict[str, RegionCall]) -> None:
        """The program is lowered: `phases` are executors, which call the regions compiled."""
        if self.level != "off":
            verify_lowered(program)
        self.note(program, "lower", program.num_regions, program.lowering_seconds, exact=True)
        if self.recorder is not None:
            self.recorder.finished(program, compiled)

    def failed(self, program: Program, name: str, error: Exception) -> None:
        """A pass raised an error; the recorder keeps it."""
        if self.recorder is not None:
            self.recorder.failed(program, name, error)

    def note(
        self, program: Program, name: str, rewrites: int, seconds: float, *, exact: bool = True, text: str = ""
    ) -> Stage:
        """Add a stage to the history, and have it recorded; nothing is verified.

        Args:
            text: what is said of the program in the place of its text.
        """
        num_nodes = sum(n.op.startswith("call") for p in program.phases.values() for n in p.module.graph.nodes)
        number(program)
        printed = self.most is None or num_nodes <= self.most or self.level != "off"
        if not text:
            text = print_program(program, self._lines) if printed else f"{num_nodes:,} operators: too many to print\n"
        stage = Stage(name, rewrites, seconds, text, num_nodes, exact)
        program.history.append(stage)
        log.info("%s: %d rewrites in %.2f s%s", name, rewrites, seconds, "" if exact else ", may change numerics")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s:\n%s", name, stage.folded)
        trace_stage(program, stage)
        if self.recorder is not None:
            self.recorder.stage(program, stage, self._next(name))
        return stage

    def _next(self, name: str) -> Pass | None:
        """The pass that follows the one named; the first after capture."""
        following = dict(zip(("capture", *(step.name for step in self.passes)), self.passes))
        return following.get(name)

    def _check_count(self, name: str, rewrites: int, now: tuple[str, Plan | None]) -> None:
        if self._last is None:
            return
        if rewrites == 0 and now != self._last:
            raise PassError(f"{name}: rewrite returned 0, but the program changed. Return the number of rewrites.")
        if rewrites != 0 and now == self._last:
            raise PassError(f"{name}: rewrite returned {rewrites}, but the program is what it was. Return 0.")
