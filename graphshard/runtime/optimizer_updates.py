"""Run an optimizer of torch.optim on this rank's shards, for some parameters at a time.

The optimizer's `step` runs on a stand-in for the optimizer whose groups have the local tensors of DTensors, with the
gradients that have arrived, and the current hyperparameters. State is read from the optimizer and new state is put
there, as the DTensors that it would have made itself, so that state dicts and checkpoints do not change.

Only for optimizers that compute each element of a parameter by itself (`ELEMENTWISE`), and have a step on DTensors to
be equal to. Others that are known need whole matrices or DTensors, but only after backward (`is_whole`).

Adam and AdamW have one kernel (`fused=True`), which reads and writes a third of what torch's operators do one after the
other, and rounds differently. With Inductor, which rounds differently, too, it is taken on the CPU where the optimizer
leaves the choice to torch. On other devices it needs the number of the step there, which would change checkpoints.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

from graphshard.ir.subclasses import shard_in
from graphshard.runtime.step_overlap import Arrival
from graphshard.torch_compat.dtensor import sharded_like

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop)
# Where torchao has the step of its optimizers with states of eight and four bits, and in float8.
_TORCHAO = "torchao.optim.adam"
# State that is one number for a parameter, and no DTensor.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is an unchanged one of torch that computes element by element."""
    return any(
        isinstance(optimizer, known)
        and all(_plain(type(optimizer), name) is _plain(known, name) for name in ("step", "_init_group"))
        for known in ELEMENTWISE
    )


def is_whole(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is known to run on DTensors after a backward."""
    step = _plain(type(optimizer), "step")
    return step is _plain(Muon, "step") or getattr(step, "__module__", "") == _TORCHAO


def _plain(cls: type, name: str) -> Callable[..., Any]:
    """Return a method without torch's wrappers: hooks, ranges, no_grad."""
    found: Callable[..., Any] = inspect.unwrap(getattr(cls, name))
    return found


class Updates:
    """The steps of an elementwise optimizer, group by group and shard by shard.

    With `fuses` torch's fused kernel is taken where the optimizer leaves that to torch.
    """

    def __init__(self, optimizer: Optimizer, *, fuses: bool = False) -> None:
        self._optimizer, self._step = optimizer, _plain(type(optimizer), "step")
        self._fuses = fuses and self._step is _plain(Adam, "step")
        self._group_of: dict[int, int] = {}  # by the parameter's id: tensors are hashed in Python

    def begin(self) -> None:
        """Look at which groups there are now."""
        groups = enumerate(self._optimizer.param_groups)
        self._group_of = {id(param): number for number, group in groups for param in group["params"]}

    def __contains__(self, param: nn.Parameter) -> bool:
        """Return whether the optimizer has a parameter."""
        return id(param) in self._group_of

    @torch.no_grad()
    def __call__(self, arrivals: Iterable[Arrival]) -> None:
        """Update parameters of the optimizer by their gradients."""
        groups: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            groups.setdefault(self._group_of[id(arrival.param)], []).append(arrival)
        for number, members in groups.items():
            self._update(self._optimizer.param_groups[number], members)

    def _update(self, group: Mapping[str, Any], members: list[Arrival]) -> None:
        shards, state = [], defaultdict[torch.Tensor, dict[str, Any]](dict)
        before: list[dict[str, Any]] = []
        for param, grad in members:
            shard = shard_in(param).detach()
            shard.grad = grad
            shards.append(shard)
            known = self._optimizer.state.get(param) or {}
            before.append({name: shard_in(v) if isinstance(v, torch.Tensor) else v for name, v in known.items()})
            if known:
                state[shard] = dict(before[-1])
        group = {**group, "params": shards}
        if self._fuses and _can_fuse(group, before):
            group["fused"] = True
        stand_in = object.__new__(type(self._optimizer))
        stand_in.__dict__.update(self._optimizer.__dict__, param_groups=[group], state=state)
        self._step(stand_in)
        for shard, known, (param, _) in zip(shards, before, members):
            for name, value in state.get(shard, {}).items():
                if name in known and known[name] is value:
                    continue  # changed in place
                if isinstance(value, torch.Tensor) and isinstance(param, DTensor) and name not in _NUMBERS:
                    value = sharded_like(value, param)
                self._optimizer.state[param][name] = value


def _can_fuse(group: Mapping[str, Any], state: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether torch's fused kernel computes the same as its operators, for Adam and AdamW.

    It goes through memory from end to end, so all tensors of a parameter must have the same layout, and it reads the
    number of a step as float32. `group` is the stand-in's, and `state` of each of its shards.
    """
    if any(group[name] is not None for name in ("fused", "foreach")) or group["capturable"] or group["differentiable"]:
        return False
    if torch.get_default_dtype() is not torch.float32:
        return False  # steps that begin now are counted in that
    for shard, known in zip(group["params"], state):
        dtype = shard.dtype
        if not (dtype.is_floating_point and shard.is_cpu and shard.is_contiguous() and shard.grad.is_contiguous()):
            return False
        for name, value in known.items():
            if name in _NUMBERS:
                if value.dtype is not torch.float32:
                    return False
            elif value.dtype is not dtype or not value.is_contiguous():
                return False
    return True
