"""Capture a few of many equal blocks.

The forward of the model runs as it is, with all its blocks. Those that are left out return what they are given, so that
code between the blocks sees their true number. Each call is compared with the one before it. If a block is given
something else than its predecessor's result and what that was given, nothing can be said of those left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphshard.capture.attributes import classes_of
from graphshard.capture.capture import CaptureSpec, capture
from graphshard.capture.hooks import hooks_of
from graphshard.capture.repeats import PARTS, PLAIN, about_tensor, key_of
from graphshard.ir.errors import CaptureError
from graphshard.ir.make_table import named_parameters
from graphshard.ir.program import Program
from graphshard.ir.repeats import Repeats, Uneven, captured_rows
from graphshard.ir.torch_internals import replaced
from graphshard.ir.tracing_internals import is_recorded, is_written


class Unequal(CaptureError):
    """Blocks that look equal are not called alike; the model is captured as a whole then."""


def capture_few(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, repeats: Repeats
) -> Program:
    """The program of a model in which blocks are left out; its parameters are those of the others.

    Raises:
        Uneven: a parameter of a block that is left out is elsewhere in the model, too.
        CaptureError: as `capture`, and if the blocks are not called one after the other.
    """
    units = tuple(unit for unit in spec.units if not repeats.has_left_out(unit))
    params = captured_rows(spec.params, repeats)
    known = {name for row in params for name in row.names}
    with _few_blocks(model, repeats) as check_ended:
        elsewhere = next((name for names in named_parameters(model) for name in names if name not in known), None)
        if elsewhere is not None:
            raise Uneven(f"{elsewhere} is of a block that is left out")
        program = capture(model, args, kwargs, replace(spec, params=params, units=units), grad=True)
        check_ended()
    # Of blocks that were left out it is known that they have the hooks and modules of others.
    program.state = replace(program.state, hooks=hooks_of(model), modules=classes_of(model))
    return program


@contextlib.contextmanager
def _few_blocks(model: nn.Module, repeats: Repeats) -> Iterator[Callable[[], None]]:
    """Within it blocks that are left out return what they are given; what is yielded checks the calls afterwards."""
    owner = model.get_submodule(repeats.path)
    blocks = list(owner.children())[repeats.first : repeats.first + repeats.period * repeats.groups]
    calls = _Calls(repeats, blocks)
    # torch.fx puts a function of its own in the place of __call__, which calls this
    call: Callable[..., Any] = nn.Module._call_impl
    numbers = {block: number for number, block in enumerate(blocks)}
    held = dict(owner._modules)
    for name, block in held.items():
        if block is not None and repeats.has_left_out(f"{repeats.path}.{name}"):
            owner._modules[name] = hollow = _hollow(block)
            numbers[hollow] = numbers[block]

    @functools.wraps(call)
    def instead(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number = numbers.get(self)
        if number is None:
            return call(self, *args, **kwargs)
        return calls.next(number, (args, kwargs), lambda: call(self, *args, **kwargs))

    try:
        with replaced(nn.Module, "_call_impl", instead):
            yield calls.check_ended
    finally:
        owner._modules.update(held)


def _hollow(block: nn.Module) -> nn.Module:
    """A module with the attributes of another, and none of its tensors and parts: looking through those takes long."""
    made: nn.Module = object.__new__(type(block))  # the classes of sharded modules make others
    made.__dict__.update({**vars(block), **{part: {} for part in PARTS}})
    return made


class _Calls:
    """The calls of the blocks of one forward, in order."""

    def __init__(self, repeats: Repeats, blocks: Sequence[nn.Module]) -> None:
        self.period, self.blocks, self.count = repeats.period, blocks, len(blocks)
        self.captured = [repeats.is_captured(number // repeats.period) for number in range(self.count)]
        self.ended = self.writes = False
        self._forget()

    def next(self, number: int, given: Any, run: Callable[[], Any]) -> Any:
        """Call a block, or leave it out."""
        if number == 0:  # the forward runs several times
            self._forget()
            self.ended = False
        if number != len(self.made) or number != len(self.given):
            raise Unequal("blocks are not called one after the other")
        self.given.append(pytree.tree_flatten(given))
        self.relations.append(self._relation(number))
        if number >= 2 * self.period and self.relations[number] != self.relations[number - self.period]:
            raise Unequal("blocks are not given alike")
        runs = self._runs(number)
        result = run() if runs else self._left_out(number)
        self.writes = self.writes or (runs and any(map(is_written, self.blocks[number].buffers())))
        self.made.append(pytree.tree_flatten(result))
        if number == self.count - 1:  # capture looks for tensors that somebody keeps
            self._forget()
            self.ended = True
        return result

    def _runs(self, number: int) -> bool:
        """Whether a block is called.

        AOTAutograd first runs a forward without making a graph of it, to see what it takes, returns and writes. Blocks
        between the first group and the last one add nothing to that, if they are called like the first, which writes
        nothing. That tracing then sees the same writes is checked where it ends (`FlatForward`).
        """
        if not self.captured[number]:
            return False
        if is_recorded() or not self.period <= number < self.count - self.period:
            return True
        return self.writes or any(type(what) is object for what in self.relations[number])

    def _forget(self) -> None:
        self.given: list[tuple[list[Any], pytree.TreeSpec]] = []
        self.made: list[tuple[list[Any], pytree.TreeSpec]] = []
        self.relations: list[tuple[Any, ...]] = []
        self.writes = False

    def _relation(self, number: int) -> tuple[Any, ...]:
        """What each leaf of the arguments is: a result of the block before, or what an earlier group was given."""
        leaves, structure = self.given[number]
        results = self.made[number - 1][0] if number else []
        before = self.given[number - self.period][0] if number >= self.period else []
        found: list[Any] = [(str(structure), _modes())]
        for index, leaf in enumerate(leaves):
            carried = next((j for j, result in enumerate(results) if _is_tensor(leaf) and result is leaf), None)
            if carried is not None:
                found.append(("result", carried))
            elif index < len(before) and _is_same(leaf, before[index]):
                found.append("the same")
            else:
                found.append(object())
        return tuple(found)

    def _left_out(self, number: int) -> Any:
        """What a block is given that takes the place of what it would return."""
        example, structure = self.made[number - self.period]
        following = self.relations[number - self.period + 1][1:]
        given = self.given[number][0]
        results: list[Any] = []
        for index, leaf in enumerate(example):
            if not _is_tensor(leaf):
                if leaf is not None:
                    raise Unequal("blocks return more than tensors")
                results.append(None)
                continue
            taken = [place for place, what in enumerate(following) if what == ("result", index)]
            if not taken or taken[0] >= len(given) or not _is_like(given[taken[0]], leaf):
                raise Unequal("a result of a block is not what the next one is given")
            results.append(given[taken[0]])
        return pytree.tree_unflatten(results, structure)

    def check_ended(self) -> None:
        """Raise Unequal if not all blocks were called."""
        if not self.ended:
            raise Unequal("not all blocks are called")


def _modes() -> tuple[Any, ...]:
    """What a call of a block depends on besides: code between the blocks may have changed it."""
    casts = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    enabled = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    return *enabled, torch.get_default_dtype(), *casts


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) in PLAIN and key_of(value) == key_of(other))


def _is_like(value: Any, other: torch.Tensor) -> bool:
    # Of blocks that are left out it is the very same one; attributes of tensors are looked up through all that watches.
    return value is other or (_is_tensor(value) and about_tensor(value)[1:] == about_tensor(other)[1:])
