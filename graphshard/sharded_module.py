"""The compiled module: the user's class with another forward.

Everything else of the module, names and `isinstance` included, stays as it was.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import nn

from graphshard.entry import Entry, install_entries
from graphshard.module import Runner


class ShardedModule(nn.Module):
    """Mixed into the user's class by `compile`; `forward` runs the captured program."""

    _graphshard: Runner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A compiled module of its own: shards are copied, programs are captured again, compiled regions are shared."""
        for param in self.parameters():
            if id(param) not in memo:
                # What torch copies of a Parameter; the detour is for parameters that are DTensors.
                memo[id(param)] = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        for module in self.modules():
            memo.update((id(value), None) for value in module.__dict__.values() if isinstance(value, Entry))
        attributes = {name: value for name, value in self.__dict__.items() if name != "_graphshard"}
        twin.__dict__.update(copy.deepcopy(attributes, memo))
        attach(twin, self._graphshard.for_copy(twin))
        return twin


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a compiled module: a subclass of the user's, whose forward has the signature of the user's."""

    @functools.wraps(cls.forward)
    def forward(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        return self._graphshard.call(self, args, kwargs)

    return type(f"Sharded{cls.__name__}", (ShardedModule, cls), {"__module__": cls.__module__, "forward": forward})


def attach(module: nn.Module, runner: Runner) -> None:
    """Let a runner run the module, and each of its submodules that is called on its own."""
    module.__dict__["_graphshard"] = runner
    install_entries(module, runner.call_submodule)


def retie(module: nn.Module, _keys: Any) -> None:
    """Tie parameters again that `load_state_dict(assign=True)` replaced one by one."""
    assert isinstance(module, ShardedModule)
    for alias in module._graphshard.aliases:
        alias.tie()
