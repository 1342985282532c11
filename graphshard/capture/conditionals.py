"""torch.cond: both branches are computed, and the results of the one that is taken are chosen (if-conversion).

    torch.cond(p, f, g, (x,))      where(p, f(x'), g(x''))      x', x'': x, through one node of autograd whose
                                                                gradient is where(p, that of x', that of x'')

So the graph stays one list of operators, which passes schedule, and ranks that take different branches launch the same
collectives. A gradient from the other branch is never added, not even as zero times infinity, and what a tensor gets
from the taken one is one term, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphshard.capture.known_values import as_tensor
from graphshard.capture.untraceable import Untraceable
from graphshard.capture.watch import Watch
from graphshard.ir.tracing_internals import number_of_next_node

_COND = torch.ops.higher_order.cond


class Conditionals(TorchFunctionMode):
    """Computes both branches of torch.cond.

    Args:
        watch: sees what operators of the branches do.
        check_unchanged: called when a branch begins; what it returns is called at its end, and raises if the branch
            has changed what forward can reach.
    """

    def __init__(self, watch: Watch, check_unchanged: Callable[[], Callable[[], None]]) -> None:
        super().__init__()
        self._watch, self._check_unchanged = watch, check_unchanged
        self._within: _Branch | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not _COND:
            return func(*args, **(kwargs or {}))
        with self:
            return self._choose(*args, **(kwargs or {}))

    def _choose(self, pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
        if isinstance(pred, (bool, int, float)):
            return (true_fn if pred else false_fn)(*operands)
        taken = as_tensor(pred) if isinstance(pred, torch.SymBool) else pred.reshape(()).to(torch.bool)
        entries = _Entries(taken, self._within)
        of_true = self._run(_Branch(entries, 0), taken, true_fn, operands)
        of_false = self._run(_Branch(entries, 1), ~taken, false_fn, operands)
        leaves = [pytree.tree_flatten(result) for result in (of_true, of_false)]
        if leaves[0][1] != leaves[1][1]:
            raise Untraceable("branches", f"their structures are {leaves[0][1]} and {leaves[1][1]}")
        chosen = [_either(taken, *pair) for pair in zip(leaves[0][0], leaves[1][0])]
        return pytree.tree_unflatten(chosen, leaves[0][1])

    def _run(self, branch: _Branch, taken: Tensor, function: Callable[..., Any], operands: Any) -> Any:
        """The results of a branch, whose checks hold where it is not taken."""
        outer, self._within = self._within, branch
        check_unchanged = self._check_unchanged()
        # What is given enters here, as functions of the user's may use it before torch's do; so do the hooks of units.
        given = pytree.tree_map_only(Tensor, branch.enter, operands)
        try:
            with self._watch.branch(taken), branch:
                result = function(*given)
        finally:
            self._within = outer
        result = pytree.tree_map_only(Tensor, branch.enter, result)
        check_unchanged()
        branch.check_entries(result)
        return result


class _Entries:
    """The tensors that enter the branches of one torch.cond, each through one node of autograd.

    Args:
        taken: whether the first branch is.
        outer: the branch that the torch.cond is in.
    """

    def __init__(self, taken: Tensor, outer: _Branch | None) -> None:
        self._taken, self._outer = taken, outer
        self._begin = number_of_next_node()
        self._entered: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
        self.nodes: set[Any] = set()

    def enter(self, tensor: Tensor, branch: int) -> Tensor:
        """What a branch sees of a tensor."""
        if not tensor.requires_grad or not self.is_outside(tensor.grad_fn):
            return tensor
        if id(tensor) not in self._entered:
            whole = tensor if self._outer is None else self._outer.enter(tensor)
            with torch.enable_grad():
                pair = _Enter.apply(whole, self._taken)
            self.nodes.add(pair[0].grad_fn)
            self._entered[id(tensor)] = tensor, pair
        return self._entered[id(tensor)][1][branch]

    def is_outside(self, node: Any) -> bool:
        """Whether a node of autograd was there before; None is that of a leaf."""
        return node is None or node._sequence_nr() < self._begin or node.name().endswith("AccumulateGrad")


class _Branch(TorchFunctionMode):
    """While it is open, torch's functions see tensors from outside as they enter this branch."""

    def __init__(self, entries: _Entries, index: int) -> None:
        super().__init__()
        self._entries, self._index = entries, index

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.register_hook and self.enter(args[0]) is not args[0]:
            raise Untraceable("branch", "register_hook of a tensor that it has not made")
        args, kwargs = pytree.tree_map_only(Tensor, self.enter, (args, kwargs))
        return func(*args, **kwargs)

    def enter(self, tensor: Tensor) -> Tensor:
        """What the branch sees of a tensor."""
        return self._entries.enter(tensor, self._index)

    def check_entries(self, result: Any) -> None:
        """Raise Untraceable if a gradient of the results would reach a tensor outside on another way."""
        leaves = pytree.tree_leaves(result)
        nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        seen: set[Any] = set(self._entries.nodes)
        while nodes:
            node: Any = nodes.pop()
            if node is None or node in seen:
                continue
            if self._entries.is_outside(node):
                raise Untraceable("branch", "a function that is not torch's uses a tensor that it has not made")
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]


class _Enter(torch.autograd.Function):
    """A value for either branch; its gradient is that of the branch that is taken."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(taken)
        ctx.set_materialize_grads(False)
        return value.view_as(value), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (taken,) = ctx.saved_tensors
        some = next((grad for grad in grads if grad is not None), None)
        if some is None:
            return None, None
        one, other = (torch.zeros_like(some) if grad is None else grad for grad in grads)
        return torch.where(taken, one, other), None


def _either(taken: Tensor, one: Any, other: Any) -> Any:
    """A result of torch.cond: torch demands equal shapes and dtypes of tensors."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        if type(one) is type(other) and one == other:
            return one
        raise Untraceable("branches", f"they return {one} and {other}")
    kinds = [f"{each.dtype}, shape {list(each.shape)}, strides {list(each.stride())}" for each in (one, other)]
    if kinds[0] != kinds[1]:
        raise Untraceable("branches", f"they return {kinds[0]} and {kinds[1]}")
    return torch.where(taken, one, other)
