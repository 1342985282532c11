"""Between which seconds a step lies, as far as constants of the machine are not known well.

The schedule is fixed. Each number of the profile that has a range is replaced by samples, and regions, collectives and
the clock are evaluated once for all of them. What the model leaves out is not in it: docs/explain.md says how far
predictions of published steps were off.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphshard.cost.costs import Costs
from graphshard.cost.multiplications import Scalar
from graphshard.cost.samples import sampled
from graphshard.explain.training import Training
from graphshard.ir.program import Program
from graphshard.schedule.clock import run
from graphshard.schedule.timeline import timed_events

# Of the samples: one in ten is below, one in ten is above.
PERCENTILES = (10, 90)


def step_range(
    program: Program, costs: Costs, *, trained: int, training: Training, middle: float, microbatches: int = 1
) -> tuple[float, float]:
    """Seconds between which four of five samples of a step lie; `middle` twice if no constant has a range.

    Args:
        trained: bytes of the shards of trained parameters.
        training: the optimizer, and what it follows.
        middle: what the constants themselves give.
        microbatches: forwards and backwards of a step.
    """
    if not costs.profile.ranges:
        return middle, middle
    drawn = replace(costs, profile=sampled(costs.profile))
    events = timed_events(program, costs, drawn)
    step = microbatches * run(events, drawn.profile.contention).step(events)
    step += (microbatches - 1) * drawn.addition(trained) + training.update_seconds(drawn, program.mesh, trained)
    return between(step, middle)


def between(samples: Scalar, middle: float) -> tuple[float, float]:
    """The percentiles of samples, and what the constants themselves give between them."""
    low, high = np.percentile(samples, PERCENTILES)
    return min(float(low), middle), max(float(high), middle)
