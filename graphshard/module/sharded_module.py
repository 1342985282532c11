"""The compiled module: the user's class with another forward.

Everything else of the module, names and `isinstance` included, stays as it was.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from graphshard.ir.entry import OF_UNITS, Entry, install_entries
from graphshard.ir.errors import ArgumentError
from graphshard.ir.sentinel import MISSING
from graphshard.ir.text import brief
from graphshard.module.runner import Runner
from graphshard.module.unit_module import UnitModule, become_units, unit_class
from graphshard.runtime.shards import copy_of


class ShardedModule(UnitModule):
    """Mixed into the user's class by `compile`; `forward` runs the captured program."""

    _graphshard: Runner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A compiled module of its own: shards are copied, programs are captured again, compiled regions are shared."""
        self._graphshard.unsharded.shown.hide()
        for param in self.parameters():
            if id(param) not in memo:
                memo[id(param)] = copy_of(param)
        twin = object.__new__(self.__class__)
        memo[id(self)] = twin
        for module in self.modules():
            memo.update((id(value), None) for value in module.__dict__.values() if isinstance(value, Entry))
        attributes = {name: value for name, value in self.__dict__.items() if name not in OF_UNITS}
        twin.__dict__.update(copy.deepcopy(attributes, memo))
        for module, copied in zip(self.modules(), twin.modules()):
            for name, value in module.__dict__.items():
                if isinstance(value, Entry):
                    copied.__dict__.pop(name, None)  # a class of the user's may copy something else
                    if value.replaced is not MISSING:
                        copied.__dict__[name] = copy.deepcopy(value.replaced, memo)
        attach(twin, self._graphshard.for_copy(twin))
        return twin


def compiled_module(model: object) -> ShardedModule:
    """The argument `model` of functions for compiled modules; raise ArgumentError if it is none."""
    if not isinstance(model, ShardedModule):
        raise ArgumentError(f"model: {brief(model)} is not compiled. Call graphshard.compile(model, mesh) first.")
    return model


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a compiled module: a subclass of the user's, whose forward has the signature of the user's."""

    @functools.wraps(cls.forward)
    def forward(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        if "_graphshard" not in self.__dict__:  # of a model that is uncompiled for now, called by what wraps this
            return cls.forward(self, *args, **kwargs)
        return self._graphshard.call(self, args, kwargs)

    # torch.compile of what calls the model compiles the rest of it.
    return unit_class(cls, ShardedModule, forward=torch.compiler.disable(forward))


def attach(module: nn.Module, runner: Runner) -> None:
    """Let a runner run the module, and each of its submodules that is called on its own."""
    module.__dict__["_graphshard"] = runner
    become_units(module, runner)
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
    if isinstance(module, ShardedModule):  # it may have become a part of another model
        for alias in module._graphshard.aliases:
            alias.tie()
