"""Inspection and replay of compiled programs: dumps, stages, HTML reports, traces, single passes, bisection.

`dump.py` writes every stage of a program, file by file, so that a crash leaves all stages up to it, and executors as
Python files that run by themselves; `show.py` reads dumps, and `_repro.py` runs one pass on a stage. `html_report.py`
renders a program and its predicted timeline as one HTML file that opens without a network. `bisect.py` finds the pass
or region that changes results.

* **Bisection compares neighbors**, operator by operator on real ranks, not final results. So an error does not drown
  in the rounding of what follows. The compiled regions are compared on their operators' inputs for the same reason.
"""
