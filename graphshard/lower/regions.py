"""Cut the scheduled graph at its collectives into regions and write the executor that calls them.

    wait, region_0(...), start, region_1(...), wait, region_0(...), ...

What lies between two collectives is pure compute with no rank in it. Equal regions share compiled code, so the
time to compile does not grow with depth. The executor is an FX graph of region calls and collectives;
`lower/executor.py` makes its code of it, which is the program that runs, line by line.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from graphshard.ir.graph import (
    OWN,
    aten,
    emit,
    fake,
    is_communication,
    is_idle_draw,
    is_part,
    is_random,
    is_view,
    module_of,
)
from graphshard.ir.printer import describe, print_graph, print_subgraphs
from graphshard.ir.program import Phase, Program, Region
from graphshard.ir.sizes import SYMBOLS, is_size, rename, size_inputs, symbols_of
from graphshard.ir.units import unit_of
from graphshard.lower.executor import Boxed, Executor
from graphshard.lower.region_call import RegionCall
from graphshard.torch_compat.fx_code import uncompiled
from graphshard.utils.progress import check_cancelled, collector_paused

log = logging.getLogger(__name__)

# Callable regions by name; closing it ends what it has begun.
Compiled = Generator[tuple[str, Boxed], None, None]
# Makes regions callable, by name, in an order of its own; is given a function to show progress with.
Compiler = Callable[[dict[str, Region], Callable[[str], None]], Compiled]


def lower(
    program: Program,
    compiler: Compiler,
    compiled: dict[str, RegionCall],
    show: Callable[[str], None] = lambda _: None,
) -> None:
    """Replace the compute of every phase by region calls, in place, and make these callable.

    Args:
        program: scheduled; its graphs hold ATen operators and collectives, or are outlined.
        compiler: makes regions callable.
        compiled: regions by key; what is there is used, what is new is added.
        show: told what is being compiled.
    """
    start = time.perf_counter()
    if not any(phase.module.graph.find_nodes(op="call_module") for phase in program.phases.values()):
        outline(program)
    names = {key: name for name, key in program.region_names.items()}
    within = program.sizes[0].value.node.shape_env if program.sizes else None
    known = {key for key, call in compiled.items() if call.within in (None, within)}
    new = {names[key]: region for key, region in program.regions.items() if key not in known}
    with contextlib.closing(compiler(new, show)) as made:  # a compiler may hold locks, and have others run
        for name, fn in made:
            check_cancelled()
            is_dynamic = bool(size_inputs(new[name].module.graph))
            compiled[new[name].key] = RegionCall(fn, within if is_dynamic else None)
    with collector_paused():
        for phase in program.phases.values():
            phase.module = executor(phase.module.graph, {name: compiled[key] for key, name in names.items()})
    program.lowering_seconds = time.perf_counter() - start
    counts = program.num_regions, program.num_distinct_regions
    log.info("lowered %d regions, %d distinct, in %.2f s", *counts, program.lowering_seconds)


@collector_paused()
def outline(program: Program) -> None:
    """Replace the compute of every phase by calls of regions, which are yet to be compiled, in place."""
    cuts = {name: cut(phase) for name, phase in program.phases.items()}
    calls = [call for found in cuts.values() for call in found]
    distinct = {call.region.key: call.region for call in calls}
    program.regions = {key: found.as_region() for key, found in distinct.items()}
    names = {key: name for name, key in program.region_names.items()}
    yet_to_come = nn.Module()
    for name in program.region_names:
        setattr(yet_to_come, name, None)
    for name, phase in program.phases.items():
        phase.module = uncompiled(yet_to_come, _outlined(phase, cuts[name], names, program.params.units))
    list_calls(program)


def list_calls(program: Program) -> None:
    """Find what an outlined program calls, in order."""
    keys = program.region_names
    calls = (phase.module.graph.find_nodes(op="call_module") for phase in program.phases.values())
    program.region_calls = [keys[str(node.target)] for found in calls for node in found]


@dataclass(frozen=True)
class Extract:
    """The kernels of a run, in canonical form; equal ones have equal keys, and one of them becomes a region."""

    key: str
    text: str
    graph: Graph

    def as_region(self) -> Region:
        """With code that runs it."""
        return Region(self.key, self.text, GraphModule(nn.Module(), self.graph))


@dataclass(frozen=True)
class Call:
    """One call of a region: the run of nodes it stands for, what it reads and what others read of it."""

    run: list[Node]
    inputs: list[Node]
    outputs: list[Node]
    region: Extract


def cut(phase: Phase) -> list[Call]:
    """Cut a phase at its collectives into region calls, in order.

    Views and dynamic sizes do not leave a region: whoever needs one makes it again from what it is made of. Random
    numbers that nobody reads do, or they would not be drawn, and the next would be others than in eager mode.
    """
    _pick_idle_draws(phase.module.graph)
    nodes = [node for node in phase.module.graph.nodes if node.op != "call_function" or not is_size(node)]
    runs = _runs(nodes)
    sizes = size_inputs(phase.module.graph)
    inputs = [_inputs(run, sizes) for run in runs]
    outside = {root for node in nodes if not _is_compute(node) for n in node.all_input_nodes for root in _roots(n)}
    needed = outside.union(*inputs)
    calls = []
    for run, sources in zip(runs, inputs):
        results = [node for node in run if (node in needed and not is_view(node)) or is_idle_draw(node)]
        if results:
            calls.append(Call(run, sources, results, extract(run, sources, results)))
    return calls


def _pick_idle_draws(graph: Graph) -> None:
    """Let a region return the first tensor of a random operator that makes several and that nobody reads."""
    for node in list(graph.nodes):
        if is_random(node) and not node.users and not isinstance(node.meta["val"], torch.Tensor):
            with graph.inserting_after(node):
                emit(graph, operator.getitem, node, 0, like=node)


def _outlined(phase: Phase, calls: list[Call], names: dict[str, str], units: Sequence[str]) -> Graph:
    """The graph of region calls and collectives that runs. Views that it returns stand behind what they are of."""
    graph = Graph()
    env: dict[Node, Node] = {}
    call_at = {call.run[0]: call for call in calls}

    def copy(node: Node) -> Node:
        if node not in env:
            for source in node.all_input_nodes:
                copy(source)
            env[node] = graph.node_copy(node, env.__getitem__)
        return env[node]

    returned: dict[Node, list[Node]] = {}
    for node in phase.results:
        if isinstance(node, Node) and is_view(node) and (base := _base_of_plain(node)) is not None:
            returned.setdefault(base, []).append(node)

    def made(node: Node) -> None:
        for view in returned.get(node, ()):
            copy(view)

    for node in phase.module.graph.nodes:
        if node in call_at:
            call = call_at[node]
            name = names[call.region.key]
            result = graph.call_module(name, ([env[n] for n in call.inputs],))
            result.meta["val"] = tuple(n.meta["val"] for n in call.outputs)
            result.meta["where"] = _where(call.run, units)
            for i, output in enumerate(call.outputs):
                env[output] = graph.create_node("call_function", operator.getitem, (result, i), name=output.name)
                env[output].meta = dict(output.meta)
            for output in call.outputs:
                made(output)
        if node.op != "call_function" or not (_is_compute(node) or is_size(node)):
            copy(node)
            made(node)
    return graph


def _base_of_plain(node: Node) -> Node | None:
    """What a view is made of, by views that are given nothing else; None for one of an input, or with dynamic sizes."""
    while is_view(node):
        if len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return node if node.op == "call_function" else None


def executor(graph: Graph, regions: Mapping[str, RegionCall]) -> Executor:
    """The module of a graph of region calls and collectives; `regions` by the names that it calls them."""
    root = nn.Module()
    for name, region in regions.items():
        setattr(root, name, region)
    reshape_views(graph)
    made = Executor(root, graph)
    for region in regions.values():
        region.callers.add(made)
    return made


def _where(run: list[Node], units: Sequence[str]) -> str:
    """The units a run computes, and modules of the root unit: "embed, layers.0"."""
    modules = (module_of(node) for node in run if not is_view(node))
    found = list(dict.fromkeys(name for name in (unit_of(module, units) or module for module in modules) if name))
    return ", ".join(found) if len(found) < 4 else f"{found[0]} to {found[-1]}"


def _is_compute(node: Node) -> bool:
    if node.op != "call_function" or is_communication(node) or is_size(node):
        return False
    return (node.all_input_nodes[0] if is_part(node) else node).target not in OWN


def _runs(nodes: list[Node]) -> list[list[Node]]:
    """Maximal runs of compute between collectives."""
    runs: list[list[Node]] = [[]]
    for node in nodes:
        if _is_compute(node):
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _inputs(run: list[Node], sizes: Mapping[Any, Node]) -> list[Node]:
    """What the kernels of a run read from outside, in order of first use. Views are made again inside.

    Dynamic sizes come last, those of all shapes in the run: its code may need one that no operator is given.
    """
    kernels = {node for node in run if not is_view(node)}
    roots = [root for node in run if node in kernels for source in node.all_input_nodes for root in _roots(source)]
    read = dict.fromkeys(root for root in roots if root not in kernels and not is_size(root))
    vals = [node.meta.get("val") for node in (*read, *run)] if sizes else []
    used = set().union(*map(symbols_of, vals))
    # Sizes that depend on values may be arguments only.
    given = [root for root in roots if is_size(root) and root.op == "placeholder"]
    return list(dict.fromkeys([*read, *(node for symbol, node in sizes.items() if symbol in used), *given]))


def _roots(node: Node) -> Iterator[Node]:
    """What a value is made of in place, if it is a view or a size: what is computed, communicated or given."""
    if node.op == "call_function" and (is_view(node) or is_size(node)):
        for source in node.all_input_nodes:
            yield from _roots(source)
    else:
        yield node


def extract(run: list[Node], inputs: list[Node], outputs: list[Node]) -> Extract:
    """Extract the kernels of a run into a graph of their own, in canonical form.

    Values are numbered in order of first use and nothing but operators, shapes, strides, dtypes and devices goes
    into the key, so that equal blocks of a model give equal regions.
    """
    graph = Graph()
    env: dict[Node, Node] = {}
    for i, node in enumerate(inputs):
        env[node] = graph.placeholder(f"x{i}")
        env[node].meta.update({key: node.meta[key] for key in ("val", SYMBOLS) if key in node.meta})

    def copy(node: Node) -> Node:
        if node not in env:
            for source in node.all_input_nodes:
                copy(source)
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].name = f"v{len(env)}"
        return env[node]

    for node in run:
        if not is_view(node):
            copy(node)
    graph.output(tuple(env[node] for node in outputs))
    names = {symbol: f"n{index}" for index, symbol in enumerate(size_inputs(graph))}
    signature = [_number(n) if is_size(n) else _layout(fake(n), names) for n in inputs]
    text = print_graph(graph, signature, [""] * len(outputs), canonical=True)
    if subgraphs := print_subgraphs(graph):
        text = f"{text}\n{subgraphs}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Extract(key, text, graph)


def _number(node: Node) -> str:
    return "float" if isinstance(node.meta["val"], torch.SymFloat) else "size"


def _layout(val: torch.Tensor, names: Mapping[Any, str]) -> str:
    stride = ", ".join(rename(size, names) for size in val.stride())
    return f"{describe(val, names)} ({stride}) {val.device.type}"


def reshape_views(graph: Graph) -> None:
    """Replace `view` by `reshape` where operators run one by one.

    Some operators return other strides than their fake kernels said (batch norm of a transposed input does), and a
    view that was possible in the capture may need a copy.
    """
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
