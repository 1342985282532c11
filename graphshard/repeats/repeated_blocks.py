"""A trace of a few of a deep model's equal blocks.

    layers.0 .. layers.125        block  0  1  2 ... 122  123  124  125
                                  traced x  x  -  ...  -    x    x    x

Blocks that are left out return what they are given, and cost nothing. Forward runs as it is, so code between the
blocks sees their true number. Each call of a block is compared with the one before it, while Dynamo traces: if a block
is given something else than the result of its predecessor and what that was given, nothing can be said of the blocks
that are left out, and the whole model is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphshard.ir.repeats import TEMPLATE, BlocksDifferError, Repeats
from graphshard.repeats.find_repeats import PARTS
from graphshard.torch_compat.dynamo import ChainedSource, Guard, Source

# Calls of blocks so far in this trace: leaves of the arguments and of the result, what each argument is, modes, the
# result, and the arguments. Empty before and after a trace, so that nothing of it is a side effect.
_calls: list[tuple[list[Any], list[Any], list[Any], int, Any, tuple[Any, ...]]] = []

# In the names of what this file changes.
_OWN = "repeated_blocks"


@dataclasses.dataclass(frozen=True)
class Block:
    """One of equal blocks.

    Attributes:
        place: number of its call, as text: a number that is another in the next trace would be dynamic.
        size: blocks in a group, as text.
        left_out: it is not traced.
        follows: the block before is left out, too, and each block is a group.
    """

    place: str
    size: str
    left_out: bool
    follows: bool

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the block, or return what its template says of its arguments.

        Raises:
            BlocksDifferError: calls are not alike.
        """
        number, period, modes = int(self.place), int(self.size), _modes()
        if number != len(_calls):
            raise BlocksDifferError("blocks are not called one after the other")
        passed = (*args, *kwargs.values())
        if self.follows and _is_repeated(passed, modes):
            _calls.append(_calls[-1])
            return _calls[-1][4]
        given = _leaves_of(passed)
        before = _calls[number - 1][1] if number else []
        earlier = _calls[number - period][0] if number >= period else []
        relations = _relations(given, before, earlier)
        if number >= 2 * period and [relations, modes] != [*_calls[number - period][2:4]]:
            raise BlocksDifferError("blocks are not given alike")
        if not self.left_out:
            result = run(*args, **kwargs)
            _calls.append((given, _leaves_of(result), relations, modes, result, passed))
            return result
        _, example, _, _, structure, _ = _calls[number - period]
        # What the template's successor was given of the template's results says what is carried.
        place = number - period + 1
        leaves = _carried(example, relations if place == number else _calls[place][2], given)
        result = _rebuilt(structure, list(leaves))
        _calls.append((given, leaves, relations, modes, result, passed))
        return result


def _modes() -> int:
    """Return which modes are on."""
    on = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return sum(is_on << place for place, is_on in enumerate(on))


def _is_repeated(passed: tuple[Any, ...], modes: int) -> bool:
    """Return whether a call is given what the one before was, which returned what it was given.

    Dynamo follows each instruction, for each block that is left out: so this is short, and gives up at lists and dicts.
    """
    _, _, _, before_modes, _, before = _calls[-1]
    if modes != before_modes or len(passed) != len(before):
        return False
    for one, other in zip(passed, before):  # noqa: SIM110 - Dynamo follows a loop with fewer instructions
        if one is not other or isinstance(one, (list, dict)):
            return False
    return True


def end_of_blocks(number: int) -> None:
    """Forget the calls of a trace.

    Raises:
        BlocksDifferError: not all blocks were called.
    """
    complete = len(_calls) == number
    _calls.clear()
    if not complete:
        raise BlocksDifferError("not all blocks are called")


@contextlib.contextmanager
def few_blocks(model: nn.Module, repeats: Repeats) -> Iterator[dict[str, Block]]:
    """Put hollow modules in the places of blocks that are left out; yield what each block is, by its name."""
    owner = model.get_submodule(repeats.path)
    held = dict(owner._modules)
    names = list(held)[repeats.first : repeats.first + repeats.period * repeats.groups]
    torch.compiler.assume_constant_result(_modes)
    blocks = {}
    follows = False
    for number, name in enumerate(names):
        path = f"{repeats.path}.{name}"
        left_out = repeats.has_left_out(path)
        blocks[path] = Block(str(number), str(repeats.period), left_out, left_out and follows)
        follows = left_out and repeats.period == 1
        if left_out:
            owner._modules[name] = _hollow(model.get_submodule(path))
    _calls.clear()
    try:
        yield blocks
    finally:
        _calls.clear()
        owner._modules.update(held)


def check_changes(changed: Iterable[nn.Module | str], model: nn.Module, blocks: Iterable[str]) -> None:
    """Check that all blocks find the same state: what forward changes between their calls, one might read.

    Args:
        changed: modules, or names of other objects.
        blocks: names of all blocks.

    Raises:
        BlocksDifferError: forward changes something that blocks may read, or a block changes something.
    """
    parts = [part for block in blocks for part in model.get_submodule(block).modules()]
    held = {id(value) for part in parts for value in _values_in(vars(part))}
    for each in changed:
        if isinstance(each, str):
            if _OWN not in each:
                raise BlocksDifferError(f"forward changes {each}, which blocks may read")
        elif id(each) in held or any(part is each for part in parts):
            raise BlocksDifferError(f"forward changes a {type(each).__name__} that blocks may read")


def _values_in(attributes: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of attributes, and what their containers and weak references hold."""
    for name, value in attributes.items():
        yield value
        if name not in PARTS and isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple, set)):
            yield from value
        elif isinstance(value, weakref.ref):
            yield value()


def _hollow(block: nn.Module) -> nn.Module:
    """Return a module with the attributes of another, and none of its tensors and parts."""
    made: nn.Module = object.__new__(type(block))
    made.__dict__.update({**vars(block), **{part: {} for part in PARTS}})
    return made


# Dynamo takes about 15 us for each instruction that it follows, and follows these for every block: they call little.


def _relations(given: list[Any], before: list[Any], earlier: list[Any]) -> list[Any]:
    """Return what arguments are: the place of a result of the block before, "same" as an earlier group's, or None."""
    relations: list[Any] = []
    for leaf in given:
        index = len(relations)
        is_tensor = isinstance(leaf, torch.Tensor)
        first = [place for place in range(len(before)) if before[place] is leaf] if is_tensor else []
        if first:
            relations.append(first[0])
        elif index >= len(earlier) or isinstance(earlier[index], torch.Tensor) != is_tensor:
            relations.append(None)
        else:
            same = earlier[index] is leaf if is_tensor else earlier[index] == leaf
            relations.append("same" if same else None)
    return relations


def _carried(example: list[Any], following: list[Any], given: list[Any]) -> list[Any]:
    """Return the results of a block that is left out: what the next one is given of them, it was given itself.

    Args:
        example: results of the template.
        following: what the arguments of the template's successor are.
    """
    leaves: list[Any] = []
    for leaf in example:
        if leaf is None:
            leaves.append(None)
        elif not isinstance(leaf, torch.Tensor):
            raise BlocksDifferError("blocks return more than tensors")
        elif len(leaves) in following:
            leaves.append(given[following.index(len(leaves))])
        else:
            raise BlocksDifferError("a result of a block is not what the next one is given")
    return leaves


def _leaves_of(value: Any) -> list[Any]:
    """Return the leaves of lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple)):
        return [value]
    leaves: list[Any] = []
    for part in value:
        if isinstance(part, (dict, list, tuple)):
            leaves += _leaves_of(part)
        else:
            leaves.append(part)
    return leaves


def _rebuilt(value: Any, leaves: list[Any]) -> Any:
    """Return a container with other leaves, which are taken out of the list."""
    if isinstance(value, dict):
        items = {key: _rebuilt(part, leaves) for key, part in value.items()}
        return items if type(value) is dict else type(value)(items)
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(part, leaves) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return leaves.pop(0)


# --- guards ------------------------------------------------------------------------------------------------------


def guards_of_blocks(guards: Sequence[Guard], repeats: Repeats, sizes: dict[Source, Any]) -> list[Guard]:
    """Return what guards say of the block that those left out are copies of, said of each of these.

    Args:
        sizes: sizes and strides of tensors, by source; the blocks' are added.
    """
    found = []
    first = _Moved(repeats, repeats.missing[0])
    of_template = [guard for guard in guards if first.source(guard.originating_source) is not guard.originating_source]
    for group in repeats.missing:
        moved = _Moved(repeats, group)
        for guard in of_template:
            source, create = moved.source(guard.originating_source), guard.create_fn
            if isinstance(create, functools.partial):
                named = {name: moved.source(each) for name, each in create.keywords.items()}
                create = functools.partial(create.func, *map(moved.source, create.args), **named)
            if guard.originating_source in sizes:
                sizes[source] = sizes[guard.originating_source]
            found.append(Guard(source, create))
    return found


class _Moved:
    """Sources in a block of the template, as they are in a block of another group."""

    def __init__(self, repeats: Repeats, group: int) -> None:
        self._repeats, self._group = repeats, group
        self._known: dict[int, Any] = {}  # by the id of a source, which its guard holds

    def source(self, source: Any) -> Any:
        """Return a source in the other group; itself if it is not in a block of the template."""
        if not isinstance(source, ChainedSource):
            return source
        found = self._known.get(id(source))
        if found is None:
            found = self._known[id(source)] = self._moved(source)
        return found

    def _moved(self, source: Any) -> Any:
        base = self.source(source.base)
        if base is not source.base:
            return dataclasses.replace(source, base=base)
        index = getattr(source, "index", None)
        if not (isinstance(index, str) and index.isdigit()) or _path_of(source.base) != self._repeats.path:
            return source
        name = f"{self._repeats.path}.{index}"
        if self._repeats.group_of(name) != TEMPLATE:
            return source
        return dataclasses.replace(source, index=self._repeats.name_at(self._group, name).rpartition(".")[2])


def _path_of(source: Source) -> str:
    """Return the name of the module whose submodules a source holds, such as "layers"."""
    return ".".join(re.findall(r"_modules(?:'\])?\['([^']+)'\]", str(source.name)))
