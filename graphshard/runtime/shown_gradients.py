"""Gradients of full parameters that modules show: what computes with them outside of forward is one more call.

    hidden = model(tokens)                        a call: its backward reduces gradients
    loss = fused(hidden, model.head.weight)       the weight is a result of a call, too: `_Shown`

Backward goes through both, and adds up the gradients of a parameter before it reduces them, as after several calls of a
model (`Accumulation.still_to_come`). The reduction is the backward of a program whose forward returns the parameters;
it is made when the first gradient arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphshard.ir.mesh import PendingReduction
from graphshard.runtime._backward_checks import check_backward
from graphshard.runtime.executable import Executable
from graphshard.runtime.gradient_accumulation import Accumulation
from graphshard.runtime.gradient_graphs import Reduction
from graphshard.runtime.parameter_writes import ReadParameters
from graphshard.runtime.shards import ParamRef
from graphshard.torch_compat.autograd_state import fate_at, number_of_backward


@dataclass(eq=False)
class ShownCall:
    """Parameters of a unit that are shown together; `Accumulation.calls` asks it what it asks an `Executable`.

    Attributes:
        trained: parameters by their names in the model.
        program_of: returns the program that returns parameters, by their names, and whose backward reduces gradients.
    """

    trained: dict[str, ParamRef]
    accumulation: Accumulation
    program_of: Callable[[Sequence[str]], Executable]

    @property
    def names_in_model(self) -> dict[str, str]:
        """Names of parameters by their names here."""
        return {name: name for name in self.trained}

    @property
    def summands(self) -> dict[str, tuple[PendingReduction, ...]]:
        """Sums over tensor axes that the reduction takes: none, as parameters on these show DTensors."""
        return dict.fromkeys(self.trained, ())

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Kind of each gradient that backward computes."""
        return ("param",) * len(self.trained)

    def connect(self, full: Sequence[torch.Tensor]) -> None:
        """Make full parameters results of a node of autograd, in place."""
        with torch.enable_grad():
            _Shown.apply(self, full, *(ref.param for ref in self.trained.values()))


class _Shown(torch.autograd.Function):
    """Full parameters, as results of what has gathered them."""

    @staticmethod
    def forward(ctx: Any, shown: ShownCall, full: Sequence[torch.Tensor], *_: torch.Tensor) -> Any:
        ctx.executable, ctx.ran, ctx.full = shown, -1, {}
        ctx.read = ReadParameters(shown.trained.values())
        ctx.set_materialize_grads(False)
        shown.accumulation.calls.add(ctx)
        return tuple(full)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        shown: ShownCall = ctx.executable
        given = dict(zip(shown.trained, grads, strict=True))
        # Other calls leave their gradients of any of these to this one if it comes last.
        left = {each.name for each in shown.accumulation.sums if each.kind == "pending"}
        given = {name: grad for name, grad in given.items() if grad is not None or name in left}
        program = shown.program_of(list(given))
        outputs = zip(program.names, given.values(), strict=True)
        tangents = {name: grad for name, grad in outputs if grad is not None}
        check_backward(program.program, tangents, (), again=True)
        fate_of = dict(zip(shown.trained, (fate_at(node) for node, _ in ctx.next_functions), strict=True))
        fates = [fate_of[name] for name in program.trained]
        if torch.is_grad_enabled():
            found = Reduction.apply(program, {}, tuple(tangents), fates, *tangents.values())
        else:
            ctx.ran = number_of_backward()
            found = program.backward({}, tangents, fates, shown.accumulation.still_to_come(ctx))
        reduced = dict(zip(program.trained, found, strict=True))
        return (None, None, *(reduced.get(name) for name in shown.trained))
