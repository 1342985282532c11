"""What can be wrong with the arguments of `compile_step`, found before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as of_optimizers

from graphshard.ir.errors import ArgumentError, UnsupportedError
from graphshard.ir.text import brief
from graphshard.runtime.shown_parameter import behind
from graphshard.runtime.updates import ELEMENTWISE, is_elementwise, is_whole

# Whose updates fail on parameters that are sharded.
_NOT_ON_DTENSORS = (torch.optim.Adafactor, torch.optim.Rprop)
_SEPARATELY = "Call loss.backward(), optimizer.step() and optimizer.zero_grad() one after the other instead."


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Find what keeps an optimizer from being run shard by shard.

    Raises:
        ArgumentError: it is no optimizer, or has parameters that are not the model's.
        UnsupportedError: it has a step of its own, or one that needs more than gradients, or hooks.
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {brief(optimizer)}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"compile_step: optimizer: the step of {_name(optimizer)}, {_place(type(optimizer).step)}, computes the "
            "loss several times, by a closure. Call optimizer.step(closure) instead, with a closure that calls "
            "optimizer.zero_grad(), computes the loss, calls loss.backward() and returns the loss."
        )
    if not (is_elementwise(optimizer) or is_whole(optimizer)):
        raise UnsupportedError(f"compile_step: optimizer: {_other_step(optimizer)} {_SEPARATELY}")
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):  # that of schedules only counts
        raise UnsupportedError(
            f"compile_step: optimizer: the step of {_name(optimizer)} was replaced by {_place(replaced)}. {_SEPARATELY}"
        )
    check_step(optimizer, model)


def check_step(optimizer: Optimizer, model: nn.Module, known: Iterable[nn.Parameter] = ()) -> None:
    """What may have changed since: hooks, options of groups, parameters.

    Args:
        known: parameters of the model that are at hand; to go through all of its modules takes longer.

    Raises:
        ArgumentError: a parameter is not the model's.
        UnsupportedError: there are hooks, or an option that needs the separate step.
    """
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *of_optimizers._global_optimizer_pre_hooks.values(),
        *of_optimizers._global_optimizer_post_hooks.values(),
    )
    if hooks:
        raise UnsupportedError(
            f"compile_step: optimizer: a hook is registered on the step of {_name(optimizer)}, {_place(hooks[0])}, "
            f"and there is no one moment at which it would run. Remove it, or: {_SEPARATELY}"
        )
    owned = {id(param) for param in known}
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise UnsupportedError(
                f"compile_step: optimizer: group {number} of {_name(optimizer)} has differentiable=True, and updates "
                f"are not differentiated. Leave it out, or: {_SEPARATELY}"
            )
        for index, param in enumerate(group["params"]):
            if id(param) not in owned and id(param) not in _ids_of_parameters(model):
                raise ArgumentError(
                    f"optimizer: parameter {index} of group {number}, of shape {list(param.shape)}, is not the "
                    "model's. Make the optimizer of model.parameters() after graphshard.compile, and one for each "
                    "model."
                )


def _ids_of_parameters(model: nn.Module) -> set[int]:
    """Of all that the model has, also of those that are not sharded."""
    return {id(behind(param)) for module in model.modules() for param in module._parameters.values()}


def check_scaler(scaler: Any) -> None:
    """Raise ArgumentError for what is no GradScaler."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(f"scaler must be a torch.amp.GradScaler or None, got {brief(scaler)}.")


def check_loss(loss: Any, where: str) -> None:
    """Raise ArgumentError for what backward cannot begin with."""
    if not isinstance(loss, torch.Tensor):
        raise ArgumentError(
            f"loss: {where} returned {brief(loss)}, and backward begins with a tensor of one element. Pass "
            "loss=function, which is called with the model and what step is called with, and returns the loss."
        )
    if loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {list(loss.shape)}" if loss.numel() != 1 else "a tensor that needs no gradients"
        raise ArgumentError(
            f"loss: {where} returned {what}. Return a tensor of one element, computed from the model's parameters with "
            "gradients on."
        )


def _other_step(optimizer: Optimizer) -> str:
    """Which step an optimizer has, and why it is not run shard by shard."""
    known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
    if type(optimizer) in _NOT_ON_DTENSORS:
        return (
            f"the step of {_name(optimizer)}, {_place(type(optimizer).step)}, takes no DTensors in torch 2.13, which "
            "parameters of a sharded model are, so it fails with FSDP2, too. Take another optimizer; or if your torch "
            "has such a step:"
        )
    name = "_init_group" if _step_is_torchs(optimizer) else "step"
    method = inspect.unwrap(getattr(type(optimizer), name))
    return (
        f"{_name(optimizer)} has a {name} of its own, {_place(method)}, which may look at more than a parameter's "
        f"elements one by one. Known to do just that are those of {known} in torch.optim."
    )


def _step_is_torchs(optimizer: Optimizer) -> bool:
    own = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, cls) and inspect.unwrap(cls.step) is own for cls in ELEMENTWISE)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _place(function: Any) -> str:
    """Where a function is defined."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else brief(function)
