"""Find the longest run of equal blocks in a model.

Blocks are equal if nothing that their forward could read differs: classes, attributes, hooks, and shapes of what they
hold.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from graphshard.ir.repeats import CAPTURED, Repeats
from graphshard.ir.submodule_entry_points import without_entries
from graphshard.utils.source_lines import PLAIN

# What is compared of a module apart from its other attributes.
PARTS = ("_parameters", "_buffers", "_modules")
# Hooks of a module, and what is said of some of them by their numbers.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MARKS_OF_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# Whose objects say of a module that a function was applied to it: nothing that forward reads.
_LABELS = ("graphshard.module.", "torch.distributed._composable.contract")
# Of functions in functions; what is deeper is compared by what it is.
_DEEPEST = 8


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
    others = sorted(name for name in attributes if name not in (*PARTS, *HOOKS, *MARKS_OF_HOOKS))
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
