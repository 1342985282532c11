"""What a forward writes to on modules must share no memory with what else it reads there: a program reads first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graphshard.capture.signature import Signature
from graphshard.ir.errors import CaptureError, InputError
from graphshard.ir.program import Program
from graphshard.module.guard import Guard
from graphshard.runtime.apart import span_of


def check_held(program: Program, module: nn.Module, guard: Guard, signature: Signature) -> None:
    """Check buffers, and attributes that are tensors, when a program is bound to their module.

    Raises:
        CaptureError: one that forward writes to shares memory with another one.
    """
    forward = program.phases["forward"]
    written = [slot for slot in forward.outputs if slot.kind == "mutation"]
    if not written:
        return
    given = sum(len(key) == 4 for key in signature.inputs)
    attributes = {str(given + i): str(places[0]) for i, places in enumerate(program.state.inputs)}
    buffers = {slot.name for slot in forward.inputs if slot.kind == "buffer"}
    buffers |= {slot.name for slot in written if slot.of == "buffer"}
    # Constants of the program are buffers of its own.
    held = {name: module.get_buffer(name) for name in sorted(buffers - program.constants.keys())}
    held |= dict(zip(attributes.values(), guard.tensors()))
    spans = {name: span_of(tensor) for name, tensor in held.items()}
    for slot in written:
        name = slot.name if slot.of == "buffer" else attributes.get(slot.name, "")
        begin, end = spans.get(name, (0, 0))
        for other, (first, last) in spans.items():
            if name in held and held[other] is not held[name] and first < end and begin < last:
                raise CaptureError(
                    f"{program.model}.{name} and {program.model}.{other} share memory, and forward writes to {name}: a "
                    f"program reads {other} before it writes. Hold one of them, and take views of it in forward."
                )


def check_inputs(program: Program, guard: Guard, given: Sequence[torch.Tensor]) -> None:
    """Check the inputs of a call against the buffers of its module.

    Raises:
        InputError: one shares memory with a buffer, and forward writes to one of the two.
    """
    for number, name in guard.near_buffers(given):
        for slot in program.phases["forward"].outputs:
            if slot.kind == "mutation" and (slot.of, slot.name) in (("input", str(number)), ("buffer", name)):
                raise InputError(
                    f"input {number} of the call and the buffer {name} of {program.model} share memory, and forward "
                    f"writes to {slot.of} {slot.name}: a program reads both before it writes. Pass a copy, x.clone()."
                )
