"""Whether a call's inputs fit a program that was captured with dynamic sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphshard.ir.program import Program
from graphshard.ir.sizes import evaluate, expression, rename, renamed
from graphshard.ir.strides import strides_without_gaps


def misfit(program: Program, tensors: Sequence[torch.Tensor]) -> str:
    """Why tensors do not fit a program with dynamic sizes; "" if they do.

    They fit if the sizes that the program calls by one name are equal, its fixed sizes and strides are met, and what
    its capture and the compilation of its regions took for granted holds.
    """
    names = {size.symbol: size.name for size in program.sizes}
    dims = [(size, tensors[size.source[0]]) for size in program.sizes]
    if any(tensor.dim() <= size.source[1] for size, tensor in dims):
        return "an input has fewer dimensions"
    env = {size.symbol: tensor.shape[size.source[1]] for size, tensor in dims}
    shape_env = program.sizes[0].value.node.shape_env
    for symbol, value in env.items():
        known = shape_env.var_to_range[symbol]
        if value < 2:
            return f"{names[symbol]} is {value}; sizes of 0 and 1 broadcast and have programs of their own"
        if not known.lower <= value <= known.upper:
            return f"{names[symbol]} is {value}, outside of {known.lower} to {known.upper}"
    for index, (tensor, (shape, stride)) in enumerate(zip(tensors, program.shapes, strict=True)):
        strides = strides_without_gaps(tensor)
        for what, wanted, found in (("shape", shape, tensor.shape), ("strides", stride, strides)):
            if tuple(evaluate(expression(size), env) for size in wanted) != tuple(found):
                text = ", ".join(rename(size, names) for size in wanted)
                return f"input {index} has {what} {tuple(found)}, the program was captured for ({text})"
    for guard in shape_env.guards:
        condition = shape_env.replace(guard.expr)
        if condition.free_symbols <= set(env) and not evaluate(condition, env):
            return f"the program holds where {renamed(condition, names)}"
    return ""
