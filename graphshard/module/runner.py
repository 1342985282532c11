"""Capture a program for each signature a module is called with, and run it."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from graphshard.capture.capture import CaptureSpec, capture
from graphshard.capture.fit import misfit
from graphshard.capture.inputs import moved_to
from graphshard.capture.signature import Signature, leaf_key
from graphshard.debug.dump import Dump
from graphshard.ir.errors import CaptureLimitError
from graphshard.ir.params import ParamTable
from graphshard.ir.program import Phase, Program
from graphshard.ir.progress import progress
from graphshard.ir.units import units_within
from graphshard.lower.backends import Backend, compiler_for
from graphshard.lower.regions import RegionCall, lower
from graphshard.module.agreement import Agreement
from graphshard.module.callchecks import check_materialized, check_no_new_parameters, warn_of_hooks
from graphshard.pipeline.observe import Level, Observer
from graphshard.pipeline.pipeline import Partitioned, Pipeline, rerun_backward, run_pipeline
from graphshard.runtime.accumulation import Accumulation
from graphshard.runtime.shards import Alias, ParamRef, Storage, aliases, param_refs
from graphshard.runtime.step import BackwardFactory, Executable, Variant
from graphshard.runtime.unsharded import Unsharded, UnshardHandle, start_gathering

if TYPE_CHECKING:
    from graphshard.artifact.library import Stored

log = logging.getLogger(__name__)

# How many shapes are remembered to fit a program with dynamic sizes; finding it again costs under a millisecond.
REMEMBERED_SHAPES = 1024


@dataclass
class Runner:
    """Programs of one module, by signature.

    `export` makes one whose mesh is None, which captures programs and runs none. `stored` are programs that were loaded
    from an artifact; if they are all there is to be (`sealed`), a call for which there is none is an error. Binding
    them asks the other ranks, so a copy, which may be made on one rank only, does so when it is called (`to_install`).
    """

    spec: CaptureSpec
    mesh: DeviceMesh
    backend: Backend
    pipeline: Pipeline
    verify: Level
    dump: Path | None
    max_captures: int
    params: tuple[ParamRef, ...]
    storage: Storage
    groups: dict[str, str]
    agreement: Agreement
    aliases: tuple[Alias, ...] = ()
    name: str = ""
    executables: dict[Signature, Executable] = field(default_factory=dict)
    compiled: dict[str, RegionCall] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    entries: dict[str, Runner] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    materialized: bool = False
    accumulation: Accumulation = field(default_factory=Accumulation)
    unsharded: Unsharded = field(default_factory=Unsharded)
    names: dict[str, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    stored: Stored | None = None
    sealed: bool = False
    to_install: bool = False
    _partitioned: dict[Signature, Partitioned | None] = field(default_factory=dict)
    _fits: dict[Signature, Executable] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of the compiled module."""
        self._follow_unsharded()
        for ref in self.params:
            ref.check()
        for alias in self.aliases:
            alias.check()
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves = self.on_device(leaves, structure)
        signature = self.signature(module, leaves, structure)
        if not self.materialized:
            check_materialized(module, self.params, self.spec.device, self.storage.device)
            self.materialized = True
        if self.to_install and self.stored is not None:
            self.to_install = False
            self.stored.install(module, self)
        executable = self.executables.get(signature) or self._fitting(signature, leaves)
        if executable is None:
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            executable = self.install(module, signature, self.build(module, args, kwargs, signature))
        return executable([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def call_entry(
        self, name: str, method: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one call of a submodule's method, or another of the model's, by a program of its own on the same shards.

        The submodule's name is "" for the model itself.
        """
        self._follow_unsharded()
        return self.entry(name, method, module).call(module, args, kwargs)

    def entry(self, name: str, method: str, module: nn.Module) -> Runner:
        """The runner of a submodule, or of another method, that is called on its own."""
        entry = ".".join(part for part in (name, method) if part not in ("", "forward"))
        if entry not in self.entries:
            table = self.spec.params.within(name) if name else self.spec.params
            params = tuple(param_refs(module, table))
            spec = replace(
                self.spec,
                params=table,
                units=units_within(name, self.spec.units) if name else self.spec.units,
                precision=self.spec.precision.within(name, self.spec.units) if name else self.spec.precision,
                forward_class=type(module) if name else self.spec.forward_class,
                method=method,
                dynamic_shapes=None,
            )
            names = {row.name: self.spec.params[f"{name}.{row.name}" if name else row.name].name for row in table}
            self.entries[entry] = self._anew(module, spec=spec, params=params, name=entry, names=names)
        return self.entries[entry]

    def change(self, names: Collection[str], **choices: Any) -> None:
        """Make other choices for parameters from the next call on; the program for them is captured then."""
        rows = {ref.row.name: replace(ref.row, **choices) if ref.row.name in names else ref.row for ref in self.params}
        self.params = tuple(replace(ref, row=rows[ref.row.name]) for ref in self.params)
        self.spec = replace(self.spec, params=ParamTable(tuple(rows.values())))
        self.entries.clear()

    def unshard(self, names: Collection[str]) -> UnshardHandle:
        """Start to gather parameters that are not; the programs of the next calls read them."""
        chosen = [ref for ref in self.params if ref.row.name in names and ref.row.num_shards > 1]
        missing = [ref for ref in chosen if ref.row.name not in self.unsharded.full]
        if missing:
            current = {row.name: row for row in self._current_spec().params}
            pairs = [(current[ref.row.name], ref.param) for ref in missing]
            self.unsharded.full.update(start_gathering(pairs, self.mesh))
            self.change({ref.row.name for ref in missing}, held=True)
        return UnshardHandle(self.unsharded, [ref.row.name for ref in chosen])

    def reshard(self, names: Collection[str]) -> None:
        """Free parameters that were gathered by hand."""
        held = [name for name in names if name in self.unsharded.full]
        if held:
            self.unsharded.free(held)
            self.change(held, held=False)

    def _follow_unsharded(self) -> None:
        """Gather what is to stay gathered; programs read what is there from now on."""
        if self.name:  # the model's own runner has done it
            return
        if self.unsharded.kept:
            self.unshard(self.unsharded.kept)
        freed = [ref.row.name for ref in self.params if ref.row.held and ref.row.name not in self.unsharded.full]
        if freed:
            self.change(freed, held=False)

    def for_copy(self, module: nn.Module) -> Runner:
        """A runner for a copy of the module: nothing captured yet, compiled regions and loaded programs shared."""
        params = tuple(param_refs(module, self.spec.params))
        twin = self._anew(
            module,
            params=params,
            programs=[],
            accumulation=copy.deepcopy(self.accumulation),
            unsharded=Unsharded(kept=set(self.unsharded.kept)),
            to_install=self.stored is not None,
        )
        twin.change(list(self.unsharded.full), held=False)
        return twin

    def _anew(self, module: nn.Module, *, params: tuple[ParamRef, ...], **changes: Any) -> Runner:
        """A runner with the same options that has captured nothing yet."""
        return replace(
            self,
            params=params,
            aliases=tuple(aliases(module, params)),
            executables={},
            entries={},
            materialized=False,
            _partitioned={},
            _fits={},
            agreement=Agreement(self.mesh),
            misfits=[],
            **changes,
        )

    def _fitting(self, signature: Signature, leaves: Sequence[Any]) -> Executable | None:
        """A program with dynamic sizes that these inputs fit; what is found is remembered."""
        if signature not in self._fits:
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            found = None
            self.misfits = []
            for known, executable in self.executables.items():
                if executable.program.sizes and known.loose() == signature.loose():
                    why = misfit(executable.program, tensors)
                    found = executable if not why else found
                    self.misfits += [why] if why else []
            if found is None:
                return None
            if len(self._fits) >= REMEMBERED_SHAPES:
                self._fits.clear()
            self._fits[signature] = found
        return self._fits[signature]

    def build(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> Program:
        """Capture, shard, schedule and lower a program; the module stays as it is."""
        if self.stored is not None and self.sealed:
            raise self.stored.missing(self, signature)
        reason = self._reason(signature)
        if len(self.executables) >= self.max_captures:
            raise CaptureLimitError(
                f"{self._label} was captured {len(self.executables)} times, which is "
                f"max_captures; this call would be one more, because of {reason}. Pad inputs to a few sizes, pass "
                "numbers that change as tensors, or raise max_captures in graphshard.compile."
            )
        check_no_new_parameters(module, self.spec.params)
        if not self.executables:
            warn_of_hooks(module)
        log.info("capture %d of %s: %s", len(self.executables), self._label, reason)
        with progress(f"graphshard: {self._label}") as show:
            show("capture and passes")
            dump = self._dump(f"{self._label}-{len(self.executables)}")
            observer = Observer(self.verify, dump, self.pipeline.passes)
            program, partitioned = self.trace(module, args, kwargs, observer, reason, grad=signature.grad)
            self._partitioned[signature] = partitioned
            lower(program, compiler_for(self.backend), self.compiled, show)
            observer.lowered(program, self.compiled)
        return program

    def trace(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        observer: Observer,
        reason: str,
        *,
        grad: bool,
    ) -> tuple[Program, Partitioned | None]:
        """Capture a program and run the passes; `Partitioned` is where another backward begins."""
        start = time.perf_counter()
        program = capture(module, args, kwargs, self._current_spec(), grad=grad)
        program.model, program.reason, program.capture = self._label, reason, len(self.executables)
        observer.after(program, "capture", 0, time.perf_counter() - start)
        return program, run_pipeline(self.agreement.pipeline(self.pipeline), program, observer)

    def install(
        self, module: nn.Module, signature: Signature, program: Program, make_backward: BackwardFactory | None = None
    ) -> Executable:
        """Check that the other ranks made the same program, and bind it to the module and the mesh."""
        self.agreement.check(program)
        partitioned = self._partitioned.get(signature)
        if make_backward is None and partitioned is not None:
            make_backward = functools.partial(self.rerun, program, partitioned)
        executable = Executable(
            program,
            module,
            self.params,
            self.mesh,
            make_backward,
            self.accumulation,
            self.model_names,
            self.unsharded,
            self.groups,
        )
        self.executables[signature] = executable
        self.programs.append(program)
        return executable

    def rerun(self, program: Program, partitioned: Partitioned, variant: Variant) -> Phase:
        """Lower a program's backward again, for gradients through other outputs or for microbatches."""
        used, accumulate = variant
        why = " and microbatches" if accumulate else ""
        log.info("lowering backward again, for gradients through outputs %s%s", sorted(used), why)
        number = next(self._numbers) if accumulate else ""
        dump = self._dump(f"{program.title}/backward-{'-'.join(sorted(used)) or 'none'}{number}")
        observer = Observer(self.verify, dump, tuple(partitioned.passes(*variant)))
        other = rerun_backward(partitioned, program, used, accumulate, observer)
        if accumulate:
            self.agreement.check_accumulation(other)
        lower(other, compiler_for(self.backend), self.compiled)
        self._fits.clear()  # compiling may have found conditions on dynamic sizes
        observer.lowered(other, self.compiled)
        return other.phases["backward"]

    @property
    def model_names(self) -> dict[str, str]:
        """Names of the parameters in the whole model by their names here."""
        return self.names or {ref.row.name: ref.row.name for ref in self.params}

    def signature(self, module: nn.Module, leaves: Sequence[Any], structure: pytree.TreeSpec) -> Signature:
        """The signature of a call with these input leaves."""
        inputs = tuple(leaf_key(leaf) for leaf in leaves)
        device_type = self.spec.device.type
        autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
        params = [ref.param for ref in self.params]
        return Signature(
            structure=structure,
            inputs=inputs,
            training=tuple(sub.training for sub in module.modules()),
            grad=torch.is_grad_enabled(),
            autocast=autocast,
            params=tuple((param.requires_grad, param.dtype) for param in params),
            settings=tuple(ref.row.settings for ref in self.params),
        )

    def on_device(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> list[Any]:
        """Input leaves where the model is; raises `InputError` for those that cannot be used."""
        return moved_to(self.spec.device, leaves, structure)

    def _current_spec(self) -> CaptureSpec:
        """The spec with the parameters' flags and dtypes as they are now."""
        rows = tuple(ref.row.as_now(ref.param, self.spec.precision.of(ref.row.unit)) for ref in self.params)
        return replace(self.spec, params=ParamTable(rows))

    def _dump(self, name: str) -> Dump | None:
        return None if self.dump is None else Dump(self.dump / name)

    @property
    def _label(self) -> str:
        """What programs are called, before their number."""
        return f"{self.spec.forward_class.__name__}{'-' if self.name else ''}{self.name}"

    def _reason(self, signature: Signature) -> str:
        if not self.executables:
            return "first call"
        reason = signature.changes_from(list(self.executables)[-1])
        return f"{reason} ({'; '.join(self.misfits)})" if self.misfits else reason
