"""Scheduling of collectives: when each starts and which travel together, from the abstract problem to plans.

`problem.py`, `simulator.py`, `bounds.py` and the searches of `_solver.py` know neither graphs nor tensors.
`build_problem.py` makes a problem of a program, `planner.py` a plan of its solution, and `fsdp2_order.py` one without
costs. `clock.py` and `timeline.py` say when a lowered program does what. `schedule_graph.py` schedules external graphs.

Which plan is taken:

* **FSDP2's order is the first candidate.** The best plan of the same buckets must beat it by 2 % and a millisecond for
  each unit, and the best of all must beat that by as much again: positions of other plans differ from block to block,
  so regions of equal blocks are no longer equal and lowering grows with depth. `PlanByCost` itself (worth 0) looks for
  the shortest step only.
* **Without a limit, the peak of FSDP2's order is the limit**: a default must not take more memory than what it
  replaces.
* **A known plan serves other sizes**, because a rank may capture one alone and could not ask the others. Its positions
  are fitted to the compute of that size; its buckets and the order of its events stay. For the same reason backwards
  for other tangents are planned by unit.
* **Each phase has its link, with up to two channels**: collectives whose axes share a node's link, or the network,
  queue. Where parameters are replicated a reduction has a second leg, which carries what one bucket reduced. FSDP2's
  order continues a reduction when the next one starts.
* **Transfers of experts have separate costs**, on the same channels, and share no bucket with others. Where their axes
  lie on another link, or a reduction has other legs, programs are planned by unit; with `memory_limit=` that is an
  error.
* **For pieces of different sizes the first rank has the largest, and plans for all**: on an expert axis ranks with
  other pieces gather parameters together, so they must run one order. Positions are fitted between the model's own
  collectives, and under a limit every rank counts what it takes.
* **The model's own collectives are part of the problem, and not of the schedule.** They stay where they stand, and
  queue on the channel of their axis. The dynamic program counts them as compute; `place` tries to start what would
  hold one up after it.
* **Reductions are packed on gloo, coalesced on NCCL.** Gloo's order of summation depends on where in the buffer an
  element lies: on 3 ranks separate reductions differ from FSDP2's one buffer in the last bit of a few elements. Gloo
  also runs a coalesced reduction tensor by tensor (0.7 ms each). On NCCL only the copies of small tensors pay.

How it is found:

* **Phases are scheduled one by one**, as each waits for what it starts. What couples them is memory and what stays
  gathered.
* **Items are the compute between positions at which something is needed or ready.** Transfers are atoms: parameters of
  a unit are joined until they take as long as a latency. Neither is finer than what can gain.
* **One dynamic program** keeps pairs of clocks (channel, compute) for each number of gathers and reductions issued. It
  is exact without a limit and without copies on one channel. Otherwise phases of at most a dozen transfers are searched
  exactly: without that, 10 % of random small problems under a limit are not solved best, at worst 24 % too long.
* **Rough first.** With at most 24 places where buckets may be cut, every bucket and every order is searched in tenths
  of a second; around the cuts that were found it is repeated.
* **Under a memory limit, positions decide.** The dynamic program gives each gather its first feasible position from
  what every schedule needs. `place` follows the order, and waits for reductions only when they have ended or memory
  forces it. `delay` moves gathers later where it costs nothing.
* **The bound asks each kind by itself how much work of the link keeps to a step's time.** For gathers alone that is
  exact, for any concave cost. What gathers and reductions take from each other is not in it: up to 6 % for small
  models. The dynamic program proves the rest, if its budget is enough: it looks for schedules that are 2 % to 0.1 %
  shorter, with copies for nothing.
* **The timeline's graph (`clock.TimelineDag`) is two lists, not a networkx graph**: events are in topological order, so
  each query is one loop. Critical path and slack of 126 layers (4,296 events) take 4 ms, with networkx 27 ms.
* **Searches end after a number of steps, never of seconds**: ranks and machines must find the same plan.
* **Of two legs the dynamic program sees one at a time**: the first alone, the second alone, and both as one. None of
  them is exact then, so orders are also tried with reductions as soon as they are ready. The proof leaves
  second legs out, which is true and weak; the bound has second legs alone, each after the first one of its bucket.

External graphs (`graphshard.schedule_graph`):

* **Compute keeps its order**, so random numbers, writes and assertions do, too. What moves is launches, waits, and what
  is light: views, casts and copies that are made of inputs or follow from a wait.
* **Windows say what is allowed, costs what is best.** A window comes of the inputs and readers of a collective, and of
  writes to their memory.
* **Coalesced, never packed.** A packed bucket adds its tensors up in another order on some libraries.
* **Buckets and bounds come from the same solver.** Of each group, gathers that start from inputs and reductions that
  end with the graph are a `Chain`, which `Solver` plans and `chain_bound` bounds; the clocks of all links decide.
* **Costs belong to nodes, not to positions**, so a schedule is not shorter for what it lets fuse.
"""

from graphshard.schedule._solver import Solution, Solver
from graphshard.schedule.bounds import lower_bound
from graphshard.schedule.problem import (
    Bucketed,
    Chain,
    FixedCollective,
    Link,
    Occurrence,
    Placement,
    Problem,
    Rate,
    Schedule,
    Transfer,
)
from graphshard.schedule.simulator import Simulation, simulate

__all__ = [
    "Bucketed",
    "Chain",
    "FixedCollective",
    "Link",
    "Occurrence",
    "Placement",
    "Problem",
    "Rate",
    "Schedule",
    "Simulation",
    "Solution",
    "Solver",
    "Transfer",
    "lower_bound",
    "simulate",
]
