"""Graphs as plain JSON, node by node. `codec/stage.py` shows the format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import Graph, Node

from graphshard.codec.values import CODECS, Decoder, encode, encode_target, identifier
from graphshard.errors import ArgumentError
from graphshard.ir.plain import typed
from graphshard.ir.printer import print_graph
from graphshard.ir.program import Phase
from graphshard.ir.subgraph import Subgraph, subgraph_of
from graphshard.torch_compat.aot_autograd import CheckpointPolicy

_STACKS = {"modules": "nn_module_stack", "fwd_modules": "fwd_nn_module_stack"}
# Paths on the machine of the capture, and numbers of its process.
_DROPPED = frozenset({"stack_trace", "seq_nr"})
_MARKS = frozenset({bool, int, float, str, CheckpointPolicy})
_OWN_KEYS = _DROPPED | {"val", *_STACKS.values()}


def encode_graph(graph: Graph, names: Mapping[Any, str] = MappingProxyType({})) -> list[dict[str, Any]]:
    known: dict[tuple[str, ...], str] = {}
    return [_encode_node(node, names, known) for node in graph.nodes]


def decode_graph(nodes: list[dict[str, Any]], decoder: Decoder, *, of_call: bool = False) -> Graph:
    """Read a graph.

    Args:
        of_call: an operator is given the graph, which may return one value instead of a list.
    """
    graph = Graph()
    decoder.nodes.clear()
    for item in typed(nodes, list):
        _decode_node(item, graph, decoder)
    for output in graph.find_nodes(op="output"):
        kinds = (tuple, list, Node) if of_call else (tuple, list)
        if len(output.args) != 1 or not isinstance(output.args[0], kinds):
            raise ArgumentError(f"{output.name} returns no list of values")
    return graph


def check_phase(phase: Phase) -> Phase:
    """A phase that was read, if its slots are those of its graph.

    Raises:
        ArgumentError: they are not.
    """
    if len(phase.placeholders) != len(phase.inputs) or len(phase.results) != len(phase.outputs):
        raise ArgumentError("a graph has not one slot for each input and output")
    for value, slot in zip(phase.results, phase.outputs, strict=True):
        if slot.kind == "saved" and not isinstance(value, Node):
            raise ArgumentError(f"the saved value {slot.name!r} is none")
    return phase


def _encode_node(node: Node, names: Mapping[Any, str], known: dict[tuple[str, ...], str]) -> dict[str, Any]:
    """A node; `known` has the first node of each stack of modules, by which others name it."""
    data: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "target": encode_target(node.target),
        "args": [encode(arg) for arg in node.args],
        "kwargs": {name: encode(arg) for name, arg in node.kwargs.items()},
    }
    if "val" in node.meta:
        data["val"] = encode(node.meta["val"], names)
    for key, stack in _STACKS.items():
        if calls := node.meta.get(stack):
            modules = {call: name for call, (name, _) in calls.items()}
            first = known.setdefault((key, *modules, *modules.values()), node.name)
            data[key] = first if first != node.name else modules
    data["meta"] = encode_marks(node.meta)
    return data


def encode_marks(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds of `node.meta` besides the value and the modules."""
    return {key: _encode_mark(value) for key, value in meta.items() if _is_plain(key, value)}


def _decode_node(data: dict[str, Any], graph: Graph, decoder: Decoder) -> None:
    name, op, target = identifier(data["name"]), data["op"], typed(data["target"], str)
    if op not in ("placeholder", "call_function", "output") and not (op == "call_module" and target in decoder.regions):
        lowered = ": it is lowered, take a stage before" if op == "call_module" else ""
        raise ArgumentError(f"{name} is a {op}{lowered}")
    if name in decoder.nodes:
        raise ArgumentError(f"two values are called {name!r}")
    args = tuple(decoder.value(arg) for arg in data["args"])
    kwargs = {identifier(key): decoder.value(arg) for key, arg in data["kwargs"].items()}
    callee = decoder.target(target) if op == "call_function" else identifier(target)
    node = graph.create_node(op, callee, args, kwargs, name=name)
    if node.name != name:  # a graph that makes up names avoids some that passes give
        node.name = name
    if "val" in data:
        node.meta["val"] = decoder.value(data["val"])
    for key, stack in _STACKS.items():
        if key in data:
            node.meta[stack] = _decode_stack(data[key], stack, decoder)
    node.meta.update(decode_marks(data["meta"], decoder))
    decoder.nodes[name] = node


def _decode_stack(data: Any, stack: str, decoder: Decoder) -> dict[str, tuple[str, str]]:
    if isinstance(data, str):
        return decoder.node(data).meta[stack]
    return {call: (typed(name, str), "") for call, name in typed(data, dict).items()}


def _is_plain(key: str, value: Any) -> bool:
    return type(value) in _MARKS and key not in _OWN_KEYS


def _encode_mark(value: Any) -> Any:
    return value.name if isinstance(value, CheckpointPolicy) else encode(value)


def decode_marks(data: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Inverse of `encode_marks`; raises `ArgumentError` for what it does not write."""
    marks = {key: decoder.value(value) for key, value in data.items()}
    for key, value in marks.items():
        if not _is_plain(key, value):
            raise ArgumentError(f"{key!r} is no mark of a node")
    if "recompute" in marks:
        marks["recompute"] = CheckpointPolicy[marks["recompute"]]
    return marks


def _encode_subgraph(subgraph: Subgraph, names: Mapping[Any, str]) -> Any:
    return encode_graph(subgraph.graph, names)


def _decode_subgraph(data: Any, decoder: Decoder) -> Subgraph:
    around, decoder.nodes = decoder.nodes, {}
    try:
        return subgraph_of(decode_graph(data, decoder, of_call=True), print_graph)
    finally:
        decoder.nodes = around


CODECS[Subgraph] = "graph", _encode_subgraph, _decode_subgraph
