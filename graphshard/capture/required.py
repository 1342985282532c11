"""Whether tensors that forward is given require a gradient, where forward itself changes that.

x.requires_grad_()              of an input: forward runs again with one that does from the beginning, and each call
                                leaves x so, with its gradient in x.grad
y = f(x); x.requires_grad_()    an error: y would have that gradient, too
x.requires_grad_(False)         an error, as is any change of a parameter or buffer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphshard.capture.learned import Learned, Rerun
from graphshard.capture.untraceable import Untraceable

_SETTER = vars(torch._C.TensorBase)["requires_grad"].__set__
_SETTERS = (Tensor.requires_grad_, _SETTER)
# Their results have no gradient.
_DETACHING = (Tensor.detach, vars(torch._C.TensorBase)["data"].__get__)


class Required(TorchFunctionMode):
    """While this is open, inputs that forward makes require a gradient are learned.

    Args:
        inputs: of a call, as they are traced.
        owned: parameters and buffers, in the same way.

    Raises, where forward changes that:
        Untraceable: it changes otherwise what requires a gradient.
        Rerun: something was learned.
    """

    def __init__(self, inputs: Sequence[Tensor], owned: Sequence[Tensor], learned: Learned) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        for number, tensor in enumerate(inputs):
            self._numbers.setdefault(id(tensor), number)  # one that is given twice is the first
        self._owned = frozenset(map(id, owned))
        self._learned = learned
        self._used: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SETTERS:
            if not self._changes(args[0], *args[1:], **kwargs):
                return None if func == _SETTER else args[0]  # it may be no leaf here, which refuses to be set
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        given = self._numbers.keys() & set(map(id, _flat((*args, *kwargs.values()))))
        if given and func not in _DETACHING and any(map(_may_have_gradient, pytree.tree_leaves(result))):
            self._used |= given
        return result

    def _changes(self, tensor: Tensor, requires_grad: bool = True) -> bool:
        if tensor.requires_grad == requires_grad:
            return False
        if id(tensor) in self._owned:
            raise Untraceable("requires_grad", "requires_grad of a parameter or buffer is set")
        number = self._numbers.get(id(tensor))
        if number is None:
            return True
        if not requires_grad:
            raise Untraceable("requires_grad", "requires_grad of an input is set to False")
        if id(tensor) in self._used:
            raise Untraceable("requires_grad", "requires_grad of an input is set behind its first use")
        self._learned.required.add(number)
        raise Rerun


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    """Arguments, and what is in lists, as torch.cat takes them."""
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from arg
        else:
            yield arg


def _may_have_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
