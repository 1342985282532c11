"""Cached programs with functions that run as they are.

In a file after `test_cache.py`, whose launches in the same process fail after these: Dynamo keeps the helper's module.
"""

from __future__ import annotations

import pytest

from graphshard.ir import opaque_calls
from tests.store.launches import Launches


def test_functions_that_run_as_they_are(empty: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is found again: it calls the function of this process, if that saves and returns the same tensors."""
    empty.edit("cached_helper", "def scaled(x):", "import torch\n\n@torch.compiler.disable\ndef scaled(x):")
    losses = []
    for old, new, compiles in (
        ("FACTOR = 2.0", "FACTOR = 2.0", True),
        ("FACTOR = 2.0", "FACTOR = 2.0", False),
        ("* FACTOR", "* FACTOR + 1", False),
        ("* FACTOR", ".sin() * FACTOR", True),
    ):
        monkeypatch.setattr(opaque_calls, "_CALLS", {})  # as in a new process
        empty.edit("cached_helper", old, new)
        losses.append(empty.run()[0])
        assert empty.compiled == compiles
    assert losses[0] == losses[1] != losses[2]
