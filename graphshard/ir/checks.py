"""What is checked after each call, as a trace does not know values: results of forward behind those of the module."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphshard.ir.errors import InputError


@dataclass(frozen=True)
class Check:
    """A status that a linear-algebra operator of forward returned.

    Attributes:
        operator: as torch's error calls it: "linalg.inv".
        is_matrix: the operator works on single matrices, not on batches.
        caught: the line of the operator, if forward catches the error that eager mode raises there.
    """

    operator: str
    is_matrix: bool
    caught: str = ""

    def where(self, taken: torch.Tensor, status: torch.Tensor) -> torch.Tensor:
        """A status that is good where the operator is in a branch that is not taken."""
        return torch.where(taken, status, torch.zeros_like(status))

    def __call__(self, status: torch.Tensor) -> None:
        """Raise torch.linalg.LinAlgError if the operator failed."""
        try:
            torch.ops.aten._linalg_check_errors(status, self.operator, is_matrix=self.is_matrix)
        except torch.linalg.LinAlgError as error:
            if not self.caught:
                raise
            raise torch.linalg.LinAlgError(
                f"{error}\nForward would catch this at {self.caught}\nA program knows it after the call alone. Use an "
                "operator that returns its status, such as torch.linalg.cholesky_ex or inv_ex, and torch.where."
            ) from None


@dataclass(frozen=True)
class Condition:
    """A condition that guards an exception in forward, or of a size that the capture has found out.

    Attributes:
        line: file, number and source of the line that asks, or that makes what has the size.
        expected: the truth value with which forward goes on.
        of_size: what is made has the size that is needed where it is used.
    """

    line: str
    expected: bool
    of_size: bool = False

    def where(self, taken: torch.Tensor, status: torch.Tensor) -> torch.Tensor:
        """A truth value that is the expected one where the condition is in a branch that is not taken."""
        return status | ~taken if self.expected else status & taken

    def __call__(self, status: torch.Tensor) -> None:
        """Raise InputError where forward would have raised something; on GPUs an assertion, at a later time."""
        if status.device.type != "cpu":
            torch._assert_async(status == self.expected, f"{self._failure} at {self.line}")
        elif bool(status) != self.expected:
            remedy = "\nIf a size of 1 is to be broadcast there, expand it yourself." if self.of_size else ""
            raise InputError(f"{self._failure} for these inputs at {self.line}{remedy}")

    @property
    def _failure(self) -> str:
        if self.of_size:
            return "what is made has another size than where it is used"
        return "forward raises an exception"
