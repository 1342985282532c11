"""When collectives start and which travel together: the problem in the abstract, a simulator, bounds and solvers.

    problem     compute items in a chain, transfers that gate or follow them, one link; what a schedule of it is
    simulate    a schedule's time, exposed communication and memory, event by event
    rates       what no bucket beats, for bounds
    bounds      what no schedule can beat
    search      exact: every schedule of a small phase, except those that another is no worse than
    dynamic     buckets and the order on the link for a deep phase, linear in its depth
    coarse      fewer transfers where latencies are long
    place       launch positions of given buckets under a memory limit
    solve       which parameters stay gathered, and the best schedule found, with its bound
    build       from a program to its problem, and from a schedule to buckets and events
    footprint   what is alive in a program whatever the schedule
    planner     PlanByCost: a program in, a plan out

Only the last three know graphs and tensors.
"""

from graphshard.schedule.bounds import lower_bound
from graphshard.schedule.problem import (
    Bucketed,
    Chain,
    InfeasibleError,
    Link,
    Occurrence,
    Placement,
    Problem,
    Rate,
    Schedule,
    Transfer,
)
from graphshard.schedule.simulate import Exposed, Span, Timeline, simulate
from graphshard.schedule.solve import Solution, Solver

__all__ = [
    "Bucketed",
    "Chain",
    "Exposed",
    "InfeasibleError",
    "Link",
    "Occurrence",
    "Placement",
    "Problem",
    "Rate",
    "Schedule",
    "Solution",
    "Solver",
    "Span",
    "Timeline",
    "Transfer",
    "lower_bound",
    "simulate",
]
