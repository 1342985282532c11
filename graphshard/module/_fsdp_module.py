"""A unit of a compiled model, and the model itself: an `FSDPModule`, with FSDP2's methods.

    model.set_requires_gradient_sync(False)    all units, as FSDP2's methods with `recurse` do
    model.layers[0].unshard()                  this unit only, as its other methods; `units=["layers.*"]` names units

A choice holds from the next call of the model on. A unit keeps its forward and its class by `isinstance`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.experimental import implicit_replication

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.frontend.unit_boundaries import BoundaryModule
from graphshard.ir.submodule_entry_points import EntryPoint, install_entry, is_traced, without_entries
from graphshard.ir.units import modules_of
from graphshard.module._composable_state import UnitRegistry, UnitState
from graphshard.options.resolve import Direction
from graphshard.runtime.collective_launches import Comm, Hook, MemoryKind, UserCollectives, UserObject
from graphshard.runtime.communication_memory import is_there
from graphshard.runtime.unsharded import UnshardHandle
from graphshard.torch_compat.dtensor import register_as
from graphshard.utils.argument_validation import (
    check_bool,
    check_choice,
    check_count,
    check_function,
    check_number,
    check_texts,
)
from graphshard.utils.text import MADE_OF, brief, users_class

if TYPE_CHECKING:
    from graphshard.module.runner import Runner


@dataclass(frozen=True)
class UnitRef:
    """Place of a module in a compiled model: its path, and the name of its unit, which may have several modules."""

    runner: Runner
    path: str
    name: str

    def inside(self, *, recurse: bool) -> set[str]:
        """Return names of the units that a method is for: this one, and those within it."""
        if not recurse:
            return {self.name}
        prefix = f"{self.path}." if self.path else ""
        units = self.runner.tracer.spec.params.units
        return {self.name, *(unit for unit in units if any(name.startswith(prefix) for name in modules_of(unit)))}


def _refusal(method: str, why: str) -> Callable[..., NoReturn]:
    """Return a method of FSDP2 that raises UnsupportedError."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"{method} is not supported by graphshard. {why}")

    return refuse


def _place_gathers(unit: UnitRef, setter: str, kind: MemoryKind | None) -> None:
    spec = unit.runner.tracer.spec
    if kind is None or is_there(kind, unit.runner.groups[spec.mesh.shard.name], spec.device, setter):
        unit.runner.place_gathers(setter, [unit.name], kind)


class GraphshardFSDPModule(FSDPModule, BoundaryModule):
    """Base of the classes of the model and of its units' modules."""

    _graphshard_unit: UnitRef

    def _graphshard_begin(self) -> None:
        """Take over a forward that the user has put on this module since the last call."""
        forward = self.__dict__.get("forward")
        if forward is not None and type(forward) is not EntryPoint and not is_traced():
            unit = self._graphshard_unit
            install_entry(self, unit.path, unit.runner.call_entry)

    def _params_of(self, recurse: bool, units: Sequence[str] | None) -> set[str]:
        """Return names of the parameters that a method is for."""
        check_bool("recurse", recurse)
        unit = self._graphshard_unit
        params, prefix = unit.runner.tracer.spec.params, f"{unit.path}." if unit.path else ""
        if units is not None:
            check_texts("units", units, "['layers.*']")
            return params.of_units([f"{prefix}{pattern}" if pattern else unit.name for pattern in units])
        names = unit.inside(recurse=recurse)
        return {row.name for row in params if row.unit in names}

    # --- gradients -----------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True, units: Sequence[str] | None = None
    ) -> None:
        """Choose whether the next backwards reduce gradients, or add full gradients up without communication.

        For gradient accumulation: False before all microbatches of a step but the last, True before that. Until then
        `param.grad` stays None and the sums take the memory of full gradients, in the dtype they are reduced in.

        Args:
            requires_gradient_sync: True reduces over replicas, too; call `set_requires_all_reduce(False)` after it.
            recurse: False changes this module's own unit only.
            units: change these units only, by patterns of names within this module such as "layers.*"; "" is its own.

        Raises:
            ArgumentError: a pattern matches no unit.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        chosen, accumulation = self._params_of(recurse, units), self._graphshard_unit.runner.accumulation
        _mark(accumulation.unsynced, chosen, not requires_gradient_sync)
        if requires_gradient_sync:
            accumulation.unreplicated -= chosen

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True, units: Sequence[str] | None = None
    ) -> None:
        """Choose whether the next backwards reduce gradients over replicas, too, or over shards only (HSDP).

        With False the sums over shards are added up, which takes the memory of one shard of the gradients.
        The arguments are as in `set_requires_gradient_sync`.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        chosen, runner = self._params_of(recurse, units), self._graphshard_unit.runner
        replicates = runner.tracer.spec.mesh.replicate is not None
        _mark(runner.accumulation.unreplicated, chosen, replicates and not requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float, *, units: Sequence[str] | None = None) -> None:
        """Divide the sums of this unit's gradients by this instead of the number of ranks."""
        check_number("factor", factor, positive=True)
        self._graphshard_unit.runner.change(self._params_of(False, units), divide_factor=float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # its former name

    def set_force_sum_reduction_for_comms(self, enable: bool, *, units: Sequence[str] | None = None) -> None:
        """Let collectives of this unit add up, and divide afterwards, instead of averaging."""
        check_bool("enable", enable)
        self._graphshard_unit.runner.change(self._params_of(False, units), force_sum=enable)

    def finalize_backward(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Reduce gradients that backwards have added up, where no later backward is to do it; all ranks call it.

        Parameters for which `set_requires_gradient_sync(False)` or `set_requires_all_reduce(False)` still holds are
        left out. Parameters that stayed gathered for microbatches are freed. With `async_op` it returns a handle.

        Raises:
            UnsupportedError: no program trains all of these parameters, as when some were frozen since.
        """
        check_bool("async_op", async_op)
        runner = self._graphshard_unit.runner
        runner.finish()
        return UnshardHandle(runner.unsharded, ()) if async_op else None

    def reset_iter_state(self) -> None:
        """Forget the gradients that were accumulated and not reduced, after a step that was abandoned.

        Raises:
            ArgumentError: this is a unit of the model, and not the model.
        """
        if self._graphshard_unit.path:
            raise ArgumentError(f"reset_iter_state: {self._graphshard_unit.path} is a unit. Call it on the model.")
        self._graphshard_unit.runner.accumulation.sums.clear()

    # --- gathered parameters -------------------------------------------------------------------------------------

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True, *, units: Sequence[str] | None = None
    ) -> None:
        """Choose from the next call on whether backward gathers parameters again; see `graphshard.compile`.

        Raises:
            ArgumentError: the value is not a bool, or a pattern matches no unit.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        self._graphshard_unit.runner.change(self._params_of(recurse, units), reshard=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True, units: Sequence[str] | None = None
    ) -> None:
        """Choose whether parameters are freed after backward, or kept for the next microbatch.

        With False they are gathered once, before the next call. Set True before the last microbatch: what is kept
        does not see what the optimizer does to the shards.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        kept = self._graphshard_unit.runner.unsharded.kept
        _mark(kept, self._params_of(recurse, units), not reshard_after_backward)

    def unshard(self, async_op: bool = False, *, units: Sequence[str] | None = None) -> UnshardHandle | None:  # type: ignore[override]
        """Gather parameters of this unit now; the next calls use them, until the next backward or `reshard`.

        Args:
            async_op: return a handle at once; the next call of the model, or its `wait()`, waits for them.
            units: of these units instead; `["*", ""]` is all of the model.
        """
        check_bool("async_op", async_op)
        handle = self._graphshard_unit.runner.unshard(self._params_of(False, units))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self, *, units: Sequence[str] | None = None) -> None:
        """Free gathered parameters of this unit.

        These are kept by `unshard` or `set_reshard_after_backward(False)`, or left by a forward for its backward, which
        gathers them again from the shards as they are then.
        """
        self._graphshard_unit.runner.reshard(self._params_of(False, units))

    # --- plan ----------------------------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """Choose the units whose gathers start in forward when this one's parameters have arrived.

        Raises:
            ArgumentError: a module is not a unit of this model.
            UnsupportedError: a planner in `passes`, or a memory limit, makes the plan.
        """
        self._prefetch("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """Choose units as `set_modules_to_forward_prefetch` does, in backward."""
        self._prefetch("backward", modules)

    def _prefetch(self, direction: Direction, modules: Sequence[nn.Module]) -> None:
        unit, name = self._graphshard_unit, f"set_modules_to_{direction}_prefetch"
        if not isinstance(modules, (list, tuple)):
            raise ArgumentError(f"{name}: modules must be a list of units, got {brief(modules)}.")
        for module in modules:
            if not isinstance(module, GraphshardFSDPModule) or module._graphshard_unit.runner is not unit.runner:
                raise ArgumentError(
                    f"{name}: modules: {brief(module)} is not a unit of the model that {unit.path or 'this'} is of. "
                    f"Units are {', '.join(unit.runner.tracer.spec.units) or 'named with units='}."
                )
        names = dict.fromkeys(module._graphshard_unit.name for module in modules)
        unit.runner.prefetch(direction, unit.name, tuple(names))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Let gradients of several units be reduced at once, which takes their memory; 1 until this is called.

        Of several choices the largest counts.

        Raises:
            ArgumentError: it is not a positive int.
        """
        check_count("max_input_buffers", max_input_buffers)
        check_bool("recurse", recurse)
        unit = self._graphshard_unit
        unit.runner.limit_reductions(unit.inside(recurse=recurse), max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Run reduce-scatters in a separate process group, so that gathers need not wait for them.

        All ranks call this together: the first call makes the group.
        """
        check_bool("enable", enable)
        check_bool("recurse", recurse)
        unit = self._graphshard_unit
        unit.runner.separate_reductions(unit.inside(recurse=recurse), enable=enable)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next call wait for an event, such as the end of the optimizer's step on another stream.

        Raises:
            ArgumentError: it is not an event.
        """
        if not callable(getattr(event, "wait", None)):
            raise ArgumentError(f"event must be a torch.Event, got {brief(event)}.")
        self._graphshard_unit.runner.event = event

    # --- the user's collectives ----------------------------------------------------------------------------------
    # All ranks make the same choices.

    def set_custom_all_gather(self, comm: Comm) -> None:
        """Let this run the all-gathers of this unit: an object with FSDP2's `allocate` and `__call__`.

        It is called for each tensor that travels: once for all small parameters of the unit, once for each larger one.

        Raises:
            ArgumentError: it has no `allocate`, or cannot be called.
            UnsupportedError: a planner in `passes`, or a memory limit, decides what travels together; so below.
        """
        chosen = UserCollectives({("gather", self._graphshard_unit.name): _checked(comm)})
        self._graphshard_unit.runner.customize("set_custom_all_gather", chosen)

    def set_custom_reduce_scatter(self, comm: Comm) -> None:
        """Let this run the reduce-scatters of this unit, as `set_custom_all_gather` does for gathers."""
        chosen = UserCollectives({("reduce", self._graphshard_unit.name): _checked(comm)})
        runner = self._graphshard_unit.runner
        if runner.tracer.options.reduce == "exchange":
            why = 'set_custom_reduce_scatter: reduce="exchange" adds gradients itself. Leave one of the two out.'
            raise UnsupportedError(why)
        runner.customize("set_custom_reduce_scatter", chosen)

    def set_all_reduce_hook(self, hook: Hook, *, stream: torch.cuda.Stream | None = None) -> None:
        """Call a function with each reduced gradient of this unit, which it may change in place.

        The gradient is a shard, in the dtype of the reduction, after the reduce-scatter (with replicas the
        all-reduce), before it is divided and cast. Small gradients come in one tensor.

        Args:
            stream: where it is called, on CUDA; not with replicas.

        Raises:
            ArgumentError: it cannot be called, or there is a stream and there are replicas.
        """
        unit = self._graphshard_unit
        check_function("hook", hook, "lambda gradient: ...")
        if stream is not None and unit.runner.tracer.spec.mesh.replicate is not None:
            raise ArgumentError(f"stream={brief(stream)}: with replicas the hook runs where their all-reduce does.")
        chosen = UserCollectives({("hook", unit.name): UserObject(_on(stream, hook))})
        unit.runner.customize("set_all_reduce_hook", chosen)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let all-gathers of this unit write to memory from the process group's pool, which NCCL has registered.

        Gradients are reduced from where regions write them. Groups without a pool, such as gloo's, keep torch's memory.
        """
        name = "set_allocate_memory_from_process_group_for_comm"
        check_bool("enable", enable)
        _place_gathers(self._graphshard_unit, name, "group" if enable else None)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Let all-gathers of this unit write to symmetric memory, with NCCL's kernels or copy engines for it.

        Groups without it, such as gloo's, keep torch's memory.
        """
        check_choice("backend", backend, ["NCCL"])
        _place_gathers(self._graphshard_unit, "set_symm_mem_for_comm", "symmetric")

    # --- settings of FSDP2 without effect ------------------------------------------------------------------------

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Do nothing, as every backward finishes by itself; a method of torch 2.15."""
        check_bool("enabled", enabled)

    def set_is_last_backward(self, *_: Any, **__: Any) -> None:
        """Do nothing: every backward waits for its reductions, and gathers only what it reads.

        Every rank runs the same reductions, whichever parameters a step uses, and no gather is on the compute stream.
        """

    set_unshard_in_backward = set_reduce_scatter_unused_params = _set_unshard_async_op = set_is_last_backward
    set_keep_unsharded_storage = _refusal(
        "set_keep_unsharded_storage",
        "Programs make what they gather anew. set_reshard_after_backward(False) keeps it over microbatches.",
    )

    # --- nn.Module -----------------------------------------------------------------------------------------------

    share_memory = _refusal("share_memory", "Shards have memory on one rank. Start a process per rank with torchrun.")
    __prepare_scriptable__ = _refusal("torch.jit.script", "Script the model before compile, or use graphshard.export.")

    def _get_fsdp_state(self) -> Any:
        return UnitState(self._graphshard_unit)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of shards; `unshard` is undone until the next call."""
        self._graphshard_unit.runner.unsharded.shown.hide()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into shards as the user's class does, which may copy full tensors into parameters itself.

        Parameters that were gathered are freed.
        """
        self._graphshard_unit.runner.reshard_all()
        with implicit_replication():
            return super().load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._graphshard_unit.runner.reshard_all()
        return super(FSDPModule, self)._apply(*args, **kwargs)

    def __copy__(self) -> Any:
        """Return a module with the same shards and programs, and a separate dict for other attributes."""
        twin = object.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"{users_class(self).__name__} is compiled by graphshard and cannot be pickled. Save its state_dict(), or "
            "use graphshard.checkpoint.save_checkpoint."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as the user's class does, as a part of the whole model: an `EntryPoint` refuses to be copied alone."""
        memo[id(self._graphshard_unit)] = None
        cls = type(self)
        object.__setattr__(self, "__class__", users_class(self))
        try:
            return copy.deepcopy(self, memo)
        finally:
            object.__setattr__(self, "__class__", cls)


@contextlib.contextmanager
def _no_sync(self: GraphshardFSDPModule) -> Iterator[None]:
    """Accumulate gradients without communication within the block, as the method of FSDP1 and DDP."""
    unsynced = self._graphshard_unit.runner.accumulation.unsynced
    before = set(unsynced)
    self.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        unsynced.clear()
        unsynced.update(before)


# Methods that FSDP2 does not have, for models whose class has none of the name.
_OF_FSDP1 = {
    "clip_grad_norm_": _refusal(
        "clip_grad_norm_", "Call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)."
    ),
    "no_sync": _no_sync,
}


def _mark(marked: set[str], names: set[str], on: bool) -> None:
    """Add names to a set, or remove them."""
    if on:
        marked |= names
    else:
        marked -= names


def _checked(comm: Any) -> UserObject:
    if not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise ArgumentError(
            f"comm must have FSDP2's allocate(size, *, dtype, device) and __call__(output_tensor, input_tensor, group, "
            f"...), got {brief(comm)}."
        )
    return UserObject(comm)


def _on(stream: torch.cuda.Stream | None, hook: Hook) -> Hook:
    """Return the hook on a stream."""
    if stream is None:
        return hook

    def on_stream(gradient: torch.Tensor) -> None:
        if not gradient.is_cuda:
            hook(gradient)
            return
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            hook(gradient)
        here.wait_stream(stream)

    return on_stream


def become_units(root: nn.Module, runner: Runner) -> None:
    """Give the modules of all units, and the root, their place and a class of `GraphshardFSDPModule`."""
    for name in ("", *runner.tracer.spec.units):
        for path in modules_of(name):
            module = root.get_submodule(path)
            if not isinstance(module, GraphshardFSDPModule):
                module.__class__ = unit_class(type(module), GraphshardFSDPModule)
            unit = module.__dict__["_graphshard_unit"] = UnitRef(runner, path, name)
            register_as(module, fully_shard, UnitState(unit), UnitRegistry)


def strip_module(module: nn.Module) -> None:
    """Give a module the user's class and methods again."""
    object.__setattr__(module, "__class__", users_class(module))
    attributes = without_entries(module)
    module.__dict__.clear()
    module.__dict__.update(attributes)


def unit_class(cls: type[nn.Module], base: type[GraphshardFSDPModule], **namespace: Any) -> type[nn.Module]:
    """Return the class of a unit: a subclass of the user class, one for all units of a class.

    Called, it makes a module of the user class, which has no programs: a slice of an `nn.Sequential` is made so.
    """

    def plain(_: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        return cls(*args, **kwargs)

    for known in cls.__subclasses__():  # not a table, which would keep classes of functions for ever
        if vars(known).get(MADE_OF) is cls and known.__bases__[0] is base:
            return known
    of_fsdp1 = {name: method for name, method in _OF_FSDP1.items() if not hasattr(cls, name)}
    names = {"__module__": cls.__module__, "__new__": plain, MADE_OF: cls, **of_fsdp1, **namespace}
    return type(f"FSDP{cls.__name__}", (base, cls), names)
