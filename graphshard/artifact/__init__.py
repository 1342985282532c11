"""Compiled ahead of time: `.gshard` and `.pt2` files, what they must fit, and how they are loaded.

`export.py` writes a file, with `exporter.py` for each of its calls. `archive.py` is the checked zip, `members.py` what
is in it. `fingerprint.py` and `stored_options.py` say what must be the same where it is loaded.
`load.py` checks a file and shards the model, `library.py` has its programs. `plain.py` is PyTorch's own format.

* **The file holds executors, not schedules.** What loads is the graph of region calls and collectives. Binding it is a
  walk over a few nodes for each collective. Cutting and hashing regions at load would take as long as the passes.
* **Read once, checked, then interpreted.** The archive is in memory as a whole, so that nothing can change between the
  check and the use. No name in it is ever a path on the disk. The zip comment is the digest of all bytes before it,
  because headers and padding of a zip are covered by no member's checksum.
* **Options are compared where they have worked**, in the rows of the parameter table, the pipeline's passes and the
  units that were found, not as they were written. `units=["layers.*"]` equals the default that finds the same.
* **Options are compared mesh by mesh**: the planner depends on the number of axes.
* **Equal exports are equal files**: no dates, no times.
* **Which backwards accumulation takes is found by walking through a step of three microbatches**, with the
  `Accumulation` that the runtime asks: what one backward leaves decides which one is next. Three are enough for any
  number, as the middle one leaves what it takes. On one rank nothing is left, so there is one.
* **CUDA on a machine without it**: `ir/driver_internals.py` stands in for the GPU while the model is captured and its
  regions are compiled, so decisions are a GPU's. Without a capability regions are compiled later. Where a GPU of a
  kind that is known is, its kernels are compiled in the same way.
* **Code for GPUs is a graph and cubins**, not AOTInductor's library, which takes CUDA's headers to compile.

Pitfalls:

* zipfile does not look at local headers' times and flags: a flipped byte there is found by the digest alone.
"""
