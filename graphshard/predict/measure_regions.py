"""Time the regions of a compiled model, one by one, on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping

import torch
from torch import nn

from graphshard.errors import ArgumentError
from graphshard.ir.graph import fake
from graphshard.module.compiled_module import CompiledModule
from graphshard.predict.calibrate import seconds_of
from graphshard.utils.argument_validation import check_function, check_number, check_seconds, path_of, write_given
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
        values = [_random_like(fake(node)) for node in region.module.graph.find_nodes(op="placeholder")]
        device = next((value.device.type for value in values), "cpu")
        with torch.no_grad():
            found[key] = seconds_of(lambda key=key, values=values: compiled[key](list(values)), device, budget)  # type: ignore[misc]
    return found


def _random_like(traced: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the traced shape and strides; integers are zero, which is a valid index."""
    empty = torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device)
    return empty.uniform_(-1, 1) if traced.is_floating_point() else empty.zero_()


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
    where = path_of("path", path, "a file that graphshard.save_measured wrote")
    try:
        data = json.loads(read_file(where, _MOST_BYTES))
        check_seconds("it", data)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"path: {where} holds no measured regions, seconds by region key: {error} Give a file that "
            "graphshard.save_measured wrote."
        ) from None
    return {key: float(value) for key, value in data.items()}
