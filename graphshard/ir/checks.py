"""Checks of results of forward after each call, as a trace does not know values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphshard.errors import InputError
from graphshard.torch_compat.operators import assert_async


@dataclass(frozen=True)
class Check:
    """A status that a linear-algebra operator of forward returned.

    Attributes:
        operator: as torch's error calls it: "linalg.inv".
        is_matrix: the operator works on single matrices, not on batches.
    """

    operator: str
    is_matrix: bool

    def __call__(self, status: torch.Tensor) -> None:
        """Raise torch.linalg.LinAlgError if the operator failed."""
        torch.ops.aten._linalg_check_errors(status, self.operator, is_matrix=self.is_matrix)


@dataclass(frozen=True)
class Condition:
    """A condition that forward takes for granted with `torch._check`.

    Attributes:
        line: that says so, as "file.py:3: code".
    """

    line: str

    def __call__(self, status: torch.Tensor) -> None:
        """Raise InputError where the condition is false; on GPUs an assertion, at a later time."""
        if status.device.type != "cpu":
            assert_async(status, f"forward raises an exception at {self.line}")
        elif not bool(status):
            raise InputError(f"forward raises an exception for these inputs at {self.line}")
