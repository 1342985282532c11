"""The compiled module: the user's class with another forward.

Everything else of the module, names and `isinstance` included, stays as it was.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from graphshard.capture.entry import Entry, install_entries
from graphshard.ir.errors import ArgumentError
from graphshard.ir.given import check_bool, check_number, check_texts
from graphshard.ir.state import MISSING
from graphshard.ir.text import brief
from graphshard.module.runner import Runner
from graphshard.module.unsupported import Unsupported
from graphshard.runtime.shards import copy_of
from graphshard.runtime.unsharded import UnshardHandle


class ShardedModule(Unsupported, nn.Module):
    """Mixed into the user's class by `compile`; `forward` runs the captured program."""

    _graphshard: Runner

    def __copy__(self) -> Any:
        """The same shards and programs, with a dict of its own for other attributes."""
        twin = object.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A compiled module of its own: shards are copied, programs are captured again, compiled regions are shared."""
        for param in self.parameters():
            if id(param) not in memo:
                memo[id(param)] = copy_of(param)
        twin = object.__new__(self.__class__)
        memo[id(self)] = twin
        for module in self.modules():
            memo.update((id(value), None) for value in module.__dict__.values() if isinstance(value, Entry))
        attributes = {name: value for name, value in self.__dict__.items() if name != "_graphshard"}
        twin.__dict__.update(copy.deepcopy(attributes, memo))
        for module, copied in zip(self.modules(), twin.modules()):
            for name, value in module.__dict__.items():
                if isinstance(value, Entry):
                    del copied.__dict__[name]
                    if value.replaced is not MISSING:
                        copied.__dict__[name] = copy.deepcopy(value.replaced, memo)
        attach(twin, self._graphshard.for_copy(twin))
        return twin

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True, units: Sequence[str] | None = None
    ) -> None:
        """Choose whether the next backwards reduce gradients, or add full gradients up without communication.

        For gradient accumulation: False before all microbatches of a step but the last, True before that. Until then
        `param.grad` stays None and the sums take the memory of full gradients, in the dtype they are reduced in.

        Args:
            requires_gradient_sync: True reduces, with what was added up before.
            recurse: False changes the root's own parameters only, as in FSDP2.
            units: change these units only, by name patterns such as "layers.*"; "" is the root.

        Raises:
            ArgumentError: a pattern is the name of no unit.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        chosen = self._params_of(recurse, units)
        unsynced = self._graphshard.accumulation.unsynced
        unsynced -= chosen
        if not requires_gradient_sync:
            unsynced |= chosen

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True, units: Sequence[str] | None = None
    ) -> None:
        """Choose whether the next backwards reduce gradients over replicas, too, or over shards only (HSDP).

        With False the sums over shards are added up, which takes the memory of one shard of the gradients.
        The arguments are those of `set_requires_gradient_sync`.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        chosen = self._params_of(recurse, units)
        unreplicated = self._graphshard.accumulation.unreplicated
        unreplicated -= chosen
        if not requires_all_reduce and self._graphshard.tracer.spec.mesh.replicate is not None:
            unreplicated |= chosen

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, *, recurse: bool = True, units: Sequence[str] | None = None
    ) -> None:
        """Choose from the next call on whether backward gathers parameters again; see `graphshard.compile`.

        Raises:
            ArgumentError: the value is not a bool, or a pattern is the name of no unit.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        self._graphshard.change(self._params_of(recurse, units), reshard=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True, units: Sequence[str] | None = None
    ) -> None:
        """Choose whether parameters are freed after backward, or kept for the next microbatch.

        With False they are gathered once, before the next call. Set True before the last microbatch: what is kept
        does not see what the optimizer does to the shards.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        chosen, kept = self._params_of(recurse, units), self._graphshard.unsharded.kept
        kept -= chosen
        if not reshard_after_backward:
            kept |= chosen

    def unshard(self, async_op: bool = False, *, units: Sequence[str] | None = None) -> UnshardHandle | None:
        """Gather parameters now; the next calls use them, until the next backward has run or `reshard` is called.

        Args:
            async_op: return a handle at once; the next call of the model, or its `wait()`, waits for them.
            units: which, by name patterns; None is all.
        """
        check_bool("async_op", async_op)
        handle = self._graphshard.unshard(self._params_of(True, units))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self, *, units: Sequence[str] | None = None) -> None:
        """Free parameters that `unshard` or `set_reshard_after_backward(False)` keeps gathered."""
        self._graphshard.reshard(self._params_of(True, units))

    def set_gradient_divide_factor(self, factor: float, *, units: Sequence[str] | None = None) -> None:
        """Divide the sums of gradients by this instead of the number of ranks."""
        check_number("factor", factor, positive=True)
        self._graphshard.change(self._params_of(True, units), divide_factor=float(factor))

    def set_force_sum_reduction_for_comms(self, enable: bool, *, units: Sequence[str] | None = None) -> None:
        """Let collectives add up, and divide afterwards, instead of averaging."""
        check_bool("enable", enable)
        self._graphshard.change(self._params_of(True, units), force_sum=enable)

    def _params_of(self, recurse: bool, units: Sequence[str] | None) -> set[str]:
        check_bool("recurse", recurse)
        if units is not None:
            check_texts("units", units, "['layers.*']")
        return self._graphshard.tracer.spec.params.of_units(units if recurse else ("",))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """For programs written for FSDP2: every backward waits for its own reductions, so there is nothing to do."""

    def reset_iter_state(self) -> None:
        """Forget the gradients that were accumulated and not reduced, after a step that was given up."""
        self._graphshard.accumulation.sums.clear()


def compiled_module(model: object) -> ShardedModule:
    """The argument `model` of functions for compiled modules; raise ArgumentError if it is none."""
    if not isinstance(model, ShardedModule):
        raise ArgumentError(f"model: {brief(model)} is not compiled. Call graphshard.compile(model, mesh) first.")
    return model


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a compiled module: a subclass of the user's, whose forward has the signature of the user's.

    Called, it makes a module of the user's class, which has no programs: a slice of an `nn.Sequential` is made so.
    """

    @functools.wraps(cls.forward)
    def forward(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        return self._graphshard.call(self, args, kwargs)

    def plain(_: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        return cls(*args, **kwargs)

    namespace = {"__module__": cls.__module__, "__new__": plain, "forward": forward}
    return type(f"Sharded{cls.__name__}", (ShardedModule, cls), namespace)


def attach(module: nn.Module, runner: Runner) -> None:
    """Let a runner run the module, and each of its submodules that is called on its own."""
    module.__dict__["_graphshard"] = runner
    install_entries(module, runner.call_entry)
    for path in runner.methods:
        install_method(module, path)


def install_method(module: nn.Module, path: str) -> None:
    """Let a method of a compiled module, or of a submodule of it, run by a program of its own."""
    assert isinstance(module, ShardedModule)
    prefix, _, method = path.rpartition(".")
    owner = module.get_submodule(prefix)
    owner.__dict__[method] = Entry(owner, prefix, module._graphshard.call_entry, method)


def retie(module: nn.Module, _keys: Any) -> None:
    """Tie parameters again that `load_state_dict(assign=True)` replaced one by one."""
    assert isinstance(module, ShardedModule)
    for alias in module._graphshard.aliases:
        alias.tie()
