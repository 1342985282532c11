"""Predict a training step without the machine: studies, results, advice, formulas.

`study.py` captures a model once and schedules it once for each mesh. `predict.py` makes an `Explanation` of a lowered
program and costs. `symbols.py` and `formulas.py` say the same in the symbols of the inputs.

* **The bound of an explanation** is the schedule's bound, less what regions save in compute beside the items for which
  it was found: a step gets shorter by at most that.
* **Symbolic sizes are fitted, not traced.** The graph is captured at 2^k + 1 sizes. Each dim becomes the polynomial
  through them that is linear in each symbol, and it is checked at one more size. The model need not export with dynamic
  shapes. So what specialises on sizes still works, and the graph that is costed is the one that runs. The price is more
  captures.
* **A formula is a straight line of definitions** (regions, buckets, clock), evaluated by one lambdified function. It is
  never substituted. `smooth` and `crossover` resolve each maximum by the branch that it takes at a point.
"""
