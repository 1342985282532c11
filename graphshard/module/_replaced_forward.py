"""A function that replaces a model's forward and cannot be captured: Python runs it, on full parameters of the root.

    model.forward = redirected        TRL's and Lightning's forward redirection, a wrapper that logs
    model(batch)
    |- parameters of the root         gathered once, and shown: `model.head.weight` is full
    |- redirected                     Python
    |  |- model.model(tokens)         programs, which read the parameters that are shown
    |  `- fused(x, head.weight)       Python; its gradients join the programs' before they are reduced
    `- until backward                 the parameters stay, as FSDP2's do

So the forward that was replaced is still one program if the function calls it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import nn

from graphshard.ir.submodule_entry_points import method_of
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.text import users_class

log = logging.getLogger(__name__)


class ReplacedForward:
    """Calls of what replaces the forward of a model; `runner` is the model's `Runner`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._functions: dict[Any, Any] = {}
        self._not_captured: set[Any] = set()
        self._depth = 0

    @property
    def is_open(self) -> bool:
        """Whether Python runs such a function now."""
        return self._depth > 0

    def covers(self, module: nn.Module) -> bool:
        """Return whether the function is not captured: it was found to break, or each call has another of its code."""
        key, found = _key(module), method_of(module, "forward")
        if self._functions.setdefault(key, found) != found:
            self._not_captured.add(key)
        return key in self._not_captured

    def begin(self, reason: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first call of a function that is not captured."""
        self._not_captured.add(_key(module))
        log.warning(
            "%s.forward was replaced by %s, which is not captured: Python runs it, and programs run what it calls of "
            "the model. %s",
            users_class(module).__name__,
            getattr(method_of(module, "forward"), "__qualname__", "an object"),
            reason,
        )
        return self.call(module, args, kwargs)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in Python; backward frees the parameters."""
        runner = self._runner
        device = runner.tracer.spec.device
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        names = {row.name for row in runner.tracer.spec.params if not row.unit and not row.ignored}
        peers = runner.agreement.peers
        label = f"{users_class(module).__name__}.forward, which was replaced, in Python"
        with peers.step(label, "") if peers is not None else contextlib.nullcontext():  # a rank alone is an error
            runner.unshard(names).wait()
        self._depth += 1
        try:
            return method_of(module, "forward")(*args, **kwargs)
        finally:
            self._depth -= 1
            if not torch.is_grad_enabled():
                runner.reshard(names - runner.unsharded.kept)


def _key(module: nn.Module) -> Any:
    found = method_of(module, "forward")
    function = getattr(found, "__func__", found)
    return getattr(function, "__code__", function)
