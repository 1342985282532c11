"""Find the longest run of equal blocks in a model.

Blocks are equal if nothing that their forward could read differs: classes, attributes, hooks, and shapes of what they
hold.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from graphshard.ir.repeats import CAPTURED, Repeats, longest_run
from graphshard.ir.submodule_entry_points import without_entries
from graphshard.utils.source_lines import PLAIN

# What is compared of a module apart from its other attributes.
PARTS = ("_parameters", "_buffers", "_modules")
# Hooks of state dicts, which no forward runs.
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
# Hooks of a module, and what is said of some of them by their numbers.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MARKS_OF_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# Whose objects say of a module that a function was applied to it: nothing that forward reads.
_LABELS = ("graphshard.module.", "torch.distributed._composable.contract")
# Of functions in functions; what is deeper is compared by what it is.
_DEEPEST = 8


def find_repeats(model: nn.Module) -> Repeats | None:
    """Return the longest run of equal blocks, or of equal groups of blocks; None if all can as well be captured."""
    places = Counter(id(p) for owner in model.modules() for p in owner._parameters.values() if p is not None)
    best: Repeats | None = None
    for path, owner in model.named_modules():
        if path and type(owner) in (nn.ModuleList, nn.Sequential):
            signatures = [_signature(block, places) for block in owner]
            numbers = [signatures.index(each) for each in signatures]
            found = Repeats(path, *longest_run(numbers, longest=len(numbers) // (CAPTURED + 1), ends=CAPTURED))
            if found.left_out > (0 if best is None else best.left_out):
                best = found
    return best


def _signature(module: nn.Module, places: Counter[int]) -> Any:
    """Return what is equal for modules whose forward does the same with tensors of the same shapes.

    Args:
        places: number of modules that hold a parameter, by its id.
    """

    def of_parameter(param: nn.Parameter | None) -> Any:
        # Of a tied one, it is not seen in a block where its gradients are added up.
        return object() if places[id(param)] > 1 else _of_tensor(param)

    attributes = without_entries(module)
    others = sorted(name for name in attributes if name not in (*PARTS, *HOOKS, *MARKS_OF_HOOKS, *_STATE_HOOKS))
    rest = tuple((name, _key_of(attributes[name])) for name in others) + tuple(_hooks(attributes))
    params = tuple((name, of_parameter(value)) for name, value in module._parameters.items())
    buffers = tuple((name, _of_tensor(value)) for name, value in module._buffers.items())
    parts = tuple((name, None if part is None else _signature(part, places)) for name, part in module._modules.items())
    return type(module), rest, params, buffers, parts


def _of_tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    lies = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    about = tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad
    return type(tensor), *about, *lies


def _hooks(attributes: dict[str, Any]) -> Iterator[Any]:
    """Yield hooks by what they do, in their order; torch numbers them."""
    for name in HOOKS:
        marks = [mark for mark in MARKS_OF_HOOKS if mark.startswith(name)]
        for number, hook in attributes.get(name, {}).items():
            yield name, _key_of(hook), tuple(number in attributes.get(mark, {}) for mark in marks)


def _key_of(value: Any, depth: int = 0) -> Any:
    """Return what is equal for values that code cannot tell apart.

    Functions are equal if they have the same code and close over equal values, such as the hooks of tensor parallelism.
    Of objects that are not plain it is the very object.
    """
    inner = functools.partial(_key_of, depth=depth + 1)
    found: Any = ("object", id(value))
    if depth > _DEEPEST:
        pass
    elif type(value) in PLAIN:
        found = repr(value)
    elif type(value) in (tuple, list):
        found = tuple(map(inner, value))
    elif type(value) in (set, frozenset):
        found = tuple(sorted(map(repr, map(inner, value))))
    elif isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        found = tuple((inner(name), inner(item)) for name, item in value.items())
    elif type(value) is functools.partial:
        found = inner(value.func), inner(value.args), inner(value.keywords), inner(vars(value))
    elif type(value) is types.FunctionType and not vars(value):
        cells = tuple(map(_in_cell, value.__closure__ or ()))
        found = value.__code__, id(value.__globals__), inner((value.__defaults__, value.__kwdefaults__, cells))
    elif type(value) is types.MethodType:
        found = inner(value.__func__), inner(value.__self__)
    elif isinstance(value, ParallelStyle):
        found = tuple((name, inner(item)) for name, item in sorted(vars(value).items()))
    elif isinstance(value, (DeviceMesh, Placement)):
        found = value
    elif type(value).__module__.startswith(_LABELS):
        found = "label"
    return type(value), found


def _in_cell(cell: types.CellType) -> Any:
    """Return what a function closes over; an empty cell is equal to none."""
    try:
        return cell.cell_contents
    except ValueError:
        return object()
