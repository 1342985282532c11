"""Full parameters as tensors of autograd, gathered by a separate program.

    shards  ->  all-gather  ->  full parameters in the compute dtype      forward
    shards  <-  reduce-scatter, divided, in the reduce dtype  <-  grads   backward

They are results of a program, captured from a module that holds these parameters under their names, and nothing else.
So reduction, accumulation and choices for units work as in any other program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from graphshard.ir.param_table import ParamTable
from graphshard.runtime.executable import Executable
from graphshard.runtime.shards import ParamRef, param_refs
from graphshard.runtime.unsharded import Unsharded
from graphshard.torch_compat.autograd_state import disable_autocast, without_transforms


class FullParameters:
    """Gathers parameters of a module, of which `runner` runs the calls; the program is an entry with a name.

    Its end of backward frees parameters that are gathered by hand, unless it has other ones (`unsharded`).
    """

    def __init__(self, runner: Any, refs: Sequence[ParamRef], name: str, unsharded: Unsharded | None = None) -> None:
        self._runner, self._refs, self._name, self._unsharded = runner, refs, name, unsharded
        self._holder = ParameterHolder([ref.row.name for ref in refs])

    def __call__(self, shards: Mapping[str, nn.Parameter] | None = None) -> dict[str, torch.Tensor]:
        """Return the full parameters by name; trained ones belong to the graph of autograd.

        Args:
            shards: to gather, by their names in the model; by default the present ones.
        """
        self._holder.hold([ref.param if shards is None else shards[ref.name] for ref in self._refs])
        with without_transforms():
            values = self._entry().call(self._holder, (), {})
        return {ref.row.name: tensor for ref, tensor in zip(self._refs, values, strict=True)}

    def executable(self) -> Executable:
        """Return the program, without a call: its backward reduces gradients."""
        runner = self._entry()
        runner.tracer.change([ref.row.name for ref in self._refs], held=False)
        self._holder.hold([ref.param for ref in self._refs])
        with torch.enable_grad(), disable_autocast():
            executable: Executable = runner.executable_of(self._holder)
        return executable

    def _entry(self) -> Any:
        """Return the runner of the program."""
        model_runner = self._runner.of_model
        if self._name not in model_runner.entries:  # they are cleared when the model is planned again
            entry = model_runner.entry_runner(self._tracer(), self._runner.path)
            model_runner.entries[self._name] = replace(entry, unsharded=self._unsharded or entry.unsharded)
        return model_runner.entries[self._name]

    def _tracer(self) -> Any:
        """Return a tracer of the holder, under the choices for the module."""
        base = self._runner.tracer
        names = {ref.row.name: ref.name for ref in self._refs}
        rows = ParamTable(tuple(replace(row, names=row.names[:1]) for row in base.spec.params if row.name in names))
        precision = base.spec.precision
        of_root = replace(precision.of(""), output_dtype=None)
        spec = replace(
            base.spec,
            params=rows,
            units=(),
            precision=replace(precision, by_unit={**precision.by_unit, "": of_root}),
            forward_class=ParameterHolder,
            method="forward",
            dynamic_shapes=None,
        )
        params = tuple(param_refs(self._holder, rows, names))
        return replace(base, spec=spec, params=params, name=self._name)


class ParameterHolder(nn.Module):
    """Holds the parameters of a module under their names there; `forward` returns them."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._places: list[tuple[nn.Module, str]] = []
        for name in names:
            *path, attribute = name.split(".")
            owner: nn.Module = self
            for each in path:
                owner = cast(nn.Module, owner._modules.setdefault(each, nn.Module()))
            self._places.append((owner, attribute))

    def hold(self, params: Collection[nn.Parameter]) -> None:
        """Hold other parameters, in the order of the names."""
        for (owner, attribute), param in zip(self._places, params, strict=True):
            owner._parameters[attribute] = param

    def forward(self) -> list[torch.Tensor]:
        """Return the parameters, as tensors that are not the graph's inputs."""
        return [owner._parameters[attribute].clone() for owner, attribute in self._places]  # type: ignore[union-attr]
