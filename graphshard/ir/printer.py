"""Printer of programs: numbered values with shapes, dtypes, slots, modules and buckets.

    forward:
      %0: f32[2, 4] = param:layers.0.weight
    * %9: f32[4, 4] = all_gather_into_tensor(%0, 2, shard)  # layers.0 [gather layers.0 in forward]
      %10: f32[4, 4] = wait_tensor(%9)  # layers.0 [gather layers.0 in forward]
    > %40: (f32[3, 4]) = region_0([%1, %10])  # layers.0

FX names change between torch releases and between passes. A value keeps its number through all stages and in both
phases, so a diff of two stages shows what a pass inserted, erased or moved. `*` marks collectives, `>` region calls,
`[...]` buckets.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.errors import visible
from graphshard.ir.collective_regions import collectives
from graphshard.ir.graph import is_collective, is_in_order, module_of
from graphshard.ir.operators import NAMING_GROUPS
from graphshard.ir.program import Phase, Program
from graphshard.ir.sizes import SymNumber, expression, is_size, rename
from graphshard.ir.subgraph import subgraphs_of
from graphshard.ir.triton_launches import kwargs_of
from graphshard.torch_compat.aot_autograd import CheckpointPolicy
from graphshard.torch_compat.torch_ops import OpOverload

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b8"}
_MARKS = {CheckpointPolicy.MUST_RECOMPUTE: "(recompute)", CheckpointPolicy.MUST_SAVE: "(save)"}


def print_program(program: Program) -> str:
    """Return the text of all phases and of the subgraphs they call; number values without a number."""
    number(program)
    texts = [f"{name}:\n{print_phase(phase)}" for name, phase in program.phases.items()]
    if subgraphs := print_subgraphs(*(phase.module.graph for phase in program.phases.values())):
        texts.append(subgraphs)
    return "\n".join(texts)


def print_subgraphs(*graphs: Graph) -> str:
    """Return the text of the subgraphs that graphs call, each once."""
    found = {name: each.text for graph in graphs for name, each in subgraphs_of(graph).items()}
    return "\n".join(f"{name}:  # argument of a call\n{text}" for name, text in found.items())


def print_phase(phase: Phase) -> str:
    """Return one line for each node of a numbered phase."""
    slots = (*phase.inputs, *phase.outputs)
    labels = ["saved" if slot.kind == "saved" else visible(str(slot), lines=False) for slot in slots]
    return print_graph(phase.module.graph, labels[: len(phase.inputs)], labels[len(phase.inputs) :])


def number(program: Program) -> None:
    """Number every value that has no number yet, or the same number as an earlier value (a copied node)."""
    for phase in program.phases.values():
        taken: set[int | None] = set()
        for node in phase.module.graph.nodes:
            known = node.meta.get("number")
            if node.op != "output" and (known is None or known in taken):
                node.meta["number"] = known = program.next_number
                program.next_number += 1
            taken.add(known)


def print_graph(graph: Graph, inputs: list[str], outputs: list[str], *, canonical: bool = False) -> str:
    """Return the text of a graph, with a label for each placeholder and output.

    If `canonical`, number values consecutively and omit comments, so that equal graphs have equal text.
    """
    numbers: dict[Node, str] = {}
    for node in graph.nodes:
        numbers[node] = f"%{len(numbers) if canonical else node.meta.get('number', len(numbers))}"
    # Sizes of a region are named in order, sizes of a program by their label: "size:s0".
    sizes = {node: label for node, label in zip(graph.find_nodes(op="placeholder"), inputs) if is_size(node)}
    names = {
        expression(node.meta["val"]): f"n{index}" if canonical else label.removeprefix("size:")
        for index, (node, label) in enumerate(sizes.items())
    }

    labels = iter(inputs)
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]  # of a subgraph
            for value, label in zip(results, outputs, strict=True):
                name = f" as {label}" if label else ""
                comment = module_of(value) if label == "saved" else ""
                lines.append(_commented(f"  return {_arg(value, numbers)}{name}", comment))
            continue
        args = [
            *(_arg(a, numbers) for a in node.args),
            *(f"{k}={_arg(v, numbers)}" for k, v in kwargs_of(node).items()),
        ]
        call = next(labels) if node.op == "placeholder" else f"{_target(node)}({', '.join(args)})"
        mark = ">" if node.op == "call_module" else "*" if is_collective(node) else " "
        text = f"{mark} {numbers[node]}: {describe(node.meta.get('val'), names)} = {call}"
        lines.append(_commented(text, "" if canonical else _comment(node)))
    return "".join(lines)


def _commented(line: str, comment: str) -> str:
    return f"{line}  # {visible(comment, lines=False)}\n" if comment else f"{line}\n"


def print_nodes_around(phase: Phase, node: Node) -> str:
    """Return the lines of a phase around a node, which is marked, for error messages."""
    index = list(phase.module.graph.nodes).index(node)
    lines = list(enumerate(print_phase(phase).splitlines()))[max(0, index - 3) : index + 4]
    return "\n".join(f"{'-->' if at == index else '   '} {line}" for at, line in lines)


def print_communication(program: Program) -> list[str]:
    """Return one line for each collective, including the model's, in order; must be equal on all ranks."""
    lines = []
    for name, phase in program.phases.items():
        planned = {collective.node: collective for collective in collectives(phase)}
        for node in phase.module.graph.nodes:
            if node.target in NAMING_GROUPS:  # sizes may differ along the axis
                lines.append(f"{name}: {node.target._opname} over {node.args[-1]}")
            elif node in planned:
                sent = ", ".join(describe(each.meta["val"]) for each in node.all_input_nodes)
                how = ", by all-to-all" if node.meta.get("exchanged") else ", in order" if is_in_order(node) else ""
                params = visible(", ".join(planned[node].params), lines=False)
                lines.append(f"{name}: {planned[node].kind} {params} as {sent}{how}")
    return lines


def describe(val: Any, names: Mapping[Any, str] = MappingProxyType({})) -> str:
    """Return `bf16[64, s0]` for a tensor, `(f32[4], f32[4])` for several, `s0*s1` for a number, or a type."""
    if isinstance(val, torch.Tensor):
        sizes = [str(size) if type(size) is int else rename(size, names) for size in val.shape]
        return f"{dtype_name(val.dtype)}[{', '.join(sizes)}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(describe(v, names) for v in val)})"
    if isinstance(val, SymNumber) and val.node.expr.free_symbols:
        return rename(val, names)
    return type(val).__name__.removeprefix("Sym").lower()  # a data-dependent number may be specialized later


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: f32, bf16, i64, b8."""
    name = str(dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    return _DTYPES[stem] + name[len(stem) :] if stem in _DTYPES else name


def _comment(node: Node) -> str:
    bucket = node.meta.get("bucket")
    if node.meta.get("exchanged"):
        bucket = f"{bucket}, by all-to-all"
    mark = _MARKS.get(node.meta["recompute"], "") if "recompute" in node.meta else ""
    direction = "(backward)" if node.meta.get("partitioner_tag") == "is_backward" else ""
    return " ".join(filter(None, [module_of(node), direction, bucket and f"[{bucket}]", mark]))


def _target(node: Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, OpOverload):
        name = node.target._opname
        return name if node.target._overloadname == "default" else f"{name}.{node.target._overloadname}"
    return getattr(node.target, "__name__", str(node.target))


def _arg(arg: Any, numbers: dict[Node, str]) -> str:
    if isinstance(arg, Node):
        return numbers[arg]
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(_arg(a, numbers) for a in arg)}]"
    if isinstance(arg, dict):
        return f"{{{', '.join(f'{name}: {_arg(a, numbers)}' for name, a in arg.items())}}}"
    if isinstance(arg, torch.dtype):
        return dtype_name(arg)
    if isinstance(arg, torch.device):
        return arg.type  # ranks run the same program on different devices
    return str(arg)
