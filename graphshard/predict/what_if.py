"""Predict what would make a step faster, what fits, what it costs, and how it scales: `graphshard.what_if`.

    case -> base prediction -> changes, each predicted -> largest batch, smallest mesh -> other numbers of ranks

A change is a whole `Case` that differs in one field: another batch, mesh, activation or machine. Whether it is sensible
(replicas need several nodes, another network needs a network) is decided here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from typing_extensions import Unpack

from graphshard.cost.profile import Hardware, Profile, builtin_profiles, load_profile
from graphshard.errors import ArgumentError, GraphshardError
from graphshard.ir.mesh import CONTEXT, EXPERT, MOST_RANKS, PIPELINE, TENSOR, MeshLike
from graphshard.options.options import Options, check_names, takes_options
from graphshard.options.simulated_mesh import Parallelize
from graphshard.predict._symbolic_cost import Inputs, resized
from graphshard.predict.answers import Answer, Fit, Outcome, Scaled, WhatIf, reason_of
from graphshard.predict.explanation import Explanation, shown_mesh
from graphshard.predict.study import Study
from graphshard.predict.training_config import ExplainArguments, Training, batch_of, split_arguments
from graphshard.utils.argument_validation import check_count, check_function
from graphshard.utils.text import brief

# How many times more microbatches are tried.
_MORE = 4
# Numbers of ranks that scaling is predicted for, and how many may be given.
RANKS = (64, 256, 1024, 4096)
_MOST_ROWS = 100
# Another effect of a kind of change.
_NOTES = dict.fromkeys(("precision", "reduce"), "other rounding")
# Predictions in the search for what fits, and how many times the batch is tried at most.
_TRIES, _TIMES = 6, 1024
# Axes that are not of data, and so do not grow with the ranks.
_FIXED = (*TENSOR, *CONTEXT, *EXPERT, *PIPELINE)


@dataclass(frozen=True)
class Case:
    """Everything that a prediction depends on, except the model."""

    inputs: Inputs
    mesh: MeshLike
    profile: Profile
    network: str
    options: Options
    training: Training

    @property
    def batch(self) -> int | None:
        """Sequences of one rank; None if the inputs have no batch."""
        return batch_of(self.inputs)

    @property
    def key(self) -> Hashable:
        """Key of the prediction; options, training and profile are compared by identity."""
        same = id(self.options), id(self.training), id(self.profile)
        return *same, self.batch, str(self.mesh), self.network

    def changed(self, **fields: Any) -> Case:
        """Return the case with other values of its fields, of options and of training; also of `batch` and `sizes`."""
        case = self
        for name, value in fields.items():
            if name == "batch":
                inputs = resized(case.inputs, {"batch": 0}, {"batch": case.batch or 0}, {"batch": value})
                case = replace(case, inputs=inputs)
            elif name == "sizes":  # of the mesh, on the same axes
                mesh = dict(zip(case.mesh, value)) if isinstance(case.mesh, Mapping) else tuple(value)
                case = replace(case, mesh=mesh)
            elif name in Training.__dataclass_fields__:
                case = replace(case, training=replace(case.training, **{name: value}))
            elif name in Options.__dataclass_fields__:
                case = replace(case, options=replace(case.options, **{name: value}))
            else:
                case = replace(case, **{name: value})
        return case

    def with_ranks(self, ranks: int) -> Case | None:
        """Grow or shrink the outermost axis of data to that many ranks; None if there is no such mesh."""
        axes = _axes_of(self.mesh)
        if axes is None:
            return None
        rest = math.prod(size for name, size in axes if name in _FIXED)
        data = [index for index, (name, _) in enumerate(axes) if name not in _FIXED]
        if ranks % rest or not data:
            return None
        left, sizes = ranks // rest, [size for _, size in axes]
        for index in reversed(data[1:]):
            sizes[index] = min(sizes[index], left)
            if left % sizes[index]:
                return None
            left //= sizes[index]
        sizes[data[0]] = left
        return self.changed(sizes=sizes)


# Kind of `ABOUT`, name, and arguments of `Case.changed`, which is called for requested kinds only: some do not fit.
_Offer = tuple[str, str, dict[str, Any]]


def _axes_of(mesh: MeshLike) -> list[tuple[str, int]] | None:
    """Return names, "" if there are none, and sizes of a mesh that need not exist; None for a DeviceMesh."""
    if isinstance(mesh, DeviceMesh):
        return None
    if isinstance(mesh, Mapping):
        return list(mesh.items())
    return [("", size) for size in ([mesh] if isinstance(mesh, int) else mesh)]


def _sizes(case: Case) -> Iterator[_Offer]:
    if case.batch is not None:
        yield "batch", f"batch {2 * case.batch} per rank", {"batch": 2 * case.batch}
        if case.batch and case.batch % 2 == 0:
            yield "batch", f"batch {case.batch // 2} per rank", {"batch": case.batch // 2}
    axes, node = _axes_of(case.mesh), case.profile.ranks_per_node
    if axes is None:
        return
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    cut = [index for index, name in enumerate(names) if name in (*TENSOR, *PIPELINE)]
    if cut:
        others = [index for index in range(len(names)) if names[index] not in _FIXED]
        for inner, factor in itertools.product(cut, (2, 0.5)):
            size, outer = sizes[inner] * factor, sizes[others[0]] / factor if others else 0.5
            near = size <= node or names[inner] in PIPELINE
            if size >= 1 and size % 1 == 0 and outer >= 1 and outer % 1 == 0 and near:
                new = list(sizes)
                new[inner], new[others[0]] = int(size), int(outer)
                yield "mesh", f"mesh {shown_mesh(dict(zip(names, new)))}", {"sizes": new}
    elif len(sizes) == 1 and sizes[0] > node and sizes[0] % node == 0 and node > 1:
        replicas = sizes[0] // node
        yield "mesh", f"mesh replicate {replicas}, shard {node}", {"mesh": (replicas, node)}
    elif len(sizes) == 2 and sizes[0] > 1:
        yield "mesh", f"mesh shard {math.prod(sizes)}", {"mesh": (math.prod(sizes),)}


def _options(case: Case) -> Iterator[_Offer]:
    options, axes, node = case.options, _axes_of(case.mesh) or [], case.profile.ranks_per_node
    reshard, policy, low = options.reshard_after_forward, options.mp_policy, torch.bfloat16
    if not any(name in PIPELINE for name, _ in axes):  # stages are gathered once
        again: list[bool | int] = [False] if reshard is not False and reshard != 1 else []
        if reshard is not None and reshard is not True:
            again.append(True)
        elif len(axes) == 1 and node > 1 and axes[0][1] > node and axes[0][1] % node == 0:
            again.append(node)
        for value in again:
            yield "reshard", f"reshard_after_forward={value}", {"reshard_after_forward": value}
    if options.activation is None:
        yield "activation", 'activation="full"', {"activation": "full"}
    else:
        yield "activation", "activation=None", {"activation": None}
    if isinstance(options.offload_policy, CPUOffloadPolicy):
        yield "offload", "nothing on the host", {"offload_policy": None}
    else:
        yield "offload", "state on the host", {"offload_policy": CPUOffloadPolicy()}
    if policy is None or (isinstance(policy, MixedPrecisionPolicy) and policy.param_dtype is None):
        mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        yield "precision", "parameters in bfloat16", {"mp_policy": mixed}
    elif isinstance(policy, MixedPrecisionPolicy) and policy.reduce_dtype == torch.float32:
        reduced = replace(policy, reduce_dtype=low)
        yield "precision", "gradients reduced in bfloat16", {"mp_policy": reduced}
    if options.reduce is not None:
        yield "reduce", "reduce=None", {"reduce": None}
    elif policy is None or (isinstance(policy, MixedPrecisionPolicy) and policy.reduce_dtype in (None, torch.float32)):
        sent = replace(policy or MixedPrecisionPolicy(), reduce_dtype=low)
        yield "reduce", 'reduce="exchange" in bfloat16', {"mp_policy": sent, "reduce": "exchange"}
    else:
        yield "reduce", 'reduce="exchange"', {"reduce": "exchange"}
    if options.backend == "eager":
        yield "backend", 'backend="inductor"', {"backend": "inductor"}


def _costs(case: Case) -> Iterator[_Offer]:
    """Yield changes of costs alone, which take no time to predict."""
    training, axes = case.training, _axes_of(case.mesh)
    if training.global_batch is None:
        more = _MORE * training.accumulate
        yield "accumulate", f"accumulate {more} microbatches", {"accumulate": more}
        if training.accumulate > 1:
            yield "accumulate", "accumulate nothing", {"accumulate": 1}
    if training.foreach:
        yield "optimizer", "a fused optimizer", {"foreach": False}
    ranks = case.mesh.size() if isinstance(case.mesh, DeviceMesh) else math.prod(size for _, size in axes or ())
    for name in case.profile.outside if ranks > case.profile.ranks_per_node else ():
        if name != case.network:
            yield "network", f"network {name}", {"network": name}
    for name in builtin_profiles():
        profile = load_profile(name)
        # A family of GPUs is enough: their variants of other links or memory have a second word.
        alike = profile.device == case.profile.device and case.network in profile.outside and len(profile.words) == 1
        if alike and profile.hash != case.profile.hash:  # the price is of another GPU
            yield "hardware", f"hardware {name}", {"profile": profile, "price": None}


# Kinds of changes.
ABOUT = (
    *("batch", "mesh", "reshard", "activation", "offload", "precision", "reduce", "backend"),
    *("accumulate", "optimizer", "network", "hardware"),
)


def check_about(given: object, argument: str = "changes") -> list[str]:
    """Return the requested kinds of changes; None is all of them."""
    if given is None:
        return list(ABOUT)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentError(f'{argument} must be a list such as ["batch", "hardware"], got {brief(given)}.')
    for name in given:
        if not isinstance(name, str) or name not in ABOUT:
            close = get_close_matches(str(name)[:100], ABOUT, 1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(ABOUT)}."
            raise ArgumentError(f"{argument} has {brief(name)}, which is no kind of change. {hint}")
    return list(dict.fromkeys(given))


def changes_of(case: Case, about: Sequence[str]) -> Iterator[tuple[str, str, Case]]:
    """Yield all changes of these kinds: kind, name and the case to try."""
    offers = [*_sizes(case), *_options(case), *_costs(case)]
    for wanted in about:
        for kind, name, fields in offers:
            if kind == wanted:
                yield kind, name, case.changed(**fields)


@partial(takes_options, also=(Training,))
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
        changes: kinds of changes to predict, of "batch", "mesh", "reshard", "activation", "offload", "precision",
            "reduce", "backend", "accumulate", "optimizer", "network" and "hardware"; None is all. Of each kind those
            are tried that make sense for the step: twice and half the batch, replicas with shards in a node, all of the
            known GPUs, and so on.
        ranks: numbers of ranks for which the same step is predicted; () is none.
        show: receives progress.

    Raises:
        ArgumentError: an argument is wrong. A change that cannot be made is no error: `WhatIf.left_out` says why.
        CaptureError: the module cannot be captured from the example inputs.
    """
    check_names(what_if, options)
    about = check_about(changes)
    check_function("show", show, "print")
    program, training = split_arguments(options)
    capture: dict[str, Any] = {"show": show, "every_block": every_block, "parallelize": parallelize, "device": device}
    study = Study(model, example_inputs, example_kwargs, program, training, **capture)
    inputs = tuple(example_inputs or ()), dict(example_kwargs or {})
    return answer(study, Case(inputs, mesh, load_profile(hardware), network, program, training), about, ranks)


def answer(study: Study, case: Case, about: Sequence[str], ranks: Sequence[int]) -> WhatIf:
    """Return all answers about a case: kinds of changes, what fits, and scaling to numbers of ranks."""
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence) or len(ranks) > _MOST_ROWS:
        raise ArgumentError(
            f"ranks must be a list of at most {_MOST_ROWS} numbers of ranks such as [64, 1024], got {brief(ranks)}."
        )
    for count in ranks:
        check_count("ranks", count, most=MOST_RANKS, what="number of ranks, or several, such as [64, 1024]")
    predictions = _Predictions(study, case)
    base = predictions.base
    answers, left_out = [], []
    fits = [predictions.largest_batch(case)]
    for kind, name, changed in changes_of(case, about):
        found = predictions.predict(changed, name)
        if not isinstance(found, Explanation):
            left_out.append(f"{name}: {found}")
            continue
        if kind == "activation" and case.batch is not None:
            fits.append(predictions.largest_batch(changed, name))
        gain = found.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu - 1
        price = case.training.price if kind == "hardware" else None
        reason = reason_of(base, found, gain=gain, note=_NOTES.get(kind, ""), price=price)
        answers.append(Answer(kind, name, gain, Outcome.of(found, changed.batch), reason))
    fits.append(predictions.smallest_mesh())
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


class _Predictions:
    """Predictions, each made once. Programs of other meshes than the base's are freed."""

    def __init__(self, study: Study, case: Case) -> None:
        self.case = case
        self._study = study
        self._by_batch = {case.batch: study}
        self.base: Explanation = study.explain(case.mesh, case.profile, case.network)
        # The cases keep the objects whose ids are in their keys.
        self._known = {case.key: (case, Outcome.of(self.base, case.batch))}

    def predict(self, case: Case, name: str) -> Explanation | str:
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
        self._known[case.key] = case, Outcome.of(found, case.batch)
        return found

    def outcome(self, case: Case, name: str) -> Outcome | str:
        found = None if case.key in self._known else self.predict(case, name)
        return found if isinstance(found, str) else self._known[case.key][1]

    def largest_batch(self, case: Case, name: str = "") -> Fit:
        """Find the largest batch of a rank that fits; `name` is of the change that makes the case."""
        what = f"the largest batch with {name}" if name else "the largest batch"
        batch = case.batch
        if batch is None:
            return Fit(what, None, "the inputs have no tensor with a batch")
        if case.training.global_batch is not None:  # other batches need not divide it
            case = case.changed(global_batch=None, accumulate=self.base.microbatches)
        label = ", ".join(filter(None, (name, "largest batch")))
        return largest(what, lambda count: self.outcome(case.changed(batch=count), label), batch)

    def smallest_mesh(self) -> Fit:
        case, ranks, what = self.case, self.base.num_ranks, "the smallest mesh"
        if case.with_ranks(ranks) is None:
            return Fit(what, None, "mesh is a DeviceMesh, which exists; give its shape to see others")

        def at(count: int) -> Outcome | str:
            other = case if count == ranks else case.with_ranks(count)
            return f"there is no such mesh of {count} ranks" if other is None else self.outcome(other, what)

        return smallest(what, at, ranks)


def largest(what: str, at: Callable[[int], Outcome | str], batch: int) -> Fit:
    """Find the largest batch that fits, as memory grows with it in a straight line.

    Two predictions give the line; a third one, at what should just fit, is the answer, or corrects the line.
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
    """Find the fewest ranks that fit, by halves or doubles: memory is a + b / ranks, where b is the state."""
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
