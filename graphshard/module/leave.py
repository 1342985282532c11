"""Leave on a module what forward would have left there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from graphshard.capture.contents import delete_attribute, delete_item, extend, put_item, refill, set_attribute
from graphshard.capture.outer import put
from graphshard.ir.state import Constant, Counted, Given, Made, ModuleState, Old, Place, Result, Term, Write, evaluate
from graphshard.module.places import look_up, owner_of


def leave(state: ModuleState, root: nn.Module, results: Sequence[Any], given: Sequence[Any]) -> None:
    """Do what a program's forward does to the module.

    Args:
        state: of the program.
        root: the module that it is for.
        results: the leaves of the result, and the tensors behind them.
        given: the tensors that the program was given.
    """

    def now(place: Place) -> Any:
        return look_up(root, place).now()

    def value_of(term: Term) -> Any:
        match term:
            case Constant(value):
                return value
            case Result(index):
                return results[index]
            case Given(index):
                return given[index]
            case Old(place):
                return now(place)
            case Counted(expression):
                return evaluate(expression, now)
            case Made(structure, leaves):
                return pytree.tree_unflatten([value_of(leaf) for leaf in leaves], structure)

    # All values first: they are computed of what was there before.
    values = [[value_of(term) for term in write.terms] for write in state.writes]
    owners = [
        now(write.place) if write.kind in ("extend", "replace") else owner_of(root, write.place)
        for write in state.writes
    ]
    for write, owner, found in zip(state.writes, owners, values):
        _write(write, owner, found)


def _write(write: Write, owner: Any, values: list[Any]) -> None:
    if write.kind == "extend":
        extend(owner, values)
    elif write.kind == "replace":
        refill(owner, values)
    elif write.kind == "register":
        name, (buffer, persistent) = write.place.path[-1][1], values
        nn.Module.register_buffer(owner, name, buffer, persistent=persistent)
    else:
        kind, key = write.place.path[-1]
        if kind in ("cell", "global", "default", "context"):
            put(owner, kind, key, values[0])
        elif write.kind == "set":
            (put_item if kind == "item" else set_attribute)(owner, key, values[0])
        elif kind == "value":
            del owner[list(owner)[key]]
        else:
            (delete_item if kind == "item" else delete_attribute)(owner, key)
