"""Seconds of a call on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def seconds_of(fn: Callable[[], Any], device: str, budget: float = 0.2) -> float:
    """Median of many calls, in about `budget` seconds; ranks call it as often as they like."""
    from torch.utils.benchmark import Timer  # takes a second to import

    for _ in range(3):
        fn()
    synchronize(device)
    timer = Timer("fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=budget).median)


def seconds_together(fn: Callable[[], Any], device: str, repeats: int) -> float:
    """Median of a number of calls that is the same on all ranks: for what they do together."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        fn()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def synchronize(device: str) -> None:
    """Wait for what the device has been told to do."""
    if device == "cuda":
        torch.cuda.synchronize()
