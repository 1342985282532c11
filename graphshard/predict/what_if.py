"""Predict what would make a step faster, what fits, what it costs, and how it scales: `graphshard.what_if`.

    case -> base prediction -> changes, each predicted -> largest batch, smallest mesh -> other numbers of ranks

Each answer is a separate prediction, as `explain` makes it: with another plan where another plan is better. Captures,
and programs where only costs change, are shared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from typing_extensions import Unpack

from graphshard.cost.profile import Hardware, load_profile
from graphshard.errors import ArgumentError, GraphshardError
from graphshard.ir.mesh import MOST_RANKS, MeshLike
from graphshard.options.options import check_names, takes_options
from graphshard.options.simulated_mesh import Parallelize
from graphshard.predict.answers import Answer, Fit, Outcome, Scaled, WhatIf, reason_of
from graphshard.predict.explanation import Explanation
from graphshard.predict.step_changes import Case, changes_of, check_about
from graphshard.predict.study import Study
from graphshard.predict.training_config import ExplainArguments, Training, split_arguments
from graphshard.utils.argument_validation import check_count, check_function
from graphshard.utils.text import brief

# Numbers of ranks that scaling is predicted for, and how many may be given.
RANKS = (64, 256, 1024, 4096)
_MOST_ROWS = 100
# Predictions in the search for what fits, and how many times the batch is tried at most.
_TRIES, _TIMES = 6, 1024


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

    Arguments not described here are the same as for `graphshard.explain`.

    Args:
        model, mesh, example_inputs, example_kwargs, hardware, network: of the step that changes are compared with.
        changes: kinds of changes to predict, of "batch", "mesh", "reshard", "activation", "offload", "precision",
            "backend", "accumulate", "optimizer", "network" and "hardware"; None is all. Of each kind those are tried
            that make sense for the step: twice and half the batch, replicas with shards in a node, all of the known
            GPUs, and so on.
        ranks: numbers of ranks for which the same step is predicted; () is none.
        show: receives progress.
        every_block, parallelize, device: as for `explain`.

    Raises:
        ArgumentError: an argument is wrong. A change that cannot be made is no error: `WhatIf.left_out` says why.
        CaptureError: the module cannot be captured from the example inputs.
    """
    check_names(what_if, options)
    about = check_about(changes)
    check_function("show", show, "print")
    program, training = split_arguments(options)
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
    inputs = tuple(example_inputs or ()), dict(example_kwargs or {})
    return answer(study, Case(inputs, mesh, load_profile(hardware), network, program, training), about, ranks)


def answer(study: Study, case: Case, about: Sequence[str], ranks: Sequence[int]) -> WhatIf:
    """Return all answers about a case: kinds of changes, what fits, and scaling to numbers of ranks."""
    _check_ranks(ranks)
    predictions = _Predictions(study, case)
    base = predictions.base
    answers, left_out = [], []
    fits = [_largest_batch(predictions, case)]
    for change in changes_of(case, about):
        found = predictions.predict(change.case, change.name)
        if not isinstance(found, Explanation):
            left_out.append(f"{change.name}: {found}")
            continue
        if change.about == "activation" and case.batch is not None:
            fits.append(_largest_batch(predictions, change.case, change.name))
        gain = found.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu - 1
        price = case.training.price if change.about == "hardware" else None
        reason = reason_of(base, found, gain=gain, note=change.note, price=price)
        answers.append(Answer(change.about, change.name, gain, Outcome.of(found, change.case.batch), reason))
    fits.append(_smallest_mesh(predictions))
    scaling = []
    for count in sorted({*ranks, base.num_ranks}) if ranks else ():
        other = case.with_ranks(count) if count != base.num_ranks else case
        outcome = predictions.outcome(other, "scaling") if other else "there is no such mesh with the given inner axes"
        if isinstance(outcome, Outcome):
            efficiency = outcome.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu
            scaling.append(Scaled(count, outcome, efficiency))
        else:
            left_out.append(f"{count} ranks: {outcome}")
    return WhatIf(
        base=base,
        here=Outcome.of(base, case.batch),
        changes=tuple(sorted(answers, key=lambda each: (not each.outcome.fits, -each.gain))),
        fits=tuple(fits),
        scaling=tuple(scaling),
        left_out=tuple(left_out),
    )


def _check_ranks(ranks: object) -> None:
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence) or len(ranks) > _MOST_ROWS:
        raise ArgumentError(
            f"ranks must be a list of at most {_MOST_ROWS} numbers of ranks such as [64, 1024], got {brief(ranks)}."
        )
    for count in ranks:
        check_count("ranks", count, most=MOST_RANKS, what="number of ranks, or several, such as [64, 1024]")


class _Predictions:
    """Predictions, each made once. Programs of other meshes than the base's are freed."""

    def __init__(self, study: Study, case: Case) -> None:
        self.case = case
        self._study = study
        self._by_batch = {case.batch: study}
        self.base: Explanation = study.explain(case.mesh, case.profile, case.network)
        self._known = [(case, Outcome.of(self.base, case.batch))]

    def predict(self, case: Case, name: str) -> Explanation | str:
        """Return a prediction, or why there is none."""
        if case.batch not in self._by_batch:
            args, kwargs = case.inputs
            study = replace(self._study, example_inputs=args or None, example_kwargs=kwargs or None)
            self._by_batch[case.batch] = study
        study = self._by_batch[case.batch].changed(case.options, case.training, name)
        try:
            found = study.explain(case.mesh, case.profile, case.network)
        except GraphshardError as error:
            return str(error)
        if case.mesh is not self.case.mesh:
            study.forget(case.mesh)
        self._known.append((case, Outcome.of(found, case.batch)))
        return found

    def outcome(self, case: Case, name: str) -> Outcome | str:
        """Return the main numbers of a prediction, or why there is none."""
        for other, known in self._known:
            if case.is_like(other):
                return known
        found = self.predict(case, name)
        return found if isinstance(found, str) else self._known[-1][1]


def _largest_batch(predictions: _Predictions, case: Case, name: str = "") -> Fit:
    what = f"the largest batch with {name}" if name else "the largest batch"
    batch = case.batch
    if batch is None:
        return Fit(what, None, "the inputs have no tensor with a batch")
    if case.training.global_batch is not None:  # other batches need not divide it
        case = case.with_training(global_batch=None, accumulate=predictions.base.microbatches)
    label = ", ".join(filter(None, (name, "largest batch")))
    return largest(what, lambda count: predictions.outcome(case.with_batch(count), label), batch)


def _smallest_mesh(predictions: _Predictions) -> Fit:
    case, ranks, what = predictions.case, predictions.base.num_ranks, "the smallest mesh"
    if case.with_ranks(ranks) is None:
        return Fit(what, None, "mesh is a DeviceMesh, which exists; give its shape to see others")

    def at(count: int) -> Outcome | str:
        other = case if count == ranks else case.with_ranks(count)
        return f"there is no such mesh of {count} ranks" if other is None else predictions.outcome(other, what)

    return smallest(what, at, ranks)


def largest(what: str, at: Callable[[int], Outcome | str], batch: int) -> Fit:
    """Find the largest batch that fits, guessed from a straight line and then predicted.

    Memory grows with the batch in a straight line. Two predictions give the line; a third one, at what should just
    fit, is the answer, or corrects the line. `at` predicts a batch, or says why it cannot be.
    """
    most = batch * _TIMES
    known: dict[int, Outcome] = {}
    fits, too_many, guess = 0, most + 1, batch
    for _ in range(_TRIES):
        found = at(guess)
        if isinstance(found, str):
            return Fit(what, known.get(fits), f"batch {guess}: {found}")
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
        guess = min(max(_on_line(known, found.memory_capacity_bytes), fits), too_many - 1)
        if guess == fits:  # the next one would not fit, by the line
            too_many = fits + 1
            break
    if not fits:
        too_large = "one sequence for each rank is too large" if too_many == 1 else f"batch {too_many} does not fit"
        return Fit(what, None, too_large)
    if fits == most:
        return Fit(what, known[fits], f"more than {most} were not tried")
    untried = "" if too_many - fits == 1 else f"up to {too_many - 1} may fit, which were not tried"
    return Fit(what, known[fits], untried)


def _on_line(known: dict[int, Outcome], room: float) -> int:
    """Return the largest batch that fits by the line through the two predictions closest to the room."""
    low, high = sorted(sorted(known, key=lambda batch: abs(known[batch].peak_memory_bytes - room))[:2])
    slope = (known[high].peak_memory_bytes - known[low].peak_memory_bytes) / (high - low)
    if slope <= 0:
        return max(known) * _TIMES
    return math.floor(low + (room - known[low].peak_memory_bytes) / slope)


def smallest(what: str, at: Callable[[int], Outcome | str], ranks: int) -> Fit:
    """Find the smallest number of ranks that fits, by halves or doubles of the given one.

    Memory is a + b / ranks, where b is the state. `at` predicts a number of ranks, or says why it cannot be.
    """
    found = at(ranks)
    if isinstance(found, str):
        return Fit(what, None, found)
    if found.fits:
        halves = [ranks >> power for power in range(1, ranks.bit_length()) if ranks % (1 << power) == 0]
        held = {n: found.peak_memory_bytes + found.state_bytes * (found.num_ranks / n - 1) for n in halves}
        # Of the ones that fit by the line, from the smallest on: the first is the answer, if the line is right.
        for count in reversed([half for half in halves if held[half] <= found.memory_capacity_bytes]):
            fewer = at(count)
            if not isinstance(fewer, str) and fewer.fits:
                return Fit(what, fewer, "")
        return Fit(what, found, "")
    for _ in range(_TRIES):
        room = found.memory_capacity_bytes - (found.peak_memory_bytes - found.state_bytes)
        if room <= 0:
            break
        count = int(found.num_ranks * 2 ** max(1, math.ceil(math.log2(found.state_bytes / room))))
        if count > MOST_RANKS:
            break
        found = at(count)
        if isinstance(found, str):
            return Fit(what, None, found)
        if found.fits:
            return Fit(what, found, "")
    return Fit(what, None, "what is not sharded is too large")
