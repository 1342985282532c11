"""A program as text: values numbered by us, with shapes, dtypes, meaning and module.

FX names change between torch releases and between passes; these do not, so the text can be diffed and kept
in tests.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.graph import collectives, is_collective, module_of
from graphshard.program import Phase, Program

_DTYPES = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
    "bool": "b8",
}


def print_program(program: Program) -> str:
    """All phases of a program, one after the other."""
    return "\n".join(f"{name}:\n{print_phase(phase)}" for name, phase in program.phases.items())


def print_phase(phase: Phase) -> str:
    """One line per node: `%3: f32[4, 8] = mm(%1, %2)  # layers.0`; collectives start with `*`."""
    return print_graph(phase.module.graph, list(map(str, phase.inputs)), list(map(str, phase.outputs)))


def print_graph(graph: Graph, inputs: list[str], outputs: list[str], *, modules: bool = True) -> str:
    """A graph as text, with a label for each placeholder and output; `modules` adds module names as comments."""
    numbers: dict[Node, str] = {}
    lines = []
    labels = iter(inputs)
    for node in graph.nodes:
        if node.op == "output":
            values = zip(node.args[0], outputs, strict=True)
            lines += [f"  return {_arg(value, numbers)}" + (f" as {label}" if label else "") for value, label in values]
            continue
        numbers[node] = f"%{len(numbers)}"
        kind = describe(node.meta.get("val"))
        if node.op == "placeholder":
            lines.append(f"  {numbers[node]}: {kind} = {next(labels)}")
            continue
        call = f"{_target(node)}({_args(node, numbers)})"
        mark = "*" if is_collective(node) else " "
        where = module_of(node) if modules else ""
        lines.append(f"{mark} {numbers[node]}: {kind} = {call}" + (f"  # {where}" if where else ""))
    return "\n".join(lines) + "\n"


def print_communication(program: Program) -> list[str]:
    """One line per collective, in order: what must be the same on every rank."""
    lines = []
    for name, phase in program.phases.items():
        for collective in collectives(phase):
            sent = ", ".join(describe(node.meta["val"]) for node in collective.node.all_input_nodes)
            lines.append(f"{name}: {collective.kind} {', '.join(collective.params)} as {sent}")
    return lines


def describe(val: Any) -> str:
    """`bf16[64, 32]` for a tensor, `(f32[4], f32[4])` for several, the type's name otherwise."""
    if isinstance(val, torch.Tensor):
        return f"{dtype_name(val.dtype)}[{', '.join(map(str, val.shape))}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(map(describe, val))})"
    return type(val).__name__


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: f32, bf16, i64, b8."""
    name = str(dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    return _DTYPES[stem] + name[len(stem) :] if stem in _DTYPES else name


def _target(node: Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._opname
        return name if node.target._overloadname == "default" else f"{name}.{node.target._overloadname}"
    return getattr(node.target, "__name__", str(node.target))


def _args(node: Node, numbers: dict[Node, str]) -> str:
    positional = [_arg(a, numbers) for a in node.args]
    return ", ".join(positional + [f"{k}={_arg(v, numbers)}" for k, v in node.kwargs.items()])


def _arg(arg: Any, numbers: dict[Node, str]) -> str:
    if isinstance(arg, Node):
        return numbers[arg]
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(_arg(a, numbers) for a in arg)}]"
    if isinstance(arg, torch.dtype):
        return dtype_name(arg)
    return str(arg)
