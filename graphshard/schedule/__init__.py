"""When collectives start and which travel together: the problem in the abstract, a simulator, bounds and solvers.

    problem     compute items in a chain, transfers that gate or follow them, links; what a schedule of it is
    together    transfers in one bucket: what they cost, whether they may be packed, where they may start
    simulate    a schedule's time, exposed communication and memory, event by event
    own         what the model itself communicates: on the link, where it stands
    rates       what no bucket beats, for bounds
    deadlines   the least work of the link with which gathers alone, or reductions alone, keep to a step's time
    legs        what is certain of reductions with two legs
    bounds      what no schedule can beat
    budget      what a search may do, in steps that are the same on all machines
    simple      schedules that need no search
    states      where a schedule of a small phase may stand, and what may happen next
    exact       every schedule of a small phase, except those that another is no worse than
    deep        buckets and the order on the link for a deep phase; exact without a limit, window and copies
    coarse      fewer transfers: joined where latencies are long, or cut at given places only
    place       launch positions of given buckets under a memory limit, as early as their order allows
    delay       gathers moved behind, as late as costs nothing
    phase       the best schedule of one phase that a budget finds, and what is proven of it
    solve       which parameters stay gathered, and all phases
    ways        which axes a phase's collectives run over, and what its link is
    build       from a program to its problem, and from a schedule to buckets and events
    shared      which values have the memory of others
    footprint   what is alive in a program whatever the schedule
    by_unit     PlanByUnit: FSDP2's order, which needs no costs
    by_cost     PlanByCost: a program in, the plan that costs say is best out
    peak        bytes that a program takes with a plan, which may be another rank's
    agreed      plans that are the same on all ranks
    clock       what a lowered program does, and when; the same for numbers and expressions
    timeline    the same as steps to show
    memory      what memory its values hold meanwhile
    dag         the timeline as a graph: critical path, slack, what delays a wait

The first eighteen know neither graphs nor tensors.

Which plan is taken:

* **FSDP2's order is the first candidate.** The best plan of the same buckets must beat it by 2 % and a millisecond for
  each unit, and the best of all must beat that by as much again. Positions of other plans differ from block to block,
  so regions of equal blocks are no longer equal and lowering grows with depth. `PlanByCost` itself (worth 0) looks for
  the shortest step only.
* **Without a limit, the peak of FSDP2's order is the limit**: a default must not take more memory than what it
  replaces.
* **A known plan serves other sizes**, because a rank may capture one alone and could not ask the others. Its positions
  are fitted to what that size computes; its buckets and the order of its events stay.
* **Each phase has a link of its own, with up to two channels**: collectives whose axes share a node's link, or the
  network, queue. Where parameters are replicated a reduction has a second leg, which carries what one bucket reduced: a
  packed reduction's buffer is all-reduced as it is. FSDP2's order continues a reduction when the next one starts.
* **Transfers of experts have costs of their own**, on the same channels, and share no bucket with others. Where their
  axes lie on another link, or a reduction has other legs, programs are planned by unit (with `memory_limit=` it is an
  error).
* **Of pieces of different sizes the first rank has the largest, and plans for all**: on an expert axis ranks with other
  pieces gather parameters together, so they must run one order. Positions are fitted between the model's own
  collectives, and under a limit every rank counts what it takes (`peak`). Programs that gather other parameters again,
  as torch computes products with one expert in a way of its own, are planned by unit.
* **What the model communicates is part of the problem, and not of the schedule.** It stays where it stands, takes the
  channel of its axis and queues there. The dynamic program of deep phases counts it as compute; `place` tries to start
  what would hold it up behind it, and the simulator and the exact search know all of it.
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
* **Exact where small, a dynamic program where deep.** `exact` explores every sequence of events with dominance, and
  equals exhaustive search. `deep` keeps pairs of clocks (channel, compute) for each number of gathers and reductions
  issued. That is exact without a limit and with copies on one channel: a past clock of compute can be replaced by "now
  minus the items between", because if compute was held up in between, the channel is later anyway.
* **Under a memory limit, positions decide.** `earliest_launches` gives each gather its first feasible position from
  what every schedule needs. `place` then follows the order, and waits for reductions only when they have ended or
  memory forces it. `delay` moves gathers behind where it costs nothing, so that an unlimited plan does not gather the
  model at once.
* **The bound asks each kind by itself how much work of the link keeps to a step's time.** For gathers alone that is
  exact, for any concave cost, and what is shortest for one kind tells where buckets of both may be cut. One line below
  the cost (a latency and a rate) made the bound 5 to 10 % loose on 1,024 ranks, where short and long messages have
  other protocols. What gathers and reductions take from each other is not in it: up to 6 % for small models on 1,024
  ranks. `deep` proves the rest, if its budget is enough: it looks for a schedule that is 2 %, 0.5 % and 0.1 % shorter,
  with copies for nothing, and leaves out only what cannot be that short.
* **Rough first.** With at most 24 places where buckets may be cut, every bucket and every order is searched in tenths
  of a second; around the cuts that were found it is repeated. A window of eight transfers, as before, missed buckets of
  half a model, which are best where latencies are long: plans were up to 7 % longer.
* **Searches end after a number of steps, never of seconds**: ranks and machines must find the same plan. What was found
  by then stands.

* **Of two legs `exact` knows all, the other searches one at a time**: the first alone, the second alone, and both as
  one. None of them is exact then, so `place` tries second legs as soon as the first have ended, and at the end. While
  compute is held up by a gather, second legs of what ends before that start, and reductions are tried before gathers
  that are needed later. The proof leaves second legs out, which is true and weak; `legs` has the rest of the bound: of
  second legs alone, each behind the first one of its bucket (`Jobs.lead`).

Pitfalls:

* Which of two states of `exact` is better depends on the buckets whose second legs are still to come, not on clocks
  alone: those are part of what is compared.
* A packed reduction behind the last item of a phase needs its buffer, too, under a memory limit.
"""

from graphshard.schedule.bounds import lower_bound
from graphshard.schedule.own import Own
from graphshard.schedule.problem import (
    Bucketed,
    Chain,
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
    "Link",
    "Occurrence",
    "Own",
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
