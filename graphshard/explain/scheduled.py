"""Kernels of regions as Inductor's scheduler makes them for a GPU, as costs count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from graphshard.cost.kernels import Work, operations_of, work_of
from graphshard.cost.multiplications import is_multiplication
from graphshard.cost.profile import Profile
from graphshard.ir.gpus import USUAL, Capability, capability_of
from graphshard.ir.graph import is_alias, is_part
from graphshard.ir.program import Region

if TYPE_CHECKING:
    from graphshard.lower.scheduler_internals import FusedKernel

# By the region and the GPU it is for; None where Inductor makes no kernels of it.
Scheduled = dict[tuple[str, Capability], tuple[Work, ...] | None]


def schedule_regions(
    regions: Mapping[str, Region], profile: Profile, known: Scheduled, show: Callable[[str], None]
) -> dict[str, tuple[Work, ...]]:
    """Kernels by the keys of regions, of those that Inductor compiles; equal ones are asked about once.

    Args:
        profile: the GPU by its multiprocessors, and any other if there is none with so many.
        known: what was found before; what is new is added.
        show: told what is being done.
    """
    capability = capability_of(int(profile.units)) or USUAL
    new = [region for key, region in regions.items() if (key, capability) not in known]
    if new:
        from graphshard.lower import scheduler_internals  # takes seconds to import

        for number, region in enumerate(new, start=1):
            show(f"schedule kernels, {number} of {len(new)}")
            kernels = scheduler_internals.fused_kernels(region, capability)
            known[region.key, capability] = None if kernels is None else tuple(map(_work, kernels))
    return dict(_found(regions, known, capability))


def _found(
    regions: Mapping[str, Region], known: Scheduled, capability: Capability
) -> Iterator[tuple[str, tuple[Work, ...]]]:
    for key in regions:
        works = known[key, capability]
        if works is not None:
            yield key, works


def _work(kernel: FusedKernel) -> Work:
    """A product or an attention of a library as the rules have it; other code by its bytes and operations."""
    products = [node for node in kernel.operators if is_multiplication(node)] if kernel.extern else []
    if products:
        return work_of(products[:1], fused=False)[0]
    computing = [node for node in kernel.operators if not (is_alias(node) or is_part(node))]
    return Work("pointwise", 0, operations_of(computing), kernel.num_bytes, "float32")
