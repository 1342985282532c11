"""Questions that passes ask an FX graph, and the one way in which they insert a node."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.ir.operators import COPIES, DOWNLOAD, NAMING_GROUPS, SETTLED, UPLOADS
from graphshard.ir.plan import CollectiveKind
from graphshard.ir.program import Phase
from graphshard.torch_compat.aot_autograd import run_and_save_rng_state
from graphshard.torch_compat.operators import OpOverload, OpOverloadPacket

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

GATHERS = frozenset({c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default})
REDUCES = frozenset({c10d.reduce_scatter_tensor.default, c10d.reduce_scatter_tensor_coalesced.default})
ALL_REDUCES = frozenset({c10d.all_reduce.default, c10d.all_reduce_coalesced.default})
_COLLECTIVES = GATHERS | REDUCES | ALL_REDUCES
WAIT = c10d.wait_tensor.default
# These questions are asked of every node again and again, and torch hashes an operator in Python: ids need none of it.
_COLLECTIVE_IDS = frozenset(map(id, _COLLECTIVES))
# Operators of our own, which stay outside of regions.
OWN = frozenset({SETTLED}) | COPIES | NAMING_GROUPS
# Lines of a stack trace, and files of torch in them.
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_OF_TORCH = re.compile(r"(^|(site|dist)-packages/)torch/")


def emit(graph: Graph, target: Callable[..., Any], *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
    """Insert a call at the graph's insertion point, with its fake value.

    Module stack and partitioner tag are taken from `like`, so that the node prints as part of that module.
    """
    return _insert(graph, target, args, kwargs, _made(target, args, kwargs), like)


# Fake values that calls made, with the values that they were made of, by question.
_MADE: ContextVar[dict[Hashable, tuple[Any, Any]] | None] = ContextVar("_MADE", default=None)


@contextmanager
def made_once() -> Iterator[None]:
    """Within it calls that are emitted share their fake value with the first one of the same values.

    Copies of equal blocks have the values of what they were copied from, so that one block is asked for all.
    """
    token = _MADE.set({})
    try:
        yield
    finally:
        _MADE.reset(token)


def _made(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The fake value of a call."""
    known = _MADE.get()
    key = None if known is None else question(target, args, kwargs)
    if known is not None and key in known:
        return known[key][1]
    vals = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    made = target(*vals[0], **vals[1])
    if known is not None:
        known[key] = vals, made  # ids are those of values that are there
    return made


def question(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Equal for calls of an operator with the very same values, as long as these are there."""
    return id(target), _asked(args), _asked(kwargs) if kwargs else ()


def _asked(arg: Any) -> Hashable:
    if isinstance(arg, Node):
        return Node, id(arg.meta.get("val"))
    if isinstance(arg, (tuple, list)):
        return (list, *map(_asked, arg))
    if isinstance(arg, Mapping):
        return (dict, *((key, _asked(value)) for key, value in arg.items()))
    return type(arg), str(arg)


def _insert(graph: Graph, target: Callable[..., Any], args: Any, kwargs: Any, val: Any, like: Node | None) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = val
    if like is not None:
        node.meta.update({k: like.meta[k] for k in ("nn_module_stack", "partitioner_tag") if k in like.meta})
    return node


def start_together(
    graph: Graph, packet: OpOverloadPacket, tensors: list[Node], *args: Any, like: Node, vals: list[Any] | None = None
) -> list[Node]:
    """Start one collective for all tensors at the insertion point; for each the node that carries its result.

    Args:
        packet: the collective, without its overload.
        vals: the fake values of the results, if they are known: those of inputs may be of different modes.
    """
    if len(tensors) == 1:
        return [emit(graph, packet.default, *tensors, *args, like=like)]
    coalesced = getattr(c10d, f"{packet.__name__}_coalesced").default
    if vals is None:
        group = emit(graph, coalesced, tensors, *args, like=like)
    else:
        group = _insert(graph, coalesced, (tensors, *args), {}, vals, like)
    carried = group.meta["val"]
    return [_insert(graph, operator.getitem, (group, i), {}, carried[i], like) for i in range(len(tensors))]


# Torch's function in Python takes for labels what stands behind their end, and has another result (torch 2.13).
WRONG_IN_PYTHON = frozenset({aten.multilabel_margin_loss_forward.default})


def interpolations() -> list[OpOverload]:
    """The operators behind `F.interpolate` that torch has looked up, as those that it has written in Python, too."""
    names = (name for name in dir(aten) if name.startswith(("upsample_", "_upsample_")))
    packets = (getattr(aten, name) for name in names if not name.endswith("_backward"))
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def behind(node: Node) -> AbstractContextManager[Any]:
    """Insert behind a node, or behind all placeholders if it is one of them."""
    if node.op == "placeholder":
        node = node.graph.find_nodes(op="placeholder")[-1]
    return node.graph.inserting_after(node)


def calls_of(phase: Phase, target: Callable[..., Any]) -> list[Node]:
    """The phase's calls of an operator, in order."""
    return list(phase.module.graph.find_nodes(op="call_function", target=target))


def replace_after(node: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Apply an operator to a value and let everything that used the value use the result."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        new = emit(node.graph, target, node, *args, like=node, **kwargs)
    for user in users:
        user.replace_input_with(node, new)
    return new


def arrange(phase: Phase, calls: Iterable[Node]) -> None:
    """Put all calls of a phase in this order."""
    anchor = phase.placeholders[-1]
    for node in calls:
        anchor.append(node)
        anchor = node


def rewrite_gradients(phase: Phase, rewrite: Callable[[Node, str], Node]) -> int:
    """Let the graph return, as a parameter's gradient, what `rewrite` makes of gradient and name; how many changed."""
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
    """Erase calls whose result nobody uses, collectives included; placeholders stay.

    Random operators stay, too, but for those named: what is drawn later is what comes after in the generator.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and (not is_random(node) or node in random):
            graph.erase_node(node)


def is_random(node: Node) -> bool:
    """Whether a call draws random numbers from torch's generator."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return node.target is run_and_save_rng_state


def is_idle_draw(node: Node) -> bool:
    """Whether a call makes random numbers, or is one tensor of such, that nobody uses."""
    source = node.args[0] if node.target is operator.getitem else node
    return not node.users and isinstance(source, Node) and is_random(source)


def is_collective(node: Node) -> bool:
    """An all-gather, reduce-scatter or all-reduce, single or coalesced; not its wait."""
    return id(node.target) in _COLLECTIVE_IDS


def is_reduction(node: Node) -> bool:
    """A reduce-scatter or all-reduce."""
    return node.target in REDUCES or node.target in ALL_REDUCES


def is_reduced(node: Node) -> bool:
    """The wait for a reduce-scatter or all-reduce."""
    return node.target is WAIT and is_reduction(launch_of(node))


def is_gathered(node: Node) -> bool:
    """The wait for an all-gather."""
    return node.target is WAIT and launch_of(node).target in GATHERS


def kind_of(launch: Node) -> CollectiveKind:
    """What a collective does."""
    if launch.target in GATHERS:
        return "gather"
    return "reduce" if launch.target in REDUCES else "all_reduce"


def is_communication(node: Node) -> bool:
    """A collective, its wait, or the selection of one result of a coalesced collective."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_collective(source)
    return node.target is WAIT or is_collective(node)


def launch_of(wait: Node) -> Node:
    """The collective that a wait completes."""
    source = wait.all_input_nodes[0]
    return source.all_input_nodes[0] if source.target is operator.getitem else source


def is_view(node: Node) -> bool:
    """A call whose result may share the memory of its first argument and that writes nothing."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return isinstance(node.target, OpOverload) and _may_alias(node.target)


def is_alias(node: Node) -> bool:
    """A view, or what has the memory of its input though its schema does not say so."""
    return node.target is aten._unsafe_view.default or is_view(node)


# By id; an operator is kept, so that no other one has its id.
_ALIASING: dict[int, tuple[OpOverload, bool]] = {}


def _may_alias(target: OpOverload) -> bool:
    """Whether a result may share memory that the operator does not write."""
    known = _ALIASING.get(id(target))
    if known is None:
        infos = [r.alias_info for r in target._schema.returns]
        known = target, any(info is not None and not info.is_write for info in infos)
        _ALIASING[id(target)] = known
    return known[1]


def base_of(node: Node, shares: Callable[[Node], bool] = is_view) -> Node:
    """The value whose memory `node` may share: the end of its chain of views.

    Args:
        shares: whether a call has the memory of its first input.
    """
    while node.op == "call_function" and node.all_input_nodes and shares(node):
        node = node.all_input_nodes[0]
    return node


def fake(node: Node) -> torch.Tensor:
    """The fake tensor of a node with a single result."""
    val = node.meta["val"]
    assert isinstance(val, torch.Tensor)
    return val


def restride(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A real value with the strides that the graph relies on; itself if it has them."""
    if value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def module_of(node: Node) -> str:
    """Name of the innermost module whose forward (or backward) made the node; "" for the root.

    A call of a region names the modules it computes.
    """
    if "where" in node.meta:
        return str(node.meta["where"])
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def is_on_host(node: Node) -> bool:
    """Whether a value lives on the host, as shards, gradients and what is saved may: it is copied from or to there."""
    return node.target is DOWNLOAD or any(user.target in UPLOADS for user in node.users)


def writes(node: Node) -> bool:
    """Whether an operator writes to what it is given."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_part(node: Node) -> bool:
    """One result of an operator that returns several."""
    return node.target is operator.getitem and not is_communication(node) and not is_view(node)


def with_parts(node: Node) -> list[Node]:
    """A node and its parts, and theirs."""
    return [node, *(part for user in node.users if is_part(user) for part in with_parts(user))]


def is_backward(node: Node) -> bool:
    """Whether a node of a joint graph was made by differentiation."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def place_of(node: Node) -> str:
    """Return where in the user's code an operator was called, as the end of a message; "" if that is not known."""
    return place_in(node.meta.get("stack_trace"))


def place_in(stack: str | None) -> str:
    """Return the innermost place in the user's code of a stack trace, as `place_of` does."""
    lines = [line.strip() for line in (stack or "").splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        frame = _FRAME.match(lines[index])
        if frame is not None and not _OF_TORCH.search(frame[1]):
            source = lines[index + 1] if index + 1 < len(lines) else ""
            return f" at {frame[1]}:{frame[2]}: {source}"
    return ""
