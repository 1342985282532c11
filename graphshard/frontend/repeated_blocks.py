"""Equal blocks of a deep model: which they are, a trace of a few of them, and guards of the others.

    layers.0 .. layers.125        block  0  1  2 ... 122  123  124  125
                                  traced x  x  -  ...  -    x    x    x

Blocks are equal if nothing that their forward could read differs: classes, attributes, hooks, and shapes of what they
hold. Blocks that are left out return what they are given, and cost nothing. Forward runs as it is, so code between the
blocks sees their true number. Each call of a block is compared with the one before it, while Dynamo traces: if a block
is given something else than the result of its predecessor and what that was given, nothing can be said of the blocks
that are left out, and the whole model is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import ChainedSource, Guard, Source
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from graphshard.frontend.entry import without_entries
from graphshard.frontend.inputs import PLAIN
from graphshard.ir.repeats import CAPTURED, TEMPLATE, Repeats, Uneven

# Calls of blocks so far in this trace: leaves of the arguments and of the result, what each argument is, modes, and the
# result. Empty before and after a trace, so that nothing of it is a side effect.
_calls: list[tuple[list[Any], list[Any], list[Any], list[bool], Any]] = []

# In the names of what this file changes.
_OWN = "repeated_blocks"
# What is compared of a module apart from its other attributes.
_PARTS = ("_parameters", "_buffers", "_modules")
# Hooks of a module, and what is said of some of them by their numbers.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MARKS_OF_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# Whose objects say of a module that a function was applied to it: nothing that forward reads.
_LABELS = ("graphshard.module.", "torch.distributed._composable.contract")
# Of functions in functions; what is deeper is compared by what it is.
_DEEPEST = 8


@dataclasses.dataclass(frozen=True)
class Block:
    """One of equal blocks.

    Attributes:
        place: number of its call, as text: a number that is another in the next trace would be dynamic.
        size: blocks in a group, as text.
        left_out: it is not traced.
    """

    place: str
    size: str
    left_out: bool

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the block, or return what its template says of its arguments.

        Raises:
            Uneven: calls are not alike.
        """
        number, period = int(self.place), int(self.size)
        if number != len(_calls):
            raise Uneven("blocks are not called one after the other")
        given = leaves_of((*args, *kwargs.values()))
        before = _calls[number - 1][1] if number else []
        earlier = _calls[number - period][0] if number >= period else []
        relations = _relations(given, before, earlier)
        modes = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]
        if number >= 2 * period and [relations, modes] != [*_calls[number - period][2:4]]:
            raise Uneven("blocks are not given alike")
        if not self.left_out:
            result = run(*args, **kwargs)
            _calls.append((given, leaves_of(result), relations, modes, result))
            return result
        _, example, _, _, structure = _calls[number - period]
        # What the template's successor was given of the template's results says what is carried.
        place = number - period + 1
        leaves = _carried(example, relations if place == number else _calls[place][2], given)
        result = rebuilt(structure, list(leaves))
        _calls.append((given, leaves, relations, modes, result))
        return result


def end_of_blocks(number: int) -> None:
    """Forget the calls of a trace.

    Raises:
        Uneven: not all blocks were called.
    """
    complete = len(_calls) == number
    _calls.clear()
    if not complete:
        raise Uneven("not all blocks are called")


@contextlib.contextmanager
def few_blocks(model: nn.Module, repeats: Repeats) -> Iterator[dict[str, Block]]:
    """Put hollow modules in the places of blocks that are left out; yield what each block is, by its name."""
    owner = model.get_submodule(repeats.path)
    held = dict(owner._modules)
    names = list(held)[repeats.first : repeats.first + repeats.period * repeats.groups]
    blocks = {}
    for number, name in enumerate(names):
        path = f"{repeats.path}.{name}"
        blocks[path] = Block(str(number), str(repeats.period), repeats.has_left_out(path))
        if blocks[path].left_out:
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
        Uneven: forward changes something that blocks may read, or a block changes something.
    """
    parts = [part for block in blocks for part in model.get_submodule(block).modules()]
    held = {id(value) for part in parts for value in _values_in(vars(part))}
    for each in changed:
        if isinstance(each, str):
            if _OWN not in each:
                raise Uneven(f"forward changes {each}, which blocks may read")
        elif id(each) in held or any(part is each for part in parts):
            raise Uneven(f"forward changes a {type(each).__name__} that blocks may read")


def _values_in(attributes: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of attributes, and what their containers and weak references hold."""
    for name, value in attributes.items():
        yield value
        if name not in _PARTS and isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple, set)):
            yield from value
        elif isinstance(value, weakref.ref):
            yield value()


def _hollow(block: nn.Module) -> nn.Module:
    """Return a module with the attributes of another, and none of its tensors and parts."""
    made: nn.Module = object.__new__(type(block))
    made.__dict__.update({**vars(block), **{part: {} for part in _PARTS}})
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
            raise Uneven("blocks return more than tensors")
        elif len(leaves) in following:
            leaves.append(given[following.index(len(leaves))])
        else:
            raise Uneven("a result of a block is not what the next one is given")
    return leaves


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple)):
        return [value]
    leaves: list[Any] = []
    for part in value:
        if isinstance(part, (dict, list, tuple)):
            leaves += leaves_of(part)
        else:
            leaves.append(part)
    return leaves


def rebuilt(value: Any, leaves: list[Any]) -> Any:
    """Return a container with other leaves, which are taken out of the list."""
    if isinstance(value, dict):
        items = {key: rebuilt(part, leaves) for key, part in value.items()}
        return items if type(value) is dict else type(value)(items)
    if isinstance(value, (list, tuple)):
        parts = [rebuilt(part, leaves) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return leaves.pop(0)


# --- which blocks are equal ---------------------------------------------------------------------------------------


def find_repeats(model: nn.Module) -> Repeats | None:
    """The longest run of equal blocks, or of equal groups of blocks; None if all can as well be captured."""
    places = Counter(id(p) for owner in model.modules() for p in owner._parameters.values() if p is not None)
    best: Repeats | None = None
    for path, owner in model.named_modules():
        if not path or type(owner) not in (nn.ModuleList, nn.Sequential) or len(owner) <= CAPTURED:
            continue
        keys = [_signature(block, places) for block in owner]
        for found in _runs(keys):
            first, period, groups = found
            run = Repeats(path, first, period, groups)
            if best is None or run.left_out > best.left_out:
                best = run
    return best


def _runs(keys: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Begins, periods and numbers of groups in which a sequence repeats more often than is captured."""
    numbers: list[int] = []
    known: list[Any] = []
    for key in keys:
        if key not in known:
            known.append(key)
        numbers.append(known.index(key))
    for period in range(1, len(keys) // (CAPTURED + 1) + 1):
        first = 0
        while first + period < len(keys):
            end = first
            while end + period < len(keys) and numbers[end] == numbers[end + period]:
                end += 1
            groups = (end - first) // period + 1
            if groups > CAPTURED:
                yield first, period, groups
            first = end + 1


def _signature(module: nn.Module, places: Counter[int]) -> Any:
    """Equal for modules whose forward does the same with tensors of the same shapes."""
    attributes = without_entries(module)
    others = sorted(name for name in attributes if name not in (*_PARTS, *HOOKS, *MARKS_OF_HOOKS))
    rest = tuple((name, key_of(attributes[name])) for name in others) + tuple(_hooks(attributes))
    params = tuple((name, _of_parameter(value, places)) for name, value in module._parameters.items())
    buffers = tuple((name, about_tensor(value)) for name, value in module._buffers.items())
    parts = tuple((name, None if part is None else _signature(part, places)) for name, part in module._modules.items())
    return type(module), rest, params, buffers, parts


def _of_parameter(param: nn.Parameter | None, places: Counter[int]) -> Any:
    if param is None:
        return None
    if places[id(param)] > 1:  # tied: where its gradients are added up is not seen in a block
        return object()
    return about_tensor(param)


def about_tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    lies = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    about = tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad
    return type(tensor), *about, *lies


def key_of(value: Any) -> Any:
    """Equal for values that code cannot tell apart; of objects that are not plain, for the very object."""
    if type(value) in PLAIN:
        return type(value), repr(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(key_of, value))
    if type(value) in (set, frozenset):
        return type(value), tuple(sorted(map(repr, map(key_of, value))))
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return type(value), tuple((key_of(name), key_of(item)) for name, item in value.items())
    if type(value) is functools.partial:
        return functools.partial, key_of(value.func), key_of(value.args), key_of(value.keywords)
    if isinstance(value, (DeviceMesh, Placement)):
        return type(value), value
    if type(value).__module__.startswith(_LABELS):
        return type(value), "label"
    return "object", id(value)


def _hooks(attributes: dict[str, Any]) -> Iterator[Any]:
    """Hooks by what they do, in their order; torch numbers them."""
    for name in HOOKS:
        marks = [mark for mark in MARKS_OF_HOOKS if mark.startswith(name)]
        for number, hook in attributes.get(name, {}).items():
            yield name, _key_of_hook(hook, 0), tuple(number in attributes.get(mark, {}) for mark in marks)


def _key_of_hook(value: Any, depth: int) -> Any:
    """Equal for functions of the same code that close over equal values, such as the hooks of tensor parallelism."""
    if depth > _DEEPEST:
        return "object", id(value)
    inner = functools.partial(_key_of_hook, depth=depth + 1)
    if type(value) is types.FunctionType and not vars(value):
        cells = tuple(map(inner, map(_contents, value.__closure__ or ())))
        defaults = value.__defaults__ or (), sorted((value.__kwdefaults__ or {}).items())
        return types.FunctionType, value.__code__, id(value.__globals__), key_of(defaults), cells
    if type(value) is types.MethodType:
        return types.MethodType, inner(value.__func__), inner(value.__self__)
    if type(value) is functools.partial:
        return functools.partial, inner(value.func), tuple(map(inner, value.args)), key_of(value.keywords)
    if isinstance(value, ParallelStyle):
        return type(value), tuple((name, inner(item)) for name, item in sorted(vars(value).items()))
    if type(value) in (tuple, list):
        return type(value), tuple(map(inner, value))
    return key_of(value)


def _contents(cell: types.CellType) -> Any:
    """What a function closes over; an empty cell is equal to none."""
    try:
        return cell.cell_contents
    except ValueError:
        return object()


# --- guards of blocks that are left out ---------------------------------------------------------------------------


def guards_of_blocks(guards: Sequence[Guard], repeats: Repeats, sizes: dict[Source, Any]) -> list[Guard]:
    """Return what guards say of the block that those left out are copies of, said of each of these.

    Args:
        sizes: sizes and strides of tensors, by source; the blocks' are added.
    """
    found = []
    of_template = [guard for guard in guards if _is_inside(guard.originating_source, repeats)]
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
        place = _place_in_template(source, self._repeats)
        if place is None:
            return source
        return dataclasses.replace(source, index=self._repeats.name_at(self._group, place).rpartition(".")[2])


def _is_inside(source: Any, repeats: Repeats) -> bool:
    """Return whether a source is in a block of the template."""
    while isinstance(source, ChainedSource):
        if _place_in_template(source, repeats) is not None:
            return True
        source = source.base
    return False


def _place_in_template(source: Any, repeats: Repeats) -> str | None:
    """Return the name of the template's block that a source is; None if it is something else."""
    index = getattr(source, "index", None)
    if not (isinstance(index, str) and index.isdigit()) or _path_of(source.base) != repeats.path:
        return None
    name = f"{repeats.path}.{index}"
    place = repeats.place_of(name)
    return name if place is not None and place[0] == TEMPLATE else None


def _path_of(source: Source) -> str:
    """Return the name of the module whose submodules a source holds, such as "layers"."""
    return ".".join(re.findall(r"_modules(?:'\])?\['([^']+)'\]", str(source.name)))
