"""The order of passes on one screen; what is verified and recorded between them.

`pipeline.py` is the order, and how users change it. `observe.py` is what happens between passes. `rules.py` says what
must be true of a program, and when; `graph_rules.py` and `sharding_rules.py` have a function for each rule, and
`verify.py` checks them.

* **Passes name the rules that they establish** (`Pass.establishes`), and every later pass must keep them. So
  `InsertCollectives` does not check what `Reorder` may break, and a pass of a user is checked like ours. A disabled
  pass is noticed, too: the rules that a program needs to be lowered (`rules.REQUIRED`) are checked whoever established
  them.
* **The pipeline has no debug code.** Verification, history, traces and dumps are observers. Dumps are handed in by the
  API as a recorder, so that importing the pipeline imports neither reports nor the cost model.
* **A backward for other gradients begins at the partitioned graph** (`Partitioned`). What follows it in the pipeline
  runs again, and nothing is captured.
"""
