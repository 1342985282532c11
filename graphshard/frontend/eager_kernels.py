"""Operators that run as eager mode runs them although they are traced.

    F.interpolate(x, mode="bilinear")    eager mode    upsample_bilinear2d
                                         tracing       a function in Python: arange, index, mul, add, ...

torch has written some operators in Python for compilers, in the place of their kernels. They round differently. Only
sizes that are not known need them: torch's kernels ask for numbers. Layers of nn.RNN, LSTM and GRU are operators of
torch's, too; the function in Python leaves out the dropout between them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decompositions
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from graphshard.ir.graph import WRONG_IN_PYTHON, interpolations
from graphshard.ir.torch_internals import replaced

_OTHERS = (torch.ops.aten.multi_margin_loss.default, *WRONG_IN_PYTHON)
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_IN_PYTHON = (DispatchKey.Autograd, _COMPOSITE)


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """In the block these operators are not taken apart while they are traced."""
    others = []
    for op in (*interpolations(), *_OTHERS):
        for key in _IN_PYTHON:
            if key in op.py_kernels:
                others.append((op, key, op.py_kernels[key]))
                op.py_kernels[key] = functools.partial(_chosen, op, key, op.py_kernels[key])
                op._dispatch_cache.clear()
    try:
        with replaced(decompositions, "_rnn_helper", functools.partial(_layers, decompositions._rnn_helper)):
            yield
    finally:
        for op, key, kernel in others:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def _layers(
    run: Callable[..., tuple[Tensor, list[Any]]],
    x: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Callable[..., Any],
) -> tuple[Tensor, list[Any]]:
    """Run the layers of an nn.RNN, LSTM or GRU one by one, with dropout between them."""
    directions = 2 if bidirectional else 1
    x = x.transpose(0, 1) if batch_first else x
    final: list[Any] = []
    for number in range(num_layers):
        own = slice(directions * number, directions * (number + 1))
        x, ends = run(x, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer)
        final += pytree.tree_map(_shaped, ends, [*hidden[own]])
        if train and dropout and number < num_layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return (x.transpose(0, 1) if batch_first else x), final


def _shaped(end: Tensor, begin: Tensor) -> Tensor:
    """A final state, with the shape of the initial one; torch 2.11 leaves a dim too many on those of an LSTM."""
    return end if end.dim() == begin.dim() else end.reshape(begin.shape)


def _chosen(op: OpOverload, key: DispatchKey, in_python: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run torch's kernel, or the function in Python where sizes are not known; what is whole is not taken apart."""
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [*leaves, *(size for tensor in tensors for size in tensor.shape)]
    if any(isinstance(number, (torch.SymInt, torch.SymFloat)) for number in numbers):
        return in_python(*args, **kwargs)
    kernel = next((each for each in (key, _COMPOSITE) if op.has_kernel_for_dispatch_key(each)), None)
    return NotImplemented if kernel is None else op._op_dk(kernel, *args, **kwargs)
