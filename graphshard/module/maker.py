"""Make programs of a module: find them in the cache, or capture, schedule and lower them, on all ranks alike."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphshard.capture.signature import Signature
from graphshard.ir.errors import CaptureLimitError
from graphshard.ir.program import Program
from graphshard.ir.progress import progress
from graphshard.ir.state import Place
from graphshard.ir.torch_internals import forget_sources, without_dispatch_modes
from graphshard.lower.backends import begin_compiling, compiler_for
from graphshard.lower.regions import RegionCall, lower
from graphshard.module.agreement import Agreement
from graphshard.module.callchecks import check_no_new_parameters, check_same_modules
from graphshard.module.executables import Executables
from graphshard.module.tracer import Tracer
from graphshard.options.table import check_activation
from graphshard.pipeline.observe import Observer, Recorder
from graphshard.pipeline.pipeline import Partitioned, Pipeline, rerun_backward
from graphshard.runtime.step import BackwardFactory, Strides, Variant
from graphshard.runtime.unsharded import Unsharded

log = logging.getLogger(__name__)
# Changes of a number after which it is taken for one that is another at each call.
_TAKEN_FOR_INPUT = 2
_OF_SIZES = "Pad inputs to a few sizes, keep numbers that change in buffers (register_buffer) or pass them as tensors"
_OF_VALUES = "Compute with tensors what depends on values: torch.where, a mask, index_copy or gather"
_WITHOUT_GRADIENTS = " Calls without gradients run without programs within `with graphshard.uncompiled(model):`."


class Kept(NamedTuple):
    """A program that an earlier launch has compiled; `partitioned` makes where another backward of it begins."""

    program: Program
    partitioned: Callable[[], Partitioned] | None
    compiled: dict[str, RegionCall]


class Search(Protocol):
    """For a program that may have been kept."""

    def find(self) -> Kept | None:
        """The program, if there is one that was made of the same."""

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Around the capture, if there is none."""

    def keep(self, program: Program, partitioned: Partitioned | None) -> None:
        """Keep what was captured, when it is lowered."""


class Cache(Protocol):
    """Programs of earlier launches."""

    def search(
        self, maker: Maker, module: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor]
    ) -> Search | None:
        """For the program of a call; None if it cannot be kept."""


@dataclass(kw_only=True)
class Maker:
    """Makes programs of one module, or of one entry into it.

    Attributes:
        tracer: captures them.
        agreement: with the other ranks.
        recorder: what records a program, by its name; None for what is not recorded.
        executables: the programs that there are.
        unsharded: what is gathered by hand, of which nothing is shown while a program is captured.
        cache: programs of earlier launches; None keeps none.
    """

    tracer: Tracer
    agreement: Agreement
    recorder: Callable[[str], Recorder | None]
    executables: Executables = field(default_factory=Executables)
    unsharded: Unsharded = field(default_factory=Unsharded)
    cache: Cache | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _rerun: set[str] = field(default_factory=set)
    _partitioned: dict[Signature, Partitioned | Callable[[], Partitioned] | None] = field(default_factory=dict)
    _changed: Counter[Place] = field(default_factory=Counter)

    @property
    def passes(self) -> Pipeline:
        """The tracer's, with a planner that plans alike on all ranks."""
        return self.agreement.pipeline(self.tracer.pipeline)

    def build(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> Program:
        """Capture, shard, schedule and lower a program; the module stays as it is."""
        reason = self.executables.reason(signature)
        with self.agreement.together(self.tracer.label, reason):
            return self._build(module, args, kwargs, signature, reason)

    @forget_sources()
    @without_dispatch_modes()
    def _build(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature, reason: str
    ) -> Program:
        tracer, number = self.tracer, len(self.executables)
        self.unsharded.shown.hide()
        if number >= tracer.options.max_captures:
            remedy = _OF_VALUES if self.executables.by_values else _OF_SIZES
            raise CaptureLimitError(
                f"{tracer.label} was captured {number} times, which is max_captures; this call would be one more, "
                f"because of {reason}. {remedy}, or raise max_captures in graphshard.compile."
                f"{'' if signature.grad else _WITHOUT_GRADIENTS}"
            )
        check_same_modules(module, tracer.params)
        check_no_new_parameters(module, tracer.spec.params)
        if not tracer.name:
            check_activation(tracer.options, tracer.label, tracer.spec.units)
        self._follow_number()
        log.info("capture %d of %s: %s", number, tracer.label, reason)
        with progress(f"graphshard: {tracer.label}") as show:
            recorder = self.recorder(f"{tracer.label}-{number}")
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            search = self.cache.search(self, module, signature, tensors) if self.cache and recorder is None else None
            if search is not None:
                show("look for it in the cache")
            kept = search.find() if search is not None else None
            if self.agreement.all_have(kept.program if kept is not None else None):
                assert kept is not None
                tracer.compiled.update(kept.compiled)
                self._partitioned[signature] = kept.partitioned
                kept.program.capture = number
                return kept.program
            show("capture")
            begin_compiling(tracer.options.backend, tracer.spec.device)
            watching = search.watching if search is not None else contextlib.nullcontext
            observer = Observer(tracer.options.level, recorder, tracer.pipeline.passes, show)
            program, partitioned = tracer.trace(
                module,
                args,
                kwargs,
                observer,
                reason,
                grad=signature.grad,
                number=number,
                passes=self.passes,
                watching=watching,
                few=recorder is None,
            )
            self._partitioned[signature] = partitioned
            show("compare with the other ranks")
            new = self.agreement.check(program)
            show("lower")
            lower(program, compiler_for(tracer.options.backend), tracer.compiled, show)
            observer.lowered(program, tracer.compiled)
            if new:
                self.agreement.compiled()
            if search is not None and program.decided is None:  # another launch begins with other values
                show("keep")
                search.keep(program, partitioned() if callable(partitioned) else partitioned)
        return program

    def _follow_number(self) -> None:
        """A number that has changed twice may change at each call: it becomes an input, if it can be one."""
        place = self.executables.number
        if place is None:
            return
        self._changed[place] += 1
        if self._changed[place] == _TAKEN_FOR_INPUT:
            self.tracer.follow(place)
        elif self._changed[place] == _TAKEN_FOR_INPUT + 1:
            log.warning(
                "%s is captured again for each value of %s: the code computes with it where a number must be known. "
                "Keep it in a buffer (register_buffer), or pass it into the call as a tensor. Now: %s",
                self.tracer.label,
                place,
                self.executables.changes[-1],
            )

    def backwards(self, program: Program, signature: Signature) -> BackwardFactory | None:
        """Makes other backwards of a program that was built for a signature; None if it has none."""
        partitioned = self._partitioned.get(signature)
        return None if partitioned is None else functools.partial(self.rerun, program, partitioned)

    def rerun(
        self,
        program: Program,
        partitioned: Partitioned | Callable[[], Partitioned],
        variant: Variant,
        strides: Strides = frozenset(),
    ) -> Program:
        """Lower a program's backward again: for other gradients of outputs or strides of them, or for microbatches."""
        used, accumulate = variant
        why = f"gradients through outputs {', '.join(sorted(used))}{' and microbatches' if accumulate else ''}"
        log.info("lowering backward again, for %s", why)
        with self.agreement.together(self.tracer.label, why):
            start = partitioned() if callable(partitioned) else partitioned
            return self._rerun_alone(program, start, variant, strides)

    @forget_sources()
    @without_dispatch_modes()
    def _rerun_alone(self, program: Program, partitioned: Partitioned, variant: Variant, strides: Strides) -> Program:
        (used, accumulate), tracer = variant, self.tracer
        name = f"{program.title}/backward-{'-'.join(sorted(used)) or 'none'}"
        number = next(self._numbers) if accumulate or name in self._rerun else ""
        self._rerun.add(name)
        recorder = self.recorder(f"{name}{number}")
        with progress(f"graphshard: {tracer.label}, another backward") as show:
            observer = Observer(tracer.options.level, recorder, tuple(partitioned.passes(*variant)), show)
            other = rerun_backward(partitioned, program, used, accumulate, observer, dict(strides))
            if accumulate:
                show("compare with the other ranks")
                self.agreement.check_accumulation(other)
            show("lower")
            lower(other, compiler_for(tracer.options.backend), tracer.compiled, show)
        self.executables.conditions_changed()
        observer.lowered(other, tracer.compiled)
        return replace(other, history=[])  # texts take memory, and this lives as long as the module
