"""A program that returns the full parameters of a unit, for modules that Python runs.

    shards  ->  all-gather  ->  full parameters in the compute dtype      forward
    shards  <-  reduce-scatter, divided, in the reduce dtype  <-  grads   backward

It is captured from a module that holds the unit's parameters, under their names, and nothing else. So reduction,
accumulation and choices for units work as in any other program, and buffers have the order of FSDP2's.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from graphshard.ir.params import ParamTable
from graphshard.ir.precision import Precision
from graphshard.module.tracer import Tracer
from graphshard.runtime.shards import Alias, ParamRef, param_refs
from graphshard.runtime.unsharded import Unsharded

# Name of the program, after the module's.
_NAME = "parameters()"


class RunsModule(Protocol):
    """Runner of a module: `graphshard.module.runner.Runner`."""

    path: str
    tracer: Tracer
    unsharded: Unsharded
    aliases: tuple[Alias, ...]

    @property
    def of_model(self) -> RunsModule:
        """The runner of the whole model."""

    @property
    def entries(self) -> MutableMapping[str, Any]:
        """Runners of submodules, by name."""

    @property
    def split_state(self) -> Any:
        """State of split modules."""

    def entry_runner(self, module: nn.Module, tracer: Tracer, path: str) -> RunsModule:
        """Return a runner of programs for a submodule."""


class ParameterHolder(nn.Module):
    """Holds the parameters of a module under their names there; `forward` returns them."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._places: list[tuple[nn.Module, str]] = []
        for name in names:
            *path, attribute = name.split(".")
            owner: nn.Module = self
            for each in path:
                if each not in owner._modules:
                    owner._modules[each] = nn.Module()
                found = owner._modules[each]
                assert found is not None
                owner = found
            self._places.append((owner, attribute))

    def hold(self, params: Collection[nn.Parameter]) -> None:
        """Hold other parameters, in the order of the names."""
        for (owner, attribute), param in zip(self._places, params, strict=True):
            owner._parameters[attribute] = param

    def forward(self) -> list[torch.Tensor]:
        """Return the parameters, as tensors that are not the graph's inputs."""
        return [owner._parameters[attribute].clone() for owner, attribute in self._places]  # type: ignore[union-attr]


class ParameterGather:
    """Gathers the parameters of a module that belong to its own unit.

    Args:
        runner: of the module.
        refs: the parameters, by their names in the module.
    """

    def __init__(self, runner: RunsModule, refs: Collection[ParamRef]) -> None:
        self._runner, self._refs = runner, tuple(refs)
        self._name = f"{runner.path}.{_NAME}" if runner.path else _NAME
        self._holder = ParameterHolder([ref.row.name for ref in refs])

    def __call__(self) -> dict[str, torch.Tensor]:
        """Return the full parameters by name; those that are trained belong to the graph of autograd."""
        self._holder.hold([ref.param for ref in self._refs])
        entries = self._runner.of_model.entries
        if self._name not in entries:  # they are cleared when the model is planned again
            entries[self._name] = self._runner.of_model.entry_runner(self._holder, self._tracer(), self._runner.path)
        full = entries[self._name].call(self._holder, (), {})
        return {ref.row.name: tensor for ref, tensor in zip(self._refs, full, strict=True)}

    def _tracer(self) -> Tracer:
        base = self._runner.tracer
        kept = {ref.row.name for ref in self._refs}
        rows = ParamTable(tuple(replace(row, names=row.names[:1]) for row in base.spec.params if row.name in kept))
        policy = base.spec.precision.of("")
        spec = replace(
            base.spec,
            params=rows,
            units=(),
            precision=Precision(replace(policy, output_dtype=None)),
            forward_class=ParameterHolder,
            method="forward",
            dynamic_shapes=None,
        )
        names = {row.name: base.model_names[row.name] for row in rows}
        params = tuple(param_refs(self._holder, rows))
        return replace(base, spec=spec, params=params, name=self._name, names=names)
