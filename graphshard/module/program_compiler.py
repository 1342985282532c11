"""Programs of a module: found in the cache or in a file, or captured, scheduled and lowered, on all ranks alike."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from graphshard.codec.program_format import graph_digest
from graphshard.errors import GraphBreak, UnsupportedError
from graphshard.frontend.dynamo_capture import DynamoTrace
from graphshard.frontend.graph_breaks import raise_break
from graphshard.frontend.signature import Signature
from graphshard.ir.program import Program
from graphshard.ir.sizes import conditions_of
from graphshard.lower.backends import begin_compiling, compiler_for
from graphshard.lower.regions import RegionCall, lower
from graphshard.module._agreement import Agreement
from graphshard.module._call_checks import check_same_modules
from graphshard.module.installed_programs import Installed, InstalledPrograms, Reason
from graphshard.module.tracer import ModuleCall, Tracer
from graphshard.options.resolve import check_activation
from graphshard.pipeline.instrumentation import Observer, Recorder
from graphshard.pipeline.pipeline import Partitioned, Pipeline, rerun_backward
from graphshard.runtime.executable import BackwardFactory, Strides, Variant
from graphshard.runtime.unsharded import Unsharded
from graphshard.torch_compat.autograd_state import modes_of_functions, without_dispatch_modes
from graphshard.torch_compat.torch_ops import forget_sources, pytree
from graphshard.utils.progress import progress

log = logging.getLogger(__name__)
cache_log = logging.getLogger("graphshard.cache")


class LoweredProgram(NamedTuple):
    """A program that can be installed, and what makes its other backwards.

    Attributes:
        compiled: its regions by key, if they are not the tracer's yet.
        of_file: it is from a file that `graphshard.export` wrote.
        remember: keeps its trace when guards were built, so that later launches need not trace.
    """

    program: Program
    make_backward: BackwardFactory | None
    compiled: Mapping[str, RegionCall] = MappingProxyType({})
    of_file: bool = False
    remember: Callable[[Program, DynamoTrace], None] | None = None


class EqualProgram(NamedTuple):
    """A trace that equals an installed program's, so that only its guards are new."""

    installed: Installed
    traced: Program


class _Found(Exception):
    """The program of a trace is there, so that no pass need run."""

    def __init__(self, made: LoweredProgram | EqualProgram) -> None:
        super().__init__()
        self.made = made


class ProgramSearch(Protocol):
    """Search for the program that was made of a trace in an earlier launch; it keeps what was lowered instead."""

    def find(self) -> LoweredProgram | None: ...
    def keep(self, program: Program, partitioned: Partitioned | None) -> None: ...
    def remember(self, of_inputs: Signature, program: Program, trace: DynamoTrace) -> None: ...


class Cache(Protocol):
    """Programs of earlier launches."""

    def search(
        self, maker: Any, module: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], program: Program
    ) -> ProgramSearch | None:
        """Return the search for a traced program, before passes; None if it cannot be kept."""

    def recall(self, maker: Any, call: ModuleCall, of_inputs: Signature) -> LoweredProgram | None:
        """Return the program of a call whose trace would be one of an earlier launch; None if that is not sure."""


class Library(Protocol):
    """Programs of a file, which need not be compiled, by names of the entries; "" is the model."""

    @property
    def entries(self) -> Collection[str]: ...

    def find(self, maker: Any, module: nn.Module, traced: Program) -> LoweredProgram | None:
        """Return the program of a trace, before passes, ready to be installed; None if the file has none."""

    def missing(self, maker: Any, call: Signature, traced: Program | GraphBreak) -> Exception:
        """Return the error for a call for which there is no program, or that cannot be traced whole."""


@dataclass(kw_only=True)
class ProgramCompiler:
    """Makes programs of one module, or of one entry into it.

    Attributes:
        recorder: returns what records a program, by its name; None for one that is not recorded.
        sealed: a call for which the file has no program is an error.
    """

    tracer: Tracer
    agreement: Agreement
    recorder: Callable[[str], Recorder | None]
    executables: InstalledPrograms = field(default_factory=InstalledPrograms)
    unsharded: Unsharded = field(default_factory=Unsharded)
    cache: Cache | None = None
    library: Library | None = None
    sealed: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _rerun: set[str] = field(default_factory=set)

    @property
    def passes(self) -> Pipeline:
        """The tracer's, with a planner that plans alike on all ranks."""
        return self.agreement.pipeline(self.tracer.pipeline)

    def build_or_break(self, call: ModuleCall, signature: Signature) -> LoweredProgram | GraphBreak | EqualProgram:
        """Trace, shard, schedule and lower a program; return the graph break if all ranks are to split the module."""
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            raise UnsupportedError(
                f"torch.jit.trace and torch.export cannot trace {self.tracer.label}, which graphshard has compiled: "
                "its parameters are shards. Trace the model before compile, or use graphshard.export."
            )
        if "_SpmdTypeMode" in modes_of_functions():
            raise UnsupportedError(
                f"spmd_types checks types of this call, and programs of {self.tracer.label} have no annotations. Check "
                "the model before graphshard.compile, and call it outside of spmd_types.checker.typecheck() after."
            )
        of_inputs = self.tracer.signature(call.module, *pytree.tree_flatten((call.args, call.kwargs)))
        reason = self.executables.reason(of_inputs)
        with self.agreement.together(self.tracer.label, reason.text):
            try:
                return self._build(call, signature, of_inputs, reason)
            except GraphBreak as error:
                if self.tracer.options.fullgraph or (self.sealed and error.raised and error.is_own):
                    raise_break(error)
                if self.library is not None and self.sealed:
                    raise self.library.missing(self, of_inputs, error) from error
                return error
            except Exception as error:
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(
                        f"graphshard: {self.tracer.label} has no program for this call, which has not begun: its "
                        "parameters, buffers and attributes are as before."
                    )
                raise

    @forget_sources()
    @without_dispatch_modes()
    def _build(
        self, call: ModuleCall, signature: Signature, of_inputs: Signature, reason: Reason
    ) -> LoweredProgram | EqualProgram:
        tracer, number = self.tracer, self.executables.added
        self.unsharded.shown.hide()
        check_same_modules(call.module, tracer.params)
        if not tracer.name:
            check_activation(tracer.options, tracer.label, tracer.spec.units)
        self.executables.log_capture(tracer.label, reason)
        with progress(f"graphshard: {tracer.label}") as show:
            recorder = self.recorder(f"{tracer.label}-{number}")
            recalled = None
            if self.cache and recorder is None and self.library is None:
                recalled = self.cache.recall(self, call, of_inputs)
            asked = recalled is not None and not self.agreement.is_first
            if self.agreement.may_skip_trace(None if recalled is None else recalled.program):
                assert recalled is not None
                return self._cached(recalled, call, reason, number)
            search: ProgramSearch | None = None
            digest = ""

            def find(traced: Program) -> None:
                """Raise _Found if the trace need not be compiled."""
                nonlocal search, digest
                digest = graph_digest(traced)
                equal = self.executables.with_digest(signature, digest)
                # Compilation may have relied on further conditions on sizes, which guards of this trace lack.
                if equal is not None and conditions_of(equal.executable.program) <= conditions_of(traced):
                    raise _Found(EqualProgram(equal, traced))
                stored = self._load(call, of_inputs, traced) if self.library is not None else None
                if stored is not None:
                    raise _Found(stored)
                if asked:  # another rank has said that it compiles
                    return
                if self.cache and recorder is None:
                    leaves = pytree.tree_leaves((call.args, call.kwargs))
                    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                    search = self.cache.search(self, call.module, signature, tensors, traced)
                    show("look for it in the cache")
                cached = search.find() if search is not None else None
                refused = self.agreement.why_not_found(None if cached is None else cached.program)
                if cached is not None and refused:
                    cache_log.info("cache: %s is compiled, although it was found: %s", tracer.label, refused)
                elif cached is not None:
                    cached.program.take_trace(traced, digest)
                    raise _Found(cached._replace(remember=remember_of(search)))

            def remember_of(search: ProgramSearch | None) -> Callable[[Program, DynamoTrace], None] | None:
                return None if search is None else functools.partial(search.remember, of_inputs)

            show("capture")
            begin_compiling(tracer.options.backend, tracer.spec.device)
            observer = Observer(tracer.options.level, recorder, tracer.pipeline.passes, show)
            try:
                program, partitioned = tracer.trace(
                    call,
                    observer,
                    reason.text,
                    number=number,
                    passes=self.passes,
                    # With fullgraph a break is the error of this rank, which the others are told.
                    watching=contextlib.nullcontext if tracer.options.fullgraph else self.agreement.on_graph_breaks,
                    few=recorder is None,
                    find=find,
                )
            except _Found as found:
                made = found.made
                if isinstance(made, EqualProgram):
                    log.info("%s computes the same and serves this call, too", made.installed.executable.program.title)
                    return made
                return self._cached(made, call, reason, number)
            program.digest = digest
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
        make_backward = self.backward_factory(program, partitioned)
        return LoweredProgram(program, make_backward, remember=remember_of(search))

    def _cached(self, made: LoweredProgram, call: ModuleCall, reason: Reason, number: int) -> LoweredProgram:
        """Return a program that was not captured in this launch, ready to be installed."""
        program, tracer = made.program, self.tracer
        program.model, program.capture = tracer.label, number
        program.reason = program.reason if made.of_file else reason.text
        tracer.compiled.update(made.compiled)
        passes = self.passes  # whose planner is told of the program
        self.agreement.plan_others_like(program)
        tracer.keep_captured(program, tracer.recapture(call), (passes or tracer.pipeline).passes)
        return made

    def _load(self, call: ModuleCall, of_inputs: Signature, traced: Program) -> LoweredProgram | None:
        """Return the program of the file for a trace; None, and a warning, if it is to be compiled.

        Where numbers or sizes are symbols because they have changed, the file may have a program for these very ones.

        Raises:
            ArtifactError: there is none, and nothing is to be compiled.
        """
        assert self.library is not None
        stored = self.library.find(self, call.module, traced)
        if stored is None and (traced.sizes or self.executables.added):
            alone = self.tracer.trace_alone(call)
            assert alone is not None
            traced = alone
            stored = self.library.find(self, call.module, alone)
        if self.agreement.all_load(None if stored is None else stored.program):
            return stored
        if self.sealed and stored is not None:  # the other ranks have another one, or none
            self.agreement.check(stored.program)
            return stored
        missing = self.library.missing(self, of_inputs, traced)
        if self.sealed:
            raise missing
        expected = self.tracer.name in self.library.entries
        log.log(logging.WARNING if expected else logging.INFO, "compiling instead of loading: %s", missing)
        return None

    def backward_factory(
        self, program: Program, partitioned: Partitioned | Callable[[], Partitioned] | None
    ) -> BackwardFactory | None:
        """Return the function that lowers other backwards of a program; None for one without a backward."""
        return None if partitioned is None else functools.partial(self.rerun, program, partitioned)

    @forget_sources()
    @without_dispatch_modes()
    def rerun(
        self,
        program: Program,
        partitioned: Partitioned | Callable[[], Partitioned],
        variant: Variant,
        strides: Strides = frozenset(),
    ) -> Program:
        """Lower a program's backward again: for other gradients of outputs or strides of them, or for microbatches."""
        (used, accumulate), tracer = variant, self.tracer
        why = f"gradients through outputs {', '.join(sorted(used))}{' and microbatches' if accumulate else ''}"
        log.info("lowering backward again, for %s", why)
        name = f"{program.title}/backward-{'-'.join(sorted(used)) or 'none'}"
        number = next(self._numbers) if accumulate or name in self._rerun else ""
        self._rerun.add(name)
        title = f"graphshard: {tracer.label}, another backward"
        with self.agreement.together(tracer.label, why), progress(title) as show:
            start = partitioned() if callable(partitioned) else partitioned
            recorder, passes = self.recorder(f"{name}{number}"), tuple(start.passes(*variant))
            observer = Observer(tracer.options.level, recorder, passes, show)
            other = rerun_backward(start, program, used, accumulate, observer, dict(strides))
            if accumulate:
                show("compare with the other ranks")
                self.agreement.check(other)
            show("lower")
            lower(other, compiler_for(tracer.options.backend), tracer.compiled, show)
            observer.lowered(other, tracer.compiled)
        return replace(other, history=[])  # texts take memory, and this lives as long as the module
