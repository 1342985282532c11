"""What autograd's graph of a loss says about which parameters a single call of the model sees to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


def trained_by_one_call(loss: torch.Tensor, calls: Collection[Any]) -> frozenset[str]:
    """Parameters, by their names in the model, all of whose gradient comes from the only call that a loss goes through.

    None if the loss goes through several calls of the model, or through a function of the user's, which may hide some
    (a reentrant checkpoint), or if it reads one of the parameters besides.

    Args:
        calls: nodes of all calls in graphs that are alive.
    """
    found: Any = None
    seen: set[Any] = set()
    leaves: set[int] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [next_node for next_node, _ in node.next_functions]
        if node in calls:
            if found is not None:
                return frozenset()
            found = node
            of_inputs = (of != "param" for of in node.executable.differentiated)
            following = [next_node for next_node, inputs in zip(following, of_inputs) if inputs]
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            return frozenset()
        elif hasattr(node, "variable"):
            leaves.add(id(node.variable))
        left += following
    if found is None:
        return frozenset()
    trained = found.executable.trained
    again = leaves and any(id(ref.param) in leaves for ref in trained.values())
    return frozenset() if again else frozenset(trained)
