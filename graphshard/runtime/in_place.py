"""All-reduces write over what they reduce where nothing reads it any more; the functional ones copy it first.

    %w = wait_tensor(%r)                               %w = wait_tensor(%r)
    %a = all_reduce(%w, avg, replicate)                %a = all_reduce_(%w, avg, replicate)

An executor is changed so when it is bound. In the graph all-reduces stay functional: passes move what has no effects.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from graphshard.ir.graph import ALL_REDUCES, WAIT, base_of, c10d, fake, is_view
from graphshard.ir.program import Phase

_IN_PLACE = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce_coalesced_.default,
}
# By what is launched, what was planned.
FUNCTIONAL = {launched: planned for planned, launched in _IN_PLACE.items()}


def reduce_in_place(phase: Phase) -> None:
    """Let all-reduces write over what they are given, in place, where that is read by nothing else from there on."""
    for node in phase.module.graph.nodes:
        if node.target in ALL_REDUCES:
            given = node.all_input_nodes
            bases = {base_of(value) for value in given}
            fit = len(bases) == len(given) and all(fake(value).is_contiguous() for value in given)
            if fit and all(_is_last(node, base) for base in bases):
                node.target = _IN_PLACE[node.target]


def _is_last(launch: Node, base: Node) -> bool:
    """Whether a value's memory is the step's own, and a launch is the last that reads it."""
    source = base.args[0] if base.target is operator.getitem else None
    if base.target is not WAIT and not (isinstance(source, Node) and source.op == "call_module"):
        return False
    stack = [base]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function" and is_view(user):
                stack.append(user)
            elif user.op == "output" or launch < user:
                return False
    return True
