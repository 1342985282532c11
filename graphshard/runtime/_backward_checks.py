"""Checks of backward: for nan in anomaly mode on all ranks, for hooks on outputs, and for graphs of gradients.

Autograd checks what each node returns, and cannot for the gradients of shards, which are DTensors. So the backward of a
program checks the gradients of parameters itself, adds them to `.grad`, and returns none of them to autograd, which
still runs the parameters' hooks of accumulated gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

import torch
from torch.fx import Graph, Node

from graphshard.errors import AnomalyError, UnsupportedError
from graphshard.ir.graph import aten
from graphshard.ir.program import Program
from graphshard.ir.subclasses import shard_in
from graphshard.runtime.process_groups import any_rank
from graphshard.runtime.shards import ParamRef
from graphshard.torch_compat.autograd_state import Fate

Gradients = Sequence[torch.Tensor | None]


def looks_for_nan() -> bool:
    """Return whether anomaly mode looks for nan."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def accumulate_checked(
    refs: Sequence[ParamRef | None], grads: Gradients, fates: Sequence[Fate], groups: Iterable[str], model: str
) -> list[torch.Tensor | None]:
    """Add gradients of parameters to their leaves; return the gradients that are left to autograd, of inputs.

    Args:
        refs: the parameter of each gradient; None for an input.
        groups: names of the process groups that together connect all ranks, which call this together.

    Raises:
        AnomalyError: a gradient has nan on this or another rank; no gradient was added.
    """
    asked = zip(refs, grads, fates, strict=True)
    found = [(ref, grad, fate) for ref, grad, fate in asked if ref is not None and grad is not None]
    seen = next((ref.name for ref, _, fate in found if fate == "returned" or ref.param._backward_hooks), None)
    if seen is not None:
        raise UnsupportedError(
            f"a hook of parameter {seen}, or torch.autograd.grad for it, in anomaly mode: autograd looks for nan in "
            "the gradient that it passes on, which it cannot in shards (DTensor). Call backward without such hooks, "
            "or pass check_nan=False to set_detect_anomaly."
        )
    if found:
        flags = any_rank([shard_in(grad).isnan().any() for _, grad, _ in found], groups)
        names = [ref.name for (ref, _, _), flag in zip(found, flags) if flag]
        if names:
            raise AnomalyError(
                f"backward of {model} makes nan in the gradients of {len(names)} parameter{'s'[: len(names) > 1]}, of "
                f"which {names[-1]} is the last. None of its gradients was added. To learn which operator makes it, "
                "run the same batch through the model before graphshard.compile, in anomaly mode."
            )
    with torch.no_grad():
        for ref, grad, fate in found:
            if fate == "accumulated":
                ref.param.grad = grad if ref.param.grad is None else ref.param.grad.add_(grad)
    return [grad if ref is None else None for ref, grad in zip(refs, grads)]


# --- hooks and graphs of gradients -----------------------------------------------------------------------------------


def check_backward(program: Program, given: Collection[str], hooked: Collection[str], *, again: bool) -> None:
    """Check that the operators of the program would compute the same gradients as its backward.

    One node of autograd computes the gradients of a call. Outputs that are `given` have gradients; `hooked` ones have
    hooks, past which no gradient may flow. If the call can run `again`, its gradients can be differentiated.
    """
    if torch.is_grad_enabled() and not again:
        raise UnsupportedError(
            f"gradients of {program.model} are to have a graph of their own (create_graph=True). They have none in a "
            "loaded file, in a program that was captured with its backward, and with parameters that have "
            "fsdp_pre_all_gather. In forward, torch.autograd.grad(..., create_graph=True) is traced with the rest."
        )
    if torch.is_grad_enabled() and looks_for_nan():
        raise UnsupportedError(
            "create_graph=True in anomaly mode: torch.autograd.set_detect_anomaly looks for nan in gradients, which it "
            "cannot in shards (DTensor). Pass check_nan=False, or look for it in the model before graphshard.compile."
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
_Value = tuple[Node | None, Node]


def _computed_from(program: Program, name: str) -> set[str]:
    """Return other outputs of a lowered forward that are computed from one, within regions and between them."""
    forward = program.phases["forward"]
    outputs = [(slot.name, value) for value, slot in zip(forward.results, forward.outputs) if slot.kind == "output"]

    def graph_of(call: Node) -> Graph:
        return program.regions[program.region_names[str(call.target)]].module.graph

    def sources(value: _Value) -> list[_Value]:
        call, node = value
        if call is not None and node.op == "placeholder":
            place = list(graph_of(call).find_nodes(op="placeholder")).index(node)
            return [(None, call.args[0][place])]  # type: ignore[index, list-item]
        if call is None and node.target is operator.getitem and node.all_input_nodes[0].op == "call_module":
            (made,) = node.all_input_nodes
            results = graph_of(made).find_nodes(op="output")
            if not results:  # a file has only the code of regions: any output may be made of another
                return [(None, other) for other in (*made.users, *made.all_input_nodes)]
            return [(made, results[0].args[0][node.args[1]])]
        return [(call, source) for source in node.all_input_nodes]

    def original(value: _Value) -> _Value:
        """Return what a value is a copy of: capture copies outputs that share memory with others."""
        while value[1].target in (aten.clone.default, operator.getitem) or (value[0] and value[1].op == "placeholder"):
            found = sources(value)
            if len(found) != 1:
                break
            (value,) = found
        return value

    values = {output: original((None, value)) for output, value in outputs if isinstance(value, Node)}
    found = set()
    for output in values.keys() - {name}:
        seen: set[_Value] = set()
        left = [values[output]]
        while left:
            now = left.pop()
            if now not in seen:
                seen.add(now)
                left += sources(now)
        if values[name] in seen:
            found.add(output)
    return found
