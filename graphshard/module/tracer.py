"""The program of a model with many equal blocks, made of a capture of a few of them.

    capture 0 1 N-3 N-2 N-1 -> passes up to the partition -> plan of all -> other passes -> regions -> stamp

It is the program that capturing all blocks makes (`tests/module/test_few_blocks.py` compares them value by value), or
`Uneven`. Where the plan, or what is gathered at once, is not the same for each block, the partitioned program is
stamped, and all else is of all blocks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from graphshard.codec.captured_graph import CapturedGraph
from graphshard.codec.joint_program import to_exported
from graphshard.codec.joint_reader import joint_program
from graphshard.errors import ArgumentError, DivergenceError, GraphshardError, PeerError
from graphshard.frontend.capture import capture as capture_call
from graphshard.frontend.dynamo_capture import TracedFunction
from graphshard.frontend.graph_breaks import traced_or_break
from graphshard.frontend.inputs import leaf_key, moved_to, stand_ins, without_values
from graphshard.frontend.signature import CaptureSpec, Signature, check_alike
from graphshard.ir.alike import few_of
from graphshard.ir.param_table import ParamSpec, ParamTable, Settings
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.ir.repeats import Few, Repeats, Uneven
from graphshard.ir.stamp import backward_of_all, stamp
from graphshard.ir.subclasses import is_extended
from graphshard.ir.units import modules_of, units_within
from graphshard.lower.regions import RegionCall, outline
from graphshard.module.argument_checks import Modes
from graphshard.options.options import Options
from graphshard.passes import MakePlan, Partition, Pass
from graphshard.pipeline.few import stamped
from graphshard.pipeline.observe import Observer
from graphshard.pipeline.pipeline import Partitioned, Pipeline, run_pass, run_pipeline
from graphshard.repeats.find_repeats import find_repeats
from graphshard.runtime.groups import sharding_mesh
from graphshard.runtime.shards import ParamRef, Storage, param_refs
from graphshard.schedule.by_unit import PlanByUnit
from graphshard.schedule.few import folded_plan
from graphshard.schedule.known import within_one_plan
from graphshard.subclasses.closure_variables import relied_on
from graphshard.subclasses.extensions import Extended
from graphshard.torch_compat.operators import pytree
from graphshard.utils.progress import collector_paused
from graphshard.utils.text import users_class

log = logging.getLogger(__name__)

# "1" captures every block.
VARIABLE = "GRAPHSHARD_EVERY_BLOCK"


def repeats_of(module: nn.Module, spec: CaptureSpec, options: Options) -> Repeats | None:
    """Equal blocks of which a few are enough; None if there are none, or if options look at the model as a whole."""
    by_budget = isinstance(options.activation, (int, float)) or options.activation == "auto"
    whole = options.passes is not None or by_budget or options.dynamic_shapes is not None
    communicates = any((spec.tensor, spec.whole, spec.experts, spec.extended))
    if whole or communicates or os.environ.get(VARIABLE) == "1":
        return None
    return find_repeats(module)


@dataclass
class Short:
    """A partitioned program of few blocks, and the passes that are left."""

    program: Program
    few: Few
    passes: tuple[Pass, ...]

    def finish(self, observer: Observer) -> tuple[Program, Partitioned | Callable[[], Partitioned] | None]:
        """Run the passes that are left; the program of all blocks, and where another backward of it begins.

        Raises:
            Uneven: a program of all cannot be made.
            GraphshardError: a pass does not like the program.
        """
        program = self.program
        program.few = self.few
        begin = replace(program, phases={name: phase.clone() for name, phase in program.phases.items()})
        begin.established, begin.history = set(program.established), list(program.history)
        plans: list[Plan] = []

        def plan(step: MakePlan, program: Program) -> Plan:
            with within_one_plan():
                plans.append((step.planner or PlanByUnit())(program))
                return folded_plan(plans[-1], program)

        def partitioned() -> Partitioned:
            return Partitioned(backward_of_all(begin), self.passes, frozenset(begin.established))

        steps = [replace(s, planner=partial(plan, s)) if isinstance(s, MakePlan) else s for s in self.passes]
        alone = replace(observer)
        try:
            for step in steps:
                run_pass(step, program, alone)
            alone.end(program)
            outline(program)
            begun = time.perf_counter()
            program = stamped(program, plans[-1] if plans else None)
        except Uneven as error:
            log.info("passes are of every block: %s", error)
            return self._long(begin, plans, observer)
        text = f"the program of all {self.few.repeats.groups} groups of blocks: see the stage lower\n"
        observer.note(program, "stamp", len(self.few.repeats.missing), time.perf_counter() - begun, text=text)
        return program, partitioned if "backward" in program.phases else None

    def _long(self, begin: Program, plans: Sequence[Plan], observer: Observer) -> tuple[Program, Partitioned | None]:
        """Stamp the partitioned program; a plan that was made is taken."""
        begun = time.perf_counter()
        program = stamp(begin, self.few.repeats, self.few.params)
        observer.after(program, "stamp", len(self.few.repeats.missing), time.perf_counter() - begun)
        planned = [
            replace(step, planner=lambda _: plans[-1]) if isinstance(step, MakePlan) else step for step in self.passes
        ]
        found = run_pipeline(planned if plans else self.passes, program, observer)
        return program, None if found is None else replace(found, rest=self.passes)


def program_of_few(
    trace: Callable[[], Program],
    spec: CaptureSpec,
    repeats: Repeats,
    passes: tuple[Pass, ...],
    observer: Observer,
    title: Callable[[Program], None],
    watching: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Short:
    """Capture few blocks, and run the passes up to the partition.

    Args:
        trace: of few blocks.
        title: gives the program its name.
        watching: is around the capture.

    Raises:
        Uneven: of them the program of all cannot be told.
        GraphshardError: capture or a pass does not like the model.
    """
    at = next((index for index, step in enumerate(passes) if isinstance(step, Partition)), None)
    if at is None:
        raise Uneven("there is no partition")
    start = time.perf_counter()
    with watching():
        program = trace_few(trace, spec, repeats)
    title(program)
    observer.after(program, "capture", 0, time.perf_counter() - start)
    for step in passes[: at + 1]:
        run_pass(step, program, observer)
    return Short(program, few_of(program, repeats, spec.params), passes[at + 1 :])


def trace_few(trace: Callable[[], Program], spec: CaptureSpec, repeats: Repeats) -> Program:
    """Trace a few of equal blocks, and check that they stand for all.

    Raises:
        Uneven: they do not.
    """
    check_alike(spec, repeats)
    program = trace()
    _check(program)
    return program


def _check(program: Program) -> None:
    """Raise Uneven for what a program has besides its graph that may differ between blocks."""
    if program.checks or program.sizes:
        raise Uneven("forward depends on numbers")


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
        find: Callable[[Program], None] | None = None,
    ) -> tuple[Program, Partitioned | Callable[[], Partitioned] | None]:
        """Capture a program and run the passes; `Partitioned` is where another backward begins.

        Args:
            reason: why, for the log and the dump.
            grad: whether the call is to be differentiated.
            number: how many programs were captured before.
            passes: to run in the place of the tracer's.
            watching: is around each capture.
            few: of many equal blocks a few may be captured.
            find: called with the traced program, before passes.
        """
        spec, passes_left = self.current_spec(), (passes or self.pipeline).passes

        def title(program: Program) -> None:
            program.model, program.reason, program.capture = self.label, reason, number
            if find is not None:
                find(program)

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

    def _extended(self, rows: Sequence[ParamSpec]) -> dict[str, Extended]:
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
