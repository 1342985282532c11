"""Equal blocks of a deep model: which they are, and how all but a few of them are left out of a capture.

    layers.0 .. layers.125        group   0  1  2  3 ... N-3  N-2  N-1
                                  capture x  x  x  - ... -    x    x

Blocks are equal if nothing that their forward could read differs: classes, attributes, hooks, and shapes of what they
hold. The forward of the model runs as it is, with all its blocks. Those that are left out return what they are given,
so that code between the blocks sees their true number. Each call is compared with the one before it. If a block is
given something else than its predecessor's result and what that was given, nothing can be said of those left out.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from graphshard.capture.capture import CaptureSpec
from graphshard.capture.entry import without_entries
from graphshard.ir.errors import CaptureError
from graphshard.ir.repeats import CAPTURED, Repeats, Uneven
from graphshard.ir.torch_internals import replaced

# What is compared of a module apart from its other attributes.
_PARTS = ("_parameters", "_buffers", "_modules")
# Hooks of a module, and what is said of some of them by their numbers.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MARKS_OF_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# Whose objects say of a module that a function was applied to it: nothing that forward reads.
_LABELS = ("graphshard.module.", "torch.distributed._composable.contract")
# Of functions in functions; what is deeper is compared by what it is.
_DEEPEST = 8
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)


class Unequal(CaptureError):
    """Blocks that look equal are not called alike; the model is captured as a whole then."""


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
    others = sorted(name for name in attributes if name not in (*_PARTS, *_HOOKS, *_MARKS_OF_HOOKS))
    rest = tuple((name, _key(attributes[name])) for name in others) + tuple(_hooks(attributes))
    params = tuple((name, _of_parameter(value, places)) for name, value in module._parameters.items())
    buffers = tuple((name, _of_tensor(value)) for name, value in module._buffers.items())
    parts = tuple((name, None if part is None else _signature(part, places)) for name, part in module._modules.items())
    return type(module), rest, params, buffers, parts


def _of_parameter(param: nn.Parameter | None, places: Counter[int]) -> Any:
    if param is None:
        return None
    if places[id(param)] > 1:  # tied: where its gradients are added up is not seen in a block
        return object()
    return _of_tensor(param)


def _of_tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    lies = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    about = tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad
    return type(tensor), *about, *lies


def _key(value: Any) -> Any:
    """Equal for values that code cannot tell apart; of objects that are not plain, for the very object."""
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_key, value))
    if type(value) in (set, frozenset):
        return type(value), tuple(sorted(map(repr, map(_key, value))))
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return type(value), tuple((_key(name), _key(item)) for name, item in value.items())
    if type(value) is functools.partial:
        return functools.partial, _key(value.func), _key(value.args), _key(value.keywords)
    if isinstance(value, (DeviceMesh, Placement)):
        return type(value), value
    if type(value).__module__.startswith(_LABELS):
        return type(value), "label"
    return "object", id(value)


def _hooks(attributes: dict[str, Any]) -> Iterator[Any]:
    """Hooks by what they do, in their order; torch numbers them."""
    for name in _HOOKS:
        marks = [mark for mark in _MARKS_OF_HOOKS if mark.startswith(name)]
        for number, hook in attributes.get(name, {}).items():
            yield name, _key_of_hook(hook, 0), tuple(number in attributes.get(mark, {}) for mark in marks)


def _key_of_hook(value: Any, depth: int) -> Any:
    """Equal for functions of the same code that close over equal values, as those of tensor parallelism are."""
    if depth > _DEEPEST:
        return "object", id(value)
    inner = functools.partial(_key_of_hook, depth=depth + 1)
    if type(value) is types.FunctionType and not vars(value):
        cells = tuple(map(inner, map(_contents, value.__closure__ or ())))
        defaults = value.__defaults__ or (), sorted((value.__kwdefaults__ or {}).items())
        return types.FunctionType, value.__code__, id(value.__globals__), _key(defaults), cells
    if type(value) is types.MethodType:
        return types.MethodType, inner(value.__func__), inner(value.__self__)
    if type(value) is functools.partial:
        return functools.partial, inner(value.func), tuple(map(inner, value.args)), _key(value.keywords)
    if isinstance(value, ParallelStyle):
        return type(value), tuple((name, inner(item)) for name, item in sorted(vars(value).items()))
    if type(value) in (tuple, list):
        return type(value), tuple(map(inner, value))
    return _key(value)


def _contents(cell: types.CellType) -> Any:
    """What a function closes over; an empty cell is equal to none."""
    try:
        return cell.cell_contents
    except ValueError:
        return object()


def check_alike(spec: CaptureSpec, repeats: Repeats) -> None:
    """Raise Uneven if parameters or units of blocks that are left out are treated unlike those that are captured."""
    if spec.extended:
        raise Uneven("parameters are subclasses of tensors")
    found: dict[int, list[Any]] = {}
    for row in spec.params:
        place = repeats.place_of(row.name)
        if place is not None:
            names = tuple(repeats.name_at(0, name) for name in row.names)
            found.setdefault(place[0], []).append(replace(row, names=names, unit=repeats.name_at(0, row.unit)))
    for unit in spec.units:
        place = repeats.place_of(unit)
        if place is not None:
            found.setdefault(place[0], []).append((repeats.name_at(0, unit), spec.precision.of(unit)))
    if any(found.get(group) != found.get(0) for group in range(repeats.groups)):
        raise Uneven("parameters of blocks are treated differently")


# --- while it is captured ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def few_blocks(model: nn.Module, repeats: Repeats) -> Iterator[Callable[[], None]]:
    """Within it blocks that are left out return what they are given; what is yielded checks the calls afterwards."""
    owner = model.get_submodule(repeats.path)
    blocks = list(owner.children())[repeats.first : repeats.first + repeats.period * repeats.groups]
    calls = _Calls(repeats, blocks)
    # torch.fx puts a function of its own in the place of __call__, which calls this
    call: Callable[..., Any] = nn.Module._call_impl
    numbers = {block: number for number, block in enumerate(blocks)}

    @functools.wraps(call)
    def instead(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number = numbers.get(self)
        if number is None:
            return call(self, *args, **kwargs)
        return calls.next(number, (args, kwargs), lambda: call(self, *args, **kwargs))

    with replaced(nn.Module, "_call_impl", instead):
        yield calls.check_ended


class _Calls:
    """The calls of the blocks of one forward, in order."""

    def __init__(self, repeats: Repeats, blocks: Sequence[nn.Module]) -> None:
        self.period, self.count = repeats.period, len(blocks)
        self.captured = [repeats.is_captured(number // repeats.period) for number in range(self.count)]
        self.ended = False
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
        result = run() if self.captured[number] else self._left_out(number)
        self.made.append(pytree.tree_flatten(result))
        if number == self.count - 1:  # capture looks for tensors that somebody keeps
            self._forget()
            self.ended = True
        return result

    def _forget(self) -> None:
        self.given: list[tuple[list[Any], pytree.TreeSpec]] = []
        self.made: list[tuple[list[Any], pytree.TreeSpec]] = []
        self.relations: list[tuple[Any, ...]] = []

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
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *casts


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) in _PLAIN and _key(value) == _key(other))


def _is_like(value: Any, other: torch.Tensor) -> bool:
    return _is_tensor(value) and _of_tensor(value)[1:] == _of_tensor(other)[1:]
