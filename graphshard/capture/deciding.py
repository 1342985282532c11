"""Values of inputs and buffers that forward asks for, and that become conditions of its program.

    if mask.any(): ...                  causal masks of nn.Transformer, layers that are run from some step on
    start = int(self.pointer)           queues, of which a step writes the next part

They are computed of the call that is captured, and asked again before each later one (`module/value_checks.py`), as
eager mode asks. A forward is traced so only where it cannot be otherwise, for each value is a program of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.utils import _pytree as pytree

from graphshard.capture.dynamic_shapes import WITHOUT_VALUES
from graphshard.capture.guards import line_of
from graphshard.capture.learned import Learned
from graphshard.capture.lines import asking, outside_torch
from graphshard.capture.origins import Formula, Given, Number, OfTensor, Origin, Step, in_order, is_origin, values_of
from graphshard.capture.untraceable import Untraceable
from graphshard.ir.driver_internals import stands_in
from graphshard.ir.program import Slot
from graphshard.ir.unbacked_internals import is_unknown, without_any_modes
from graphshard.ir.value_guards import ValueGuard, ValueGuards, text_of

aten = torch.ops.aten
# Code decides by them; numbers that are only computed with can be traced.
DECIDERS = {
    Tensor.__bool__,
    Tensor.__contains__,
    Tensor.__index__,
    Tensor.equal,
    Tensor.is_nonzero,
    torch.equal,
    torch.is_nonzero,
}
READERS = {
    *DECIDERS,
    Tensor.__array__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.item,
    Tensor.numpy,
    Tensor.tolist,
}
# Elements of a tensor that may become a constant of the program.
_MOST = 4096


class Deciding:
    """What a run of forward has asked for.

    Args:
        given: tensors that are traced, with what they stand for at this call.
        learned: of the runs before; told that another run may ask for more.
    """

    def __init__(self, given: Iterable[tuple[Slot, Tensor, Tensor]], learned: Learned) -> None:
        self.given = [(traced, Given(slot, real)) for slot, traced, real in given if _has_values(real)]
        self._learned = learned
        self._asked: dict[tuple[Any, ...], tuple[Origin, ValueGuard]] = {}
        self._numbers: dict[sympy.Symbol, Number] = {}

    def may_ask(self, func: Callable[..., Any] | None) -> bool:
        """Whether a function may read values of inputs; if not, the next run may be allowed to.

        An operator, or None, stands for all numbers and sizes.
        """
        wanted = 1 if func in DECIDERS else 2 if func in READERS else 3
        self._learned.wanted = max(self._learned.wanted, wanted)
        return self._learned.decides >= wanted

    def ask(self, func: Callable[..., Any], args: tuple[Any, ...], line: str) -> Any:
        """What a function returns of this call's values; origins are in the place of tensors."""
        origins = [arg for arg in args if is_origin(arg)]
        with without_any_modes():
            read = _read(func, args)
            *values, asked = values_of([*origins, read], on_host=stands_in())
            self._asked.setdefault((func, *args), (read, ValueGuard(text_of(asked), line)))
            return called(func, args, values)

    def note(self, number: Any, tensor: OfTensor, dim: int | None = None) -> None:
        """A number that the trace does not know is a size of a tensor, or is in it."""
        if is_unknown(number) and number.node.expr.is_Symbol:
            self._numbers[number.node.expr] = Number(tensor, dim)

    def knows(self, size: Any) -> bool:
        """Whether a size is not known to the trace, and can be found out."""
        return is_unknown(size) and all(symbol in self._numbers for symbol in size.node.expr.free_symbols)

    def is_one(self, size: Any) -> bool:
        """Whether a size that can be found out is 1.

        Raises:
            Untraceable: forward may not ask for it.
        """
        found = self.find(sympy.Eq(size.node.expr, 1))
        if found is None:
            raise Untraceable("value", "squeeze")
        return bool(found)

    def find(self, expression: sympy.Basic) -> bool | int | float | None:
        """What an expression of such numbers is; None if there are others in it, or forward may not ask."""
        numbers = {symbol: self._numbers.get(symbol) for symbol in expression.free_symbols}
        known = {symbol: number for symbol, number in numbers.items() if number is not None}
        asked = Formula(expression, known)
        # Torch has reordered what is rounded: where the numbers themselves are asked for, Python computes with them.
        if len(known) < len(numbers) or not self.may_ask(Tensor.__bool__ if asked.is_exact else None):
            return None
        with without_any_modes():
            (value,) = values_of([asked], on_host=stands_in())
            if not known:
                return value
            guard = ValueGuard(text_of(value), line_of(outside_torch(asking())))
            self._asked.setdefault((expression, *known.values()), (asked, guard))
            return value

    def made(self, step: Step, line: str) -> list[Tensor] | None:
        """What an operator makes whose results have sizes that depend on values; None if it is more than a few numbers.

        They are constants of the program, which holds while they are what they were.
        """
        with without_any_modes():
            steps = [replace(step, index=index) for index in range(len(step.run._schema.returns))]
            values = values_of([*steps], on_host=stands_in())
            if any(value.is_floating_point() or value.is_complex() or value.numel() > _MOST for value in values):
                return None
            for one, value in zip(steps, values):
                if not step.fixed:
                    self._asked[one,] = (one, ValueGuard(text_of(value), line))
            return values

    @without_any_modes()
    def guards(self) -> ValueGuards | None:
        """All of them; None if nothing was asked."""
        if not self._asked:
            return None
        graph = Graph()
        nodes: dict[Origin, Node] = {}
        order = in_order(origin for origin, _ in self._asked.values())
        given = [origin for origin in order if isinstance(origin, Given)]
        inputs = {one: int(one.slot.name) for one in given if one.slot.kind == "input"}
        buffers = {one: one.slot.name for one in given if one.slot.kind == "buffer"}
        for number, one in enumerate((*inputs, *buffers)):
            nodes[one] = graph.placeholder(f"given_{number}")
        for origin in order:
            if isinstance(origin, Step):
                nodes[origin] = _add(graph, origin, nodes)
            elif isinstance(origin, Number):
                nodes[origin] = _read_number(graph, origin, nodes)
            elif isinstance(origin, Formula):
                numbers = {symbol: Proxy(nodes[number]) for symbol, number in origin.numbers.items()}
                nodes[origin] = origin.compute(numbers).node
        graph.output(tuple(nodes[origin] for origin, _ in self._asked.values()))
        guards = tuple(guard for _, guard in self._asked.values())
        return ValueGuards(
            GraphModule(torch.nn.Module(), graph), tuple(inputs.values()), tuple(buffers.values()), guards
        )


def called(func: Callable[..., Any], args: tuple[Any, ...], values: Iterable[Tensor]) -> Any:
    """What a function returns of values in the place of origins; an array that it returns is only to be read."""
    numbers = iter(values)
    result = func(*(next(numbers) if is_origin(arg) else arg for arg in args))
    if func in (Tensor.numpy, Tensor.__array__):
        result = result.copy()  # what is written to it would be written to the call's input, or lost
        result.flags.writeable = False
    return result


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_meta and not hasattr(tensor, WITHOUT_VALUES)


def _read(func: Callable[..., Any], args: tuple[Any, ...]) -> OfTensor:
    """What a function makes its result of, as numbers that tell whether it is the same."""
    first, *others = args
    if func in (Tensor.equal, torch.equal):
        return Step(aten.equal.default, (first, *others), {})
    if func is Tensor.__contains__:
        compare = aten.eq.Tensor if is_origin(others[0]) else aten.eq.Scalar
        return Step(aten.any.default, (Step(compare, (first, *others), {}),), {})
    if func in DECIDERS and func is not Tensor.__index__:
        return Step(aten.ne.Scalar, (first, 0), {})
    return first


def _add(graph: Graph, step: Step, nodes: Mapping[Origin, Node]) -> Node:
    """The step as a node of a graph."""
    if step.run is aten.lift_fresh.default:
        return _constant(graph, step.args[0])
    args, kwargs = pytree.tree_map_only((Given, Step), nodes.__getitem__, (step.args, dict(step.kwargs)))
    args, kwargs = pytree.tree_map_only(torch.device, lambda device: torch.device(device.type), (args, kwargs))
    node = graph.call_function(step.run, args, kwargs)
    if step.written is not None:
        return nodes[step.written]
    returns = step.run._schema.returns
    is_one = len(returns) == 1 and not isinstance(returns[0].type, torch._C.ListType)
    return node if is_one else graph.call_function(operator.getitem, (node, step.index))


def _read_number(graph: Graph, number: Number, nodes: Mapping[Origin, Node]) -> Node:
    if number.dim is None:
        return graph.call_function(aten._local_scalar_dense.default, (nodes[number.tensor],))
    return graph.call_function(aten.sym_size.int, (nodes[number.tensor], number.dim))


def _constant(graph: Graph, tensor: Tensor) -> Node:
    """A small tensor of numbers that are in the code."""
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    numbers = [graph.call_function(aten.scalar_tensor.default, (n,), options) for n in tensor.reshape(-1).tolist()]
    if not numbers:
        return graph.call_function(aten.empty.memory_format, (list(tensor.shape),), options)
    stacked = graph.call_function(aten.stack.default, (numbers,))
    return graph.call_function(aten.reshape.default, (stacked, list(tensor.shape)))
