"""Checks for nan in anomaly mode (`torch.autograd.set_detect_anomaly`), on all ranks.

Autograd checks what each node returns, and cannot for the gradients of shards, which are DTensors. So the backward of a
program checks the gradients of parameters itself, adds them to `.grad`, and returns none of them to autograd, which
still runs the parameters' hooks of accumulated gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from graphshard.errors import AnomalyError, UnsupportedError
from graphshard.ir.subclasses import shard_in
from graphshard.runtime.shards import ParamRef
from graphshard.torch_compat.autograd_state import Fate
from graphshard.torch_compat.dtensor import process_group

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
        flags = torch.stack([shard_in(grad).isnan().any() for _, grad, _ in found]).to(torch.int32)
        for group in groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, process_group(group))
        names = [ref.name for (ref, _, _), flag in zip(found, flags.tolist()) if flag]
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
