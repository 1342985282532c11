"""Put what is launched again and again, always alike, in the place of regions in the lines of an executor.

      g = all_gather(w)  # start gather layers.1           g = all_gather(w)  # start gather layers.1
      (y,) = self.region_0([x, f])                       * (z,) = replays[0]([x, f])  # layers.0
      a = view(y, [8]);  y = None
      (z,) = self.region_1([a])
      f = wait_tensor(g)  # wait gather layers.1           f = wait_tensor(g)  # wait gather layers.1

A run is of regions, and of views and sizes between them: no collective, no copy to or from the host, and nothing whose
results have sizes that depend on values. What a run makes and only reads itself does not leave it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from graphshard.ir.sizes import is_size
from graphshard.lower.lines import Call, Line, Operator, Replay, Return, Take, Variable
from graphshard.torch_compat.operators import OpOverload

Boxed = Callable[[list[Any]], Any]

# What its results are, or how many, depends on values, so the host waits for the device; or its author says so.
_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)


@dataclass(frozen=True)
class Run:
    """Lines that are launched together.

    Attributes:
        lines: a function of their own, from what they are given to what they return.
        where: the modules that they compute.
        lasting: whether each of the inputs is one of the executor's own, which may be at the same place in every step.
    """

    lines: tuple[Line, ...]
    where: str
    lasting: tuple[bool, ...]


class Replays(Protocol):
    """Who launches runs."""

    def wants(self, call: Call) -> bool:
        """Whether a region may be part of a run."""

    def runs(self, lines: Sequence[Line], kept: Set[Variable], own: Set[Variable]) -> Sequence[range]:
        """Which lines are to be runs: places of the first to the last one of each.

        Args:
            lines: regions that may be, and views between them; the first and the last one is a region.
            kept: values that are read behind them.
            own: those of the executor itself.
        """

    def replay(self, run: Run, code: Boxed) -> Boxed:
        """What runs in the place of a run; `code` does what its lines say."""


def with_replays(lines: Sequence[Line], replays: Replays) -> tuple[list[Line], list[Run]]:
    """The lines with runs taken out of them, and the runs; what lines free is to be found anew."""
    found: list[Line] = []
    runs: list[Run] = []
    own = frozenset(name for line in lines if isinstance(line, Take) for name in line.results)
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and _fits(lines[end], replays.wants):
            end += 1
        calls = [index for index in range(start, end) if isinstance(lines[index], Call)]
        if calls:
            first, behind = calls[0], calls[-1] + 1
            kept = {name for line in lines[behind:] for name in line.reads}
            for chosen in replays.runs(lines[first:behind], kept, own):
                begin, until = first + chosen.start, first + chosen.stop
                line, run = _run(len(runs), lines[begin:until], lines[until:], own)
                found += [*lines[start:begin], line]
                runs.append(run)
                start = until
        end = max(end, start + 1)
        found += lines[start:end]
        start = end
    return found, runs


def _fits(line: Line, wants: Callable[[Call], bool]) -> bool:
    if isinstance(line, Call):
        return wants(line)
    return type(line) is Operator and _is_view(line.target)


def _is_view(target: Any) -> bool:
    """Whether an operator between regions computes nothing, or a size."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    shares = any(result.alias_info is not None for result in target._schema.returns)
    return target.namespace == "aten" and shares and not target._schema.is_mutable


def _run(number: int, body: Sequence[Line], after: Sequence[Line], own: frozenset[Variable]) -> tuple[Replay, Run]:
    made = list(dict.fromkeys(name for line in body for name in line.results))
    inputs = tuple(dict.fromkeys(name for line in body for name in line.reads if name not in made))
    read = {name for line in after for name in line.reads}
    results = tuple(name for name in made if name in read)
    where = ", ".join(dict.fromkeys(line.where for line in body if isinstance(line, Call) and line.where))
    lines = (Take(results=inputs), *body, Return(values=results))
    line = Replay(number=number, results=results, inputs=inputs, where=where)
    return line, Run(lines, where, tuple(name in own for name in inputs))


def can_be_replayed(region: GraphModule, device: torch.device) -> bool:
    """Whether a region launches the same kernels whatever its inputs hold, all of them on one kind of device."""
    return all(_can_be(node, device) for node in region.graph.nodes)


def _can_be(node: Node, device: torch.device) -> bool:
    if node.op == "call_function" and not is_size(node) and node.target is not operator.getitem:
        target = node.target
        # The others run operators with the state of a generator, which they read on the host.
        if not isinstance(target, OpOverload) or any(tag in target.tags for tag in _WAITS):
            return False
    val = node.meta.get("val")
    tensors = val if isinstance(val, (tuple, list)) else [val]
    return all(each.device.type == device.type for each in tensors if isinstance(each, torch.Tensor))
