"""From calls of a module to programs: what is captured, under which options. There need be no process group.

Of many equal blocks a few are captured, and stand for all (`graphshard/ir/repeats.py`):

    capture 0 1 N-3 N-2 N-1 -> passes up to the partition -> plan of all -> other passes -> regions -> stamp

The result is the program that capturing all blocks makes (`tests/module/test_template_capture.py` compares both). Where
passes treat blocks differently, they run on all blocks, and in doubt every block is captured.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.codec.joint_export import joint_program, to_exported
from graphshard.cost.costs import Costs
from graphshard.errors import ArgumentError, DivergenceError, GraphshardError, PeerError
from graphshard.frontend.capture import capture as capture_call
from graphshard.frontend.dynamo_capture import TracedFunction
from graphshard.frontend.graph_breaks import traced_or_break
from graphshard.frontend.inputs import leaf_key, moved_to, stand_ins, without_values
from graphshard.frontend.signature import CaptureSpec, Signature, check_alike
from graphshard.ir.instantiate_blocks import instantiate_all_blocks, match_blocks
from graphshard.ir.param_table import ParamSpec, ParamTable, Settings
from graphshard.ir.program import Program
from graphshard.ir.repeats import BlocksDifferError, Repeats
from graphshard.ir.subclasses import is_extended
from graphshard.ir.units import modules_of, units_within
from graphshard.lower.regions import RegionCall
from graphshard.module._call_checks import ModuleTree
from graphshard.options.options import Options
from graphshard.passes import MakePlan, Partition, Pass
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import Partitioned, Pipeline, finish_template, planned_by, run_pass, run_pipeline
from graphshard.repeats.find_repeats import find_repeats
from graphshard.runtime.process_groups import sharding_mesh
from graphshard.runtime.shards import ParamRef, Storage, param_refs
from graphshard.subclasses.closure_variables import relied_on
from graphshard.subclasses.extensions import Extended
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.progress import collector_paused
from graphshard.utils.text import users_class

log = logging.getLogger(__name__)

ClassOf: TypeAlias = Callable[[nn.Module, bool, nn.Module], type]
Watching: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
# A program, and where other backwards of it start.
Traced: TypeAlias = tuple[Program, Partitioned | Callable[[], Partitioned] | None]

# "1" captures every block.
VARIABLE = "GRAPHSHARD_EVERY_BLOCK"
_NO_INPUTS = pytree.tree_structure(())


class ModuleCall(NamedTuple):
    """A call of a module with inputs that are where the model is; `grad` if it is to be differentiated."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool


@dataclass
class Tracer:
    """Captures programs of a module, of a submodule or of another method, and runs the passes over them.

    Attributes:
        options: of the user; `max_captures` is for the module, and for each entry.
        storage: where shards are kept between steps.
        costs: of the machine; None for an unknown one.
        name: of the submodule or method; "" for the model itself.
        compiled: compiled regions by key, shared by all programs of a model and its copies.
        mesh: that the module is sharded over; None where there is none.
        class_of: see `compiled_module.class_of`.
    """

    spec: CaptureSpec
    params: tuple[ParamRef, ...]
    options: Options
    pipeline: Pipeline
    storage: Storage
    costs: Costs | None = None
    name: str = ""
    compiled: dict[str, RegionCall] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    class_of: ClassOf = lambda _, __, module: type(module)
    traced: TracedFunction = field(default_factory=lambda: TracedFunction("forward"), init=False, repr=False)
    _tree: ModuleTree | None = field(default=None, init=False, repr=False)
    # With the parameters that they were made for.
    _settings: tuple[tuple[ParamRef, ...], tuple[Settings, ...]] | None = field(default=None, init=False, repr=False)
    _every_block: bool = field(default=False, init=False, repr=False)

    # --- capture -------------------------------------------------------------------------------------------------

    @collector_paused()
    def trace(
        self,
        call: ModuleCall,
        observer: Observer,
        reason: str,
        *,
        number: int = 0,
        passes: Pipeline | None = None,
        watching: Watching = contextlib.nullcontext,
        few: bool = False,
        find: Callable[[Program], None] | None = None,
    ) -> Traced:
        """Capture a program and run the passes, or other ones.

        Args:
            number: how many programs were captured before.
            watching: is around each capture.
            few: of many equal blocks a few may be captured.
            find: called with the traced program, before passes.
        """
        spec, steps = self.current_spec(), (passes or self.pipeline).passes

        def capture(make: Callable[[], Program], observer: Observer) -> Program:
            start = time.perf_counter()
            with watching():
                program = make()
            seconds = time.perf_counter() - start
            program.model, program.reason, program.capture = self.label, reason, number
            if program.few is not None and program.eager is not None:
                program.eager = replace(program.eager, function=lambda: again().eager.function())  # type: ignore[union-attr]
            if find is not None:
                find(program)
            if program.few is None:  # before values are numbered, and before a dump writes the captured program
                captured = replace(program.clone(), trace=None)
                self.keep_captured(program, lambda: captured, steps)
            observer.after(program, "capture", 0, seconds)
            return program

        repeats = self._repeats(call, spec) if few and not self._every_block else None
        if repeats is not None:
            again = self.recapture(call)
            make = functools.partial(self._trace_template, call, spec, repeats)
            found = self._of_template(functools.partial(capture, make), steps, observer)
            if found is not None:
                self.keep_captured(found[0], again, steps)
                return found
        program = capture(functools.partial(self._whole, call, spec), observer)
        return program, run_pipeline(steps, program, observer)

    def trace_alone(self, call: ModuleCall, *, few: bool = False) -> Program | None:
        """Trace a call as if it were the first one, so that no number or size is a symbol because it has changed.

        With `few` trace a few of many equal blocks; return None if there are none, or if they are called differently.
        """
        alone, spec = replace(self), self.current_spec()
        if not few:
            program = alone._whole(call, spec)
        else:
            repeats = self._repeats(call, spec)
            if repeats is None:
                return None
            try:
                program = alone._trace_template(call, spec, repeats)
            except (BlocksDifferError, GraphshardError) as error:
                log.info("%s: every block is traced: %s", self.label, error)
                return None
        program.model = self.label
        return program

    def keep_captured(self, program: Program, again: Callable[[], Program], steps: tuple[Pass, ...] = ()) -> None:
        """Let a program be exported and planned anew, from the captured program that `again` returns."""
        steps = steps or self.pipeline.passes
        program.keep_captured(lambda: to_exported(again()), lambda planner: planned_by(planner, again(), steps))

    def recapture(self, call: ModuleCall) -> Callable[[], Program]:
        """Return a function that captures every block, for a program that was made otherwise."""
        spec, modes = self.current_spec(), [part.training for part in call.module.modules()]
        leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
        leaves = [without_values(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        call = call._replace(args=(), kwargs={})  # inputs live no longer than the call

        def capture_again() -> Program:
            if modes != [part.training for part in call.module.modules()]:
                raise ArgumentError(
                    f"{self.label} is captured again for Program.exported, or for gradients of gradients "
                    "(create_graph=True), and is in another mode (train() or eval()) than at the call that the program "
                    "is for. Set it back."
                )
            args, kwargs = pytree.tree_unflatten(self.on_device(stand_ins(leaves), structure), structure)
            program = self._whole(call._replace(args=args, kwargs=kwargs), spec)
            program.model = self.label
            return program

        return capture_again

    def _whole(self, call: ModuleCall, spec: CaptureSpec) -> Program:
        """Capture every block."""
        program = joint_program(*call[:3], spec.params, spec.mesh, spec.device, grad=call.grad)
        return self._captured(call, spec) if program is None else program

    def _captured(self, call: ModuleCall, spec: CaptureSpec, repeats: Repeats | None = None) -> Program:
        classes = functools.partial(self.class_of, call.module, not self.name)
        trace = functools.partial(capture_call, *call[:3], spec, self.traced, classes, grad=call.grad, repeats=repeats)
        return traced_or_break(f"{spec.forward_class.__name__}.{spec.method}", trace)

    def _repeats(self, call: ModuleCall, spec: CaptureSpec) -> Repeats | None:
        """Return equal blocks of which a few are enough; None if there are none, or options are for the whole model."""
        communicates = any((spec.tensor, spec.whole, spec.experts, spec.extended))
        if self.name or not call.grad or communicates or not self.options.is_local or os.environ.get(VARIABLE) == "1":
            return None
        return find_repeats(call.module)

    def _trace_template(self, call: ModuleCall, spec: CaptureSpec, repeats: Repeats) -> Program:
        """Trace a few of equal blocks; the program's parameters are theirs and the rest of the model's.

        Raises:
            BlocksDifferError: they do not stand for all. Inside a trace, Dynamo makes other errors of it.
        """
        check_alike(spec, repeats)
        program = self._captured(call, spec, repeats)
        if program.checks or program.sizes:
            raise BlocksDifferError("forward depends on numbers")
        return program

    def _of_template(
        self, capture: Callable[[Observer], Program], steps: tuple[Pass, ...], observer: Observer
    ) -> Traced | None:
        """Capture a few of equal blocks, and run the passes; return None if they do not stand for all."""
        quiet, kinds = replace(observer), [type(step) for step in steps]
        partition, plan = kinds.index(Partition) + 1, kinds.index(MakePlan) + 1
        try:
            program = capture(quiet)
            for step in steps[:partition]:
                run_pass(step, program, quiet)
            match_blocks(program)
        except (BlocksDifferError, GraphshardError) as error:
            self._doubt(error)
            return None
        start = program.clone()

        def partitioned() -> Partitioned:
            backward = instantiate_all_blocks(start).phases["backward"]
            return Partitioned(backward, steps[partition:], frozenset(start.established))

        try:
            for step in steps[partition:plan]:
                run_pass(step, program, quiet)
            program = finish_template(program, steps[plan:], observer)
        except BlocksDifferError as error:
            self._doubt(error)
            return None
        return program, partitioned if "backward" in program.phases else None

    def _doubt(self, error: Exception) -> None:
        """Capture every block from now on; raise what is an error of another rank."""
        if isinstance(error, (DivergenceError, PeerError)):
            raise error
        log.info("%s: every block is captured: %s", self.label, error)
        self._every_block = True

    # --- other tracers -------------------------------------------------------------------------------------------

    def entry(self, name: str, method: str, module: nn.Module) -> Tracer:
        """Return the tracer of a submodule, or of another method of the model (name ""), that is called directly."""
        table = self.spec.params.within(name) if name else self.spec.params
        if any(name in modules_of(unit) and unit != name for unit in self.spec.units):
            # FSDP2 frees a unit when all of its modules have run.
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
        params = tuple(param_refs(module, table, names))
        return replace(self, spec=spec, params=params, name=entry_name(name, method))

    def for_copy(self, module: nn.Module) -> Tracer:
        """Return the tracer of a copy of the module."""
        return replace(self, params=tuple(param_refs(module, self.spec.params)))

    # --- parameters ----------------------------------------------------------------------------------------------

    def change(self, names: Collection[str], **choices: Any) -> None:
        """Change rows of parameters from the next program on."""
        rows = {ref.row.name: replace(ref.row, **choices) if ref.row.name in names else ref.row for ref in self.params}
        self.params = tuple(replace(ref, row=rows[ref.row.name]) for ref in self.params)
        self.spec = replace(self.spec, params=ParamTable(tuple(rows.values())))

    def current_spec(self) -> CaptureSpec:
        """Return the spec with the parameters' flags and dtypes as they are now."""
        rows = tuple(ref.row.as_now(ref.param, self.spec.precision.of(ref.row.unit)) for ref in self.params)
        extended = self._extended(rows)
        rows = tuple(extended[row.name].described() if row.name in extended else row for row in rows)
        return replace(self.spec, params=ParamTable(rows), extended=tuple(extended.values()))

    def _extended(self, rows: Sequence[ParamSpec]) -> dict[str, Extended]:
        """Return the parameters with `fsdp_pre_all_gather`, by name."""
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

    # --- calls ---------------------------------------------------------------------------------------------------

    def tree(self, module: nn.Module) -> ModuleTree:
        """Return the submodules of a module, which is the same in each call."""
        if self._tree is None or self._tree.root is not module:
            self._tree = ModuleTree(module)
        return self._tree

    def signature(
        self,
        module: nn.Module,
        leaves: Sequence[Any] = (),
        structure: pytree.TreeSpec = _NO_INPUTS,
        params: Sequence[nn.Parameter] | None = None,
    ) -> Signature:
        """Return the signature of a call; programs are found by the one without inputs, which guards test.

        Parameters as they are now are passed if they are at hand: finding one takes longer than reading it.
        """
        device_type = self.spec.device.type
        params = [ref.param for ref in self.params] if params is None else params
        if self._settings is None or self._settings[0] is not self.params:
            self._settings = self.params, tuple(ref.row.settings for ref in self.params)
        return Signature(
            structure=structure,
            inputs=tuple(leaf_key(leaf) for leaf in leaves),
            training=self.tree(module).modes(),
            grad=torch.is_grad_enabled(),
            autocast=torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
            params=tuple((param.requires_grad, param.dtype) for param in params),
            extended=relied_on((param, ref.owner) for param, ref in zip(params, self.params)),
            settings=self._settings[1],
            casts_once=torch.is_autocast_cache_enabled(),
        )

    def on_device(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> list[Any]:
        """Return input leaves where the model is; raise `InputError` for unusable ones."""
        return moved_to(self.spec.device, leaves, structure)

    @property
    def label(self) -> str:
        """Title of programs, before their number."""
        return f"{self.spec.forward_class.__name__}{'-' if self.name else ''}{self.name}"


def entry_name(name: str, method: str) -> str:
    """Return the name of an entry: "encoder", "encode" or "encoder.encode"."""
    return ".".join(part for part in (name, method) if part not in ("", "forward"))
