"""The order of passes on one screen; verification and records between them.

`pipeline.py` is the order, how users change it, and other backwards of a program. `instrumentation.py` is what happens
between passes, and `rules.py` has the rules that a program must keep. `memory_policy.py` decides `activation="auto"`.

* **Passes name the rules that they establish** (`Pass.establishes`), and every later pass must keep them. So
  `InsertCollectives` does not check what `Reorder` may break, and a pass of a user is checked like ours. A disabled
  pass is noticed, too: the rules that lowering needs (`rules.REQUIRED`) are checked in any case.
* **The pipeline has no debug code.** Verification, history, traces and dumps are observers. Dumps are handed in by the
  API as a recorder, so that importing the pipeline imports neither reports nor dumps.
* **A backward for other gradients starts at the partitioned graph** (`Partitioned`). The passes that follow run again,
  and nothing is captured.
"""
