"""What the ranks of one model agree on: a name for it, its plans, its collectives.

Ranks must run the same collectives in the same order. Programs that differ are found before they run: ranks compare
hashes of what their programs communicate in the rendezvous store (`runtime/meeting.py`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.ir.errors import DivergenceError
from graphshard.ir.params import ParamRow
from graphshard.ir.printer import dtype_name
from graphshard.ir.program import Program
from graphshard.ir.torch_internals import rendezvous_store
from graphshard.passes import MakePlan, Pass
from graphshard.pipeline.pipeline import Pipeline
from graphshard.runtime.groups import is_fake, ranks_of
from graphshard.runtime.meeting import Look, Meeting
from graphshard.schedule.agreed import AgreedPlanner
from graphshard.schedule.by_cost import PlanByCost

# How long a rank waits for the others to come as far as a new program: compilation takes different times.
TIMEOUT = timedelta(minutes=10)


@dataclass
class Agreement:
    """Of one runner; all its ranks ask in the same order.

    Attributes:
        mesh: None while exporting, when there is nobody to agree with.
    """

    mesh: DeviceMesh | None
    _tag: str | None = None
    _communication: set[tuple[str, ...]] = field(default_factory=set)
    _pipeline: Pipeline | None = None
    _plans: int = 0

    def check(self, program: Program) -> None:
        """Raise `DivergenceError` if another rank communicates otherwise; what was seen before is not asked."""
        lines = tuple(program.communication)
        if lines not in self._communication:
            assert self.mesh is not None
            check_agreement(program, self.mesh, f"{self.tag()}/{len(self._communication)}", TIMEOUT)
            self._communication.add(lines)

    def check_accumulation(self, program: Program) -> None:
        """As `check`, for a program of another backward that accumulates gradients over microbatches."""
        self.check(replace(program, reason="gradients of microbatches are accumulated in another way"))

    def pipeline(self, passes: Pipeline) -> Pipeline:
        """The passes, with a planner that plans alike on all ranks."""
        if self.mesh is None:
            return passes
        if self._pipeline is None:
            self._pipeline = Pipeline(tuple(map(self._agreed, passes)))
        return self._pipeline

    def _agreed(self, step: Pass) -> Pass:
        """A planner by cost plans alike on all ranks: its plan is the first rank's."""
        if isinstance(step, MakePlan) and isinstance(step.planner, PlanByCost):
            return replace(step, planner=AgreedPlanner(step.planner, self._share))
        return step

    def _share(self, program: Program, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        assert self.mesh is not None
        self._plans += 1
        return from_first(self.mesh, f"{self.tag()}/plan-{self._plans}", TIMEOUT, program, make)

    def tag(self) -> str:
        """A name for the model that is the same on all ranks; taken at the first use, in the order of use."""
        if self._tag is None:
            assert self.mesh is not None
            self._tag = model_tag(self.mesh)
        return self._tag


def model_tag(mesh: DeviceMesh) -> str:
    """A name for a model that is the same on all ranks: how many were compiled before on this rank and this group."""
    if _is_alone(mesh):
        return ""
    # By its ranks: a mesh of two axes has no group of all of them, and its groups have other names on other ranks.
    group = hashlib.sha256(str(ranks_of(mesh)).encode()).hexdigest()[:16]
    return f"model-{group}-{rendezvous_store().add(f'graphshard/models/{group}/{mesh.get_rank()}', 1)}"


def check_agreement(program: Program, mesh: DeviceMesh, tag: str, timeout: timedelta) -> None:
    """Compare this rank's parameters and collectives with those of the other ranks of the mesh.

    Args:
        tag: names the occasion; the same on every rank.
        timeout: how long to wait for a rank that has not come as far.

    Raises:
        DivergenceError: names the rank that differs and the first line that does, or the rank that is missing.
    """
    if _is_alone(mesh):
        return
    meeting = _meeting(mesh, tag)
    text = agreed_text(program)
    meeting.store.set(f"came {meeting.rank}", "")
    look = _patience(program, mesh, meeting, timeout)
    meeting.come(text, functools.partial(_difference, meeting.rank), look)
    end = meeting.end(look)
    if end.how != "same":
        raise DivergenceError(end.message)


def agreed_text(program: Program) -> str:
    """What must be the same on all ranks: parameters that are sharded or reduced, and every collective in order."""
    parameters = {row.name: _described(row) for row in program.params if not row.ignored}
    return json.dumps([parameters, program.communication])


def _described(row: ParamRow) -> str:
    shape = f"{dtype_name(row.dtype)}[{', '.join(map(str, row.shape))}]"
    return f"{shape} in {row.num_shards} shards along dim {row.dim}" if row.num_shards > 1 else shape


def from_first(
    mesh: DeviceMesh, tag: str, timeout: timedelta, program: Program, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What the first rank of the mesh makes (plain data), on all its ranks.

    Args:
        tag, timeout: as for `check_agreement`.
        program: what it is made for.

    Raises:
        DivergenceError: the first rank is missing.
    """
    if _is_alone(mesh):
        return make()
    meeting = _meeting(mesh, tag)
    (first, *_) = ranks_of(mesh)
    if meeting.rank == first:
        made = make()
        meeting.give(json.dumps(made))
        return made
    taken = meeting.take(_patience(program, mesh, meeting, timeout))
    assert isinstance(taken, str)
    return cast("dict[str, Any]", json.loads(taken))


def _meeting(mesh: DeviceMesh, tag: str) -> Meeting:
    store = dist.PrefixStore(f"graphshard/{tag}", rendezvous_store())
    return Meeting(store, dist.get_rank(), mesh.size())


def _patience(program: Program, mesh: DeviceMesh, meeting: Meeting, timeout: timedelta) -> Look:
    """What ends a wait for the other ranks."""

    def look(waited: float) -> None:
        if waited < timeout.total_seconds():
            return
        missing = next(rank for rank in ranks_of(mesh) if not meeting.store.check([f"came {rank}"]))
        raise DivergenceError(
            f"rank {meeting.rank} has a new program to run ({program.reason}), but rank {missing} has none after "
            f"{waited:.0f} s. All ranks must make the same sequence of calls: look for a branch that depends on the "
            f"rank or on the data, or for an exception on rank {missing}."
        )

    return look


def _is_alone(mesh: DeviceMesh) -> bool:
    return mesh.size() == 1 or is_fake(mesh)


def _difference(me: int, first: int, theirs: str, mine: str) -> str:
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
