"""A module whose forward cannot be traced whole: Python runs it, and its units run by separate programs.

    forward of the model          Python, on full parameters that one program gathers, and whose gradients it reduces
    `- layers.0, layers.1, ...    each by a program; one that cannot be traced is split in turn
    `- other submodules           Python, as a part of forward

The result has FSDP2's bits: the parameters of a unit are gathered together and their gradients reduced once, and what
FSDP2's hooks do where values enter and leave a unit is done by `UnitBoundary` in the unit's `__call__`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from graphshard.errors import GraphBreak, UnsupportedError
from graphshard.frontend.signature import Signature
from graphshard.frontend.unit_boundaries import BOUNDARY, UnitBoundary
from graphshard.ir.recompute import checkpoint_region, is_in_checkpoint, is_recomputing
from graphshard.ir.submodule_entry_points import method_of
from graphshard.ir.units import modules_of, unit_of
from graphshard.module._full_parameters import FullParameters, ParameterHolder
from graphshard.module.tracer import ModuleCall, Tracer
from graphshard.repeats.find_repeats import HOOKS
from graphshard.runtime.shards import ParamRef
from graphshard.torch_compat.autograd_state import without_transforms
from graphshard.torch_compat.torch_ops import pytree, sent_to

log = logging.getLogger(__name__)
Hooks: TypeAlias = tuple[tuple[int, ...], ...]

# Name of the program that gathers parameters, after the module's.
_GATHER = "parameters()"
# How many units a warning names.
_SHOWN = 3


@dataclass
class SplitState:
    """State of a compiled model's split modules, which its runner and its entries' runners share.

    Attributes:
        open: modules that Python runs now, the innermost last.
        full: parameters that were gathered since the outermost forward started, by path and whether gradients are on.
            A unit that is called again takes them: gradients of both calls are added up before they are reduced.
    """

    open: list[OpenModule] = field(default_factory=list)
    full: dict[tuple[str, bool], dict[str, torch.Tensor]] = field(default_factory=dict)

    def forget_full(self) -> None:
        """Forget what was gathered if the outermost forward has ended."""
        if not self.open:
            self.full.clear()

    def runs_in_python(self, name: str, units: Sequence[str]) -> bool:
        """Return whether a submodule is a part of a forward that Python runs now, and is not a unit."""
        return bool(self.open) and not _is_unit(name, units) and self.holds(name, unit_of(name, units))

    def holds(self, name: str, unit: str) -> bool:
        """Return whether a submodule holds the full parameters of its unit now."""
        holders = (each.split.path for each in self.open if each.split.unit == unit)
        return any(f"{name}.".startswith(f"{path}." if path else "") for path in holders)

    def is_open(self, module: nn.Module) -> bool:
        """Return whether Python runs a module already: gradients that its forward asks for may run a region again."""
        return any(each.module is module for each in self.open)

    def keep_in_region(self) -> None:
        """Let modules hold what they hold now when backward runs the region of torch.utils.checkpoint again."""
        region = checkpoint_region() if self.open else None
        if region is not None and type(region.recompute_fn) is not _Recomputation:
            around = tuple(each for each in self.open if each.region is not region)
            region.recompute_fn = _Recomputation(region.recompute_fn, self, around)


@dataclass(frozen=True)
class OpenModule:
    """A module that Python runs.

    Attributes:
        full: parameters of its unit, gathered; none if a module around it holds them.
        region: of torch.utils.checkpoint, in which it was called; backward runs such a module again as a whole.
    """

    split: SplitModule
    module: nn.Module
    full: dict[str, torch.Tensor]
    region: Any


@dataclass(frozen=True)
class _Recomputation:
    """Region of torch.utils.checkpoint that backward runs again, with modules as they were in forward.

    They hold the tensors that forward has gathered: nothing is gathered again.
    """

    recompute: Callable[..., Any]
    state: SplitState
    around: tuple[OpenModule, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(self.state.forget_full)
            for each in self.around:
                each.split.boundaries(stack, each.module)
                stack.enter_context(each.split.holding(each))
            return self.recompute(*args, **kwargs)


class SplitModule:
    """Calls of one module, or of one entry, that Python runs; `runner` is its `Runner`."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.path = runner, runner.path
        self.state: SplitState = runner.split_state
        # Calls with a graph break, and inputs of calls that raise, with the hooks at that time: they come and go.
        self._breaks: set[tuple[Signature, Hooks]] = set()
        self._raising: set[tuple[Signature, Hooks]] = set()
        self._warned = False

    @property
    def tracer(self) -> Tracer:
        """The runner's; it may be replaced when choices change."""
        tracer: Tracer = self.runner.tracer
        return tracer

    @functools.cached_property
    def unit(self) -> str:
        """The unit that the module's own parameters belong to."""
        return unit_of(self.path, self.runner.of_model.tracer.spec.units)

    @functools.cached_property
    def _refs(self) -> tuple[ParamRef, ...]:
        """Parameters of the module's own unit."""
        return tuple(ref for ref in self.tracer.params if not ref.row.unit and not ref.row.ignored)

    def covers(self, signature: Signature, call: ModuleCall) -> bool:
        """Return whether Python runs a call for which there is no program.

        It does if one with the same signature and hooks had a graph break, or raised with the same inputs.
        """
        if not (self._breaks or self._raising):
            return False
        is_known = (signature, _hooks_in(call.module)) in self._breaks
        return is_known or (bool(self._raising) and self._with_inputs(call) in self._raising)

    def _with_inputs(self, call: ModuleCall) -> tuple[Signature, Hooks]:
        of_inputs = self.tracer.signature(call.module, *pytree.tree_flatten((call.args, call.kwargs)))
        return of_inputs, _hooks_in(call.module)

    def expect(self, error: GraphBreak, signature: Signature, module: nn.Module) -> None:
        """Remember a graph break before the first call; what a statement of forward raises is left to that call."""
        if error.raised and not error.is_own:
            raise error
        if not error.raised:
            self._remember(error, signature, module)

    def begin(self, error: GraphBreak, signature: Signature, call: ModuleCall) -> Any:
        """Run the first call that has a graph break, and remember it unless forward itself raises."""
        if self.tracer.spec.forward_class is ParameterHolder:
            raise error
        if not error.raised:
            self._remember(error, signature, call.module)
        result = self.run(call)
        if error.raised:
            self._remember(error, signature, call.module)
        return result

    def run(self, call: ModuleCall) -> Any:
        """Run a call in Python, and remember whether it raises: hooks may stop each forward where they have enough."""
        key = self._with_inputs(call)
        self._raising.add(key)
        result = self.call(*call[:3])
        self._raising.discard(key)
        return result

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in Python."""
        forward = method_of(module, self.tracer.spec.method)
        with contextlib.ExitStack() as stack:
            boundary = self.boundaries(stack, module)
            if boundary is not None:
                args, kwargs = boundary.enter(args, kwargs)
            stack.callback(self.state.forget_full)
            is_held = not self._refs or self.state.holds(self.path, self.unit)
            full = {} if is_held else self._gather()
            stack.enter_context(self.holding(OpenModule(self, module, full, checkpoint_region())))
            result = forward(*args, **kwargs)
        shown, refs = self.runner.unsharded.shown, [ref for ref in self._refs if full and not ref.row.reshard]
        with without_transforms():
            for ref in refs:  # as FSDP2's root is until backward
                value = full[ref.row.name]
                shown.show_as_attribute(ref, value.dtype, value.device, lambda ref: full[ref.row.name].detach())
            shown.connect()
        return result if boundary is None else boundary.leave(result)

    def call_in_python(self, reason: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that no program can run, inside a transform of torch.func or with nested tensors, say."""
        if not (self._warned or self.state.open):
            self._warned = True
            log.warning(
                "%s %s: Python runs such calls, on full parameters that each unit gathers and keeps until backward. "
                "In forward, both are captured with the rest.",
                self.tracer.label,
                reason,
            )
        return self.call(module, *sent_to(self.tracer.spec.device, (args, kwargs)))

    def _remember(self, error: GraphBreak, signature: Signature, module: nn.Module) -> None:
        self._breaks.add((signature, _hooks_in(module)))
        units = self.tracer.spec.units
        if self._warned:
            return
        self._warned = True
        named = ", ".join(units[:_SHOWN]) + (f" and {len(units) - _SHOWN} more" if len(units) > _SHOWN else "")
        if units:
            lost = f"Each unit ({named}) is captured by itself: no gather of a unit overlaps with compute of another"
        else:
            lost = "It contains no units: no part of it is captured, and no collective overlaps with its compute"
        log.warning(
            "%s is split, and Python runs its %s. It has a graph break%s: %s %s. %s fullgraph=True makes it an error.",
            self.tracer.label,
            self.tracer.spec.method,
            error.at,
            error.reason,
            lost,
            error.remedy,
        )

    def boundaries(self, stack: contextlib.ExitStack, module: nn.Module) -> _LiveBoundary | None:
        """Give units inside their boundaries until the stack is closed, and return the module's own.

        None if it has none, or if its `__call__` has gone through it already.
        """
        spec, found = self.tracer.spec, None
        sharded = {row.unit for row in spec.params if not row.ignored}
        is_unit = not self.path or _is_unit(self.path, self.runner.of_model.tracer.spec.units)
        for unit in ("", *spec.units):
            policy = spec.precision.of(unit)
            casts = policy.param_dtype if policy.cast_forward_inputs else None
            node = UnitBoundary(unit or "root", "0", "1", casts, policy.output_dtype, unit in sharded)
            owners = [module] if not unit else [module.get_submodule(path) for path in modules_of(unit)]
            called: set[int] = set()
            for index, owner in enumerate(owners):
                if BOUNDARY in owner.__dict__ or (not unit and not is_unit):
                    continue
                boundary = _LiveBoundary(node, called, index, len(owners))
                if not unit:
                    found = boundary
                    continue
                owner.__dict__[BOUNDARY] = boundary
                stack.callback(owner.__dict__.pop, BOUNDARY, None)
        return found

    @contextlib.contextmanager
    def holding(self, opened: OpenModule) -> Iterator[None]:
        """Let modules hold the full parameters of the module's own unit, which autograd keeps, while Python runs it."""
        full = opened.full
        if full:
            self.runner.unsharded.shown.hide()
        held = []
        for ref in self._refs if full else ():
            value = cast(nn.Parameter, full[ref.row.name])
            value._is_param = True  # an nn.Parameter by isinstance
            held.append((ref, ref.param, value, value._version))
        self.state.open.append(opened)
        try:
            for ref, _, value, _ in held:
                ref.put(value)
                _refresh(ref)
            yield
        finally:
            self.state.open.pop()
            for ref, shard, value, _ in held:
                ref.put(shard, instead_of=value)
                _refresh(ref)
        written = next((ref.row.name for ref, _, value, version in held if value._version != version), None)
        if written is not None:
            raise UnsupportedError(
                f"forward of {self.tracer.label} writes to the parameter {written}, of which it holds a copy. "
                "Write to it between calls, under torch.no_grad(), or hold the value in a buffer."
            )

    def _gather(self) -> dict[str, torch.Tensor]:
        """Return the full parameters of the unit by name, of an earlier call in the same forward if any."""
        key = self.path, torch.is_grad_enabled()
        full = None if is_recomputing() else self.state.full.get(key)
        if full is None:
            full = self._full_parameters()
        if not (is_recomputing() or is_in_checkpoint()):  # in a region, autograd keeps nothing of a unit until backward
            self.state.full[key] = full
        return full

    @functools.cached_property
    def _full_parameters(self) -> FullParameters:
        return FullParameters(self.runner, self._refs, f"{self.path}.{_GATHER}" if self.path else _GATHER)


def _hooks_in(module: nn.Module) -> Hooks:
    """Return how many hooks of each kind there are, by the number of the module; without modules that have none."""
    counts = (
        (index, *(len(vars(part).get(kind, ())) for kind in HOOKS)) for index, part in enumerate(module.modules())
    )
    return tuple(each for each in counts if any(each[1:]))


class _LiveBoundary:
    """Boundary of a unit's module while Python runs the forward around it; of a unit, one module has the node."""

    block = checkpointed = None  # no block is left out, and hooks run

    def __init__(self, boundary: UnitBoundary, called: set[int], index: int, num_modules: int) -> None:
        self._first, self._called, self._index, self._count = boundary, called, index, num_modules
        self._later = replace(boundary, has_node=False)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Return the inputs of the module as the module finds them."""
        boundary = self._later if self._called else self._first
        self._called.add(self._index)
        if len(self._called) == self._count:
            self._called.clear()
        return boundary.enter(args, kwargs)

    def leave(self, output: Any) -> Any:
        """Return the results of the module as the caller finds them."""
        return self._first.leave(output)


def _is_unit(name: str, units: Sequence[str]) -> bool:
    unit = unit_of(name, units)
    return bool(unit) and name in modules_of(unit)


def _refresh(ref: ParamRef) -> None:
    """Let recurrent modules use the parameter that they hold now: they keep a list, too."""
    for owner, _ in ref.places:
        if isinstance(owner, nn.RNNBase):
            owner._flat_weights = [owner._parameters.get(name) for name in owner._flat_weights_names]
