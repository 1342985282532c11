"""Scheduling of collectives: when each starts and which travel together, from the abstract problem to plans.

    problem                  compute items in a chain, transfers that gate or follow them, buckets, links, schedules
    simulator                the state of a phase after some events, and a schedule's time and memory
    bounds                   seconds that no schedule beats
    placement                schedules that need no search; positions of given buckets under a memory limit
    dynamic_program          buckets and their order on the link
    exact_search             every schedule of a small phase
    solver                   the best schedule of a problem that a budget finds, and what is proven of it

    graph_facts              layouts, collectives and other facts of graphs, kept while these do not change
    template_schedule        chains and plans of all blocks, of programs that have few of many equal ones
    fsdp2_order              PlanByUnit: FSDP2's order, which needs no costs
    axis_links               axes of a phase's collectives, and the link that they make
    program_memory           values that share memory, and bytes that are alive whatever the schedule
    build_problem            from a program to its problem
    planner                  PlanByCost: a program in, the plan with the shortest predicted step out
    rank_consistent_planner  plans that are the same on all ranks
    clock                    events of a lowered program, their times as numbers or expressions, and as a graph
    timeline                 the same as steps to show, and the memory that values hold meanwhile
    stages                   turns of a pipeline's stages

    graph_collectives        collectives and process groups of external graphs
    reordering_windows       between which positions each may start, and where it is needed
    graph_problem            the problem of an external graph; schedules run through its clocks and written into it
    graph_search             the shortest schedule found, and the bound
    schedule_graph           `schedule_graph`

The first seven know neither graphs nor tensors.

Which plan is taken:

* **FSDP2's order is the first candidate.** The best plan of the same buckets must beat it by 2 % and a millisecond for
  each unit, and the best of all must beat that by as much again. Positions of other plans differ from block to block,
  so regions of equal blocks are no longer equal and lowering grows with depth. `PlanByCost` itself (worth 0) looks for
  the shortest step only.
* **Without a limit, the peak of FSDP2's order is the limit**: a default must not take more memory than what it
  replaces.
* **A known plan serves other sizes**, because a rank may capture one alone and could not ask the others. Its positions
  are fitted to the compute of that size; its buckets and the order of its events stay.
* **Each phase has its link, with up to two channels**: collectives whose axes share a node's link, or the network,
  queue. Where parameters are replicated a reduction has a second leg, which carries what one bucket reduced: a packed
  reduction's buffer is all-reduced as it is. FSDP2's order continues a reduction when the next one starts.
* **Transfers of experts have separate costs**, on the same channels, and share no bucket with others. Where their axes
  lie on another link, or a reduction has other legs, programs are planned by unit; with `memory_limit=` that is an
  error.
* **For pieces of different sizes the first rank has the largest, and plans for all**: on an expert axis ranks with
  other pieces gather parameters together, so they must run one order. Positions are fitted between the model's own
  collectives, and under a limit every rank counts what it takes. Programs that gather other parameters again, as torch
  computes products with one expert in another way, are planned by unit.
* **The model's own collectives are part of the problem, and not of the schedule.** They stay where they stand, take the
  channel of their axis and queue there. The dynamic program counts them as compute; `place` tries to start what would
  hold one up after it, and the simulator knows all of it.
* **Backwards for other tangents are planned by unit**, as a rank may need one alone and could not ask the others.
* **A plan holds what it was made with** (name and hash of the profile, network), inside `Plan.hash`. Costs come from a
  file.
* **Reductions are packed on gloo, coalesced on NCCL.** Gloo's order of summation depends on where in the buffer an
  element lies: on 3 ranks separate reductions differ from FSDP2's one buffer in the last bit of a few elements. Gloo
  also runs a coalesced reduction tensor by tensor. On NCCL the copies cost more than they give, and only small tensors
  are packed.
* On CPUs a tensor is packed if its copy takes less than a tensor of a coalesced collective costs (0.7 ms on gloo).

How it is found:

* **Phases are scheduled one by one.** Each waits for what it starts, so the times add up. What couples them is memory
  and what stays gathered. A step captured whole, with the optimizer inside, would be one chain.
* **Items are the compute between positions at which something is needed or ready.** Transfers are atoms: parameters of
  a unit are joined until they take as long as a latency. Neither is finer than what can gain.
* **One dynamic program** keeps pairs of clocks (channel, compute) for each number of gathers and reductions issued. It
  is exact without a limit and without copies on one channel: a past clock of compute can be replaced by "now minus the
  items between", because if compute was held up in between, the channel is later anyway. With
  a limit, copies or two channels, phases of at most a dozen transfers are searched exactly (`exact_search.py`): without
  it 10 % of random small problems under a limit are not solved best, at worst 24 % too long.
* **Rough first.** With at most 24 places where buckets may be cut, every bucket and every order is searched in tenths
  of a second; around the cuts that were found it is repeated. A third search changed no gap of the table.
* **Under a memory limit, positions decide.** The dynamic program gives each gather its first feasible position from
  what every schedule needs. `place` then follows the order, and waits for reductions only when they have ended or
  memory forces it. `delay` moves gathers later where it costs nothing, so that an unlimited plan does not gather the
  model at once.
* **The bound asks each kind by itself how much work of the link keeps to a step's time.** For gathers alone that is
  exact, for any concave cost, and the cuts that are shortest for one kind tell where buckets of both may be cut. One
  line below the cost made it 5 to 10 % loose on 1,024 ranks, where short and long messages have other protocols. What
  gathers and reductions take from each other is not in it: up to 6 % for small models. The dynamic program proves the
  rest, if its budget is enough: it looks for schedules that are 2 % to 0.1 % shorter, with copies for nothing.
* **Searches end after a number of steps, never of seconds**: ranks and machines must find the same plan. What was found
  by then stands.
* **Of two legs the dynamic program sees one at a time**: the first alone, the second alone, and both as one. None of
  them is exact then, so `place` tries second legs as soon as the first have ended, and at the end, and reductions
  before gathers that are needed later. The proof leaves second legs out, which is true and weak; the bound has second
  legs alone, each after the first one of its bucket (`Jobs.lead`).
* A packed reduction after the last item of a phase needs its buffer, too, under a memory limit.

External graphs (`graphshard.schedule_graph`):

* **Compute keeps its order**, so random numbers, writes and assertions do, too. What moves is launches, waits, and what
  is light: views, casts and copies that are made of inputs or follow from a wait.
* **Windows say what is allowed, costs what is best.** A window comes of the inputs and readers of a collective, and of
  writes to their memory. Everything after it searches freely.
* **Coalesced, never packed.** A bucket is one grouped launch without copies. A packed one adds its tensors up in
  another order on some libraries, and bits would change.
* **One solver, one clock.** Of each group, gathers that start from inputs and reductions that end with the graph are a
  `Chain`, which `Solver` plans and `chain_bound` bounds. That gives buckets; the clocks of all links decide.
* **Costs belong to nodes, not to positions**, so a schedule is not shorter for what it lets fuse.
"""

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
from graphshard.schedule.solver import Solution, Solver

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
