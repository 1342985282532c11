"""Programs that an earlier launch has compiled, and what looks for them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from graphshard.codec.graph_digest import graph_digest
from graphshard.frontend.graph_breaks import raise_break
from graphshard.frontend.signature import Signature
from graphshard.ir.graph_break import GraphBreak
from graphshard.ir.program import Program
from graphshard.ir.sizes import conditions_of
from graphshard.lower.backends import begin_compiling, compiler_for
from graphshard.lower.regions import RegionCall, lower
from graphshard.module.agreement import Agreement
from graphshard.module.argument_checks import check_no_new_parameters, check_same_modules
from graphshard.module.installed_programs import Executables, Reason
from graphshard.module.tracer import Tracer
from graphshard.options.resolve import check_activation
from graphshard.pipeline.observe import Observer, Recorder
from graphshard.pipeline.pipeline import Partitioned, Pipeline, rerun_backward
from graphshard.runtime.step import BackwardFactory, Strides, Variant
from graphshard.runtime.unsharded import Unsharded
from graphshard.torch_compat.autograd_state import without_dispatch_modes
from graphshard.torch_compat.fx_code import forget_sources
from graphshard.torch_compat.operators import pytree
from graphshard.utils.progress import progress

if TYPE_CHECKING:
    from graphshard.module.installed_programs import Installed


class CachedProgram(NamedTuple):
    """A program that was compiled before: by an earlier launch, or by `graphshard.export`.

    Attributes:
        partitioned: makes where another backward of it begins; None if it has none.
        compiled: its regions, by key.
        of_file: it is from a file of `export`.
        make_backward: makes its other backwards, where that is not done from `partitioned`.
    """

    program: Program
    partitioned: Callable[[], Partitioned] | None
    compiled: dict[str, RegionCall]
    of_file: bool = False
    make_backward: BackwardFactory | None = None


class FoundProgram(Exception):
    """A traced program is in the cache or in a file, so that no pass need run."""

    def __init__(self, kept: CachedProgram) -> None:
        super().__init__()
        self.kept = kept


class EqualProgram(Exception):
    """A trace equals that of a program that is installed, so that only its guards are new."""

    def __init__(self, installed: Installed, traced: Program) -> None:
        super().__init__()
        self.installed, self.traced = installed, traced


class Search(Protocol):
    """For a program that may have been kept."""

    def find(self) -> CachedProgram | None:
        """The program, if there is one that was made of the same."""

    def keep(self, program: Program, partitioned: Partitioned | None) -> None:
        """Keep what was captured, when it is lowered."""


class Cache(Protocol):
    """Programs of earlier launches."""

    def search(
        self,
        maker: Any,
        module: nn.Module,
        signature: Signature,
        tensors: Sequence[torch.Tensor],
        program: Program,
    ) -> Search | None:
        """Return what looks for the program of a call; None if it cannot be kept.

        Args:
            program: of the trace, before passes.
        """


class Library(Protocol):
    """Programs that need not be compiled, because a file has them."""

    @property
    def entries(self) -> Collection[str]:
        """Names of what there are programs of; "" is the model."""

    def check_same(self, module: nn.Module, runner: Any) -> None:
        """Check that the other ranks have read the same programs; all ranks call this together."""

    def find(self, runner: Any, module: nn.Module, traced: Program) -> CachedProgram | None:
        """Return the program of a trace, ready to be installed; None if the file has none.

        Args:
            runner: of the module that was traced, the model or an entry of it.
            traced: before passes.
        """

    def missing(self, runner: Any, call: Signature, traced: Program) -> Exception:
        """Return the error for a call for which there is no program.

        Args:
            call: its signature, with all inputs.
            traced: its program, before passes.
        """

    def untraceable(self, runner: Any, call: Signature, error: GraphBreak) -> Exception:
        """Return the error for a call that cannot be traced whole, so that no program can be for it."""


log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ProgramCompiler:
    """Makes programs of one module, or of one entry into it.

    Attributes:
        tracer: captures them.
        agreement: with the other ranks.
        recorder: what records a program, by its name; None for what is not recorded.
        executables: the programs that there are.
        unsharded: what is gathered by hand, of which nothing is shown while a program is captured.
        cache: programs of earlier launches; None keeps none.
        library: programs of a file; None if there is no file.
        sealed: the programs of the file are all there are to be, and a call without one is an error.
    """

    tracer: Tracer
    agreement: Agreement
    recorder: Callable[[str], Recorder | None]
    executables: Executables = field(default_factory=Executables)
    unsharded: Unsharded = field(default_factory=Unsharded)
    cache: Cache | None = None
    library: Library | None = None
    sealed: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _rerun: set[str] = field(default_factory=set)
    _partitioned: dict[Signature, Partitioned | Callable[[], Partitioned] | None] = field(default_factory=dict)
    _of_file: dict[Signature, CachedProgram] = field(default_factory=dict)

    @property
    def passes(self) -> Pipeline:
        """The tracer's, with a planner that plans alike on all ranks."""
        return self.agreement.pipeline(self.tracer.pipeline)

    def build_or_break(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> Program | GraphBreak | EqualProgram:
        """Trace, shard, schedule and lower a program; the module stays as it is.

        A graph break is returned: other ranks have it, too, and split the module as this one does. A program of an
        earlier call that computes the same is returned with this call's trace.
        """
        call = self.tracer.signature(module, *pytree.tree_flatten((args, kwargs)))
        reason = self.executables.reason(signature, call)
        with self.agreement.together(self.tracer.label, reason.text):
            try:
                return self._build(module, args, kwargs, signature, call, reason)
            except GraphBreak as error:
                if self.tracer.options.fullgraph or (self.sealed and error.raised and error.is_own):
                    raise_break(error)
                if self.library is not None and self.sealed:
                    raise self.library.untraceable(self, call, error) from error
                return error

    @forget_sources()
    @without_dispatch_modes()
    def _build(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
        call: Signature,
        reason: Reason,
    ) -> Program | EqualProgram:
        tracer, number = self.tracer, self.executables.added
        self.unsharded.shown.hide()
        check_same_modules(module, tracer.params)
        check_no_new_parameters(module, tracer.spec.params)
        if not tracer.name:
            check_activation(tracer.options, tracer.label, tracer.spec.units)
        self.executables.log.capture(tracer.label, number, reason)
        with progress(f"graphshard: {tracer.label}") as show:
            recorder = self.recorder(f"{tracer.label}-{number}")
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            search: Search | None = None
            digest = ""

            def found(traced: Program) -> None:
                nonlocal search, digest
                digest = graph_digest(traced)
                equal = self.executables.with_digest(signature, digest)
                # Compilation may have relied on further conditions on sizes, which guards of this trace lack.
                if equal is not None and conditions_of(equal.executable.program) <= conditions_of(traced):
                    raise EqualProgram(equal, traced)
                if self.library is not None:
                    stored = self._load(module, args, kwargs, call, traced)
                    if stored is not None:
                        stored.program.model, stored.program.capture = tracer.label, number
                        raise FoundProgram(stored)
                if self.cache and recorder is None:
                    search = self.cache.search(self, module, signature, tensors, traced)
                    show("look for it in the cache")
                kept = search.find() if search is not None else None
                if not self.agreement.all_have(kept.program if kept is not None else None):
                    return
                assert kept is not None
                kept.program.model, kept.program.reason, kept.program.capture = tracer.label, reason.text, number
                kept.program.trace, kept.program.taken, kept.program.digest = traced.trace, traced.taken, digest
                raise FoundProgram(kept)

            def use(kept: CachedProgram) -> Program:
                tracer.compiled.update(kept.compiled)
                if kept.of_file:
                    self._of_file[signature] = kept
                else:
                    self._partitioned[signature] = kept.partitioned
                kept.program.keep_captured(tracer.recapture(module, args, kwargs, grad=signature.grad))
                return kept.program

            show("capture")
            begin_compiling(tracer.options.backend, tracer.spec.device)
            observer = Observer(tracer.options.level, recorder, tracer.pipeline.passes, show)
            try:
                program, partitioned = tracer.trace(
                    module,
                    args,
                    kwargs,
                    observer,
                    reason.text,
                    grad=signature.grad,
                    number=number,
                    passes=self.passes,
                    # With fullgraph a break is the error of this rank, which the others are told.
                    watching=contextlib.nullcontext if tracer.options.fullgraph else self.agreement.on_graph_breaks,
                    few=recorder is None,
                    find=found,
                )
            except FoundProgram as made:
                return use(made.kept)
            except EqualProgram as equal:
                log.info("%s computes the same and serves this call, too", equal.installed.executable.program.title)
                return equal
            program.digest = digest
            self._partitioned[signature] = partitioned
            show("compare with the other ranks")
            new = self.agreement.check(program)
            show("lower")
            lower(program, compiler_for(tracer.options.backend), tracer.compiled, show)
            observer.lowered(program, tracer.compiled)
            if new:
                self.agreement.compiled()
            if search is not None:
                show("keep")
                search.keep(program, partitioned() if callable(partitioned) else partitioned)
        return program

    def _load(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Signature, traced: Program
    ) -> CachedProgram | None:
        """Return the program of the file for a trace; None, and a warning, if it is to be compiled.

        Where numbers or sizes are symbols because they have changed, the file may have a program for these very ones.

        Raises:
            ArtifactError: there is none, and nothing is to be compiled.
        """
        assert self.library is not None
        kept = self.library.find(self, module, traced)
        if kept is None and (traced.sizes or self.executables.added):
            alone = self.tracer.trace_alone(module, args, kwargs, grad=call.grad)
            assert alone is not None
            traced = alone
            kept = self.library.find(self, module, alone)
        if self.agreement.all_load(None if kept is None else kept.program):
            return kept
        if self.sealed and kept is not None:  # the other ranks have another one, or none
            self.agreement.check(kept.program)
            return kept
        missing = self.library.missing(self, call, traced)
        if self.sealed:
            raise missing
        expected = self.tracer.name in self.library.entries
        log.log(logging.WARNING if expected else logging.INFO, "compiling instead of loading: %s", missing)
        return None

    def backwards(self, program: Program, signature: Signature) -> BackwardFactory | None:
        """Return what makes other backwards of the program that was just built for a signature; None if it has none."""
        partitioned = self._partitioned.pop(signature, None)
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
        observer.lowered(other, tracer.compiled)
        return replace(other, history=[])  # texts take memory, and this lives as long as the module
