"""FSDP2's methods by which a user runs collectives of a unit, or chooses how they are run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphshard.ir.errors import ArgumentError
from graphshard.ir.given import check_bool, check_count, check_function
from graphshard.ir.text import brief
from graphshard.ir.units import modules_of
from graphshard.module.replan import customize, limit_reductions, separate
from graphshard.module.runner import Runner
from graphshard.runtime.custom import Comm, Custom, Hook, Used


@dataclass(frozen=True)
class UnitOf:
    """Which part of which model a module is.

    Attributes:
        path: of the module in the model.
        name: of its unit, which may have several modules.
    """

    runner: Runner
    path: str
    name: str

    def inside(self, *, recurse: bool) -> set[str]:
        """Names of the units that a method is for: this one, and those within it."""
        if not recurse:
            return {self.name}
        prefix = f"{self.path}." if self.path else ""
        units = self.runner.tracer.spec.params.units
        return {self.name, *(unit for unit in units if any(name.startswith(prefix) for name in modules_of(unit)))}


class CustomCollectives:
    """Mixed into the classes of the model and of its units' modules. All ranks make the same choices."""

    _graphshard_unit: UnitOf

    def set_custom_all_gather(self, comm: Comm) -> None:
        """Let this run the all-gathers of this unit: an object with FSDP2's `allocate` and `__call__`.

        It is called for each tensor that travels: once for all small parameters of the unit, once for each larger one.

        Raises:
            ArgumentError: it has no `allocate`, or cannot be called.
            UnsupportedError: a planner of the user's, or a limit of memory, decides what travels together; so below.
        """
        name = self._graphshard_unit.name
        customize(self._graphshard_unit.runner, "set_custom_all_gather", Custom(gathers={name: _checked(comm)}))

    def set_custom_reduce_scatter(self, comm: Comm) -> None:
        """Let this run the reduce-scatters of this unit, as `set_custom_all_gather` does for gathers."""
        name = self._graphshard_unit.name
        customize(self._graphshard_unit.runner, "set_custom_reduce_scatter", Custom(reductions={name: _checked(comm)}))

    def set_all_reduce_hook(self, hook: Hook, *, stream: torch.cuda.Stream | None = None) -> None:
        """Call a function with each reduced gradient of this unit, which it may change in place.

        The gradient is a shard, in the dtype of the reduction, behind the reduce-scatter (with replicas the
        all-reduce), before it is divided and cast. Small gradients come in one tensor.

        Args:
            stream: where it is called, on CUDA; not with replicas.

        Raises:
            ArgumentError: it cannot be called, or there is a stream and there are replicas.
        """
        unit = self._graphshard_unit
        check_function("hook", hook, "lambda gradient: ...")
        if stream is not None and unit.runner.tracer.spec.mesh.replicate is not None:
            raise ArgumentError(f"stream={brief(stream)}: with replicas the hook runs where their all-reduce does.")
        customize(unit.runner, "set_all_reduce_hook", Custom(hooks={unit.name: Used(_on(stream, hook))}))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Let gradients of so many units be on their way at once; 1 until this is called.

        More of them hide behind the backward of more units, and take their memory. Of several choices the largest
        counts.

        Raises:
            ArgumentError: it is no positive int.
        """
        check_count("max_input_buffers", max_input_buffers)
        check_bool("recurse", recurse)
        unit = self._graphshard_unit
        limit_reductions(unit.runner, unit.inside(recurse=recurse), max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Run reduce-scatters in a process group of their own, so that gathers need not wait for them.

        All ranks call this together: the first call makes the group.
        """
        check_bool("enable", enable)
        check_bool("recurse", recurse)
        unit = self._graphshard_unit
        separate(unit.runner, unit.inside(recurse=recurse), enable=enable)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next call wait for an event, such as the end of the optimizer's step on another stream.

        Gathers start after what the current stream was given before in any case.

        Raises:
            ArgumentError: it is no event.
        """
        if not callable(getattr(event, "wait", None)):
            raise ArgumentError(f"event must be a torch.Event, got {brief(event)}.")
        self._graphshard_unit.runner.event = event


def _checked(comm: Any) -> Used:
    if not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise ArgumentError(
            f"comm must have FSDP2's allocate(size, *, dtype, device) and __call__(output_tensor, input_tensor, group, "
            f"...), got {brief(comm)}."
        )
    return Used(comm)


def _on(stream: torch.cuda.Stream | None, hook: Hook) -> Hook:
    """The hook on a stream."""
    if stream is None:
        return hook

    def on_stream(gradient: torch.Tensor) -> None:
        if not gradient.is_cuda:
            hook(gradient)
            return
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            hook(gradient)
        here.wait_stream(stream)

    return on_stream
