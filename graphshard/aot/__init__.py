"""Ahead-of-time compilation: `graphshard.export` writes `.gshard` and `.pt2` files, `graphshard.load` runs them.

`export.py` has the interface, `exporter.py` makes one program, or a file of PyTorch's own format. `load.py` checks a
file and shards the model. `store/` has the file.

* **The file holds executors, not schedules**: graphs of region calls and collectives. Binding one is a walk over a few
  nodes for each collective; to cut and hash regions at load would take as long as the passes.
* **Options are compared mesh by mesh**: the planner depends on the number of axes.
* **Backwards for accumulation are found by walking through a step of three microbatches**, with the `Accumulation`
  that the runtime asks: the state after one backward selects the next. Three are enough for any number, as the middle
  one does not change the state. On one rank nothing is left, so there is one.
* **Code for GPUs is a graph and cubins**, not AOTInductor's library, which takes CUDA's headers to compile.
"""
