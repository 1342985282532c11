"""Writes to shards, which make what was gathered of them before stale, and optimizers that write elsewhere.

torch counts writes to a tensor in its version. It counts none through `.data`, by fused optimizers, and by `_foreach`
functions on DTensors. Optimizers' steps are seen by a hook. For parameters that stay gathered from one call to the
next, which may be written to in any way, sums of the shards' bits are compared.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphshard.errors import ParameterError
from graphshard.ir.param_table import REPLACED
from graphshard.ir.subclasses import parts_of, shard_in
from graphshard.ir.tensor_memory import bit_sums
from graphshard.runtime.process_groups import any_rank
from graphshard.runtime.shards import ParamRef

# Identity and version of a shard, and version of its parameter.
Version = tuple[int, int, int]


def version_of(param: nn.Parameter) -> Version:
    """Return what changes when a parameter or its shard is written to, or replaced, as far as torch counts writes."""
    local = shard_in(param)
    return id(local), local._version, param._version


class ReadParameters:
    """Parameters that a forward has read, with their versions then, and which of them optimizers have updated since.

    Backward reads these, whatever modules hold by then: `torch.func.functional_call` takes back what it has put there.

    Attributes:
        params: by their names in the model.
    """

    # All that may be checked yet: steps of optimizers are reported to them.
    _alive: ClassVar[weakref.WeakSet[ReadParameters]] = weakref.WeakSet()
    _hook: ClassVar[Any] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, refs: Iterable[ParamRef]) -> None:
        self.params = {ref.name: ref.param for ref in refs}
        self._versions = {name: version_of(param) for name, param in self.params.items()}
        self._updated: set[str] = set()
        with self._lock:
            if ReadParameters._hook is None:
                ReadParameters._hook = register_optimizer_step_post_hook(report_step)
            self._alive.add(self)

    def check(self, refs: Sequence[ParamRef], model: str) -> None:
        """Check that none of these parameters was written to since.

        Raises:
            ParameterError: one was. Plain torch raises a RuntimeError, too, if it has saved the parameter.
        """
        for ref in refs:
            if version_of(self.params[ref.name]) != self._versions[ref.name]:
                raise _written_before_backward(ref.name, model, "written to in place, or replaced")
            if ref.name in self._updated:
                raise _written_before_backward(ref.name, model, "updated by an optimizer")


def report_step(optimizer: Optimizer, *_: Any) -> None:
    """Report a step of any optimizer, which may write to parameters in ways that torch does not count: a hook."""
    with ReadParameters._lock:
        alive = list(ReadParameters._alive)
    updated = {id(param) for param in _params(optimizer)} if alive else set()
    for read in alive:
        read._updated |= {name for name, param in read.params.items() if id(param) in updated}


def reject_former_parameters(optimizer: Optimizer, *_: Any) -> None:
    """Check that an optimizer that steps was not made before `compile`: a hook.

    Raises:
        ParameterError: it holds parameters that shards have replaced. They get no gradients, so it trains nothing.
            Or an optimizer of torch has gradients or state that are not `DTensor`s for parameters that are.
    """
    params = [param for param in _params(optimizer) if param.grad is None]
    former = [name for param in params if (name := param.__dict__.get(REPLACED)) is not None]
    if former:
        raise ParameterError(
            f"{type(optimizer).__name__} was made before graphshard replaced the model's parameters by shards, so it "
            f"trains none of {', '.join(former[:3])}{f' and {len(former) - 3} more' if len(former) > 3 else ''}. Make "
            "it of model.parameters() after graphshard.compile or fully_shard."
        )
    if not type(optimizer).__module__.startswith("torch.optim."):
        return  # it may keep what it likes
    kind, dtensors = type(optimizer).__name__, [param for param in _params(optimizer) if isinstance(param, DTensor)]
    for param in dtensors:
        if param.grad is not None and not isinstance(param.grad, DTensor):
            raise ParameterError(
                f"{kind}: the gradient of a parameter of shape {list(param.shape)} is a plain tensor, but the "
                "parameter is a DTensor. Assign torch.distributed.tensor.distribute_tensor(gradient, "
                "param.device_mesh, param.placements)."
            )
    for param in dtensors[:1]:  # all state was loaded together
        state = optimizer.state.get(param, {}).values()
        if any(type(each) is torch.Tensor and each.dim() and each.shape == param.shape for each in state):
            raise ParameterError(
                f"{kind} has the state of a model that is not sharded. Load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and "
                "StateDictOptions(full_state_dict=True), which cuts it into shards."
            )


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@functools.cache
def watch_optimizers() -> None:
    """Let each step of an optimizer check whose parameters it holds, from the first compiled model on."""
    register_optimizer_step_pre_hook(reject_former_parameters)


def _written_before_backward(name: str, model: str, how: str) -> ParameterError:
    return ParameterError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: parameter "
        f"{name} of {model} was {how} between a forward and its backward, which needs the values of the forward. Call "
        "backward before parameters change, or run forward again."
    )


# --- sums of bits ------------------------------------------------------------------------------------------------


@torch.no_grad()
def sums_of(param: nn.Parameter) -> torch.Tensor:
    """Return sums over the bits of a parameter's shard."""
    return torch.cat([bit_sums(part) for part in parts_of(shard_in(param.detach()))])


@torch.no_grad()
def changed_on_any_rank(
    refs: Sequence[ParamRef], sums: Mapping[str, torch.Tensor], groups: Iterable[str], device: torch.device
) -> list[str]:
    """Return which parameters' shards have other bits than when `sums` were computed, on this or another rank.

    All ranks call this together. The host waits for the answer.

    Args:
        groups: names of the process groups that together connect all ranks.
        device: of the process groups.
    """
    differs = [(sums_of(ref.param) != sums[ref.name]).any().to(device) for ref in refs]
    return [ref.name for ref, flag in zip(refs, any_rank(differs, groups)) if flag]
