"""Run a graph with functional collectives in one process, as seen by one of several ranks, and detect races.

The result of a launch is garbage until its wait, and its inputs must not change until then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

c10d = torch.ops._c10d_functional
GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default)
REDUCES = (c10d.reduce_scatter_tensor.default, c10d.reduce_scatter_tensor_coalesced.default)
ALL_REDUCES = (c10d.all_reduce.default, c10d.all_reduce_coalesced.default)


class Emulation(Interpreter):
    """Emulator of one rank: the other ranks' tensors are this one's plus a number that depends on rank and group.

    Attributes:
        launched: launches in order, as (operator, non-tensor arguments, number of tensors).
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.flying: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.launched: list[tuple[str, tuple[Any, ...], int]] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is c10d.wait_tensor.default:
            return self._wait(args[0])
        if target not in (*GATHERS, *REDUCES, *ALL_REDUCES, c10d.all_to_all_single.default):
            return super().call_function(target, args, kwargs)
        many = isinstance(args[0], (list, tuple))
        tensors = list(args[0]) if many else [args[0]]
        self.launched.append((target._schema.name, args[1:], len(tensors)))
        results = [self._launch(target, tensor, args[1:]) for tensor in tensors]
        return results if many else results[0]

    def _launch(self, target: Any, tensor: torch.Tensor, rest: tuple[Any, ...]) -> torch.Tensor:
        shift = len(str(rest[-1]))
        if target in GATHERS:
            value = torch.cat([tensor + rank * shift for rank in range(rest[0])])
        elif target in REDUCES:
            value = tensor.chunk(rest[1])[0] * 3 + shift
        elif target in ALL_REDUCES:
            value = tensor * 3 + shift
        else:
            value = tensor.flip(0) + shift
        buffer = torch.full_like(value, float("nan"))
        self.flying[id(buffer)] = (buffer, value, tensor, tensor.clone())
        return buffer

    def _wait(self, buffer: torch.Tensor) -> torch.Tensor:
        if id(buffer) in self.flying:
            _, value, tensor, before = self.flying.pop(id(buffer))
            assert torch.equal(tensor, before), "what a collective was given was written before its wait"
            buffer.copy_(value)
        return buffer


def results(module: GraphModule, inputs: list[torch.Tensor], seed: int = 0) -> list[Any]:
    """Return the results of a graph, and its inputs afterwards, because it may write them."""
    inputs = [tensor.clone() for tensor in inputs]
    torch.manual_seed(seed)
    emulation = Emulation(module)
    found = torch.utils._pytree.tree_leaves(emulation.run(*inputs))
    return [*(value.clone() if isinstance(value, torch.Tensor) else value for value in found), *inputs]


def same(one: list[Any], other: list[Any]) -> bool:
    """Return whether all values are bitwise equal."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )
