"""Ahead-of-time compilation: `graphshard.export` writes `.gshard` and `.pt2` files, `graphshard.load` runs them.

`export.py` has the interface, `exporter.py` makes one program, `model_axes.py` those for meshes along which the model
communicates. `load.py` checks a file and shards the model. `pt2.py` writes PyTorch's own format. `store/` has the file.

* **The file holds executors, not schedules**: graphs of region calls and collectives. Binding one is a walk over a few
  nodes for each collective; to cut and hash regions at load would take as long as the passes.
* **Options are compared mesh by mesh**: the planner depends on the number of axes.
* **Backwards for accumulation are found by walking through a step of three microbatches**, with the `Accumulation`
  that the runtime asks: the state after one backward selects the next. Three are enough for any number, as the middle
  one does not change the state. On one rank nothing is left, so there is one.
* **CUDA on a machine without it**: `cross/driver.py` stands in for the GPU during capture and compilation, so
  decisions are a GPU's. Without a capability, regions are compiled later.
* **Code for GPUs is a graph and cubins**, not AOTInductor's library, which takes CUDA's headers to compile.
"""
