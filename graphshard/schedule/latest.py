"""When the clocks of the dynamic program must have come to a state if the step is to end before so many seconds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from graphshard.schedule.deadlines import Jobs, jobs
from graphshard.schedule.problem import Chain, Link

_Numbers = NDArray[np.float64]


class Latest:
    """By gathers and reductions that were issued.

    Attributes:
        channel, compute: the latest clocks, of compute at the use of the next gather.
    """

    def __init__(self, chain: Chain, link: Link, below: float) -> None:
        gathers, reductions = jobs(chain, link)
        num = len(gathers.behind)
        self.together = gathers.together.tolist()
        self.seconds = [gathers.between(first) for first in range(num)]
        self.use = [*(below - gathers.behind).tolist(), below]
        # What is left of gathers as one bucket, and of reductions in buckets that keep to the end of the step.
        gathering = np.array([*(float(times[-1]) for times in self.seconds), 0.0])
        work = gathering[:, None] + reductions.work(below)[::-1]
        self.channel, self.compute = self._clocks(gathers, below, 1.0)
        if link.contention:
            # The same beside the link, before what contention takes for the work that is left.
            share, lost = 1 - link.contention, link.contention * np.where(np.isfinite(work), work, 0.0)
            beside = self._clocks(jobs(chain, link, share)[0], below, share)
            self.channel = np.minimum(self.channel, beside[0] - lost)
            self.compute = np.minimum(self.compute, beside[1] - lost)
        self.channel = np.minimum(below - work, self.channel)
        self.compute = np.broadcast_to(self.compute, work.shape)

    def _clocks(self, gathers: Jobs, below: float, share: float) -> tuple[_Numbers, _Numbers]:
        """Of the link if what is left of gathers comes next, and of compute at the use of the next one; as columns."""
        latest = (below - gathers.behind[i:] - share * self.seconds[i] for i in range(len(self.seconds)))
        channel = [*(float(times.min()) for times in latest), math.inf]
        return np.array(channel)[:, None], np.append(below - gathers.behind, below)[:, None]

    def may_gather(self, first: int, end: int) -> NDArray[np.bool_]:
        """By length, whether a bucket that begins with a gather can end in time, if all before travel as one."""
        found: NDArray[np.bool_] = self.together[first] + self.seconds[first][: end - first] <= self.use[first]
        return found
