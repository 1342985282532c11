"""Inputs that a forward writes to must share no memory with others: a program reads them before it writes.

One tensor that is given twice is one in the program, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from graphshard.errors import InputError


def check_apart(tensors: Sequence[torch.Tensor], written: Collection[int]) -> None:
    """Check the inputs of a program.

    Args:
        tensors: of a call, and those that modules hold.
        written: which of them forward writes to.

    Raises:
        InputError: one of these shares memory with another input.
    """
    spans = [span_of(tensor) for tensor in tensors]
    for number in written:
        begin, end = spans[number]
        for other, (first, last) in enumerate(spans):
            if tensors[other] is not tensors[number] and first < end and begin < last:
                pair = f"inputs {min(number, other)} and {max(number, other)}"
                raise InputError(
                    f"{pair} of the call share memory, and forward writes to input {number}. Pass a copy of one, "
                    "x.clone()."
                )


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first element to the end of the last; nothing of what has no memory here."""
    if tensor.numel() == 0 or tensor.is_meta or tensor.layout is not torch.strided:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
