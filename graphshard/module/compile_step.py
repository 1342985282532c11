"""What can be wrong with the arguments of `compile_step`, found before anything is changed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as of_optimizers

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.subclasses import is_extended, shard_in
from graphshard.module.compiled_module import CompiledModule, compiled_module
from graphshard.runtime.ahead import Ahead
from graphshard.runtime.arrivals import Arrival, Taker
from graphshard.runtime.clipping import Clipping, placed_alike
from graphshard.runtime.graphs import trained_by_one_call
from graphshard.runtime.shown_parameter import behind
from graphshard.runtime.updates import ELEMENTWISE, Updates, is_elementwise, is_whole
from graphshard.utils.argument_validation import check_bool, check_count, check_function, check_number
from graphshard.utils.text import brief

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

    Bit for bit what `loss.backward()`, `clip_grad_norm_`, `optimizer.step()` and `optimizer.zero_grad()` do one after
    the other. State stays in the optimizer, and hyperparameters are read from its groups at each step. With the backend
    "inductor", Adam and AdamW that leave the choice to torch (`fused=None, foreach=None`) are fused on the CPU, as with
    `fused=True`.

    Args:
        model: a compiled module.
        optimizer: of the model's parameters, or of some of them: one of torch.optim that computes element by element
            (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop), Muon, or one of torchao.optim
            with states of few bits. Those of the latter two run behind the backward.
        loss: is called with the model and what `step` is called with, and returns the loss; None calls the model, which
            returns the loss itself.
        clip_norm: what the norm of all gradients of the model may be at most, as for `clip_grad_norm_`; None clips
            nothing.
        accumulate: how many microbatches a step takes. Their gradients are added up, as by so many calls of backward:
            the loss is not divided.
        scaler: scales the loss and skips the steps whose gradients overflow; updates then follow the backward.
        gather_ahead: start the gathers that the next forward begins with as soon as their parameters are updated, under
            the updates of others. They are kept until the next call of the model; one by another program drops them,
            and so does whoever writes to the parameters, which all ranks must do alike.

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
    check_scaler(scaler)
    check_bool("gather_ahead", gather_ahead)
    return CompiledStep(compiled, optimizer, loss, clip_norm, accumulate, scaler, gather_ahead=gather_ahead)


class CompiledStep:
    """What `compile_step` returns.

    Attributes:
        grad_norm: the total norm of the last step's gradients before they were clipped; None without `clip_norm`.
        updated_in_backward: whether the last step's updates ran inside the backward, as most do.
    """

    def __init__(
        self,
        model: CompiledModule,
        optimizer: Optimizer,
        loss: Callable[..., torch.Tensor] | None,
        clip_norm: float | None,
        accumulate: int,
        scaler: torch.amp.GradScaler | None,
        *,
        gather_ahead: bool,
    ) -> None:
        self.grad_norm: torch.Tensor | None = None
        self.updated_in_backward = False
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._clip_norm = clip_norm
        self._accumulate = accumulate
        self._scaler = scaler
        self._updates = Updates(optimizer, fuses=model._graphshard.tracer.options.backend != "eager")
        self._by_shards = is_elementwise(optimizer)
        self._clipping = Clipping(clip_norm) if clip_norm is not None else None
        self._taker = Taker(self._clipping.take if self._clipping is not None else self._update)
        self._gather_ahead = gather_ahead
        self._ahead: Ahead | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train one step; returns the loss, or for several microbatches a tensor of their losses."""
        check_step(self._optimizer, self._model, (ref.param for ref in self._model._graphshard.tracer.params))
        self._updates.begin()
        if self._accumulate == 1:
            return self._last(self._loss_of(args, kwargs))
        calls = self._microbatches(args, kwargs)
        losses = []
        with self._unsynced():
            for call in calls[:-1]:
                losses.append(self._loss_of(*call))
                self._scaled(losses[-1]).backward()
                losses[-1] = losses[-1].detach()
        losses.append(self._last(self._loss_of(*calls[-1])))
        return torch.stack([loss.reshape(()) for loss in losses])

    def _loss_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        loss = self._model(*args, **kwargs) if self._loss is None else self._loss(self._model, *args, **kwargs)
        check_loss(loss, "the model" if self._loss is None else brief(self._loss))
        return loss

    def _microbatches(
        self, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
        """What each call of the loss is called with."""
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
        """In the block gradients are added up and not reduced."""
        runner = self._model._graphshard
        before = set(runner.accumulation.unsynced)
        runner.accumulation.unsynced.update(row.name for row in runner.tracer.spec.params)
        try:
            yield
        finally:
            runner.accumulation.unsynced.clear()
            runner.accumulation.unsynced.update(before)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._scaler.scale(loss) if self._scaler is not None else loss
        return scaled

    def _last(self, loss: torch.Tensor) -> torch.Tensor:
        """The backward that reduces gradients, and all that follows."""
        accumulation = self._model._graphshard.accumulation
        self._taker.params, self._taker.ran, self._taker.at_the_end = self._taken(loss), False, False
        accumulation.taker = self._taker if self._taker.params else None
        self._ahead = self._begin_ahead() if self._gather_ahead else None
        try:
            try:
                self._scaled(loss).backward()
            finally:
                self._taker.beside.finish()
            self.updated_in_backward = self._taker.ran
            if self._clipping is not None and self._taker.ran:
                self._end_clipping(self._clipping)
        finally:
            accumulation.taker = None
            if self._clipping is not None:
                self._clipping.forget()
        self._follow()
        if self._ahead is not None:
            self._ahead.finish()
            accumulation.ahead = self._ahead
        return loss.detach()

    def _begin_ahead(self) -> Ahead | None:
        """The gathers of the next forward, if the loss goes through one program, which is taken for the next one."""
        programs = {call.executable for call in self._model._graphshard.accumulation.calls}
        ahead: Ahead | None = programs.pop().ahead() if len(programs) == 1 else None
        if ahead is not None:
            ahead.begin()
        return ahead

    def _update(self, arrivals: list[Arrival]) -> None:
        """Update parameters, and start to gather them if the next forward begins with that."""
        self._updates(arrivals)
        if self._ahead is not None:
            at_the_end = self._taker.at_the_end or self._model._graphshard.accumulation.taker is None
            self._ahead.updated([param for param, _ in arrivals], start=at_the_end)

    def _is_late(self, arrivals: Iterable[Arrival]) -> bool:
        """Whether parameters may be updated last behind a backward: the next forward does not begin with them."""
        return self._ahead is not None and not self._ahead.first([param for param, _ in arrivals])

    def _end_clipping(self, clipping: Clipping) -> None:
        """Update parameters by what was kept of the backward; leave it to torch if that is not all."""
        if any(param.grad is not None for param in self._model.parameters()):
            clipping.give_back()
            self.updated_in_backward = False
            return
        self.grad_norm, groups = clipping.end(self._model.parameters(), self._is_late)
        for group in groups:
            self._update(group)

    def _taken(self, loss: torch.Tensor) -> set[str]:
        """Parameters, by their names, whose gradients are used where they arrive; none if that would not be exact."""
        refs = self._model._graphshard.tracer.params
        own = [(ref.row.name, ref.param) for ref in refs]
        if not self._by_shards or self._scaler is not None or any(_has_more_to_do(param) for _, param in own):
            return set()
        trained = trained_by_one_call(loss, self._model._graphshard.accumulation.calls)
        taken = {name: param for name, param in own if name in trained and param in self._updates}
        if taken and self._clipping is not None and (taken.keys() != trained or not placed_alike(list(taken.values()))):
            return set()
        return set(taken)

    def _follow(self) -> None:
        """What backward has left: clip, update by gradients that were accumulated, and zero them."""
        if self.updated_in_backward:
            self._update_rest()
        else:
            self._separate()
        if self._scaler is None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedules ask for
        self._optimizer.zero_grad()

    def _separate(self) -> None:
        if self._scaler is not None and self._clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            total = nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
            self.grad_norm = total.full_tensor() if hasattr(total, "full_tensor") else total
        if self._scaler is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        elif not self._by_shards or any(is_extended(param) for param in self._params()):
            self._optimizer.step()
        else:
            self._update_rest()

    def _update_rest(self) -> None:
        left = [Arrival(param, shard_in(param.grad)) for param in self._params() if param.grad is not None]
        for late in (False, True):
            self._update([one for one in left if self._is_late([one]) == late])

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for group in self._optimizer.param_groups for param in group["params"])


def _has_more_to_do(param: nn.Parameter) -> bool:
    """Whether more is done with its gradient than to update it: it is added to another one, or hooks see it."""
    hooks = param._backward_hooks or param._post_accumulate_grad_hooks
    return bool(hooks) or param.grad is not None or is_extended(param)
