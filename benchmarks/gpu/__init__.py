"""Right, and how fast, on one GPU: everything that is to be known of a machine, in minutes. `tests/gpu/run.sh` runs it.

Each part is a process of its own with a share of the budget, so that one that fails, hangs or kills its process takes
nothing from the others. What a part has found is on disk line by line, and stays when the part is ended.

`parts.py` runs the parts, `table.py` is what they find, `settings.py` the models and sizes. The parts themselves:
`tests.py` (is it right), `artifact.py` (a file made without a GPU), `first.py` (seconds to the end of the first step),
`predicted.py` (calibration, and what it predicts), `steps.py` (step time and memory beside others: `variants.py`, each
in a process of its own, `workers.py`).
"""
