"""Predict a training step without the machine: studies, results, advice, formulas.

`programs.py` captures a model once and schedules it once for each mesh; `study.py` predicts steps of what it makes.
`predict.py` makes an `Explanation` of a lowered program and costs. `symbols.py` and `formulas.py` say the same in the
symbols of the inputs. `what_if.py` predicts what `changes.py` changes and what `fitting.py` guesses; `answers.py` is
what it finds, `tables.py` and `summary.py` show it.

* **The bound of an explanation** is the schedule's bound, less what regions save in compute beside the items for which
  it was found: a step gets shorter by at most that.
* **Symbolic sizes are fitted, not traced.** The graph is captured at 2^k + 1 sizes. Each dim becomes the polynomial
  through them that is linear in each symbol, and it is checked at one more size. The model need not export with dynamic
  shapes. So what specialises on sizes still works, and the graph that is costed is the one that runs. The price is more
  captures.
* **A change is a prediction of its own**, not an estimate from the base's timeline: the planner may do something else.
  What is shared is what cannot differ: captures by inputs, units and precision, programs by the options that shape them
  (`sharing.py`). Programs of other meshes are let go, as each is as large as the base's.
* **A formula is a straight line of definitions** (regions, buckets, clock), evaluated by one lambdified function. It is
  never substituted. `smooth` and `crossover` resolve each maximum by the branch that it takes at a point.
"""
