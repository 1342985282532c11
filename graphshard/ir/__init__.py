"""What travels and how it is asked: programs, parameters, plans, graphs, printing, errors, and torch internals.

Everything else in the house is built on this room, and it imports nothing of the others. A `Program` (`program.py`)
holds FX graphs with the meaning of their inputs and outputs, the mesh (`mesh.py`), the parameter table (`params.py`;
`make_table.py` makes it), the plan (`plan.py`) and the history of what was done to it. `graph.py` has the questions
that passes ask of a graph, and the one way in which they insert a node. `transport.py` says how a parameter travels.
`printer.py` and `fold.py` make text of it. `errors.py` has every error that a user can meet.

* **A position in a plan is a number of compute nodes.** The compute order of a phase is fixed, so a plan is a list of
  buckets and a list of (start or wait, bucket, position). Casts, copies and views that only serve a collective are not
  compute (`layout.Layout`). So positions mean the same before and after bucketing, and a planner can decide everything
  before the graph is touched.
* **What can be changed at run time is part of a parameter's row** (`ParamRow.settings`), and so of a call's signature.
  A change captures another program, and going back finds the earlier one. Parameters that were gathered by hand are
  inputs of the program (`gathered:` instead of `param:`), which then has no gather for them in either phase.
* **Experts lie on a second mesh of the same ranks** (`Mesh.experts`), and a row says whether its parameter does
  (`ParamRow.on`). Passes ask the row which axis it travels along, so nothing else knows about experts. An axis of the
  one mesh that says where experts are would not do: with a tensor axis the two meshes share no axis at all.
* **Dtypes that gloo or NCCL cannot send travel as others of their size**, bit by bit (`transport.carrier`).
* **Dynamic sizes are inputs of their own** (`size:s0`). Every other size is computed from them where it is used, in
  each phase and each region, as views are. So no number is saved for backward or returned by a region, and regions have
  their symbols at hand. A graph prints `s0*s1` under names that do not depend on torch.
* **Values keep their number.** With numbers in order, an insertion would change every line behind it. With a number
  that a value keeps from its first stage on, a diff of two stages says what the pass did. Region keys use numbers in
  order.
* **Folding works on text.** So a dump is folded and unfolded without the program. Blocks are equal if their lines are,
  counted from the block's own number.
* **Importing registers a few operators** (`operators.py`): this rank's chunk, and copies between host and device.
  Nothing else happens at import.

Pitfalls:

* Do not call `int()` or `bool()` on sizes of fake values in passes, and do not compare them: torch records it as a
  condition. Use `torch_internals.hint`.
* A bucket boundary must not fall between an operator with several results and its `getitem`s: `graph.with_parts`.
"""
