"""Agreement of the ranks of one model on its plans, its parameters and its collectives, before programs run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from graphshard.errors import GraphBreak
from graphshard.ir.printer import dtype_name
from graphshard.ir.program import Program
from graphshard.passes import MakePlan
from graphshard.pipeline.pipeline import Pipeline
from graphshard.runtime.health_monitor import MAKES
from graphshard.runtime.peers import Peers
from graphshard.schedule.rank_consistent_planner import AgreedPlanner, agreed

# What a rank says of its trace; ranks take the largest.
_WHOLE, _RAISED, _BROKEN = range(3)


@dataclass
class Agreement:
    """Agreement of the ranks that run one runner; all of them ask in the same order.

    All ranks make a program that gathers or reduces other parameters than earlier ones, such as the first one, in the
    same call. A rank may make another one alone, as its inputs have other shapes: it does not ask then, and the program
    must communicate as an earlier one does.

    Attributes:
        peers: the other ranks that have the same pieces of parameters; None while exporting.
        everyone: all ranks that plan together, if some have other pieces; None if they are `peers`.
    """

    peers: Peers | None
    everyone: Peers | None = None
    _known: set[str] = field(default_factory=set)
    # What known programs send, in any order.
    _sent: list[frozenset[tuple[str, ...]]] = field(default_factory=list)
    # There are new programs that not all ranks are known to have bound.
    _unbound: bool = False
    # This rank has not found a program in the cache, and has not told the others, who may have found it.
    _untold: bool = False
    _pipeline: Pipeline | None = None

    @contextlib.contextmanager
    def together(self, label: str, reason: str) -> Iterator[None]:
        """Make an error while a program of `label` is made one of all ranks that make it."""
        doing, self._untold = f"{MAKES} of {label} ({reason})", False
        with contextlib.ExitStack() as stack:
            for ranks in (self._others, self.peers):
                if ranks is not None:
                    stack.enter_context(ranks.together(doing))
            yield

    def anew(self) -> Agreement:
        """Return an agreement of the same ranks, which have not agreed on anything yet."""
        return Agreement(self.peers, self.everyone)

    @property
    def _others(self) -> Peers | None:
        """`everyone`, who meet as often as the peers do."""
        if self.everyone is not None and self.peers is not None:
            self.everyone.follow(self.peers)
        return self.everyone

    def pipeline(self, passes: Pipeline) -> Pipeline:
        """Return the passes with a planner that plans alike on all ranks."""
        if self.peers is None and self.everyone is None:
            return passes

        def planning() -> Peers:
            self._tell_missing()
            return cast(Peers, self._others or self.peers)

        def share(program: Program, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            return cast("dict[str, Any]", json.loads(planning().share(lambda: json.dumps(make()))))

        if self._pipeline is None:
            self._pipeline = Pipeline(agreed(passes, share, lambda number: planning().most(number)))
        return self._pipeline

    def plan_others_like(self, program: Program) -> None:
        """Plan programs of other sizes as a program that all ranks have found in a file is planned."""
        for step in self._pipeline or ():
            planner = step.planner if isinstance(step, MakePlan) else None
            if isinstance(planner, AgreedPlanner) and program.plan is not None:
                planner.from_files.append(program.plan)

    def check(self, program: Program) -> bool:
        """Raise DivergenceError if another rank communicates otherwise; return False if no rank needed to be asked."""
        text, everyone = agreed_text(program), self._others
        if (self.peers is None and everyone is None) or text in self._known:
            return False
        self._tell_missing()
        if self.peers is not None:
            self.peers.agree(text, functools.partial(difference, self.peers.rank))
        if everyone is not None:  # ranks that have other pieces gather other parameters, among themselves
            shared = [line for line in program.communication if " as " not in line]
            everyone.agree(json.dumps([{}, shared]), functools.partial(difference, everyone.rank))
        self._know(program, text)
        return True

    def why_not_found(self, program: Program | None) -> str:
        """Return why a program that was found in the cache, or None, may not be run; "" if it may.

        A rank that has found none says so when it first needs the others, in the planner or in `check`: only then it
        knows that they make a program, too.
        """
        if program is None:
            self._untold = self.peers is not None
            return "it was not found"
        text = agreed_text(program)
        if self.peers is None or text in self._known:
            return ""
        if _sent_by(program) in self._sent:
            return "it gathers and reduces in another order than a program of this launch with the same parameters"
        if not self.peers.unanimous(text):
            return "another rank has not found it, or another one"
        self._know(program, text)
        return ""

    @property
    def is_first(self) -> bool:
        """Whether the next program is the first one, which all ranks make in the same call."""
        return not self._known

    def may_skip_trace(self, program: Program | None) -> bool:
        """Return whether a program that was found before a trace, or None, may be run.

        All ranks ask for the first program: they trace it together. Later, only ranks that have found one ask.
        """
        if self.is_first:
            return self.all_load(program)
        return program is not None and not self.why_not_found(program)

    def _tell_missing(self) -> None:
        """Tell the ranks that have found a program that this one has not, if it has not told them yet."""
        if self._untold and self.peers is not None:
            self._untold = False
            self.peers.unanimous("")

    def _know(self, program: Program, text: str) -> None:
        self._known.add(text)
        self._unbound = True
        self._sent.append(_sent_by(program))

    def all_load(self, program: Program | None) -> bool:
        """Return whether a program of a file may be run: in the first call, every rank has found the same one.

        Later ones may be run by a rank alone: ranks have compared the programs of the file when they read it.
        """
        text = agreed_text(program) if program is not None else ""
        if self.peers is not None and not self._known and not self.peers.unanimous(text):
            return False
        if program is not None:
            self._know(program, text)
        return program is not None

    def compiled(self) -> None:
        """Wait until the other ranks have compiled a new program, too; raise `PeerError` if one cannot."""
        if self.peers is not None:
            self.peers.agree("compiled", lambda *_: "")

    def bound(self) -> None:
        """Wait until the other ranks have bound a new program, too; raise `PeerError` if one cannot."""
        if self._unbound:
            if self.peers is not None:
                self.peers.agree("bound", lambda *_: "")
            self._unbound = False

    @contextlib.contextmanager
    def on_graph_breaks(self) -> Iterator[None]:
        """Split a module on all ranks if some rank cannot trace it in the block."""
        if self.peers is None or self._known:
            yield
            return

        error: GraphBreak | None = None
        try:
            yield
        except GraphBreak as found:
            error = found
        own = _WHOLE
        if error is not None:
            own = _RAISED if error.raised else _BROKEN
        most = self.peers.most(own)
        if most == _WHOLE:
            return
        if error is None:
            text = "Another rank cannot trace it.", "The log of that rank names the line."
            error = GraphBreak("forward", *text, raised="an exception", is_own=True)
        if most > _RAISED:
            error.raised = ""
        raise error


def _sent_by(program: Program) -> frozenset[tuple[str, ...]]:
    """Return what the planned collectives of a program send, however they are ordered and packed."""
    buckets = program.plan.buckets if program.plan is not None else ()
    return frozenset((b.phase, b.kind, str(b.axis), member) for b in buckets for member in b.members)


def agreed_text(program: Program) -> str:
    """Return what must be the same on all ranks: parameters that are sharded or reduced, and collectives in order."""
    parameters = {}
    for row in program.params:
        if not row.ignored:
            text = f"{dtype_name(row.dtype)}[{', '.join(map(str, row.shape))}]"
            if row.split is not None:
                text += f", of {list(row.split.shape)} {' and '.join(map(str, row.split.cuts))},"
            if row.num_shards > 1:
                text += f" in {row.num_shards} shards along dim {row.dim}"
            parameters[row.name] = text
    return json.dumps([parameters, program.communication])


def difference(me: int, first: int, theirs: str, mine: str) -> str:
    """Return how this rank's text differs from the text of the first rank."""
    (their_parameters, their_collectives), (parameters, collectives) = json.loads(theirs), json.loads(mine)
    names = dict.fromkeys([*their_parameters, *parameters])
    pairs = [(f"parameter {name}", their_parameters.get(name), parameters.get(name)) for name in names]
    longest = itertools.zip_longest(their_collectives, collectives)
    pairs += [(f"collective {index}", *pair) for index, pair in enumerate(longest)]
    where, other, own = next(pair for pair in pairs if pair[1] != pair[2])
    return (
        f"rank {me} made a different program than rank {first}; they first differ at {where}:\n"
        f"  rank {first}: {other or '(nothing)'}\n"
        f"  rank {me}: {own or '(nothing)'}\n"
        "Give every rank the same model, the same requires_grad flags and the same arguments of compile."
    )
