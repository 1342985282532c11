"""Prediction of a training step without the machine, and measurement of a step on it.

`study.py` captures a model once and schedules it once for each mesh. `step_prediction.py` makes an `Explanation` of a
lowered program and costs; `_pipeline_stages.py` and `_pipeline_schedule.py` do so for meshes with pipeline stages.
`_symbolic_cost.py` states the same in the symbols of the inputs. `search.py` ranks many predictions, `what_if.py`
predicts changes, `answers.py` shows them. `_calibrate.py` writes a profile of this machine, and `profile_step.py`
measures a whole step, or times regions one by one.

* **The bound of an explanation** is the schedule's bound, minus the compute that regions save compared with the items
  for which it was found: a step gets shorter by at most that.
* **Symbolic sizes are fitted, not traced.** The graph is captured at 2^k + 1 sizes. Each dim becomes the polynomial
  through them that is linear in each symbol, and it is checked at one more size. The model need not export with dynamic
  shapes, so what specializes on sizes still works, and the graph that is costed is the one that runs. The price is more
  captures.
* **A change is a separate prediction**, not an estimate from the base's timeline: the planner may do something else.
  Studies share what cannot differ: captures by inputs, units and precision, programs by the options that shape them.
  Programs of other meshes are freed, as each is as large as the base's.
* **A formula is a straight line of definitions** (regions, buckets, clock), evaluated by one lambdified function. It is
  never substituted. `smooth` and `crossover` resolve each maximum by the branch that it takes at a point.
* **Profiles of a step use code that differs by a clock around each line** (`runtime/step_recorder.py`), so numerics are
  the same, and steps that are not measured pay nothing. The slowest rank counts, and all ranks measure at once.
* **The arrival of a collective is unknown** if compute does not wait for it. It is given until the end of its wait, as
  an upper bound. The wait of compute is known, and is the cost.

Pitfalls:

* `torchrun` sets OMP_NUM_THREADS=1. A profile made under it is of one thread for each rank (recorded in `made`).
* float16 products on a CPU without float16 units take 100 times as long as float32: series of sizes stop early.
* On CPUs the best of three rounds is taken, because machines that others use are slow at times.
"""
