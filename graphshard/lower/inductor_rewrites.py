"""Rewrites of regions for Inductor, whose kernels take only sizes and tensors, and corrections of what it makes.

`sums_as_sizes`: Inductor must find each symbol in a size of an input. A gathered tensor is as long as the sum of its
parts, and where these are not known the sum is one number:

    %x: f32[u6 + u7, 8] = input                %x: f32[u9, 8] = input

`floats_as_tensors`: floats that calls give.

    %lr = input: 0.1                           %t: f64[] = input: tensor(0.1)
                                               %n = _local_scalar_dense(%t)
    %y = mul.Tensor(%x, %lr)                   %y = mul.Tensor(%x, %n)

`OneHots`: constants scattered into constants, which Inductor would write to memory and read again, such as the gradient
of a loss over a vocabulary. torch.compile does the same in a pass over the joint graph, which regions skip:

    %full = full([rows, columns], 0)           %columns = arange(columns)
    %y = scatter.value(%full, 1, %index, -1)   %y = where(%index == %columns, -1, 0)
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.torch_version import TorchVersion

from graphshard.ir.graph import aten
from graphshard.ir.sizes import evaluate, expression, numbers_in, symbols_of
from graphshard.lower.regions import Boxed
from graphshard.torch_compat.aot_autograd import fake_mode_of
from graphshard.torch_compat.symbolic_sizes import is_unknown, new_symbols_dropped, new_unknown_size

# Before torch 2.13 Inductor ends a sum over several dims that keeps them, `(1, 1, width)`, by a call of torch and
# returns `(width,)`, where a normalization's gradients and its weight's share a kernel on a GPU.
DIMS_ARE_LOST = TorchVersion(torch.__version__) < "2.13"
# For regions of dynamic sizes, whose shapes are not known: they have no such kernels.
WITHOUT_LOST_DIMS = {"triton.mix_order_reduction": False}
# Functions of generated code that measure it, and are not called.
NEVER_RUN = ("get_args", "benchmark_compiled_module")


class _ValueInterpreter(Interpreter):
    """Run a graph under fake inputs; `meta["val"]` of each node becomes its value."""

    def run_node(self, n: Node) -> Any:
        n.meta["val"] = value = super().run_node(n)
        return value


def sums_as_sizes(module: GraphModule) -> GraphModule:
    """Give each size of an input that is made of symbols that no input has a symbol."""
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
    with mode, torch.no_grad(), mode.shape_env.ignore_fresh_unbacked_symbols():  # which are read of tensors again
        _ValueInterpreter(found).run(*map(like, values))
    return found


def unknown_in(code: str) -> set[str]:
    """Find sizes that depend on values and that Inductor's code reads before it defines them, or never defines."""
    found: set[str] = set()
    if not re.search(r"\bu\d+\b", code):
        return found
    runs = [each for each in ast.parse(code).body if getattr(each, "name", "") not in NEVER_RUN]
    for function in (part for each in runs for part in (each.body if isinstance(each, ast.ClassDef) else [each])):
        steps = list(ast.walk(function))
        names = [step for step in steps if isinstance(step, ast.Name) and re.fullmatch(r"u\d+", step.id)]
        made = {step.arg: 0 for step in steps if isinstance(step, ast.arg)}
        for name in sorted(names, key=lambda name: name.lineno):
            if not isinstance(name.ctx, ast.Load):
                made.setdefault(name.id, name.lineno)
        reads = (name for name in names if isinstance(name.ctx, ast.Load))
        found |= {name.id for name in reads if name.lineno <= made.get(name.id, sys.maxsize)}
    return found


def float_inputs(module: GraphModule) -> list[int]:
    """Return the places of floats among the inputs of a region."""
    inputs = module.graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(inputs) if isinstance(node.meta["val"], torch.SymFloat)]


def floats_as_tensors(module: GraphModule) -> GraphModule:
    """Replace each input that is a float by a tensor without dimensions, which the module reads."""
    places = float_inputs(module)
    if not places:
        return module
    graph = copy.deepcopy(module.graph)
    inputs = graph.find_nodes(op="placeholder")
    mode = next(fake_mode_of(node.meta["val"]) for node in inputs if isinstance(node.meta["val"], torch.Tensor))
    for place in places:
        with graph.inserting_after(inputs[-1]):
            read = graph.call_function(aten._local_scalar_dense.default, (inputs[place],))
        inputs[place].replace_all_uses_with(read)
        read.args = (inputs[place],)
        with mode:
            inputs[place].meta["val"] = torch.empty((), dtype=torch.float64)
    found = GraphModule(module, graph)
    with mode, torch.no_grad(), new_symbols_dropped(mode):
        _ValueInterpreter(found).run(*(node.meta["val"] for node in inputs))
    return found


def with_float_inputs(run: Boxed, places: list[int]) -> Boxed:
    """Wrap a function that takes tensors at places among its inputs, for calls that give floats."""
    if not places:
        return run

    def call(inputs: list[Any]) -> Any:
        for place in places:
            inputs[place] = torch.tensor(inputs[place], dtype=torch.float64)
        return run(inputs)

    call.__dict__.update(source_code=getattr(run, "source_code", ""))
    return call


def has_one_hots(graph: Graph) -> bool:
    """Return whether a graph scatters a constant into a constant, one number to each row."""
    return any(map(_is_one_hot, graph.find_nodes(op="call_function", target=aten.scatter.value)))


class OneHots(Interpreter):
    """Interpreter of a graph, to be traced again, with comparisons instead of such scatters."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run_node(self, n: Node) -> Any:
        """Run an operator."""
        if n.target is not aten.scatter.value or not _is_one_hot(n):
            return super().run_node(n)
        full, dim, index, value = cast(Any, n.args)
        made, background = self.env[full], full.args[1]
        size = [1] * made.dim()
        size[dim] = made.shape[dim]
        places = torch.arange(made.shape[dim], device=made.device).view(size)
        return torch.where(self.env[index] == places, value, background).to(made.dtype)


def _is_one_hot(node: Node) -> bool:
    full, dim, index, _ = cast(Any, node.args)
    if not isinstance(full, Node) or full.target is not aten.full.default:
        return False
    made, chosen = ([expression(size) for size in each.meta["val"].shape] for each in (full, index))
    return bool(made) and chosen == [*made[:dim], 1, *made[dim % len(made) + 1 :]]


def with_dims(run: Boxed, outputs: Sequence[Any]) -> Boxed:
    """Wrap a region so that its results have all dims of its fake `outputs`, if it may lose some (`DIMS_ARE_LOST`)."""
    tensors = [(place, value) for place, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
    places = [(place, tuple(value.shape)) for place, value in tensors if value.dim() > 1 and 1 in value.shape]
    if not places:
        return run

    def call(inputs: list[Any]) -> list[Any]:
        results = list(run(inputs))
        for place, shape in places:
            if results[place].dim() != len(shape):
                results[place] = results[place].view(shape)
        return results

    call.__dict__.update(source_code=getattr(run, "source_code", ""))
    return call
