"""Regions: a scheduled graph is cut at its collectives, and an executor calls the compute between them.

    wait, region_0(...), start, region_1(...), wait, region_0(...), ...

Compute between two collectives does not depend on the rank. Equal regions share compiled code, so the time to compile
does not grow with depth. The executor is an FX graph of region calls and collectives; `executor.py` makes its code.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import operator
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
from graphshard.torch_compat.torch_ops import uncompiled
from graphshard.utils.progress import check_cancelled, collector_paused

log = logging.getLogger(__name__)

# Seconds of regions by key, where code of several is generated before the first one is ready.
compile_seconds: dict[str, float] = {}
# Yields compiled regions by name; closing it ends what it has begun.
Compiled = Generator[tuple[str, Boxed], None, None]
# Compiles regions, by name, in any order; is given a function to show progress with.
Compiler = Callable[[dict[str, Region], Callable[[str], None]], Compiled]


class _Callers(weakref.WeakSet[GraphModule]):
    """Executors that are alive."""

    def __deepcopy__(self, _: Any) -> _Callers:
        return _Callers()


class RegionCall:
    """A compiled region: a `Boxed` function. Not a module, so that hooks of all modules do not see it.

    Attributes:
        within: for a region of dynamic sizes, the sizes of the program it was compiled for; else None. Compilation
            relies on what is known of them, and may find out more, so other programs do not use it.
        kept: it is from a file, and stays without callers.
    """

    def __init__(self, fn: Boxed, within: object = None, *, kept: bool = False) -> None:
        self.fn, self.within, self.kept = fn, within, kept
        self.callers = _Callers()

    @property
    def source(self) -> str:
        """Code of the generated kernels; "" for a region that runs operator by operator."""
        return str(getattr(self.fn, "source_code", ""))

    @property
    def codes(self) -> tuple[object, ...]:
        """Code for each kind of GPU that it was compiled for (`graphshard.cross`)."""
        return tuple(getattr(self.fn, "codes", ()))

    def __call__(self, inputs: list[Any]) -> Any:
        return self.fn(inputs)


def drop_regions(compiled: dict[str, RegionCall], programs: Iterable[Program]) -> None:
    """Remove the regions that only these programs call; the programs themselves can still run."""
    programs = list(programs)
    gone = {phase.module for program in programs for phase in program.phases.values()}
    for key in {key for program in programs for key in program.region_names.values()}:
        if key in compiled and not compiled[key].kept and gone.issuperset(compiled[key].callers):
            del compiled[key]


def lower(
    program: Program,
    compiler: Compiler,
    compiled: dict[str, RegionCall],
    show: Callable[[str], None] = lambda _: None,
) -> None:
    """Replace the compute of every phase by region calls, in place, and compile the regions.

    Args:
        program: scheduled; its graphs hold ATen operators and collectives, or are outlined.
        compiled: regions by key; new ones are added.
    """
    start = time.perf_counter()
    if not any(phase.module.graph.find_nodes(op="call_module") for phase in program.phases.values()):
        outline(program)
    names = {key: name for name, key in program.region_names.items()}
    within = program.sizes[0].value.node.shape_env if program.sizes else None
    known = {key for key, call in compiled.items() if call.within in (None, within)}
    new = {names[key]: region for key, region in program.regions.items() if key not in known}
    with contextlib.closing(compiler(new, show)) as made:  # a compiler may hold locks, and have others run
        before = time.perf_counter()
        for name, fn in made:
            check_cancelled()
            is_dynamic = bool(size_inputs(new[name].module.graph))
            compiled[new[name].key] = RegionCall(fn, within if is_dynamic else None)
            now = time.perf_counter()
            program.region_seconds[new[name].key], before = compile_seconds.pop(new[name].key, now - before), now
    with collector_paused():
        for phase in program.phases.values():
            phase.module = executor(phase.module.graph, {name: compiled[key] for key, name in names.items()})
    program.lowering_seconds = time.perf_counter() - start
    counts = program.num_regions, program.num_distinct_regions
    log.info("lowered %d regions, %d distinct, in %.2f s", *counts, program.lowering_seconds)


@collector_paused()
def outline(program: Program) -> None:
    """Replace the compute of every phase by calls of regions that are not compiled yet, in place."""
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
    """List the regions that an outlined program calls, in order."""
    keys = program.region_names
    calls = (phase.module.graph.find_nodes(op="call_module") for phase in program.phases.values())
    program.region_calls = [keys[str(node.target)] for found in calls for node in found]


@dataclass(frozen=True)
class Extract:
    """Kernels of a run in canonical form; equal ones have equal keys, and one of them becomes a region."""

    key: str
    text: str
    graph: Graph

    def as_region(self) -> Region:
        """Return a region with code that runs it."""
        return Region(self.key, self.text, GraphModule(nn.Module(), self.graph))


@dataclass(frozen=True)
class ListedCall:
    """One call of a region: the nodes it replaces, its inputs, and the values that others read."""

    run: list[Node]
    inputs: list[Node]
    outputs: list[Node]
    region: Extract


def cut(phase: Phase) -> list[ListedCall]:
    """Cut a phase at its collectives into region calls, in order.

    Views and dynamic sizes do not leave a region: a reader makes them again. Random numbers that are not read do, or
    they would not be drawn, and the next would differ from eager mode.
    """
    graph = phase.module.graph
    for node in list(graph.nodes):  # a random operator that makes several tensors, none of which is read
        if is_random(node) and not node.users and not isinstance(node.meta["val"], torch.Tensor):
            with graph.inserting_after(node):
                emit(graph, operator.getitem, node, 0, like=node)
    nodes = [node for node in graph.nodes if node.op != "call_function" or not is_size(node)]
    runs = [list(run) for is_compute, run in itertools.groupby(nodes, _is_compute) if is_compute]
    sizes = size_inputs(graph)
    inputs = [_inputs(run, sizes) for run in runs]
    outside = {root for node in nodes if not _is_compute(node) for n in node.all_input_nodes for root in _roots(n)}
    needed = outside.union(*inputs)
    calls = []
    for run, sources in zip(runs, inputs):
        results = [node for node in run if (node in needed and not is_view(node)) or is_idle_draw(node)]
        if results:
            calls.append(ListedCall(run, sources, results, extract(run, sources, results)))
    return calls


def _outlined(phase: Phase, calls: list[ListedCall], names: dict[str, str], units: Sequence[str]) -> Graph:
    """Make the graph of region calls and collectives that runs. Views that it returns directly follow their base."""
    graph = Graph()
    env: dict[Node, Node] = {}
    call_at = {call.run[0]: call for call in calls}

    def copy(node: Node) -> Node:
        if node not in env:
            for source in node.all_input_nodes:
                copy(source)
            env[node] = graph.node_copy(node, env.__getitem__)
        return env[node]

    returned: dict[Node | None, list[Node]] = {}
    for node in phase.results:
        if isinstance(node, Node) and is_view(node):
            returned.setdefault(_base_of_plain(node), []).append(node)
    for node in phase.module.graph.nodes:
        if node in call_at:
            call = call_at[node]
            name = names[call.region.key]
            result = graph.call_module(name, ([env[n] for n in call.inputs],))
            result.meta["val"] = tuple(n.meta["val"] for n in call.outputs)
            modules = (module_of(made) for made in call.run if not is_view(made))
            within = (unit_of(module, units) or module for module in modules)
            found = [name for name in dict.fromkeys(within) if name]  # such as embed, layers.0
            result.meta["where"] = ", ".join(found) if len(found) < 4 else f"{found[0]} to {found[-1]}"
            for i, output in enumerate(call.outputs):
                env[output] = graph.create_node("call_function", operator.getitem, (result, i), name=output.name)
                env[output].meta = dict(output.meta)
            for view in (view for output in call.outputs for view in returned.get(output, ())):
                copy(view)
        if node.op != "call_function" or not (_is_compute(node) or is_size(node)):
            for value in (node, *returned.get(node, ())):
                copy(value)
    return graph


def _base_of_plain(node: Node) -> Node | None:
    """Return the base of a view through views without other arguments; None for an input, or with dynamic sizes."""
    while is_view(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node if node.op == "call_function" and not is_view(node) else None


def executor(graph: Graph, regions: Mapping[str, RegionCall]) -> Executor:
    """Make the module of a graph of region calls and collectives; `regions` by the names that it calls them."""
    root = nn.Module()
    for name, region in regions.items():
        setattr(root, name, region)
    reshape_views(graph)
    made = Executor(root, graph)
    for region in regions.values():
        region.callers.add(made)
    return made


def _is_compute(node: Node) -> bool:
    if node.op != "call_function" or is_communication(node) or is_size(node):
        return False
    return (node.all_input_nodes[0] if is_part(node) else node).target not in OWN


def _inputs(run: list[Node], sizes: Mapping[Any, Node]) -> list[Node]:
    """Return what the kernels of a run read from outside, in order of first use. Views are made again inside.

    Dynamic sizes of all shapes in the run come last: its code may need one that no operator takes.
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
    """Yield what a value is made of through views and sizes: values computed, communicated or given."""
    if node.op == "call_function" and (is_view(node) or is_size(node)):
        for source in node.all_input_nodes:
            yield from _roots(source)
    else:
        yield node


def extract(run: list[Node], inputs: list[Node], outputs: list[Node]) -> Extract:
    """Extract the kernels of a run into a separate graph, in canonical form: equal blocks give equal regions.

    Values are numbered in order of first use, and only operators, shapes, strides, dtypes and devices go into the key.
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

    def layout(node: Node) -> str:
        if is_size(node):
            return "float" if isinstance(node.meta["val"], torch.SymFloat) else "size"
        value = fake(node)
        stride = ", ".join(rename(size, names) for size in value.stride())
        return f"{describe(value, names)} ({stride}) {value.device.type}"

    signature = list(map(layout, inputs))
    text = print_graph(graph, signature, [""] * len(outputs), canonical=True)
    if subgraphs := print_subgraphs(graph):
        text = f"{text}\n{subgraphs}"
    return Extract(hashlib.sha256(text.encode()).hexdigest()[:16], text, graph)


def reshape_views(graph: Graph) -> None:
    """Replace `view` by `reshape` where operators run one by one: some operators return other strides than fake
    kernels said, and a view that was possible in the capture may need a copy.
    """
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
