"""Measure this machine, and the regions and steps of a compiled model on it.

`calibrate.py` writes a profile, from what `chip.py` and `links.py` measure. `regions.py` times the regions of a model,
one by one. `step.py` measures a whole step where it runs: executors run code that is the same but for a clock around
each line (`runtime/recording.py`), so that numerics are the same and steps that nobody measures pay nothing.
`spans.py` has what was measured and what was predicted in one form, and `step_profile.py` puts both side by side.

* **The slowest rank counts, and all ranks measure at once**, as in training.
* **When a collective arrives is not known** if compute does not wait for it. So it is given until the end of its wait,
  as the most that it took. What compute waits is known, and is what costs.
* **On CPUs the best of three rounds is taken**, as machines that others use are slow at times.

Pitfalls:

* `torchrun` sets OMP_NUM_THREADS=1. A profile made under it is of one thread for each rank (recorded in `made`).
* float16 products on a CPU without float16 units take 100 times as long as float32: series of sizes stop early.
"""
