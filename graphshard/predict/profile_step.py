"""Measure a compiled model: one real step on all ranks, or its regions one by one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphshard.cost.costs import Costs
from graphshard.cost.profile import Hardware, load_profile
from graphshard.errors import ArgumentError
from graphshard.ir.graph import fake
from graphshard.module.compiled_module import CompiledModule, compiled_module
from graphshard.module.runner import Runner
from graphshard.options.resolve import profile_here
from graphshard.options.validate import check_examples
from graphshard.predict._calibrate import seconds_of
from graphshard.predict.step_profile import RankStep, StepProfile, measured_spans, profile_of
from graphshard.runtime.bound_program import profiling
from graphshard.runtime.collective_launches import as_planned
from graphshard.runtime.process_groups import is_fake
from graphshard.runtime.step_recorder import Recording, clock_of, recording
from graphshard.schedule.memory_timeline import memory_of
from graphshard.schedule.timeline import estimate
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.argument_validation import (
    answer_of,
    check_count,
    check_function,
    check_number,
    check_seconds,
    path_of,
    write_given,
)
from graphshard.utils.files import read_file
from graphshard.utils.text import brief, users_class

# Limit of entries in a file of times; no model has that many regions.
_MOST_BYTES = 64 << 20


def measure_regions(
    model: nn.Module, *, budget: float = 0.2, show: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Return seconds of one call of each distinct region of a compiled model, by key, for `explain(..., measured=...)`.

    A region runs alone, on random inputs of its shapes: collectives that run at the same time would slow it down.
    Ranks that call this together include that effect.

    Args:
        model: compiled, and called or compiled with example inputs before.
        budget: seconds to spend on each region.
        show: receives progress.

    Raises:
        ArgumentError: the model is not compiled, or has no program yet.
    """
    check_number("budget", budget, positive=True)
    check_function("show", show, "print")
    if not isinstance(model, CompiledModule) or not model._graphshard.programs:
        raise ArgumentError(
            f"model: {brief(model)} has no program to measure. Call graphshard.compile(model, mesh, "
            "example_inputs=...) first, or the compiled model once."
        )
    if model._graphshard.library is not None:
        raise ArgumentError(
            f"model: {users_class(model).__name__} runs programs of a file. Measure a model that "
            "graphshard.compile compiled: its regions are the same."
        )
    compiled = model._graphshard.tracer.compiled
    regions = {key: region for program in model._graphshard.programs for key, region in program.regions.items()}
    found = {}
    for done, (key, region) in enumerate(regions.items()):
        show(f"region {done + 1} of {len(regions)}")
        values = []
        for traced in map(fake, region.module.graph.find_nodes(op="placeholder")):
            empty = torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device)
            # Zero is a valid index.
            values.append(empty.uniform_(-1, 1) if traced.is_floating_point() else empty.zero_())
        device = next((value.device.type for value in values), "cpu")
        with torch.no_grad():
            found[key] = seconds_of(lambda key=key, values=values: compiled[key](list(values)), device, budget)  # type: ignore[misc]
    return found


def save_measured(measured: Mapping[str, float], path: str | os.PathLike[str]) -> None:
    """Write times of regions as JSON: seconds by key.

    Raises:
        ArgumentError: `measured` is something else, or the file cannot be written.
    """
    check_seconds("measured", measured)
    write_given("path", path, json.dumps(dict(measured), indent=1) + "\n")


def load_measured(path: str | os.PathLike[str]) -> dict[str, float]:
    """Read a file of `save_measured`.

    Raises:
        ArgumentError: the file holds something else.
    """
    where = path_of("path", path, "a file that graphshard.profiling.save_measured wrote")
    try:
        data = json.loads(read_file(where, _MOST_BYTES))
        check_seconds("it", data)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"path: {where} holds no measured regions, seconds by region key: {error} Give a file that "
            "graphshard.profiling.save_measured wrote."
        ) from None
    return {key: float(value) for key, value in data.items()}


def metrics(model: nn.Module, *, hardware: Hardware | None = None) -> dict[str, float]:
    """Return numbers of a compiled model for a logger of experiments; nothing runs, and a second call takes no time.

    `captures`, `programs`, `regions` and `compile_s` grow where calls are captured again. `predicted_step_s` (forward
    and backward), `predicted_exposed_s` and `predicted_peak_bytes` are of the newest program. On CUDA,
    `allocated_bytes` and `peak_allocated_bytes` are of PyTorch's allocator.

    Args:
        model: compiled.
        hardware: the profile of the prediction, as for `profile_step`.

    Raises:
        ArgumentError: the model was not compiled.
    """
    runner = compiled_module(model)._graphshard
    programs, device = list(runner.programs), runner.tracer.spec.device
    regions = {key for program in programs for key in program.regions}
    seconds = sum(stage.seconds for program in programs for stage in program.history)
    found = {
        "captures": float(max((program.capture + 1 for program in programs), default=0)),
        "programs": float(len(programs)),
        "regions": float(len(regions)),
        "compile_s": float(seconds),
    }
    if programs and runner.library is None:
        costs = _costs(runner, hardware)
        known = programs[-1].__dict__.setdefault("_metrics", {})
        if costs.profile.hash not in known:
            planned = as_planned(programs[-1])
            step = estimate(planned, costs)
            numbers = (step.seconds, step.total("exposed"), memory_of(planned, step).peak_bytes)
            known[costs.profile.hash] = [float(number) for number in numbers]
        names = ("predicted_step_s", "predicted_exposed_s", "predicted_peak_bytes")
        found |= dict(zip(names, known[costs.profile.hash]))
    if device.type == "cuda" and torch.cuda.is_available():
        found["allocated_bytes"] = float(torch.cuda.memory_allocated(device))
        found["peak_allocated_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return found


def _costs(runner: Runner, hardware: Hardware | None) -> Costs:
    """Return the costs of a prediction: of the given profile, the one that `compile` planned with, or an H100."""
    options, spec = runner.tracer.options, runner.tracer.spec
    found = load_profile(hardware) if hardware is not None else profile_here(spec.device, options.hardware)
    profile = found if found is not None else load_profile(_ANY_HARDWARE)
    return Costs(profile, mesh=spec.mesh, fused=options.backend != "eager")


# The prediction's hardware where no profile is known, as in the report of a dump.
_ANY_HARDWARE = "h100"
_MOST_WARMUPS = 1000


def profile_step(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    warmup: int = 2,
    hardware: Hardware | None = None,
) -> StepProfile:
    """Measure a forward and a backward of a compiled model: regions, collectives, what compute waits for, and memory.

    Call it on all ranks of the mesh, with inputs of a call as in training; all get the same result. Where gradients are
    off (`torch.no_grad()`), it measures a forward alone. Submodules and methods that the loss calls are measured, too.

    Gradients are computed and discarded, so that the parameters' `grad` does not change, and hooks that step an
    optimizer do not run. Parameters do not change. Inputs, buffers, accumulated gradients and states of random number
    generators are restored. Other effects of forward, such as a counter in Python, are as after the same number of
    calls.

    On CUDA times are events in the stream of the compute, so that a wait is as long as the stream stands still, and
    memory comes from PyTorch's allocator, whose peak is reset for that. On CPUs times are the host's, and memory is
    shards, buffers, inputs, and the allocations beyond them that `torch.profiler` sees in one more step; None while
    another profiler runs.

    Args:
        model: compiled.
        args, kwargs: inputs of this rank's call.
        loss: returns the scalar that backward starts from, given the call's result; None takes the result itself.
        warmup: steps that run before, unmeasured; the first compiles, if that has not happened yet.
        hardware: the profile of the prediction, as for `explain`; None takes the one that `compile` planned with, or
            an H100 where there is none.

    Raises:
        ArgumentError: the model runs programs of a file, or has parameters that were gathered by hand; nothing has run
            then. Or there is no scalar to start backward from.
    """
    model = compiled_module(model)
    check_examples(model, args, {} if kwargs is None else kwargs, ("args", "kwargs"))
    if loss is not None:
        check_function("loss", loss, "lambda output: output.loss")
    check_count("warmup", warmup, most=_MOST_WARMUPS)
    runner = model._graphshard
    device, costs = runner.tracer.spec.device, _costs(runner, hardware)
    name = users_class(model).__name__
    if runner.library is not None:
        raise ArgumentError(
            f"model: {name} runs programs of a file, which have nothing to predict from. Profile a model that "
            "graphshard.compile compiled: its steps are the same."
        )
    by_hand = sorted(runner.unsharded.full.keys() - runner.unsharded.kept)
    if by_hand:
        raise ArgumentError(
            f"model: {name} has parameters that were gathered by hand ({brief(by_hand[0])}), which a backward would "
            "free. Call model.reshard() first."
        )
    step = _Step(model, tuple(args), dict(kwargs or {}), loss)
    with _restored(model, step.tensors), recording(clock_of(device)) as record:
        for _ in range(warmup):
            step.run()
        record.runs.clear()
        mine = _measure(step, record, runner.whole_mesh, device)
        runs = list(record.runs)
    return profile_of(name, _gathered(mine, runner.whole_mesh), runs, costs)


@dataclass
class _Step:
    """A step that can run many times; it works on detached inputs, so that their graphs are not freed."""

    model: CompiledModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None

    def __post_init__(self) -> None:
        detached = functools.cache(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad))
        self.args, self.kwargs = pytree.tree_map_only(torch.Tensor, detached, (self.args, self.kwargs))
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        self.tensors = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        self._sums = dict(self.model._graphshard.accumulation.sums)

    def run(self) -> None:
        """Run forward and backward; where gradients are off, forward."""
        accumulation = self.model._graphshard.accumulation
        accumulation.measured = True
        try:
            output = self.model(*self.args, **self.kwargs)
            if torch.is_grad_enabled():
                given = [*self.model.parameters(), *self.tensors]
                wanted = [tensor for tensor in given if tensor.requires_grad]
                torch.autograd.grad(self._scalar(output), wanted, allow_unused=True)
        finally:
            accumulation.measured = False
            accumulation.sums.clear()
            accumulation.sums.update(self._sums)

    def _scalar(self, output: Any) -> torch.Tensor:
        value = output if self.loss is None else answer_of("loss", self.loss, output)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad:
            return value.reshape(())
        given = "loss returned" if self.loss is not None else f"{users_class(self.model).__name__} returned"
        raise ArgumentError(
            f"loss: {given} {brief(value)}, and backward starts from a scalar that has a gradient. Give loss=, such as "
            "lambda output: output.loss, or measure a forward alone under torch.no_grad()."
        )


# Parts of a step for which its memory is kept.
_PARTS = 400


@contextlib.contextmanager
def _restored(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore inputs, buffers and random number generators at the end."""
    written = [tensor for tensor in (*model.buffers(), *inputs) if not tensor.is_inference()]
    before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in written]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, version, value in before:
                    if tensor._version != version:
                        tensor.copy_(value)


def _measure(step: _Step, record: Recording, mesh: DeviceMesh, device: torch.device) -> RankStep:
    """Measure the step on this rank; all start it together."""
    clock, on_cuda = record.clock, device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for group in mesh.get_all_groups():
        dist.barrier(group, device_ids=[device.index] if on_cuda and device.index is not None else None)
    clock.finish()
    began = clock.stamp()
    step.run()
    ended = clock.stamp()
    clock.finish()
    spans, seconds = tuple(measured_spans(record, began)), clock.seconds(began, ended)
    runs = list(record.runs)
    # What is freed while another stream uses it is no longer allocated, and still active.
    memory = () if on_cuda else _memory_on_host(step)
    peak = max((most for _, most in memory), default=None)
    if on_cuda:
        peak = torch.cuda.memory_stats(device)["active_bytes.all.peak"]
    record.runs[:] = runs  # without the step that measures memory
    return RankStep(dist.get_rank(), seconds, spans, peak, memory)


def _memory_on_host(step: _Step) -> tuple[tuple[float, int], ...]:
    """Return the bytes held before a step plus those allocated during it, over the share of one more step."""
    if profiling():
        step.run()  # as on the other ranks
        return ()
    held = [*step.model.parameters(), *step.model.buffers(), *step.tensors]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]
    before = sum(tensor.nbytes for tensor in local)
    found = [(0.0, 0), *_allocated(step.run)]
    first, last = found[min(1, len(found) - 1)][0], found[-1][0]
    most: dict[int, int] = {}  # in each of so many parts of the step
    for time, num_bytes in found:
        part = max(0, int((time - first) / (last - first or 1.0) * _PARTS))
        most[part] = max(most.get(part, 0), num_bytes)
    return tuple((part / _PARTS, before + num_bytes) for part, num_bytes in most.items())


def most_allocated(run: Callable[[], object]) -> int:
    """Return the most bytes at once that a function allocates on the CPU, beyond those that were there before."""
    return max((num_bytes for _, num_bytes in _allocated(run)), default=0)


def _allocated(run: Callable[[], object]) -> list[tuple[float, int]]:
    """Return times, and the bytes that a function has allocated on the CPU by then."""
    # Without acc_events, torch 2.11 warns that it clears events.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text("utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    sums = itertools.accumulate(change for _, change in changes)
    return [(time, num_bytes) for (time, _), num_bytes in zip(changes, sums)]


def _gathered(mine: RankStep, mesh: DeviceMesh) -> list[RankStep]:
    """Gather the step from all ranks of the mesh, ordered by rank; ranks of a fake group do not exist."""
    found = [mine]
    if is_fake(mesh):
        return found
    for group in mesh.get_all_groups():
        others: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(others, found, group)
        found = [step for steps in others for step in steps]
    return sorted(found, key=lambda step: step.rank)
