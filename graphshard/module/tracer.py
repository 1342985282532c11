"""From calls of a module to programs: what is captured, under which options. There need be no process group.

`export` has a tracer alone; `Runner` has one, and runs what it makes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from graphshard.capture.capture import CaptureSpec, capture
from graphshard.capture.extensions import Extended
from graphshard.capture.inputs import moved_to
from graphshard.capture.modes import Modes
from graphshard.capture.replaced import Replaced
from graphshard.capture.signature import Signature, facts_of, leaf_key, same_of
from graphshard.capture.variables import relied_on
from graphshard.ir.classes import users_class
from graphshard.ir.collector import collector_paused
from graphshard.ir.errors import DivergenceError, GraphshardError, PeerError
from graphshard.ir.params import ParamRow, ParamTable, Settings
from graphshard.ir.program import Program
from graphshard.ir.repeats import Uneven
from graphshard.ir.state import Place
from graphshard.ir.subclasses import is_extended
from graphshard.ir.units import modules_of, units_within
from graphshard.lower.regions import RegionCall
from graphshard.module.few_blocks import Short, program_of_few, repeats_of
from graphshard.options.options import Options
from graphshard.passes import Pass
from graphshard.pipeline.observe import Observer
from graphshard.pipeline.pipeline import Partitioned, Pipeline, run_pipeline
from graphshard.runtime.groups import sharding_mesh
from graphshard.runtime.shards import ParamRef, Storage, param_refs

log = logging.getLogger(__name__)
Watching: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]


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
    _modes: Modes | None = field(default=None, init=False, repr=False)
    _replaced: Replaced = field(default_factory=Replaced, init=False, repr=False)
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
    ) -> tuple[Program, Partitioned | Callable[[], Partitioned] | None]:
        """Capture a program and run the passes; `Partitioned` is where another backward begins.

        Args:
            reason: why, for the log and the dump.
            grad: whether the call is to be differentiated.
            number: how many programs were captured before.
            passes: to run in the place of the tracer's.
            watching: is around each capture.
            few: of many equal blocks a few may be captured.
        """
        spec, passes_left = self.current_spec(), (passes or self.pipeline).passes

        def title(program: Program) -> None:
            program.model, program.reason, program.capture = self.label, reason, number

        short = (
            self._of_few(module, args, kwargs, spec, passes_left, observer, title, watching) if few and grad else None
        )
        if short is not None:
            try:
                return short.finish(observer)
            except Uneven as error:
                self._doubt(error)
        with watching():
            program, seconds = self._whole(module, args, kwargs, spec, grad=grad)
        title(program)
        observer.after(program, "capture", 0, seconds)
        return program, run_pipeline(passes_left, program, observer)

    def _whole(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, *, grad: bool
    ) -> tuple[Program, float]:
        """The program of a capture of every block, and the seconds that it took."""
        start = time.perf_counter()
        program = capture(module, args, kwargs, spec, grad=grad)
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
            return program_of_few(module, args, kwargs, spec, repeats, passes, replace(observer), title, watching)
        except (Uneven, GraphshardError) as error:
            self._doubt(error)
            return None

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
            followed=(),
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

    def follow(self, place: Place) -> None:
        """Take a number that others than forward change for one that may be another at each call."""
        if place not in self.spec.followed:
            self.spec = replace(self.spec, followed=(*self.spec.followed, place))

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
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
        params: Sequence[nn.Parameter] | None = None,
    ) -> Signature:
        """The signature of a call with these input leaves.

        Args:
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
            replaced=self._replaced.now(),
            attributes=facts_of(leaves),
            same=same_of(leaves),
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
