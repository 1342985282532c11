"""Whether values of inputs and buffers are those for which a program was captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from graphshard.ir.torch_internals import disable_autocast
from graphshard.ir.value_guards import ValueGuards, text_of


class ValueChecks:
    """Of a program that is bound to a module.

    Args:
        guards: what the program takes for granted.
        root: the module, or submodule, that the program is for.
        label: what the module is called.
    """

    def __init__(self, guards: ValueGuards, root: nn.Module, label: str) -> None:
        self._guards, self._label = guards, label
        self._compute = GraphModule(nn.Module(), guards.module.graph)  # of a file it has another way to be called
        names = (name.rpartition(".") for name in guards.buffers)
        self._buffers = [(root.get_submodule(owner)._buffers, key) for owner, _, key in names]
        self._on_device: str | None = None  # what was found of values that depend on the device alone

    def change(self, tensors: Sequence[torch.Tensor]) -> str:
        """What is not as it was in a call with these tensors, in words; "" if the program can run."""
        if self._guards.inputs or self._guards.buffers:
            return self._change(tensors)
        if self._on_device is None:
            self._on_device = self._change(tensors)
        return self._on_device

    def _change(self, tensors: Sequence[torch.Tensor]) -> str:
        given: list[Any] = [tensors[number] for number in self._guards.inputs]
        given += [held[key] for held, key in self._buffers]
        try:
            with torch.no_grad(), disable_autocast():
                values = self._compute(*given)
        except (RuntimeError, IndexError, ValueError, ArithmeticError) as error:
            return f"{self._label}: what forward asks for cannot be computed of these values ({error})"
        for value, guard in zip(values, self._guards.guards, strict=True):
            found = text_of(value)
            if found != guard.expected:
                return f"{self._label}: a value was {guard.expected} and is {found} ({guard.line})"
        return ""
