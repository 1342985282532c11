"""See and replay what was compiled: dumps, stages, one pass alone, bisection.

`dump.py` writes every stage of a program, file by file, so that a crash leaves all stages up to it. `show.py` and
`stage_files.py` read them. `repro.py` runs one pass on a stage, without ranks. `standalone.py` makes executors Python
files that run on their own. `bisect.py` finds the pass or region that computes something else.

* **Bisection compares neighbours**, operator by operator on real ranks, not final results. So an error does not drown
  in the rounding of what follows. The compiled regions are compared on their operators' inputs for the same reason.
"""
