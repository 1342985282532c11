"""What the regions of a file are compiled with, and for which GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from graphshard.artifact.exporter import operators_only
from graphshard.errors import ArgumentError
from graphshard.ir.driver_internals import package, stand_in
from graphshard.ir.gpus import CAPABILITIES, USUAL, Capability
from graphshard.lower.kernels import dotted
from graphshard.lower.regions import Compiler
from graphshard.utils.text import brief


def capabilities_given(capability: Any, device: torch.device) -> list[Capability]:
    """The compute capabilities to compile for; [] is what is here, or none."""
    if capability is None:
        return []
    several = isinstance(capability, (list, tuple)) and all(isinstance(item, (list, tuple)) for item in capability)
    wanted = [tuple(item) for item in capability] if several else [capability]
    known = ", ".join(map(str, CAPABILITIES))
    for item in wanted:
        if not isinstance(item, (list, tuple)) or tuple(item) not in CAPABILITIES:
            raise ArgumentError(
                f"capability must be one of {known}, or a list of them, got {brief(item)}. Export where a GPU of "
                "another kind is, or leave capability out: `graphshard finish FILE` compiles there."
            )
    if device.type != "cuda" or torch.cuda.is_available():
        what = "there is a GPU here, which is compiled for" if device.type == "cuda" else "device is 'cpu'"
        raise ArgumentError(
            f"capability={brief(capability)} is for device='cuda' on a machine without a GPU, and {what}. Leave it "
            "out, or hide the GPU (CUDA_VISIBLE_DEVICES=)."
        )
    if not wanted:
        raise ArgumentError(f"capability is an empty list; such are {known}.")
    return list(dict.fromkeys((int(major), int(minor)) for major, minor in wanted))


def kinds_here(device: torch.device) -> list[Capability]:
    """The compute capability of the GPU that is here, if code for it can be put into a file; [] otherwise."""
    found = torch.cuda.get_device_capability() if device.type == "cuda" and torch.cuda.is_available() else None
    return [found] if found in CAPABILITIES else []


def without_gpu(device: torch.device, targets: list[Capability]) -> Iterator[contextlib.AbstractContextManager[None]]:
    """What stands in for a GPU while a program for one is made, if there is none."""
    if device.type == "cuda" and not torch.cuda.is_available():
        yield stand_in(targets[0] if targets else USUAL, among=targets)


def compiler_for_file(
    backend: str, device: torch.device, compile_regions: bool | None, targets: list[Capability]
) -> tuple[Compiler, bool]:
    """What regions are compiled with, and whether those without code are to be compiled on the target."""
    targets = targets or kinds_here(device)
    if targets and backend != "eager" and compile_regions is not False:
        package("triton")
        from graphshard.lower import cross_internals  # takes seconds to import

        return cross_internals.compiler_of(targets), False
    on_cpu = device.type == "cpu"
    if compile_regions and not on_cpu and not targets:
        raise ArgumentError(
            f"compile_regions=True needs a GPU of compute capability {', '.join(map(dotted, CAPABILITIES))} to compile "
            "for, and there is none here: say which one, as in capability=(9, 0). Without it the file holds programs, "
            "plans and graphs; `graphshard finish FILE` on the target machine adds the code."
        )
    if backend == "eager":
        return operators_only, False
    if compile_regions is False or not on_cpu:
        return operators_only, True
    from graphshard.lower import inductor  # takes seconds to import

    return inductor.package_all, False
