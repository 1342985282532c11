"""Measure this machine, and the regions of a compiled model on it.

`calibrate.py` writes a profile, from what `chip.py` and `links.py` measure. `regions.py` times the regions of a model.

* **The slowest rank counts, and all ranks measure at once**, as in training.
* **On CPUs the best of three rounds is taken**, as machines that others use are slow at times.

Pitfalls:

* `torchrun` sets OMP_NUM_THREADS=1. A profile made under it is of one thread for each rank (recorded in `made`).
* float16 products on a CPU without float16 units take 100 times as long as float32: series of sizes stop early.
"""
