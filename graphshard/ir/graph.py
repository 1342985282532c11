"""Queries on FX graphs, and the functions that insert nodes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.traceback import get_current_meta

from graphshard.errors import CaptureError
from graphshard.ir.operators import COPIES, DOWNLOAD, MODEL_WAIT, NAMING_GROUPS, UPLOADS
from graphshard.ir.plan import CollectiveKind
from graphshard.torch_compat.aot_autograd import run_and_save_rng_state
from graphshard.torch_compat.torch_ops import OpOverload, OpOverloadPacket, TorchDispatchMode, pytree

if TYPE_CHECKING:
    from graphshard.ir.program import Phase

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
own = torch.ops.graphshard

GATHERS = frozenset({c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default})
REDUCES_IN_ORDER = frozenset({own.reduce_scatter_in_order.default, own.reduce_scatter_in_order_coalesced.default})
ALL_REDUCES_IN_ORDER = frozenset({own.all_reduce_in_order.default, own.all_reduce_in_order_coalesced.default})
REDUCES = REDUCES_IN_ORDER | {c10d.reduce_scatter_tensor.default, c10d.reduce_scatter_tensor_coalesced.default}
ALL_REDUCES = ALL_REDUCES_IN_ORDER | {c10d.all_reduce.default, c10d.all_reduce_coalesced.default}
_COLLECTIVES = GATHERS | REDUCES | ALL_REDUCES
WAIT = c10d.wait_tensor.default
# Asked for every node, and torch hashes operators in Python: compare ids instead.
_COLLECTIVE_IDS = frozenset(map(id, _COLLECTIVES))
# graphshard's operators, which stay outside of regions.
OWN = frozenset({MODEL_WAIT}) | COPIES | NAMING_GROUPS
# Lines of a stack trace, and files between a user's forward and its operators.
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_BETWEEN = re.compile(r"(^|(site|dist)-packages/)torch/|graphshard/frontend/(unit_boundaries|dynamo_capture)\.py$")


def emit(graph: Graph, target: Callable[..., Any], *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
    """Insert a call with its fake value at the graph's insertion point; return the node.

    The module stack and partitioner tag of `like` are copied.
    """
    vals = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    return _insert(graph, target, args, kwargs, target(*vals[0], **vals[1]), like)


def trace(before: Node, function: Callable[..., Any], *given: Any, like: Node | None = None) -> Any:
    """Insert the ATen operators that a function of tensors calls before a node; return its results as nodes.

    Nodes in its arguments (`given`), also in tuples, lists and dicts, stand for tensors. `like` is as for `emit`. The
    function calls `aten.contiguous` and `aten.slice` by these names: `.contiguous()` and indexing fail for a tensor of
    CUDA where torch is built without.
    """
    with torch.no_grad(), before.graph.inserting_before(before):
        tracer = _Tracer(like or before)
        arguments = pytree.tree_map_only(Node, tracer.value_of, given)
        with tracer:
            results = function(*arguments)
    return pytree.tree_map_only(torch.Tensor, tracer.node_of, results)


class _Tracer(TorchDispatchMode):
    """Mode that inserts the operators that run as nodes, and knows the node of each value."""

    def __init__(self, like: Node) -> None:
        super().__init__()
        self._like = like
        self._nodes: dict[int, tuple[Any, Node]] = {}  # by id; the values are kept alive

    def value_of(self, node: Node) -> torch.Tensor:
        """Return a value that stands for a node; two nodes may share their fake value."""
        value = fake(node).detach()
        self._nodes[id(value)] = value, node
        return value

    def node_of(self, value: torch.Tensor) -> Node:
        return self._nodes[id(value)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, (torch.Tensor, tuple, list)):  # an attribute, such as the device
            return result
        if func is aten.detach.default:  # autograd calls it
            self._nodes[id(result)] = result, self.node_of(args[0])
            return result
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs or {}))
        node = self._insert(func, args, kwargs, result)
        for index, value in enumerate(result if isinstance(result, (tuple, list)) else ()):
            self._insert(operator.getitem, (node, index), {}, value)
        return result

    def _insert(self, func: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> Node:
        node = _insert(self._like.graph, func, args, kwargs, value, self._like)
        self._nodes[id(value)] = value, node
        return node


def _insert(graph: Graph, target: Callable[..., Any], args: Any, kwargs: Any, val: Any, like: Node | None) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = val
    if like is not None:
        node.meta.update({k: like.meta[k] for k in ("nn_module_stack", "partitioner_tag") if k in like.meta})
    return node


def start_together(
    graph: Graph, packet: OpOverloadPacket, tensors: list[Node], *args: Any, like: Node, vals: list[Any] | None = None
) -> list[Node]:
    """Start one collective for all tensors at the insertion point; return a node for each result.

    Args:
        packet: the collective, without overload.
        vals: fake values of the results, if known: inputs may have fake values of different modes.
    """
    if len(tensors) == 1:
        return [emit(graph, packet.default, *tensors, *args, like=like)]
    namespace = own if packet.default in REDUCES_IN_ORDER | ALL_REDUCES_IN_ORDER else c10d
    coalesced = getattr(namespace, f"{packet.__name__}_coalesced").default
    if vals is None:
        group = emit(graph, coalesced, tensors, *args, like=like)
    else:
        group = _insert(graph, coalesced, (tensors, *args), {}, vals, like)
    carried = enumerate(group.meta["val"])
    return [_insert(graph, operator.getitem, (group, i), {}, val, like) for i, val in carried]


# torch's Python implementation reads labels past their end marker and returns another result (torch 2.13).
WRONG_IN_PYTHON = frozenset({aten.multilabel_margin_loss_forward.default})


def interpolations() -> list[OpOverload]:
    """Return the operators of `F.interpolate` that torch has loaded, such as the ones it implements in Python."""
    names = (name for name in dir(aten) if name.startswith(("upsample_", "_upsample_")))
    packets = (getattr(aten, name) for name in names if not name.endswith("_backward"))
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def following(node: Node) -> Node:
    """Return the node before which to insert after a node: the next one, or the first after all placeholders."""
    return (node.graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node).next


def behind(node: Node) -> AbstractContextManager[Any]:
    """Insert after a node, or after all placeholders if it is one."""
    return node.graph.inserting_before(following(node))


def calls_of(phase: Phase, target: Callable[..., Any]) -> list[Node]:
    """Return the phase's calls of an operator, in order."""
    return list(phase.module.graph.find_nodes(op="call_function", target=target))


def replace_after(node: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Insert an operator on a value; the value's users use the result instead."""
    users = list(node.users)
    with behind(node):
        new = emit(node.graph, target, node, *args, like=node, **kwargs)
    for user in users:
        user.replace_input_with(node, new)
    return new


def arrange(phase: Phase, calls: Iterable[Node]) -> None:
    """Reorder all calls of a phase."""
    anchor = phase.placeholders[-1]
    for node in calls:
        anchor.append(node)
        anchor = node


def rewrite_gradients(phase: Phase, rewrite: Callable[[Node, str], Node]) -> int:
    """Replace each returned parameter gradient by `rewrite(gradient, name)`; return the number of changes."""
    results = phase.results
    count = 0
    for index, slot in enumerate(phase.outputs):
        grad = results[index]
        if slot.kind == "grad" and slot.of == "param" and isinstance(grad, Node):
            with phase.module.graph.inserting_after(grad):
                results[index] = rewrite(grad, slot.name)
            count += results[index] is not grad
    phase.set_results(results)
    return count


def erase_dead(graph: Graph, random: Collection[Node] = ()) -> None:
    """Erase unused calls, including collectives; placeholders stay.

    Random operators also stay, except for the ones in `random`: they advance the generator for later ones.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and (not is_random(node) or node in random):
            graph.erase_node(node)


def is_random(node: Node) -> bool:
    """Return whether a call draws from torch's random generator."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return node.target is run_and_save_rng_state


def is_idle_draw(node: Node) -> bool:
    """Return whether a random operator, or the `getitem` of one, is unused."""
    source = node.args[0] if node.target is operator.getitem else node
    return not node.users and isinstance(source, Node) and is_random(source)


def is_collective(node: Node) -> bool:
    """Return whether a node is an all-gather, reduce-scatter or all-reduce, single or coalesced; not its wait."""
    return id(node.target) in _COLLECTIVE_IDS


def is_reduction(node: Node) -> bool:
    """Return whether a node is a reduce-scatter or all-reduce."""
    return node.target in REDUCES or node.target in ALL_REDUCES


def is_in_order(node: Node) -> bool:
    """Return whether a node is a reduction by exchange that adds in the order of ranks."""
    return node.target in REDUCES_IN_ORDER or node.target in ALL_REDUCES_IN_ORDER


def is_exchanged(node: Node) -> bool:
    """Return whether a node is a reduction by exchange: because of its operator, or because it is cheaper."""
    return is_in_order(node) or (node.target in REDUCES and "exchanged" in node.meta)


def is_average(node: Node) -> bool:
    """Return whether a node is a reduction of means."""
    return is_reduction(node) and node.args[1] == "avg"


def is_reduced(node: Node) -> bool:
    """Return whether a node waits for a reduce-scatter or all-reduce."""
    return node.target is WAIT and is_reduction(launch_of(node))


def is_gathered(node: Node) -> bool:
    """Return whether a node waits for an all-gather."""
    return node.target is WAIT and launch_of(node).target in GATHERS


def kind_of(launch: Node) -> CollectiveKind:
    """Return the kind of a collective."""
    if launch.target in GATHERS:
        return "gather"
    return "reduce" if launch.target in REDUCES else "all_reduce"


def is_communication(node: Node) -> bool:
    """Return whether a node is a collective, its wait, or the `getitem` of a coalesced collective."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_collective(source)
    return node.target is WAIT or is_collective(node)


def launch_of(wait: Node) -> Node:
    """Return the collective that a wait completes."""
    source = wait.all_input_nodes[0]
    return source.all_input_nodes[0] if source.target is operator.getitem else source


def is_view(node: Node) -> bool:
    """Return whether the result of a call may share memory with its first argument, without a write."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return isinstance(node.target, OpOverload) and _may_alias(node.target)


def is_alias(node: Node) -> bool:
    """Return whether a node is a view, including `_unsafe_view`, whose schema does not say so."""
    return node.target is aten._unsafe_view.default or is_view(node)


# By id, as torch hashes operators in Python; the operator is kept alive so that its id stays unique.
_ALIASING: dict[int, tuple[OpOverload, bool]] = {}


def _may_alias(target: OpOverload) -> bool:
    """Return whether a result may share memory that the operator does not write."""
    if id(target) not in _ALIASING:
        infos = [r.alias_info for r in target._schema.returns]
        _ALIASING[id(target)] = target, any(info is not None and not info.is_write for info in infos)
    return _ALIASING[id(target)][1]


def base_of(node: Node, shares: Callable[[Node], bool] = is_view) -> Node:
    """Return the value whose memory `node` may share: the start of its chain of calls that share their first input."""
    while node.op == "call_function" and node.all_input_nodes and shares(node):
        node = node.all_input_nodes[0]
    return node


def fake(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node with a single result."""
    val = node.meta["val"]
    assert isinstance(val, torch.Tensor)
    return val


def restride(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a real value with the strides that the graph relies on; itself if it has them."""
    if value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def module_of(node: Node) -> str:
    """Return the name of the innermost module whose forward or backward made the node; "" is the root.

    For a region call, return the names of its modules.
    """
    if "where" in node.meta:
        return str(node.meta["where"])
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def is_on_host(node: Node) -> bool:
    """Return whether a value lives on the host, as offloaded shards, gradients and saved values do."""
    return node.target is DOWNLOAD or any(user.target in UPLOADS for user in node.users)


def writes(node: Node) -> bool:
    """Return whether an operator writes to an argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_part(node: Node) -> bool:
    """Return whether a node is the `getitem` of an operator with several results."""
    return node.target is operator.getitem and not is_communication(node) and not is_view(node)


def with_parts(node: Node) -> list[Node]:
    """Return a node and its `getitem`s, recursively."""
    return [node, *(part for user in node.users if is_part(user) for part in with_parts(user))]


def is_backward(node: Node) -> bool:
    """Return whether a node of a joint graph belongs to backward."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def place_of(node: Node) -> str:
    """Return the location of a call in user code, as the end of a message; "" if unknown."""
    return place_in(node.meta.get("stack_trace"))


def error_here(what: str) -> CaptureError:
    """Return an error for the operator of a graph that runs now, which says what "it", forward, does."""
    place = place_in(get_current_meta().get("stack_trace")).removeprefix(" at ")
    return CaptureError(f"graphshard cannot capture forward: it {what}. {place}".rstrip())


def place_in(stack: str | None) -> str:
    """Return the innermost location in user code of a stack trace, as `place_of` does."""
    lines = [line.strip() for line in (stack or "").splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        frame = _FRAME.match(lines[index])
        if frame is not None and not _BETWEEN.search(frame[1]):
            source = lines[index + 1] if index + 1 < len(lines) else ""
            return f" at {frame[1]}:{frame[2]}: {source}"
    return ""
