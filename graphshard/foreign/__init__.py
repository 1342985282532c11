"""Graphs that others made: collectives of any ATen graph, bucketed and reordered by cost.

    groups      process groups by name: how many ranks, how far apart, on which link
    effects     memory that values share, what writes it, and what must not be crossed
    messages    the collectives, and what cannot be scheduled
    windows     between which positions each may start, and where it is needed
    course      the same without tensors: items, legs and links; the clock of an itinerary
    build       from windows to a course, with costs
    bound       what no itinerary beats
    search      the planner of `schedule` for what it knows, and changes by the clock
    rewrite     from an itinerary to the graph; what memory an order of nodes takes
    report      what is returned
    schedule    `schedule_graph`

* **Compute keeps its order**, so random numbers, writes and assertions do, too. What moves is launches, waits, and what
  is light: views, casts and copies that are made of inputs or follow from a wait.
* **Windows say what is allowed, costs what is best.** A window holds what a leg is made of, what reads it, and writes
  of the same memory. Everything behind it searches freely.
* **Coalesced, never packed.** A bucket is one grouped launch without copies. A packed one adds its tensors up in
  another order on some libraries, and bits would change.
* **The planner's problem is a part of this one.** Its gathers start from inputs and its reductions end with the graph,
  on one link. Of a graph with more, each group's part is planned so, which gives buckets; the clock with all links
  decides.
* **The bound** is the largest of the compute, the work of each link, the longest path, and the planner's bound of each
  group's gathers and reductions.
* **Costs belong to nodes, not to positions**, so a schedule is not shorter for what it lets fuse.
"""
