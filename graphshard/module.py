"""Capture a program for each signature a module is called with, and run it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from graphshard.agree import check_agreement, model_tag
from graphshard.backends import Backend, compiler_for
from graphshard.callchecks import check_materialized, check_no_new_parameters
from graphshard.capture import CaptureSpec, capture
from graphshard.dump import Dump
from graphshard.dynamic import MARKS
from graphshard.errors import CaptureLimitError, InputError
from graphshard.fit import misfit
from graphshard.lower import RegionCall, lower
from graphshard.observe import Level, Observer
from graphshard.params import ParamTable
from graphshard.pipeline import Partitioned, Pipeline, rerun_backward, run_pipeline
from graphshard.program import Phase, Program
from graphshard.progress import progress
from graphshard.runtime import BackwardFactory, Executable
from graphshard.sharding import Alias, ParamRef, Storage, aliases, param_refs
from graphshard.signature import Signature, leaf_key
from graphshard.units import units_within

if TYPE_CHECKING:
    from graphshard.load import Stored

log = logging.getLogger(__name__)

# How long a rank waits for the others to come as far as a new program: compilation takes different times.
AGREEMENT_TIMEOUT = timedelta(minutes=10)

# How many shapes are remembered to fit a program with dynamic sizes; finding it again costs under a millisecond.
REMEMBERED_SHAPES = 1024

_CONSTANTS = (int, float, bool, str, type(None))


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
    aliases: tuple[Alias, ...] = ()
    name: str = ""
    tag: str | None = None
    executables: dict[Signature, Executable] = field(default_factory=dict)
    compiled: dict[str, RegionCall] = field(default_factory=dict)
    agreed: set[tuple[str, ...]] = field(default_factory=set)
    programs: list[Program] = field(default_factory=list)
    submodules: dict[str, Runner] = field(default_factory=dict)
    materialized: bool = False
    stored: Stored | None = None
    sealed: bool = False
    to_install: bool = False
    _partitioned: dict[Signature, Partitioned | None] = field(default_factory=dict)
    _fits: dict[Signature, Executable] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of the compiled module."""
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

    def call_submodule(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of a submodule on its own, by a program of its own on the same shards."""
        return self.submodule(name, module).call(module, args, kwargs)

    def submodule(self, name: str, module: nn.Module) -> Runner:
        """The runner of a submodule that is called on its own."""
        if name not in self.submodules:
            table = self.spec.params.within(name)
            params = tuple(param_refs(module, table))
            spec = dataclasses.replace(
                self.spec,
                params=table,
                units=units_within(name, self.spec.units),
                forward_class=type(module),
                dynamic_shapes=None,
            )
            own_name = ".".join(filter(None, [self.name, name]))
            self.submodules[name] = self._anew(module, spec=spec, params=params, name=own_name)
        return self.submodules[name]

    def for_copy(self, module: nn.Module) -> Runner:
        """A runner for a copy of the module: nothing captured yet, compiled regions and loaded programs shared."""
        return self._anew(
            module, params=tuple(param_refs(module, self.spec.params)), programs=[], to_install=self.stored is not None
        )

    def _anew(self, module: nn.Module, *, params: tuple[ParamRef, ...], **changes: Any) -> Runner:
        """A runner with the same options that has captured nothing yet."""
        return dataclasses.replace(
            self,
            params=params,
            aliases=tuple(aliases(module, params)),
            tag=None,
            executables={},
            agreed=set(),
            submodules={},
            materialized=False,
            _partitioned={},
            _fits={},
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
        return program, run_pipeline(self.pipeline, program, observer)

    def install(
        self, module: nn.Module, signature: Signature, program: Program, make_backward: BackwardFactory | None = None
    ) -> Executable:
        """Check that the other ranks made the same program, and bind it to the module and the mesh."""
        if self.tag is None:
            self.tag = model_tag(self.mesh)
        if tuple(program.communication) not in self.agreed:
            check_agreement(program, self.mesh, f"{self.tag}/{len(self.agreed)}", AGREEMENT_TIMEOUT)
            self.agreed.add(tuple(program.communication))

        def rerun(used: frozenset[str]) -> Phase:
            partitioned = self._partitioned[signature]
            assert partitioned is not None
            log.info("lowering backward again, for gradients through outputs %s", sorted(used))
            dump = self._dump(f"{program.title}/backward-{'-'.join(sorted(used)) or 'none'}")
            observer = Observer(self.verify, dump, partitioned.rest)
            variant = rerun_backward(partitioned, program, used, observer)
            lower(variant, compiler_for(self.backend), self.compiled)
            self._fits.clear()  # compiling may have found conditions on dynamic sizes
            observer.lowered(variant, self.compiled)
            return variant.phases["backward"]

        executable = Executable(program, module, self.params, self.mesh, make_backward or rerun)
        self.executables[signature] = executable
        self.programs.append(program)
        return executable

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
        )

    def on_device(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> list[Any]:
        """Input leaves with CPU tensors moved to the mesh's device, as FSDP2 does.

        Raises:
            InputError: a tensor is on another device, or a leaf is of a type that cannot be captured.
        """
        device = self.spec.device
        moved = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.device != device:
                if leaf.device.type != "cpu":
                    raise InputError(
                        f"input {_path(structure, index)} is on {leaf.device}, the model's mesh is on {device}. "
                        f"Move it there before the call."
                    )
                marks = {mark: getattr(leaf, mark) for mark in MARKS if hasattr(leaf, mark)}
                leaf = leaf.to(device)
                leaf.__dict__.update(marks)
            elif not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
                raise InputError(
                    f"input {_path(structure, index)} is a {type(leaf).__name__}, which is neither a tensor nor a "
                    "number, string or None. Pass its tensors, or register the class with "
                    "torch.utils._pytree.register_dataclass or torch.export.register_dataclass."
                )
            moved.append(leaf)
        return moved

    def _current_spec(self) -> CaptureSpec:
        """The spec with the parameters' flags and dtypes as they are now."""
        policy = self.spec.mp_policy
        rows = tuple(ref.row.as_now(ref.param, policy.param_dtype, policy.reduce_dtype) for ref in self.params)
        return dataclasses.replace(self.spec, params=ParamTable(rows))

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


def _path(structure: pytree.TreeSpec, index: int) -> str:
    """Where a leaf is in (args, kwargs), such as `args[0]` or `labels`."""
    marks = pytree.tree_unflatten(range(structure.num_leaves), structure)
    path = next(p for p, leaf in pytree.tree_flatten_with_path(marks)[0] if leaf == index)
    if str(path[0]) == "[0]":
        return f"args{pytree.keystr(path[1:])}"
    assert isinstance(path[1], pytree.MappingKey)
    return f"{path[1].key}{pytree.keystr(path[2:])}"
