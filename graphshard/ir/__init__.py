"""The intermediate representation: programs, mesh, parameter specs, plans, graphs, and their text.

A `Program` (`program.py`) holds FX graphs with the meaning of their inputs and outputs, the mesh (`mesh.py`), the
parameter table (`param_table.py`), the plan (`plan.py`) and a history of passes. `graph.py` has the queries that passes
make, and the functions that insert nodes. `transport.py` defines how a parameter travels. `printer.py` and
`collapse_repeats.py` turn a program into text.

* **A position in a plan is a number of compute nodes.** The compute order of a phase is fixed, so a plan is a list of
  buckets and a list of (start or wait, bucket, position). Casts, copies and views that only serve a collective are not
  compute (`collective_regions.py`). So positions are the same before and after bucketing, and a planner decides
  everything before a pass changes the graph.
* **Settings that users change at run time are part of a parameter's spec** (`ParamSpec.settings`), and so of a call's
  signature. A change captures another program, and changing back finds the first one. Parameters gathered by hand are
  inputs of the program (`gathered:` instead of `param:`) and have no gather in either phase.
* **Experts use a second mesh of the same ranks** (`Mesh.experts`), and a spec says whether its parameter does
  (`ParamSpec.on`). Passes ask the spec for its axes, so no other code knows about experts. One mesh with an axis for
  experts does not suffice: with a tensor axis the two meshes share no axis.
* **Dtypes that gloo or NCCL cannot send travel as others of the same size**, bit by bit (`transport.carrier`).
* **Dynamic sizes are inputs** (`size:s0`). Every other size is computed from them where it is used, in each phase and
  region, like a view. So sizes are neither saved for backward nor returned by regions. A graph prints `s0*s1` under
  names that do not depend on torch.
* **Values keep their number.** With consecutive numbers an insertion would change all later lines. With a number that a
  value keeps from its first stage, a diff of two stages shows the work of the pass. Keys of regions use consecutive
  numbers.
* **Repeated blocks are a record** (`repeats.py`), which the capture sets and the program carries to lowering as
  `Program.few`. `repeat_windows.py` finds its groups in graphs and in lists, and `instantiate_blocks.py` copies them.
* **Collapsing works on text**, so it needs no program. Blocks are equal if their lines are, with values numbered
  relative to the block.
* **Importing registers a few operators** (`operators.py`): a rank's chunk, and copies between host and device. There
  are no other side effects.

Pitfalls:

* Do not call `int()` or `bool()` on sizes of fake values in passes, and do not compare them: torch records a guard.
  Use `torch_compat.symbolic_sizes.hint`.
* A bucket boundary must not fall between an operator with several results and its `getitem`s: `graph.with_parts`.
"""
