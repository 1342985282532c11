"""Correctness and speed on one GPU or several, in minutes. `tests/gpu/run.sh` runs it.

Each part is a separate process with a share of the budget, so a part that fails, hangs or dies does not affect the
others. A part writes its results to disk line by line, and they remain when the part is ended.

`parts.py` runs the parts, `table.py` defines their results, `settings.py` the models and sizes. The parts themselves:
`tests.py` (correctness, faults, bits and checkpoints), `races.py`, `offload.py` (peaks with the host far ahead),
`delays.py` (priorities), `artifact.py` (a file made without a GPU), `first.py` (seconds to the end of the first step),
`predicted.py` (calibration and predictions), `steps.py` (step time and memory next to other implementations:
`variants.py`, each in a separate process, `workers.py`), and `many.py` (several GPUs).
"""
