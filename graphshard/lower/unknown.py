"""Sizes that depend on values, for Inductor, which must find each symbol in a size of some input.

    %x: f32[u6 + u7, 8] = input                %x: f32[u9, 8] = input
    %y: f32[u6 + u7, 8] = silu(%x)             %y: f32[u9, 8] = silu(%x)

What ranks send each other is as long as the sum of what each sends, and where the parts are not known the sum is one
number.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from graphshard.ir.sizes import evaluate, expression, numbers_in, symbols_of
from graphshard.torch_compat.fake_tensors import fake_mode_of
from graphshard.torch_compat.symbolic_sizes import is_unknown, new_unknown_size


def sums_as_sizes(module: GraphModule) -> GraphModule:
    """The module with a symbol in the place of each size of an input that is made of some that no input has."""
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    unknown = [size for size in numbers_in(values) if isinstance(size, torch.SymInt) and is_unknown(size)]
    known = {expression(size): size for size in unknown if expression(size).is_Symbol}
    dims = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    sums = {expression(size) for size in dims if is_unknown(size) and symbols_of(size) - known.keys()}
    mode = next((fake_mode_of(value) for value in values if isinstance(value, torch.Tensor)), None)
    if not sums or mode is None:
        return module
    sizes = {total: new_unknown_size(mode) for total in sorted(sums, key=str)}
    symbols = {**known, **{expression(size): size for size in sizes.values()}}
    found = copy.deepcopy(module)

    def again(size: Any) -> Any:
        expr = expression(size)
        return evaluate(expr.subs({t: expression(s) for t, s in sizes.items()}), symbols) if symbols_of(size) else size

    def like(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.new_empty_strided([*map(again, value.shape)], [*map(again, value.stride())])

    assert mode.shape_env is not None
    with mode, torch.no_grad(), mode.shape_env.ignore_fresh_unbacked_symbols():  # those that are read of tensors again
        ValueInterpreter(found).run(*map(like, values))
    return found


_MEASURING = ("get_args", "benchmark_compiled_module")


class ValueInterpreter(Interpreter):
    """Run a graph under fake inputs; `meta["val"]` of each node becomes its value."""

    def run_node(self, n: Node) -> Any:
        n.meta["val"] = value = super().run_node(n)
        return value


def unknown_in(code: str) -> set[str]:
    """Sizes that depend on values and that Inductor's code reads before it makes them, or that it makes nowhere."""
    if not re.search(r"\bu\d+\b", code):
        return set()
    # What would measure the code makes inputs, and runs never.
    runs = [each for each in ast.parse(code).body if getattr(each, "name", "") not in _MEASURING]
    functions = [part for each in runs for part in (each.body if isinstance(each, ast.ClassDef) else [each])]
    return set().union(*map(_unknown_in, functions))


def _unknown_in(function: ast.stmt) -> set[str]:
    steps = list(ast.walk(function))
    names = [step for step in steps if isinstance(step, ast.Name) and re.fullmatch(r"u\d+", step.id)]
    reads = [name for name in names if isinstance(name.ctx, ast.Load)]
    made = {step.arg: 0 for step in steps if isinstance(step, ast.arg)}
    for name in sorted(names, key=lambda name: name.lineno):
        if not isinstance(name.ctx, ast.Load):
            made.setdefault(name.id, name.lineno)
    return {name.id for name in reads if name.lineno <= made.get(name.id, sys.maxsize)}
