"""Digest of what a traced program computes. Two calls with equal digests can be served by one program."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from graphshard.codec.lowered import bytes_of
from graphshard.codec.stage import encode_program
from graphshard.codec.values import to_json
from graphshard.ir.program import Program


def graph_digest(program: Program) -> str:
    """Return a hash of what a traced program computes: its graph, parameters, constants and results.

    Dynamic sizes are in it with their ranges, and not with those of the call that was traced.
    """
    data = encode_program(replace(program, reason="", capture=0, history=[], taken=()))
    data["symbols"] = {name: {**known, "hint": None} for name, known in data["symbols"].items()}
    digest = hashlib.sha256(to_json(data).encode())
    digest.update(repr((program.out_spec, program.trace and program.trace.repeats)).encode())
    for name, tensor in sorted(program.constants.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
