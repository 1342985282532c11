"""Why a call needs another program: which input changed, from which value to which, and what to do about it.

model(tokens)  after  model(shorter)        args[0] was int64[2, 17] and is int64[2, 24]
model(x, step=2)  after  model(x, step=1)   step was 1 and is 2
model(x, labels=y)  after  model(x)         newly passed: labels
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from graphshard.frontend.inputs import input_path
from graphshard.frontend.signature import Signature
from graphshard.ir.text import brief

# The number of inputs that a reason names; further ones are counted.
_NAMED = 3
_OF_SIZES = (
    "Declare sizes that vary (dynamic_shapes=, or torch._dynamo.mark_dynamic on the inputs of the first call), or pad "
    "inputs to a few sizes."
)
_OF_NUMBERS = (
    "Pass a number that changes as a tensor (torch.tensor(value)), or leave it out if forward does not need it."
)
_OF_CONSTANTS = "Leave the input out if forward does not need it, or give it a few values."
_OF_STRUCTURE = "Pass the same inputs in each call, by the same names and in the same order."
_OF_VALUES = "Compute with tensors what depends on values: torch.where, a mask, index_copy or gather."
_OF_ATTRIBUTES = "Keep a number that changes in a buffer (register_buffer), or pass it into the call as a tensor."
_WITHOUT_GRADIENTS = "Calls without gradients run without programs within `with graphshard.uncompiled(model):`."


@dataclass(frozen=True)
class Reason:
    """Why a program is captured.

    Attributes:
        text: names the input or attribute with its old and new value.
        remedy: sentences that say how to need fewer programs; "" where nothing is to be done.
        first: no program was there before.
    """

    text: str
    remedy: str = ""
    first: bool = False


FIRST_CALL = Reason("first call", first=True)


def reason_of(now: Signature, known: Iterable[Signature]) -> Reason:
    """Return how a signature differs from the nearest of those that have programs; the first of equally near ones."""
    return difference(now, min(known, key=lambda before: _distance(now, before)))


def reason_at(where: str, now: Signature, before: Signature) -> Reason | None:
    """Return how the inputs that a failed guard names differ from those of another call; None if it names none.

    Args:
        where: the guard, with inputs by their paths.
    """
    if now.structure != before.structure:
        text = _structures(before.structure, now.structure)
        return Reason(text, _OF_STRUCTURE) if re.search(r"\bargs\b|\bkwargs\b", where) else None
    changed = [each for each in _changed(now, before) if re.search(rf"(?<![\w.]){re.escape(each[0])}(?![\w\[])", where)]
    if not changed:
        return None
    remedies = dict.fromkeys(_remedy(was, key) for _, was, key in changed)
    if not now.grad:
        remedies[_WITHOUT_GRADIENTS] = None
    return Reason(", ".join(_described(*each) for each in changed[:_NAMED]), " ".join(remedies))


def remedy_of(change: str) -> str:
    """Return what to do about a guard that failed and is not about inputs; "" if there is nothing to do."""
    if "by the values of" in change:
        return _OF_VALUES
    return _OF_ATTRIBUTES if re.search(r" was -?\d\S* and is -?\d", change) else ""


def difference(now: Signature, before: Signature) -> Reason:
    """Return how a call differs from another one."""
    remedies: list[str] = []
    if now.structure != before.structure:
        texts = [_structures(before.structure, now.structure)]
        remedies.append(_OF_STRUCTURE)
    else:
        changed = _changed(now, before)
        texts = [_described(*each) for each in changed[:_NAMED]]
        if len(changed) > _NAMED:
            texts.append(f"{len(changed) - _NAMED} more inputs changed")
        remedies += dict.fromkeys(_remedy(was, key) for _, was, key in changed)
    if now.inputs != before.inputs and not now.grad:
        remedies.append(_WITHOUT_GRADIENTS)
    return Reason(", ".join([*texts, *now.changes_besides_inputs(before)]), " ".join(remedies))


def _distance(now: Signature, before: Signature) -> tuple[int, bool, int]:
    return (
        len(now.changes_besides_inputs(before)),
        now.structure != before.structure,
        sum(was != key for was, key in itertools.zip_longest(before.inputs, now.inputs)),
    )


# --- inputs ------------------------------------------------------------------------------------------------------


def _changed(now: Signature, before: Signature) -> list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    """Return path, old and new key of each input that differs, of two calls with the same structure."""
    pairs = enumerate(zip(before.inputs, now.inputs, strict=True))
    return [(input_path(now.structure, index), was, key) for index, (was, key) in pairs if was != key]


def _described(path: str, was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    if not (_is_tensor(was) and _is_tensor(now)):
        return f"{path} was {_shown(was)} and is {_shown(now)}"
    strides = was[0] == now[0] and was[1] != now[1]
    gradient = was[3] != now[3]
    old, new = (_tensor(key, strides=strides, gradient=gradient) for key in (was, now))
    return f"{path} was {old} and is {new}"


def _is_tensor(key: tuple[Any, ...]) -> bool:
    return len(key) == 4


def _shown(key: tuple[Any, ...]) -> str:
    if _is_tensor(key):
        return _tensor(key)
    kind, value = key
    return value if isinstance(value, str) and kind is not str else brief(value)  # "nan" stands for a float


def _tensor(key: tuple[Any, ...], *, strides: bool = False, gradient: bool = False) -> str:
    shape, stride, dtype, requires_grad = key
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    if strides:
        text += f" with strides {list(stride)}"
    if gradient:
        text += f" {'with' if requires_grad else 'without'} a gradient"
    return text


def _remedy(was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    if _is_tensor(was) and _is_tensor(now):
        return _OF_SIZES
    return _OF_NUMBERS if now[0] in (int, float) and not _is_tensor(now) else _OF_CONSTANTS


# --- structure ---------------------------------------------------------------------------------------------------


def _structures(before: pytree.TreeSpec, now: pytree.TreeSpec) -> str:
    """Return the first difference of two calls' structures, outermost first."""
    (args, kwargs), (other_args, other_kwargs) = before.children(), now.children()
    old, new = _names_of(args, kwargs), _names_of(other_args, other_kwargs)
    if added := [name for name in new if name not in old]:
        return f"newly passed: {_listed(added)}"
    if removed := [name for name in old if name not in new]:
        return f"not passed any more: {_listed(removed)}"
    if old != new:
        return f"the inputs were in the order {_listed(old)} and are in the order {_listed(new)}"
    pairs = zip(new, (*args.children(), *kwargs.children()), (*other_args.children(), *other_kwargs.children()))
    return next((text for pair in pairs for text in _within(*pair)), "the inputs have another structure")


def _names_of(args: pytree.TreeSpec, kwargs: pytree.TreeSpec) -> list[str]:
    """Return the names of a call's arguments: `args[0]` by position, `labels` by name."""
    return [*(f"args[{index}]" for index in range(args.num_children)), *kwargs.context]


def _within(path: str, before: pytree.TreeSpec, now: pytree.TreeSpec) -> Iterator[str]:
    if before == now:
        return
    if before.type is not now.type:
        yield f"{path} was {_kind(before)} and is {_kind(now)}"
    elif before.type is dict and before.context != now.context:
        yield f"the keys of {path} were [{_listed(before.context)}] and are [{_listed(now.context)}]"
    elif before.num_children != now.num_children:
        yield f"{path} had {_counted(before)} and has {_counted(now)}"
    else:
        marks = pytree.tree_unflatten(range(now.num_leaves), now)
        steps = _steps(marks, now.num_children)
        for step, old, new in zip(steps, before.children(), now.children()):
            yield from _within(f"{path}{step}", old, new)
        yield f"what {path} holds besides tensors and numbers was {brief(before.context)} and is {brief(now.context)}"


def _steps(marks: Any, count: int) -> list[str]:
    """Return how each child of a container is reached, such as `[0]` or `.mask`."""
    found, _ = pytree.tree_flatten_with_path(marks, is_leaf=lambda value: value is not marks)
    return [pytree.keystr(path) for path, _ in found] if len(found) == count else [f"[{i}]" for i in range(count)]


def _kind(spec: pytree.TreeSpec) -> str:
    return "one value" if spec.is_leaf() else f"a {getattr(spec.type, '__name__', spec.type)}"


def _counted(spec: pytree.TreeSpec) -> str:
    return f"{spec.num_children} {'entry' if spec.num_children == 1 else 'entries'}"


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
