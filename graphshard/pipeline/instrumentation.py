"""Verification, history and records between passes; neither passes nor the pipeline contain any of it.

`program.saved`, printed by `Program.saved_table()`, lists what forward saves and backward recomputes, by unit:

    unit      saved                  bytes  computed again in backward
    (root)    embedding 1             4096
    layers.0  add 1, random state 1   9152  mm 3, mul 1, native_layer_norm 1
    total                            13248
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.errors import PassError
from graphshard.ir.collective_regions import saved_values, units_gathered
from graphshard.ir.graph import base_of, is_alias, is_part, module_of
from graphshard.ir.plan import Plan
from graphshard.ir.printer import number, print_communication, print_program
from graphshard.ir.program import Program, Stage, UnitMemory
from graphshard.ir.repeat_windows import RepeatExpansion
from graphshard.ir.repeats import TEMPLATE
from graphshard.ir.units import unit_of
from graphshard.lower.regions import RegionCall
from graphshard.passes import Pass
from graphshard.pipeline.rules import Made, verify, verify_lowered
from graphshard.torch_compat.aot_autograd import run_and_save_rng_state
from graphshard.torch_compat.dynamo import CompileContext, compile_context
from graphshard.torch_compat.torch_ops import OpOverload, trace_structured
from graphshard.utils.files import BestEffort

log = logging.getLogger(__name__)

# off: never; ends: the captured program, and the one that is lowered; each: after every pass.
Level = Literal["off", "ends", "each"]
# One for the process, as torch's trace is.
_aid = BestEffort("TORCH_TRACE")


class Recorder(Protocol):
    """Writes down the stages of one program."""

    def stage(self, program: Program, stage: Stage, next_pass: Pass | None) -> None:
        """Record a stage, after a pass, capture or lowering; `next_pass` follows."""

    def failed(self, program: Program, name: str, error: Exception) -> None:
        """Record that a pass ended with an error."""

    def finished(self, program: Program, compiled: dict[str, RegionCall]) -> None:
        """Record the regions of a lowered program."""


@dataclass
class Observer:
    """Verifies a program between passes, keeps its history and has it recorded.

    Attributes:
        level: when the rules are checked.
        passes: the passes that will run, so that a record of a stage can name the next one.
        show: called with the name of each pass before it runs.
        most: number of operators up to which the history has the program's text after each pass; None for any number.
            Checking rules needs the text.
        summary: the end of all passes writes down what ranks compare, and what is saved and gathered.
    """

    level: Level = "ends"
    recorder: Recorder | None = None
    passes: tuple[Pass, ...] = ()
    show: Callable[[str], None] = lambda _: None
    most: int | None = None
    summary: bool = True
    _last: tuple[str, Plan | None] | None = field(default=None, init=False)
    _made: Made = field(default_factory=dict, init=False)

    def after(self, program: Program, name: str, rewrites: int, seconds: float, *, exact: bool = True) -> None:
        """Handle the end of a pass, of capture or of lowering."""
        stage = self.note(program, name, rewrites, seconds, exact=exact)
        if self.level == "each" or (self.level == "ends" and name == "capture"):
            verify(program, name, made=self._made)
        now = stage.text, program.plan
        if self.level != "off" and self._last is not None and (rewrites == 0) != (now == self._last):
            problem = "is what it was. Return 0." if rewrites else "changed. Return the number of rewrites."
            raise PassError(f"{name}: rewrite returned {rewrites}, but the program {problem}")
        self._last = now

    def end(self, program: Program) -> None:
        """Handle the end of all passes."""
        if self.level != "off":
            verify(program, "the last pass", complete=True, made=self._made)
        if not self.summary:
            return
        program.communication = print_communication(program)
        gathered = {name: units_gathered(phase, program.params) for name, phase in program.phases.items()}
        program.saved = saved_by_unit(program)
        if program.few is not None:
            _unfold_summary(program, gathered)  # raises BlocksDifferError
        program.peak_gathered = {
            name: max((units for _, units in found), key=len, default=()) for name, found in gathered.items()
        }

    def lowered(self, program: Program, compiled: dict[str, RegionCall]) -> None:
        """Handle the end of lowering: `phases` are executors, which call the regions compiled."""
        if self.level != "off":
            verify_lowered(program)
        self.note(program, "lower", program.num_regions, program.lowering_seconds, exact=True)
        if self.recorder is not None:
            self.recorder.finished(program, compiled)

    def failed(self, program: Program, name: str, error: Exception) -> None:
        """Record the error of a pass."""
        if self.recorder is not None:
            self.recorder.failed(program, name, error)

    def note(
        self, program: Program, name: str, rewrites: int, seconds: float, *, exact: bool = True, text: str = ""
    ) -> Stage:
        """Add a stage to the history, and have it recorded; nothing is verified. `text` replaces the program's text."""
        num_nodes = sum(n.op.startswith("call") for p in program.phases.values() for n in p.module.graph.nodes)
        number(program)
        printed = self.most is None or num_nodes <= self.most or self.level != "off"
        if not text:
            text = print_program(program) if printed else f"{num_nodes:,} operators: too many to print\n"
        stage = Stage(name, rewrites, seconds, text, num_nodes, exact)
        program.history.append(stage)
        log.info("%s: %d rewrites in %.2f s%s", name, rewrites, seconds, "" if exact else ", may change numerics")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s:\n%s", name, stage.folded)
        trace_stage(program, stage)
        if self.recorder is not None:
            following = dict(zip(("capture", *(step.name for step in self.passes)), self.passes))
            self.recorder.stage(program, stage, following.get(name))
        return stage


def trace_stage(program: Program, stage: Stage) -> None:
    """Add the stage's folded text to torch's structured trace (`TORCH_TRACE=dir`), for tlparse.

    It has the compile id of the Dynamo trace that the program is of.
    """
    name = f"graphshard_{program.title}_{len(program.history) - 1:02d}_{stage.name}"
    metadata = {"name": name, "encoding": "string"}
    traced = getattr(getattr(program.trace, "graph", None), "meta", {}).get("dynamo_compile_id")
    with contextlib.nullcontext() if traced is None else compile_context(CompileContext(traced)):
        _aid(lambda: trace_structured("artifact", lambda: metadata, payload_fn=lambda: stage.folded))


def trace_recapture(label: str, number: int, reason: str) -> None:
    """Add the reason of a recapture to torch's structured trace, under the name that Dynamo gives such reasons."""
    metadata = {"name": "recompile_reasons", "encoding": "json"}
    reasons = json.dumps([f"{label}-{number}: {reason}"])
    _aid(lambda: trace_structured("artifact", lambda: metadata, payload_fn=lambda: reasons))


def saved_by_unit(program: Program) -> tuple[UnitMemory, ...]:
    """Return the table of a program that is partitioned and not lowered yet; empty without gradients."""
    if not {"forward", "backward"} <= set(program.phases):
        return ()
    units = program.params.units
    saved: dict[str, Counter[str]] = {}
    recomputed: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    # Two saved values may share memory: the result of attention goes to two readers.
    for node in dict.fromkeys(base_of(value, is_alias) for value in saved_values(program.phases["forward"])):
        unit = unit_of(module_of(node), units)
        saved.setdefault(unit, Counter())[_operator(node)] += 1
        total[unit] += num_bytes(node)
    for node in program.phases["backward"].module.graph.nodes:
        if node.meta.get("recomputed"):
            recomputed.setdefault(unit_of(module_of(node), units), Counter())[_operator(node)] += 1
    found = dict.fromkeys(unit for unit in ("", *units) if unit in saved or unit in recomputed)
    return tuple(UnitMemory(u, dict(saved.get(u, {})), total[u], dict(recomputed.get(u, {}))) for u in found)


def _operator(node: Node) -> str:
    """Return the name of the operator that made a value; of a random one that runs again, its original name."""
    node = base_of(node)
    if is_part(node):
        if node.all_input_nodes[0].target is run_and_save_rng_state and node.args[1] == 0:
            return "random state"
        return _operator(node.all_input_nodes[0])
    operators = [a for a in (node.target, *node.args) if isinstance(a, OpOverload)]
    return operators[0]._opname if operators else str(getattr(node.target, "__name__", node.target))


def _unfold_summary(program: Program, gathered: dict[str, list[tuple[str, tuple[str, ...]]]]) -> None:
    """Expand the summaries of a program of few blocks to all blocks; raise BlocksDifferError if blocks differ there."""
    assert program.few is not None
    repeats, lines = program.few.repeats, []
    for name in program.phases:
        unfolding = RepeatExpansion(repeats, descending=name == "backward", ends=2 if name == "backward" else 1)
        sent = [line for line in program.communication if line.startswith(f"{name}: ")]
        lines += unfolding.unfold(sent) if any(map(repeats.named_groups, sent)) else sent
        if gathered[name]:
            gathered[name] = unfolding.unfold(gathered[name], lambda entry: entry[0])
    program.communication = lines
    found = {row.unit: row for row in program.saved}
    for unit in program.all_params.units:
        if repeats.has_left_out(unit):
            template = found.get(repeats.name_at(TEMPLATE, unit))
            if template is not None:
                found[unit] = replace(template, unit=unit)
    program.saved = tuple(found[unit] for unit in dict.fromkeys(("", *program.all_params.units)) if unit in found)
