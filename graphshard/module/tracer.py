"""From calls of a module to programs: what is captured, under which options. There need be no process group.

`export` has a tracer alone; `Runner` has one, and runs what it makes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from graphshard.codec.captured_graph import CapturedGraph
from graphshard.codec.joint_program import to_exported
from graphshard.codec.joint_reader import joint_program
from graphshard.frontend.capture import capture as capture_call
from graphshard.frontend.dynamo_capture import TracedFunction
from graphshard.frontend.graph_breaks import traced_or_break
from graphshard.frontend.inputs import leaf_key, moved_to, stand_ins, without_values
from graphshard.frontend.signature import CaptureSpec, Signature
from graphshard.ir.classes import users_class
from graphshard.ir.collector import collector_paused
from graphshard.ir.errors import ArgumentError, DivergenceError, GraphshardError, PeerError
from graphshard.ir.params import ParamRow, ParamTable, Settings
from graphshard.ir.program import Program
from graphshard.ir.repeats import Repeats, Uneven
from graphshard.ir.subclasses import is_extended
from graphshard.ir.units import modules_of, units_within
from graphshard.lower.regions import RegionCall
from graphshard.module.few_blocks import Short, program_of_few, repeats_of, trace_few
from graphshard.module.kept_program import FoundProgram, Kept
from graphshard.module.modes import Modes
from graphshard.options.options import Options
from graphshard.passes import Pass
from graphshard.pipeline.observe import Observer
from graphshard.pipeline.pipeline import Partitioned, Pipeline, run_pipeline
from graphshard.runtime.groups import sharding_mesh
from graphshard.runtime.shards import ParamRef, Storage, param_refs
from graphshard.subclasses.closure_variables import relied_on
from graphshard.subclasses.extensions import Extended

log = logging.getLogger(__name__)
ClassOf: TypeAlias = Callable[[nn.Module, bool, nn.Module], type]
Watching: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
_NO_INPUTS = pytree.tree_structure(())


@dataclass
class Tracer:
    """Captures programs of a module, of a submodule or of another method, and runs the passes over them.

    Attributes:
        spec: what capture has to know: parameters, units, the mesh, the device.
        params: the module's parameters, with their rows of the table.
        options: what the user has chosen; `max_captures` is for the module, and for each entry.
        pipeline: the passes that the options make.
        storage: where shards are kept between steps.
        name: of the submodule or method; "" for the model itself.
        names: names of the parameters in the whole model by their names here; empty for the model itself.
        class_of: the class that a module has in a compiled model, see `compiled_classes.class_of`.
        traced: what Dynamo traces.
        compiled: regions that were compiled, by key; shared by all programs of a model and its copies.
        mesh: that the module is sharded over; None where there is none.
    """

    spec: CaptureSpec
    params: tuple[ParamRef, ...]
    options: Options
    pipeline: Pipeline
    storage: Storage
    name: str = ""
    names: dict[str, str] = field(default_factory=dict)
    compiled: dict[str, RegionCall] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    class_of: ClassOf = lambda _, __, module: type(module)
    traced: TracedFunction = field(default_factory=lambda: TracedFunction("forward"), init=False, repr=False)
    _modes: Modes | None = field(default=None, init=False, repr=False)
    # Of the parameters that they were found for.
    _settings: tuple[tuple[ParamRef, ...], tuple[Settings, ...]] | None = field(default=None, init=False, repr=False)
    _every_block: bool = field(default=False, init=False, repr=False)

    @collector_paused()
    def trace(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        observer: Observer,
        reason: str,
        *,
        grad: bool,
        number: int = 0,
        passes: Pipeline | None = None,
        watching: Watching = contextlib.nullcontext,
        few: bool = False,
        find: Callable[[Program], Kept | None] | None = None,
    ) -> tuple[Program, Partitioned | Callable[[], Partitioned] | None]:
        """Capture a program and run the passes; `Partitioned` is where another backward begins.

        Args:
            reason: why, for the log and the dump.
            grad: whether the call is to be differentiated.
            number: how many programs were captured before.
            passes: to run in the place of the tracer's.
            watching: is around each capture.
            few: of many equal blocks a few may be captured.
            find: looks for a program that was compiled of the same trace.

        Raises:
            FoundProgram: there is one.
        """
        spec, passes_left = self.current_spec(), (passes or self.pipeline).passes

        def title(program: Program) -> None:
            program.model, program.reason, program.capture = self.label, reason, number
            kept = find(program) if find is not None else None
            if kept is not None:
                kept.program.model = self.label
                kept.program.reason = kept.program.reason if kept.of_file else reason
                raise FoundProgram(kept)

        short = (
            self._of_few(module, args, kwargs, spec, passes_left, observer, title, watching) if few and grad else None
        )
        if short is not None:
            try:
                found = short.finish(observer)
                found[0].keep_captured(self.recapture(module, args, kwargs, grad=grad))
                return found
            except Uneven as error:
                self._doubt(error)
        with watching():
            program, seconds = self._whole(module, args, kwargs, spec, grad=grad)
        title(program)
        program.keep_captured(CapturedGraph.of(program).exported)
        observer.after(program, "capture", 0, seconds)
        return program, run_pipeline(passes_left, program, observer)

    def trace_alone(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad: bool, few: bool = False
    ) -> Program | None:
        """Trace a call as if it were the first one, so that no number or size is a symbol because it has changed.

        Args:
            few: trace a few of many equal blocks; None is returned if there are none, or if they are called otherwise.

        Raises:
            GraphBreak: forward cannot be traced whole.
        """
        alone, spec = replace(self), self.current_spec()
        if not few:
            program, _ = alone._whole(module, args, kwargs, spec, grad=grad)
        else:
            repeats = None if self.name or not grad else repeats_of(module, spec, self.options)
            if repeats is None:
                return None
            try:
                trace = functools.partial(alone._trace_few, module, args, kwargs, spec, repeats)
                program = trace_few(trace, spec, repeats)
            except (Uneven, GraphshardError) as error:
                log.info("%s: every block is traced: %s", self.label, error)
                return None
        program.model = self.label
        return program

    def recapture(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad: bool
    ) -> Callable[[], ExportedProgram]:
        """Return what captures every block for `Program.exported`, of a program that was made otherwise."""
        spec, modes = self.current_spec(), [part.training for part in module.modules()]
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves = [without_values(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def capture_again() -> ExportedProgram:
            if modes != [part.training for part in module.modules()]:
                raise ArgumentError(
                    f"exported: {self.label} is in another mode (train() or eval()) than at the call that the program "
                    "is for. Set it back."
                )
            made = self.on_device(stand_ins(leaves), structure)
            again_args, again_kwargs = pytree.tree_unflatten(made, structure)
            program, _ = self._whole(module, again_args, again_kwargs, spec, grad=grad)
            program.model = self.label
            return to_exported(program, None if program.trace is None else program.trace.returned)

        return capture_again

    def _whole(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, *, grad: bool
    ) -> tuple[Program, float]:
        """The program of a capture of every block, and the seconds that it took."""
        start = time.perf_counter()
        program = joint_program(module, args, kwargs, spec.params, spec.mesh, spec.device, grad=grad)
        if program is None:
            classes = functools.partial(self.class_of, module, not self.name)
            trace = functools.partial(capture_call, module, args, kwargs, spec, self.traced, classes, grad=grad)
            program = traced_or_break(f"{spec.forward_class.__name__}.{spec.method}", trace)
        return program, time.perf_counter() - start

    def _of_few(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        spec: CaptureSpec,
        passes: tuple[Pass, ...],
        observer: Observer,
        title: Callable[[Program], None],
        watching: Watching,
    ) -> Short | None:
        """The program of a capture of few blocks, partitioned; None if all are to be captured.

        What has once been in doubt stays so.
        """
        repeats = None if self.name or self._every_block else repeats_of(module, spec, self.options)
        if repeats is None:
            return None
        try:
            trace = functools.partial(self._trace_few, module, args, kwargs, spec, repeats)
            return program_of_few(trace, spec, repeats, passes, replace(observer), title, watching)
        except (Uneven, GraphshardError) as error:
            self._doubt(error)
            return None

    def _trace_few(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, repeats: Repeats
    ) -> Program:
        """Trace a few of equal blocks; the program's parameters are those of these and of the rest of the model.

        Dynamo makes errors of its own of `Uneven`, and of others that are raised while it traces.
        """
        few: dict[str, Any] = {"class_of": functools.partial(self.class_of, module, True), "repeats": repeats}
        trace = functools.partial(capture_call, module, args, kwargs, spec, self.traced, grad=True, **few)
        return traced_or_break(f"{spec.forward_class.__name__}.{spec.method}", trace)

    def _doubt(self, error: Exception) -> None:
        """Capture every block from now on; raises what is another rank's error."""
        if isinstance(error, (DivergenceError, PeerError)):
            raise error
        log.info("%s: every block is captured: %s", self.label, error)
        self._every_block = True

    def entry(self, name: str, method: str, module: nn.Module) -> Tracer:
        """The tracer of a submodule, or of another method of the model (its name is ""), that is called on its own."""
        table = self.spec.params.within(name) if name else self.spec.params
        if any(name in modules_of(unit) and unit != name for unit in self.spec.units):
            # FSDP2 lets go of a unit when all of its modules have run.
            table = ParamTable(tuple(replace(row, reshard=False) for row in table))
        spec = replace(
            self.spec,
            params=table,
            units=units_within(name, self.spec.units) if name else self.spec.units,
            precision=self.spec.precision.within(name, self.spec.units) if name else self.spec.precision,
            forward_class=users_class(module) if name else self.spec.forward_class,
            method=method,
            dynamic_shapes=None,
        )
        names = {row.name: self.spec.params[f"{name}.{row.name}" if name else row.name].name for row in table}
        return replace(
            self, spec=spec, params=tuple(param_refs(module, table)), name=entry_name(name, method), names=names
        )

    def for_copy(self, module: nn.Module) -> Tracer:
        """The tracer of a copy of the module."""
        return replace(self, params=tuple(param_refs(module, self.spec.params)))

    def change(self, names: Collection[str], **choices: Any) -> None:
        """Make other choices for parameters from the next program on."""
        rows = {ref.row.name: replace(ref.row, **choices) if ref.row.name in names else ref.row for ref in self.params}
        self.params = tuple(replace(ref, row=rows[ref.row.name]) for ref in self.params)
        self.spec = replace(self.spec, params=ParamTable(tuple(rows.values())))

    def current_spec(self) -> CaptureSpec:
        """The spec with the parameters' flags and dtypes as they are now."""
        rows = tuple(ref.row.as_now(ref.param, self.spec.precision.of(ref.row.unit)) for ref in self.params)
        extended = self._extended(rows)
        rows = tuple(extended[row.name].described() if row.name in extended else row for row in rows)
        return replace(self.spec, params=ParamTable(rows), extended=tuple(extended.values()))

    def _extended(self, rows: Sequence[ParamRow]) -> dict[str, Extended]:
        """The parameters that decide themselves what is gathered of them, by name."""
        mesh = None if self.mesh is None else sharding_mesh(self.mesh)
        return {
            row.name: Extended(
                row=row,
                param=ref.param,
                module=ref.owner,
                policy=self.spec.precision.of(row.unit),
                mesh=mesh,
                device=self.spec.device,
            )
            for row, ref in zip(rows, self.params, strict=True)
            if mesh is not None and is_extended(ref.param)
        }

    def signature(
        self,
        module: nn.Module,
        leaves: Sequence[Any] = (),
        structure: pytree.TreeSpec = _NO_INPUTS,
        params: Sequence[nn.Parameter] | None = None,
    ) -> Signature:
        """Return the signature of a call.

        Args:
            leaves: of the inputs; none for the signature that programs are found by, as guards look at inputs.
            params: the parameters as they are now, where they are at hand: to find one takes longer than to ask it.
        """
        device_type = self.spec.device.type
        if self._modes is None or self._modes.root is not module:
            self._modes = Modes(module)
        params = [ref.param for ref in self.params] if params is None else params
        if self._settings is None or self._settings[0] is not self.params:
            self._settings = self.params, tuple(ref.row.settings for ref in self.params)
        return Signature(
            structure=structure,
            inputs=tuple(leaf_key(leaf) for leaf in leaves),
            training=self._modes.now(),
            grad=torch.is_grad_enabled(),
            autocast=torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
            params=tuple((param.requires_grad, param.dtype) for param in params),
            extended=relied_on((param, ref.owner) for param, ref in zip(params, self.params)),
            settings=self._settings[1],
            casts_once=torch.is_autocast_cache_enabled(),
        )

    def on_device(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> list[Any]:
        """Input leaves where the model is; raises `InputError` for those that cannot be used."""
        return moved_to(self.spec.device, leaves, structure)

    @property
    def model_names(self) -> dict[str, str]:
        """Names of the parameters in the whole model by their names here."""
        return self.names or {ref.row.name: ref.row.name for ref in self.params}

    @property
    def label(self) -> str:
        """What programs are called, before their number."""
        return f"{self.spec.forward_class.__name__}{'-' if self.name else ''}{self.name}"


def entry_name(name: str, method: str) -> str:
    """What an entry is called: "encoder", "encode" or "encoder.encode"."""
    return ".".join(part for part in (name, method) if part not in ("", "forward"))
