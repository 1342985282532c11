"""The cells of the tutorial, run in one process as a notebook runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import ROOT

NOTEBOOK = ROOT / "docs/get_started/tutorial.ipynb"
# A notebook runs its cells in `__main__`. The page shows the default backend, and is not about lowering.
RUN = """
import functools, json, sys
import graphshard
graphshard.compile = functools.partial(graphshard.compile, backend="eager", cache=False)
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), "cell", "exec"))
"""


@pytest.mark.slow
def test_cells_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(NOTEBOOK)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    ((first, last),) = re.findall(r"loss ([\d.]+), after 20 more steps ([\d.]+)", result.stdout)
    assert float(last) < float(first) - 1
    assert "resumed at step 21" in result.stdout
    assert "lower bound" in result.stdout
    assert (tmp_path / "step.html").exists()


def test_the_notebook_holds_no_outputs() -> None:
    """Outputs of a machine in a page would age."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"]]
