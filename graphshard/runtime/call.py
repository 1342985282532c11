"""One call of a program in autograd's graph: what forward leaves for backward, and when that is freed.

What forward saves is autograd's, but for full parameters: `reshard()` frees these, and backward gathers them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from graphshard.ir.program import Program, Slot
from graphshard.runtime.accumulation import Accumulation
from graphshard.runtime.backward_checks import check_backward
from graphshard.torch_compat.autograd_state import Fate, fate_at, keeps_graph, number_of_backward


class Runs(Protocol):
    """A program that is bound to a module and a mesh: `graphshard.runtime.step.Executable`."""

    program: Program
    accumulation: Accumulation
    names: list[str]
    names_in_model: Mapping[str, str]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor | int, ...], dict[Slot, Any]]:
        """Run forward; return the module's results and what backward needs."""

    def backward(
        self,
        saved: dict[Slot, Any],
        tangents: dict[str, torch.Tensor],
        fates: Sequence[Fate] = (),
        deferred: Collection[str] = (),
    ) -> list[torch.Tensor | None]:
        """Run backward for the tangents at hand; `saved` is emptied."""

    def gather(self, slots: Iterable[Slot]) -> dict[Slot, torch.Tensor]:
        """Full parameters that forward left to backward, from the shards as they are now."""

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[Slot, int]:
        """The dynamic sizes of a call."""

    def show(self, full: Mapping[Slot, torch.Tensor]) -> None:
        """Let modules show what forward has kept for that."""

    def hide(self) -> None:
        """Let modules show shards again."""


class Call(torch.autograd.Function):
    """One call of a program with gradients. The parameters are passed so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, executable: Runs, tensors: Sequence[torch.Tensor], *wrt: torch.Tensor) -> Any:
        results, saved = executable.forward(tensors)
        ctx.executable, ctx.ran, ctx.results = executable, -1, []
        executable.accumulation.calls.add(ctx)
        ctx.set_materialize_grads(False)
        ctx.full, ctx.numbers, ctx.slots = {}, executable.sizes(tensors), []
        shown, kept = {}, []
        for slot, value in saved.items():
            if slot.is_full:
                ctx.full[slot] = value
            elif slot.kind == "shown":
                shown[slot] = value
            elif isinstance(value, torch.Tensor):
                ctx.slots.append(slot)
                kept.append(value)
            else:
                ctx.numbers[slot] = value
        executable.show({**ctx.full, **shown})
        ctx.save_for_backward(*kept)
        differentiable = executable.program.tangents
        named = zip(results, executable.names, strict=True)
        constant = [r for r, name in named if isinstance(r, torch.Tensor) and name not in differentiable]
        ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        executable: Runs = ctx.executable
        given = [name for name, grad in zip(executable.names, grads) if grad is not None]
        check_backward(executable.program, given, [name for name, ref in ctx.results if _is_hooked(ref())])
        executable.hide()
        saved = {**dict(zip(ctx.slots, ctx.saved_tensors, strict=True)), **ctx.numbers}
        ctx.full.update(executable.gather(slot for slot, value in ctx.full.items() if value is None))
        saved.update(ctx.full)
        if not keeps_graph():  # so that the executor can free them
            ctx.maybe_clear_saved_tensors()
            ctx.full.clear()
        tangents = {name: grad for name, grad in zip(executable.names, grads) if grad is not None}
        fates = [] if executable.accumulation.measured else [fate_at(node) for node, _ in ctx.next_functions]
        ctx.ran = number_of_backward()
        return (None, None, *executable.backward(saved, tangents, fates, _still_to_come(ctx)))


def watch_results(executable: Runs, results: Sequence[Any]) -> None:
    """Let the backward of a call know its results, if there are several that have a gradient."""
    if len(executable.program.tangents) > 1:
        named = [(name, r) for name, r in zip(executable.names, results, strict=True) if isinstance(r, torch.Tensor)]
        node: Any = next((r.grad_fn for _, r in named if r.grad_fn is not None), None)
        if node is not None:
            node.results = [(name, weakref.ref(r)) for name, r in named if r.grad_fn is not None]


def _is_hooked(result: torch.Tensor | None) -> bool:
    return result is not None and (bool(result._backward_hooks) or result.retains_grad)


def free(calls: Collection[Any], names: Collection[str]) -> None:
    """Let go of what calls hold of full parameters, which go by their names in the model, until their backwards."""
    for call in calls:
        own = call.executable.names_in_model
        call.full.update((slot, None) for slot in call.full if own[slot.name] in names)


def _still_to_come(ctx: Any) -> set[str]:
    """Parameters, by their names in the model, that calls have a part in which this backward goes through later.

    As autograd adds up what flows into a parameter before FSDP2 reduces it, the last of these calls does it here.
    """
    calls = [call for call in ctx.executable.accumulation.calls if call.ran != ctx.ran and fate_at(call) != "dropped"]
    return {name for call in calls for name in call.executable.trained}
