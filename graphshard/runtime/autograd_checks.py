"""Checks against autograd: whether a program's backward gives its gradients, and which parameters one call trains."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from graphshard.errors import UnsupportedError
from graphshard.ir.graph import aten
from graphshard.ir.program import Program


def trained_by_one_call(loss: torch.Tensor, calls: Collection[Any]) -> frozenset[str]:
    """Return names of parameters all of whose gradient comes from the only call that a loss goes through.

    None if the loss goes through several calls of the model, or through a custom function, which may hide some
    (a reentrant checkpoint), or if it reads one of the parameters directly.

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
    reads_parameter = leaves and any(id(ref.param) in leaves for ref in trained.values())
    return frozenset() if reads_parameter else frozenset(trained)


def check_backward(program: Program, given: Collection[str], hooked: Collection[str]) -> None:
    """Check that the operators of the program would compute the same gradients as its backward.

    One node of autograd computes the gradients of a call, and there is no graph in it.

    Args:
        given: outputs that have gradients.
        hooked: outputs with hooks, or that retain their gradients.

    Raises:
        UnsupportedError: gradients are to be differentiated, or checked, or flow past a hook.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"gradients of {program.model} are to have a graph of their own (create_graph=True), and a program "
            "computes them without. In forward, torch.autograd.grad(..., create_graph=True) is traced with the rest."
        )
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise UnsupportedError(
            "torch.autograd.set_detect_anomaly looks for nan in gradients, which it cannot in shards (DTensor). Pass "
            "check_nan=False, or look for it in the model before graphshard.compile."
        )
    for name in hooked:
        later = sorted(set(given) & _computed_from(program, name))
        if later:
            raise UnsupportedError(
                f"output {name} of {program.model} has a hook, or retains its gradient, and output {later[0]}, which "
                f"forward computes from it, has a gradient: it flows through the program, past the hook. Register the "
                f"hook in forward, or compute output {later[0]} from output {name} outside of the model."
            )


# A node of a graph, and the call of the region that it is in; None outside of regions.
_Value: TypeAlias = tuple[Node | None, Node]


def _computed_from(program: Program, name: str) -> set[str]:
    """Return other outputs that are computed from one."""
    forward = program.phases["forward"]
    outputs = [(slot.name, value) for value, slot in zip(forward.results, forward.outputs) if slot.kind == "output"]
    flow = _DataFlow(program)
    values = {output: flow.copied((None, value)) for output, value in outputs if isinstance(value, Node)}
    return {output for output in values if output != name and flow.reaches(values[output], values[name])}


class _DataFlow:
    """Data flow in a lowered forward, within regions and between them."""

    def __init__(self, program: Program) -> None:
        self._regions = {name: program.regions[key].module.graph for name, key in program.region_names.items()}

    def reaches(self, value: _Value, source: _Value) -> bool:
        """Return whether a value is another one, or is computed from it."""
        seen: set[_Value] = set()
        left = [value]
        while left:
            now = left.pop()
            if now == source:
                return True
            if now not in seen:
                seen.add(now)
                left += self._sources(now)
        return False

    def copied(self, value: _Value) -> _Value:
        """Return what a value is a copy of: capture copies outputs that share memory with others."""
        while value[1].target in (aten.clone.default, operator.getitem) or (value[0] and value[1].op == "placeholder"):
            sources = self._sources(value)
            if len(sources) != 1:
                break
            (value,) = sources
        return value

    def _sources(self, value: _Value) -> list[_Value]:
        call, node = value
        if call is not None and node.op == "placeholder":
            place = list(self._graph_of(call).find_nodes(op="placeholder")).index(node)
            return [(None, call.args[0][place])]  # type: ignore[index, list-item]
        if call is None and node.target is operator.getitem and node.all_input_nodes[0].op == "call_module":
            (made,) = node.all_input_nodes
            results = self._graph_of(made).find_nodes(op="output")
            if not results:  # a file has only the code of regions: any output may be made of another
                return [(None, other) for other in (*made.users, *made.all_input_nodes)]
            return [(made, results[0].args[0][node.args[1]])]
        return [(call, source) for source in node.all_input_nodes]

    def _graph_of(self, call: Node) -> Graph:
        return self._regions[str(call.target)]
