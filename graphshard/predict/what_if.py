"""The largest batch and the smallest mesh that fit into memory: guessed from a straight line, and then predicted.

Memory grows with the batch in a straight line, and with the share of the state that a rank has: a + b / ranks. Two
predictions give the line. A third one, at what should fit just so, is the answer, or corrects the line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import Unpack

from graphshard.cost.profile import Hardware, load_profile
from graphshard.errors import ArgumentError, GraphshardError
from graphshard.ir.mesh import MOST_RANKS, MeshLike
from graphshard.options.options import check_names, takes_options
from graphshard.options.simulated_mesh import Parallelize
from graphshard.predict.answers import Answer, Fit, Outcome, Scaled, WhatIf, outcome_of, reason_of
from graphshard.predict.explanation import Explanation
from graphshard.predict.step_changes import Case, Change, changes_of, check_about
from graphshard.predict.study import Study, changed
from graphshard.predict.training_config import ExplainArguments, Training, chosen
from graphshard.utils.argument_validation import check_count, check_function
from graphshard.utils.text import brief

# Predictions until the answer is what is known to fit; and how many times the batch is tried at most.
_TRIES, _TIMES = 6, 1024


@dataclass(frozen=True)
class Found:
    """What fits, or why it is not known."""

    outcome: Outcome | None
    why: str = ""


def largest(at: Callable[[int], Outcome | str], batch: int) -> Found:
    """The largest batch that fits.

    Args:
        at: predicts a batch, or says why it cannot be.
        batch: to begin with.
    """
    most = batch * _TIMES
    known: dict[int, Outcome] = {}
    fits, too_many, guess = 0, most + 1, batch
    for _ in range(_TRIES):
        found = at(guess)
        if isinstance(found, str):
            return Found(known.get(fits), f"batch {guess}: {found}")
        known[guess] = found
        if found.fits:
            fits = max(fits, guess)
        else:
            too_many = min(too_many, guess)
        if too_many - fits == 1:
            break
        if len(known) == 1:
            guess = 2 * batch if found.fits else batch // 2
            continue
        line = _line(known, room=found.memory_capacity_bytes)
        guess = min(max(line, fits), too_many - 1)  # between what is known
        if guess == fits:  # the next one would not fit, by the line
            too_many = fits + 1
            break
    if not fits:
        return Found(None, "" if too_many == 1 else f"batch {too_many} does not fit")
    if fits == most:
        return Found(known[fits], f"more than {most} were not tried")
    return Found(known[fits], "" if too_many - fits == 1 else f"up to {too_many - 1} may fit, which were not tried")


def _line(known: dict[int, Outcome], *, room: float) -> int:
    """The largest batch that fits by the line through the two predictions that are closest to the room."""
    near = sorted(known, key=lambda batch: abs(known[batch].peak_memory_bytes - room))[:2]
    low, high = sorted(near)
    slope = (known[high].peak_memory_bytes - known[low].peak_memory_bytes) / (high - low)
    if slope <= 0:
        return max(known) * _TIMES
    return math.floor(low + (room - known[low].peak_memory_bytes) / slope)


def smallest(at: Callable[[int], Outcome | str], ranks: int) -> Found:
    """The smallest number of ranks that fits, by halves or doubles of the given one.

    Args:
        at: predicts a number of ranks, or says why it cannot be.
        ranks: to begin with.
    """
    found = at(ranks)
    if isinstance(found, str):
        return Found(None, found)
    if found.fits:
        halves = [ranks >> power for power in range(1, ranks.bit_length()) if ranks % (1 << power) == 0]
        # Of those that fit by the line from the smallest on: the first is the answer, if the line is right.
        for count in reversed([half for half in halves if _held(found, half) <= found.memory_capacity_bytes]):
            fewer = at(count)
            if not isinstance(fewer, str) and fewer.fits:
                return Found(fewer)
        return Found(found)
    for _ in range(_TRIES):
        count = _enough(found)
        if count > MOST_RANKS:
            break
        found = at(count)
        if isinstance(found, str) or found.fits:
            return Found(None, found) if isinstance(found, str) else Found(found)
    return Found(None)


def _held(known: Outcome, ranks: int) -> float:
    """What a rank holds on so many, by the line."""
    return known.peak_memory_bytes + known.state_bytes * (known.num_ranks / ranks - 1)


def _enough(known: Outcome) -> int:
    """A power of two times the ranks, on which it fits by the line; more than there may be, if that is nowhere."""
    room = known.memory_capacity_bytes - (known.peak_memory_bytes - known.state_bytes)
    if room <= 0:
        return MOST_RANKS + 1
    return int(known.num_ranks * 2 ** max(1, math.ceil(math.log2(known.state_bytes / room))))


# Numbers of ranks that scaling is predicted for, and how many may be asked for.
RANKS = (64, 256, 1024, 4096)
_MOST_ROWS = 100


@functools.partial(takes_options, also=(Training,))
def what_if(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    hardware: Hardware = "h100",
    network: str = "isolated",
    changes: Sequence[str] | None = None,
    ranks: Sequence[int] = RANKS,
    show: Callable[[str], None] = lambda _: None,
    every_block: bool = False,
    parallelize: Parallelize | None = None,
    device: str | None = None,
    **options: Unpack[ExplainArguments],
) -> WhatIf:
    """Predict a training step, and what it would be if one thing were another: what helps, what fits, how it scales.

    Arguments that are not described here are those of `graphshard.predict`.

    Args:
        model, mesh, example_inputs, example_kwargs, hardware, network: of the step that changes are compared with.
        changes: kinds of changes to predict, of "batch", "mesh", "reshard", "activation", "offload", "precision",
            "backend", "accumulate", "optimizer", "network" and "hardware"; None is all. Of each kind those are tried
            that make sense for the step: twice and half the batch, replicas with shards in a node, all of the known
            GPUs, and so on.
        ranks: numbers of ranks for which the same step is predicted; () is none.
        show: told what is being done.
        every_block, parallelize, device: as for `explain`.

    Raises:
        ArgumentError: an argument is wrong. A change that cannot be made is no error: `WhatIf.left_out` says why.
        CaptureError: the module cannot be captured from the example inputs.
    """
    check_names(what_if, options)
    about = check_about(changes)
    check_function("show", show, "print")
    program, training = chosen(options)
    inputs = tuple(example_inputs or ()), dict(example_kwargs or {})
    study = Study(
        model,
        example_inputs,
        example_kwargs,
        program,
        training,
        show=show,
        every_block=every_block,
        parallelize=parallelize,
        device=device,
    )
    case = Case(inputs, mesh, load_profile(hardware), network, program, training)
    return answer(study, case, about, ranks)


def answer(study: Study, case: Case, about: Sequence[str], ranks: Sequence[int]) -> WhatIf:
    """All answers about a case.

    Args:
        study: of the case.
        about: kinds of changes.
        ranks: numbers of ranks to scale to.
    """
    _check_ranks(ranks)
    asked = _Asked(study, case)
    base = asked.base
    here, left_out = outcome_of(base, case.batch), []
    answers = []
    fits = [_largest(asked, case)]
    for change in changes_of(case, about):
        found = asked.predicted(change.case, change.name)
        if isinstance(found, Explanation):
            if change.about == "activation" and case.batch is not None:
                fits.append(_largest(asked, change.case, change.name))
            answers.append(_answer(base, found, change, case))
        else:
            left_out.append(f"{change.name}: {found}")
    fits.append(_smallest(asked))
    scaling, gone = _scaling(asked, ranks)
    return WhatIf(
        base=base,
        here=here,
        changes=tuple(sorted(answers, key=lambda each: (not each.outcome.fits, -each.gain))),
        fits=tuple(fits),
        scaling=scaling,
        left_out=(*left_out, *gone),
    )


class _Asked:
    """Predictions that were made; each once. Programs of the others than the base are let go."""

    def __init__(self, study: Study, case: Case) -> None:
        self.case = case
        self._study = study
        self._by_batch = {case.batch: study}
        self.base: Explanation = study.explain(case.mesh, case.profile, case.network)
        self._known = [(case, outcome_of(self.base, case.batch))]

    def predicted(self, case: Case, name: str) -> Explanation | str:
        """A prediction, or why there is none."""
        if case.batch not in self._by_batch:
            args, kwargs = case.inputs
            self._by_batch[case.batch] = Study(
                self._study.model,
                args or None,
                kwargs or None,
                self.case.options,
                self.case.training,
                show=self._study.show,
                every_block=self._study.every_block,
                parallelize=self._study.parallelize,
                device=self._study.device,
            )
        study = changed(self._by_batch[case.batch], case.options, case.training, name)
        try:
            found = study.explain(case.mesh, case.profile, case.network)
        except GraphshardError as error:
            return str(error)
        if case.mesh is not self.case.mesh:
            study.forget(case.mesh)
        self._known.append((case, outcome_of(found, case.batch)))
        return found

    def outcome(self, case: Case, name: str) -> Outcome | str:
        """What is kept of a prediction, or why there is none."""
        for other, known in self._known:
            if case.is_like(other):
                return known
        found = self.predicted(case, name)
        return found if isinstance(found, str) else self._known[-1][1]


def _answer(base: Explanation, found: Explanation, change: Change, case: Case) -> Answer:
    gain = found.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu - 1
    price = case.training.price if change.about == "hardware" else None
    outcome = outcome_of(found, change.case.batch)
    reason = reason_of(base, found, gain=gain, note=change.note, price=price)
    return Answer(change.about, change.name, gain, outcome, reason)


def _largest(asked: _Asked, case: Case, name: str = "") -> Fit:
    """The largest batch of a rank that fits.

    Args:
        name: of the change that the case is.
    """
    what = f"the largest batch with {name}" if name else "the largest batch"
    batch = case.batch
    if batch is None:
        return Fit(what, None, "the inputs have no tensor with a batch")
    if case.training.global_batch is not None:  # which other batches need not divide
        case = case.with_training(global_batch=None, accumulate=asked.base.microbatches)
    label = ", ".join(filter(None, (name, "largest batch")))
    found = largest(lambda count: asked.outcome(case.with_batch(count), label), batch)
    return _settled(what, found, "one sequence for each rank is too large")


def _smallest(asked: _Asked) -> Fit:
    """The smallest mesh that fits, by halves or twice the ranks."""
    ranks, what = asked.base.num_ranks, "the smallest mesh"
    if asked.case.with_ranks(ranks) is None:
        return Fit(what, None, "mesh is a DeviceMesh, which exists; give its shape to see others")

    def at(count: int) -> Outcome | str:
        case = asked.case if count == ranks else asked.case.with_ranks(count)
        return f"there is no such mesh of {count} ranks" if case is None else asked.outcome(case, what)

    return _settled(what, smallest(at, ranks), "what is not sharded is too large")


def _settled(what: str, found: Found, otherwise: str) -> Fit:
    return Fit(what, found.outcome, found.why or ("" if found.outcome else otherwise))


def _scaling(asked: _Asked, ranks: Sequence[int]) -> tuple[tuple[Scaled, ...], list[str]]:
    """The step on other numbers of ranks, with its own among them; and why some are missing."""
    rows, left_out = [], []
    base = asked.base
    for count in sorted({*ranks, base.num_ranks}) if ranks else ():
        case = asked.case if count == base.num_ranks else asked.case.with_ranks(count)
        found = asked.outcome(case, "scaling") if case else "there is no such mesh with the given inner axes"
        if isinstance(found, Outcome):
            rows.append(Scaled(count, found, found.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu))
        else:
            left_out.append(f"{count} ranks: {found}")
    return tuple(rows), left_out


def _check_ranks(ranks: object) -> None:
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence) or len(ranks) > _MOST_ROWS:
        raise ArgumentError(
            f"ranks must be a list of at most {_MOST_ROWS} numbers of ranks such as [64, 1024], got {brief(ranks)}."
        )
    for count in ranks:
        check_count("ranks", count, most=MOST_RANKS, what="number of ranks, or several, such as [64, 1024]")
