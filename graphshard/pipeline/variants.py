"""Programs that are made from others: backwards for other gradients, and all blocks of a program of few blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from graphshard.ir.graph import fake
from graphshard.ir.instantiate_blocks import instantiate_blocks
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.ir.strides import restride
from graphshard.lower.regions import list_calls
from graphshard.passes import AccumulateGradients
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import Partitioned, run_pass
from graphshard.utils.progress import collector_paused

log = logging.getLogger(__name__)


@collector_paused()
def rerun_backward(
    partitioned: Partitioned,
    program: Program,
    used: frozenset[str],
    accumulate: AccumulateGradients | None,
    observer: Observer,
    strides: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Program:
    """Make the backward for gradients through other outputs than the likely ones, or for microbatches.

    Args:
        used: names of the tangents that arrive.
        strides: of tangents, if they differ from the likely ones.
    """
    phase = partitioned.backward.clone()
    # Autograd adds up gradients of inputs in their strides.
    free = {value for value, slot in zip(phase.results, phase.outputs) if (slot.kind, slot.of) == ("grad", "input")}
    for node, slot in phase.slot_of().items():
        if slot.kind == "tangent" and slot.name in strides:
            like = fake(node)
            if not restride(node, like.new_empty_strided(like.shape, strides[slot.name]), free):
                log.info("the gradient of output %s is copied to other strides: sums may be added otherwise", slot.name)
    variant = replace(
        program,
        phases={"backward": phase},
        plan=None,
        history=[],
        established=set(partitioned.established),
        differentiated=phase.differentiated,
    )
    for step in partitioned.passes(used, accumulate):
        run_pass(step, variant, observer)
    observer.end(variant)
    return variant


def stamped(program: Program, plan: Plan | None) -> Program:
    """Return the program of all blocks from an outlined program of few blocks, which is used up.

    Args:
        plan: of all blocks.

    Raises:
        BlocksDifferError: blocks differ.
    """
    assert program.few is not None
    made = instantiate_blocks(program, program.few.repeats, program.few.params, program.few.saved)
    made.plan = plan
    list_calls(made)
    return made
