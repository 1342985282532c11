"""A whole training step: forward, backward, clipping, the optimizer's updates and zeroing, in one call.

    step = graphshard.compile_step(model, torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    loss = step(tokens, targets)

Updates run inside the backward, each after the reduction of its gradient and the last line that reads its shard, on
plain tensors. Shards on the host are updated there, by another thread. Where that cannot be, as with clipping, backward
accumulates gradients as usual, and updates follow it, with the same bits.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.subclasses import is_extended, shard_in
from graphshard.module.compiled_module import CompiledModule, compiled_module
from graphshard.optim.master_weights import MasterWeights
from graphshard.optim.matrix_optimizer import MatrixOptimizer
from graphshard.runtime.executable import Executable
from graphshard.runtime.parameter_writes import reject_former_parameters, report_step
from graphshard.runtime.shards import shard_of
from graphshard.runtime.step_overlap import (
    ELEMENTWISE,
    Arrival,
    GatherPrefetch,
    GradientConsumer,
    MasterUpdates,
    Updates,
    is_elementwise,
    is_whole,
)
from graphshard.utils.argument_validation import check_bool, check_count, check_function, check_number
from graphshard.utils.text import brief

# Optimizers whose updates fail on sharded parameters.
_NOT_ON_DTENSORS = (torch.optim.Adafactor, torch.optim.Rprop)
_SEPARATELY = "Call loss.backward(), optimizer.step() and optimizer.zero_grad() one after the other instead."


def compile_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    gather_ahead: bool = False,
) -> CompiledStep:
    """Make a function of a whole training step: forward, backward, clipping, updates and zeroing.

    It is bit for bit what `loss.backward()`, `clip_grad_norm_`, `optimizer.step()` and `optimizer.zero_grad()` do one
    after the other. State stays in the optimizer, and hyperparameters are read from its groups at each step. With the
    backend "inductor", Adam and AdamW that leave the choice to torch (`fused=None, foreach=None`) are fused on the CPU,
    as with `fused=True`.

    Args:
        model: a compiled module.
        optimizer: of the model's parameters, or of some of them: one of torch.optim that computes element by element
            (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop), Muon, one of torchao.optim with
            states of few bits, a `graphshard.optim.MatrixOptimizer` around any other, or `MasterWeights` around one of
            these. Only optimizers that compute element by element update inside backward.
        loss: is called with the model and the arguments of `step`, and returns the loss; None calls the model, which
            returns the loss itself.
        clip_norm: the largest norm of all gradients of the model, as for `clip_grad_norm_`; None clips nothing.
        accumulate: how many microbatches a step takes. Their gradients are added up, as by several calls of backward:
            the loss is not divided.
        scaler: scales the loss and skips the steps whose gradients overflow; updates then follow the backward.
        gather_ahead: start the gathers that the next forward begins with as soon as their parameters are updated, under
            the updates of others. They are kept until the next call of the model. A call by another program drops
            them, and so does writing to the parameters, which all ranks must do alike.

    Returns:
        `step(*args, **kwargs)`, which returns the loss, detached. For several microbatches it is
        `step(*microbatches)`, each a tuple of inputs, a dict of them by name or one tensor, and returns their losses
        in one tensor. `step.grad_norm` is the norm before it was clipped.

    Raises:
        ArgumentError: an argument is wrong, or the optimizer has parameters that are not the model's.
        UnsupportedError: the optimizer's step cannot be taken apart; train with the separate step.
    """
    compiled = compiled_module(model)
    check_optimizer(optimizer, model)
    if loss is not None:
        check_function("loss", loss, "lambda model, x, y: cross_entropy(model(x), y)")
    if clip_norm is not None:
        check_number("clip_norm", clip_norm, positive=True)
    check_count("accumulate", accumulate)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(f"scaler must be a torch.amp.GradScaler or None, got {brief(scaler)}.")
    check_bool("gather_ahead", gather_ahead)
    return CompiledStep(compiled, optimizer, loss, clip_norm, accumulate, scaler, gather_ahead)


@dataclass(eq=False, repr=False)
class CompiledStep:
    """A training step, returned by `compile_step`.

    Attributes:
        grad_norm: the total norm of the last step's gradients before they were clipped; None without `clip_norm`.
        updated_in_backward: whether the last step's updates ran inside the backward.
    """

    _model: CompiledModule
    _optimizer: Optimizer
    _loss: Callable[..., torch.Tensor] | None
    _clip_norm: float | None
    _accumulate: int
    _scaler: torch.amp.GradScaler | None
    _gather_ahead: bool
    grad_norm: torch.Tensor | None = field(default=None, init=False)
    updated_in_backward: bool = field(default=False, init=False)
    _prefetch: GatherPrefetch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._consumer = GradientConsumer(self._update, self._model._graphshard.tracer.costs)
        fuses = self._model._graphshard.tracer.options.backend != "eager"
        self._updates: Updates | MasterUpdates | MatrixOptimizer
        if isinstance(self._optimizer, MatrixOptimizer):
            self._updates = self._optimizer
        elif isinstance(self._optimizer, MasterWeights):
            self._updates = MasterUpdates(self._optimizer, self._consumer.thread, fuses=fuses)
        else:
            self._updates = Updates(self._optimizer, fuses=fuses)
        self._as_they_arrive = is_elementwise(self._optimizer) or self._updates is self._optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train one step; return the loss, or for several microbatches a tensor of their losses."""
        check_step(self._optimizer, self._model, (ref.param for ref in self._model._graphshard.tracer.params))
        if self._as_they_arrive:
            self._updates.begin()
        if self._accumulate == 1:
            return self._last(self._loss_of(args, kwargs))
        calls = self._microbatches(args, kwargs)
        losses = []
        with self._unsynced():
            for call in calls[:-1]:
                loss = self._loss_of(*call)
                self._scaled(loss).backward()
                losses.append(loss.detach())
        losses.append(self._last(self._loss_of(*calls[-1])))
        return torch.stack([loss.reshape(()) for loss in losses])

    def _loss_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        loss = self._model(*args, **kwargs) if self._loss is None else self._loss(self._model, *args, **kwargs)
        check_loss(loss, "the model" if self._loss is None else brief(self._loss))
        return loss

    def _microbatches(
        self, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
        """Return the arguments of each call of the loss."""
        if named or len(given) != self._accumulate:
            what = f"inputs by name ({', '.join(named)})" if named else f"{len(given)}"
            raise ArgumentError(
                f"step: it was compiled with accumulate={self._accumulate} and takes as many microbatches, each a "
                f"tuple of inputs, a dict of them by name or a tensor; given were {what}."
            )
        found: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []
        for batch in given:
            if isinstance(batch, Mapping):
                found.append(((), batch))
            else:
                found.append((tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}))
        return found

    @contextlib.contextmanager
    def _unsynced(self) -> Iterator[None]:
        """Accumulate gradients in the block, without reducing them."""
        runner = self._model._graphshard
        before = runner.accumulation.unsynced
        runner.accumulation.unsynced = before | {row.name for row in runner.tracer.spec.params}
        try:
            yield
        finally:
            runner.accumulation.unsynced = before

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._scaler.scale(loss) if self._scaler is not None else loss
        return scaled

    def _last(self, loss: torch.Tensor) -> torch.Tensor:
        """Run the backward that reduces gradients, and all that follows."""
        accumulation = self._model._graphshard.accumulation
        self._consumer.params, self._consumer.ran, self._consumer.at_the_end = self._taken(loss), False, False
        accumulation.consumer = self._consumer if self._consumer.params else None
        # The loss goes through one program, which runs the next forward, too. Parameters that are shown have none.
        called = {call.executable for call in accumulation.calls} if self._gather_ahead else ()
        programs = {each for each in called if isinstance(each, Executable)}
        self._prefetch = programs.pop().prefetch() if len(programs) == 1 else None
        if self._prefetch is not None:
            self._prefetch.begin()
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, accumulation, "consumer", None)
            stack.callback(self._consumer.thread.finish)
            self._scaled(loss).backward()
        self.updated_in_backward = self._consumer.ran
        if self.updated_in_backward:
            self._update_rest()
        else:
            self._separate()
        if self._as_they_arrive and self._scaler is None:
            self._updates.finish()
        if self._scaler is None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules check it
        self._optimizer.zero_grad()
        if self._prefetch is not None:
            self._prefetch.finish()
            accumulation.prefetch = self._prefetch
        return loss.detach()

    def _update(self, arrivals: list[Arrival]) -> None:
        """Update parameters, and start to gather them if the next forward begins with that."""
        updated = self._updates.take(arrivals)
        if self._prefetch is not None and updated:
            at_the_end = self._consumer.at_the_end or self._model._graphshard.accumulation.consumer is None
            self._prefetch.updated(updated, start=at_the_end)

    def _is_late(self, arrivals: Iterable[Arrival]) -> bool:
        """Return whether parameters may be updated last: the next forward does not begin with them."""
        return self._prefetch is not None and not self._prefetch.first([param for param, _ in arrivals])

    def _taken(self, loss: torch.Tensor) -> set[str]:
        """Return names of parameters that are updated as gradients arrive; none if that would not be exact."""
        params = [(ref.name, ref.param) for ref in self._model._graphshard.tracer.params]
        if not self._as_they_arrive or self._scaler is not None or self._clip_norm is not None:
            return set()
        offloads = isinstance(self._model._graphshard.tracer.options.offload_policy, CPUOffloadPolicy)
        if offloads and not isinstance(self._updates, Updates):
            return set()  # gradients arrive in another thread, which may neither communicate nor start others
        for _, param in params:  # a gradient may also be added to another one, or read by hooks
            hooks = param._backward_hooks or param._post_accumulate_grad_hooks
            if hooks or param.grad is not None or is_extended(param):
                return set()
        trained = self._model._graphshard.accumulation.trained_by_one_call(loss)
        return {name for name, param in params if name in trained and param in self._updates}

    def _separate(self) -> None:
        """Clip and update after the backward, by gradients that were accumulated."""
        if self._scaler is not None and self._clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            total = nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
            self.grad_norm = total.full_tensor() if hasattr(total, "full_tensor") else total
        if self._scaler is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        elif not self._as_they_arrive or any(is_extended(param) for param in self._params()):
            self._optimizer.step()
        else:
            self._update_rest()

    def _update_rest(self) -> None:
        left = [Arrival(param, shard_in(param.grad)) for param in self._params() if param.grad is not None]
        for late in (False, True):
            self._update([one for one in left if self._is_late([one]) == late])

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for group in self._optimizer.param_groups for param in group["params"])


# --- checks ------------------------------------------------------------------------------------------------------


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Check that an optimizer of the model's parameters can be run shard by shard."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"optimizer must be a torch.optim.Optimizer, got {brief(optimizer)}. Make it of model.parameters(), after "
            "graphshard.compile."
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"compile_step: optimizer: the step of {name}, {_place(type(optimizer).step)}, computes the loss several "
            "times, by a closure. Call optimizer.step(closure) instead, with a closure that calls "
            "optimizer.zero_grad(), computes the loss, calls loss.backward() and returns the loss."
        )
    runs = optimizer.wrapped if isinstance(optimizer, MasterWeights) else optimizer
    if not (is_elementwise(runs) or is_whole(runs) or isinstance(runs, MatrixOptimizer)):
        raise UnsupportedError(f"compile_step: optimizer: {_other_step(runs)} {_SEPARATELY}")
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):  # a schedule's only counts
        raise UnsupportedError(
            f"compile_step: optimizer: the step of {name} was replaced by {_place(replaced)}. {_SEPARATELY}"
        )
    check_step(optimizer, model)


def check_step(optimizer: Optimizer, model: nn.Module, known: Iterable[nn.Parameter] = ()) -> None:
    """Check what may have changed since: hooks, options of groups, parameters.

    Parameters of the model that are at hand are `known`; to walk all of its modules takes longer.
    """
    name = type(optimizer).__name__
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    hook = next((hook for hook in hooks if hook not in (report_step, reject_former_parameters)), None)
    if hook is not None:
        raise UnsupportedError(
            f"compile_step: optimizer: a hook is registered on the step of {name}, {_place(hook)}, "
            f"and there is no one moment at which it would run. Remove it, or: {_SEPARATELY}"
        )
    owned = {id(param) for param in known}
    walked = False
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise UnsupportedError(
                f"compile_step: optimizer: group {number} of {name} has differentiable=True, and updates "
                f"are not differentiated. Leave it out, or: {_SEPARATELY}"
            )
        for index, param in enumerate(group["params"]):
            if id(param) not in owned and not walked:  # parameters that are not sharded
                owned |= {id(shard_of(each)) for module in model.modules() for each in module._parameters.values()}
                walked = True
            if id(param) not in owned:
                raise ArgumentError(
                    f"optimizer: parameter {index} of group {number}, of shape {list(param.shape)}, is not the "
                    "model's. Make the optimizer of model.parameters() after graphshard.compile, and one for each "
                    "model."
                )


def check_loss(loss: Any, where: str) -> None:
    """Raise ArgumentError for a loss that backward cannot start from."""
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
    """Return which step an optimizer has, and why it is not run shard by shard."""
    cls, name = type(optimizer), type(optimizer).__name__
    if cls in _NOT_ON_DTENSORS:
        return (
            f"the step of {name}, {_place(cls.step)}, takes no DTensors in torch 2.13, which "
            "parameters of a sharded model are, so it fails with FSDP2, too. Take another optimizer; or if your torch "
            "has such a step:"
        )
    step = inspect.unwrap(cls.step)
    is_torchs = any(isinstance(optimizer, known) and inspect.unwrap(known.step) is step for known in ELEMENTWISE)
    method = "_init_group" if is_torchs else "step"
    return (
        f"{name} has a {method} of its own, {_place(inspect.unwrap(getattr(cls, method)))}, which may look at more "
        "than a parameter's elements one by one. Known to do just that are those of "
        f"{', '.join(known.__name__ for known in ELEMENTWISE)} in torch.optim. If it treats each parameter by itself, "
        "wrap it in graphshard.optim.MatrixOptimizer. Otherwise:"
    )


def _place(function: Any) -> str:
    """Return where a function is defined."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else brief(function)
