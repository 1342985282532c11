"""Operators of a trace as eager mode runs them; what a program cannot keep is an error at the line that runs it.

F.interpolate(x, mode="bilinear")     torch's kernel; tracing has a function in Python that rounds differently
nn.LSTM(..., dropout=0.1)             with the dropout between its layers, which that function leaves out
F.dropout(x)                          rounded, and drawn, as on the CPU in eager mode
checkpoint(f, x, use_reentrant=True)  its gradient with the strides of x
x.relu_()                             result with the strides of x
torch.linalg.inv(x)                   its status is a result of the program, and is checked after each call
torch._check(count <= 5)              the condition is one, too
self.weight.mul_(0.5)                 error: a program reads parameters
F.dropout(dtensor)                    error on a GPU, where its draw depends on the rank
F.embedding(..., sparse=True)         error: gradients are dense
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter, Node

from graphshard.ir.graph import WRONG_IN_PYTHON, error_here, interpolations, place_of
from graphshard.ir.param_table import inverse_of, memory_order
from graphshard.ir.program import LinalgCheck, RuntimeAssert, Slot
from graphshard.ir.subclasses import shard_in
from graphshard.torch_compat.aot_autograd import one_layer_lstm, torch_decompositions
from graphshard.torch_compat.fake_tensors import keep_strides
from graphshard.torch_compat.torch_ops import (
    DispatchKey,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    arguments_of,
    memory_of,
    pytree,
    replaced,
    written_by,
)
from graphshard.utils.progress import check_cancelled

_OTHERS = (torch.ops.aten.multi_margin_loss.default, *WRONG_IN_PYTHON)
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_IN_PYTHON = (DispatchKey.Autograd, _COMPOSITE)

aten = torch.ops.aten
_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
_EMBEDDINGS = (aten.embedding.default, aten._embedding_bag.default, aten._embedding_bag_forward_only.default)


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
    layers = functools.partial(_layers, torch_decompositions._rnn_helper)
    with_helper = replaced(torch_decompositions, "_rnn_helper", layers)
    # Torch would take oneDNN's layer for an input without a gradient, which then has none for parameters either.
    with_layer = replaced(torch_decompositions, "select_one_layer_lstm_function", lambda *_: one_layer_lstm)
    try:
        with with_helper, with_layer:
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
    """Run the layers of an nn.RNN, LSTM or GRU with dropout between them, which torch's function forgets."""
    calls, dropped = itertools.count(), dict[int, Tensor]()

    def after_dropout(x: Tensor, begins: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        number = next(calls) // (2 if bidirectional else 1)
        if number and train and dropout:
            if number not in dropped:
                dropped[number] = torch.dropout(x, dropout, train=True)
            x = dropped[number]
        x, ends = layer(x, begins, *args, **kwargs)
        # Torch 2.11 leaves an LSTM's final state a dimension too many.
        return x, pytree.tree_map(lambda e, b: e if e.dim() == b.dim() else e.reshape(b.shape), ends, begins)

    return run(x, hidden, params, has_biases, num_layers, 0.0, train, bidirectional, batch_first, after_dropout)


def _chosen(op: OpOverload, key: DispatchKey, in_python: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run torch's kernel, or the function in Python where sizes are not known; what is whole is not taken apart."""
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [*leaves, *(size for tensor in tensors for size in tensor.shape)]
    if any(isinstance(number, (torch.SymInt, torch.SymFloat)) for number in numbers):
        return in_python(*args, **kwargs)
    kernel = next((each for each in (key, _COMPOSITE) if op.has_kernel_for_dispatch_key(each)), None)
    return NotImplemented if kernel is None else op._op_dk(kernel, *args, **kwargs)


# --- dropout, which tracing rounds differently on the CPU ---------------------------------------------------------


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    if x.device.type != "cpu" or not train or p == 0:
        return NotImplemented
    if p == 1:  # nothing is drawn
        return x * _zero_like(x), torch.zeros_like(x, dtype=torch.bool)
    like = torch.empty_like(x)
    # `bernoulli_` may draw in memory order; the operator that returns a new tensor draws in the order of the dims.
    order = memory_order(like) if _draws_in_memory_order() else ()
    drawn = aten.bernoulli.p(like.permute(order) if order else like, 1 - p)
    keep = drawn.permute(inverse_of(order)) if order else drawn
    return x * (keep / (1 - p)), keep.to(torch.bool)


@functools.cache
def _draws_in_memory_order() -> bool:
    """Return whether `bernoulli_` does: torch's own kernel, but not MKL's, which is taken on Intel's processors."""
    plain = torch.empty(4, 8, device="cpu").bernoulli_(generator=torch.Generator("cpu").manual_seed(0))
    transposed = torch.empty(4, 8, device="cpu").t().bernoulli_(generator=torch.Generator("cpu").manual_seed(0))
    return torch.equal(plain, transposed.t())


def _native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    if grad.device.type != "cpu":
        return NotImplemented
    if scale == 0.0:  # of a probability of 1
        return grad * _zero_like(grad)
    return grad * (mask.to(grad.dtype) / (1 / scale))


def _zero_like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=x.dtype, device=x.device)


def capture_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return the table to differentiate a forward with."""
    _draws_in_memory_order()  # found out before anything is traced
    return {
        aten.native_dropout.default: _native_dropout,
        aten.native_dropout_backward.default: _native_dropout_backward,
    }


# --- watch over operators -----------------------------------------------------------------------------------------


class OperatorWatch(TorchDispatchMode):
    """Mode that is open while AOTAutograd runs the torch-level graph.

    Attributes:
        checks: statuses of linear algebra, and conditions, each with the tensor that holds it.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Mapping[Slot, torch.Tensor]) -> None:
        super().__init__()
        self._given = {memory_of(tensor): slot for slot, tensor in given.items()}
        self.checks: list[tuple[LinalgCheck | RuntimeAssert, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        check_cancelled()
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        if func is aten._linalg_check_errors.default:
            self.checks.append((LinalgCheck(args[1], kwargs["is_matrix"]), args[0]))
            return None
        if getattr(func, "namespace", "") == "c10d":
            raise error_here(
                f"runs {func}, a collective of a process group. Use torch.distributed._functional_collectives, or "
                "communicate outside of forward"
            )
        trained = func in _EMBEDDINGS and torch.is_grad_enabled() and args[0].requires_grad
        if trained and arguments_of(func, args, kwargs).get("sparse"):
            name = getattr(self._given.get(memory_of(args[0])), "name", "a weight")
            raise error_here(
                f"looks up rows of {name} with sparse=True, and gradients are reduced densely. Set the attribute "
                "`sparse` of that module to False; optimizers other than SparseAdam take both"
            )
        if draws(func, args, kwargs):
            given = pytree.arg_tree_leaves(*args, **kwargs)
            if any(isinstance(each, DTensor) and each.device_mesh.device_type != "cpu" for each in given):
                raise error_here(
                    f"draws random numbers for a DTensor ({func}), which on a GPU sets the generator's state around "
                    "it. Draw for local tensors: leave nn.Dropout out of the plan, or call to_local() first"
                )
        written: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            written = [(tensor, tensor.stride()) for tensor in written_by(func, args, kwargs)]
            for slot in (self._given.get(memory_of(shard_in(tensor))) for tensor, _ in written):
                if slot is not None and slot.kind == "param":
                    raise error_here(
                        f"writes parameter {slot.name} ({func}). Write it outside of forward, or use a buffer"
                    )
        result = func(*args, **kwargs)
        for tensor, stride in written:
            if len(stride) == tensor.dim() and torch.Tag.inplace_view not in func.tags:
                keep_strides(tensor, stride)
        return result


class _LaidBranches(Interpreter):
    """Runs a graph; in branches of `torch.cond` a gradient of an operand has the operand's strides.

    torch wants the same strides of both branches, and a branch may sum a tensor whose gradient is expanded.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one function."""
        if target is torch.ops.higher_order.cond and torch.is_grad_enabled():
            predicate, *branches, operands = args
            laid = (functools.partial(_run_laid, branch) for branch in branches)
            args = (predicate, *laid, operands)
        return super().call_function(target, args, kwargs)


def _run_laid(branch: Any, *operands: Any) -> Any:
    return _LaidBranches(branch).run(*map(_laid, operands))


class WatchedGraph(_LaidBranches):
    """Runs a torch-level graph of Dynamo; what forward asserts with `torch._check` is checked after each call."""

    def __init__(self, graph: GraphModule, watch: OperatorWatch, params: Iterable[torch.Tensor]) -> None:
        super().__init__(graph)
        self._watch, self._params = watch, set(map(id, params))

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        if n.target in _COMPARISONS and any(user.target is aten._assert_scalar.default for user in n.users):
            self._check(n)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one function; gradients of a reentrant region's inputs are laid out as those."""
        if target is torch.ops.higher_order.tag_activation_checkpoint and kwargs.get("use_reentrant"):
            if not any(_needs_gradient(each) and id(each) not in self._params for each in args):
                with torch.no_grad():  # gradients go through its inputs, or nowhere
                    return super().call_function(target, args, kwargs)
            args = tuple(map(_laid, args))
        return super().call_function(target, args, kwargs)

    def _check(self, condition: Node) -> None:
        """Compute a condition on numbers that are read from tensors as a tensor, too."""
        left: Any
        line = place_of(condition).removeprefix(" at ")
        if "_check" not in line:
            return  # torch's own, which holds
        left, right = (self.env[each] if isinstance(each, Node) else each for each in condition.args)
        of_tensor = torch.full((), left, dtype=torch.int64 if isinstance(left, (int, torch.SymInt)) else torch.float64)
        compare = cast(Callable[..., Any], condition.target)
        self._watch.checks.append((RuntimeAssert(line), compare(of_tensor, right)))


class _Laid(torch.autograd.Function):
    """Return a tensor as it is; its gradient gets its strides, like a leaf's: sums round by the order in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        steps = sorted((step, size) for step, size in zip(x.stride(), x.shape) if size != 1)
        sizes = [size for _, size in steps]
        is_dense = all(step == math.prod(sizes[:index]) for index, (step, _) in enumerate(steps))
        ctx.stride = x.stride() if is_dense else None
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> torch.Tensor:
        if ctx.stride is None or grad.stride() == ctx.stride:
            return cast(torch.Tensor, grad)
        return grad.new_empty_strided(grad.shape, ctx.stride).copy_(grad)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, DTensor)


def _laid(value: Any) -> Any:
    return _Laid.apply(value) if _needs_gradient(value) else value


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers; attention without dropout does not."""
    is_random = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags
    return is_random and arguments_of(func, args, kwargs).get("dropout_p") != 0
