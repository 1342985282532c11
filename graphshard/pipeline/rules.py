"""What must be true of a program between passes, one function for each rule.

A rule is named after its function, and its docstring says it. `ALWAYS` holds from capture on, a rule of `ESTABLISHED`
from the pass that names it in `establishes`, and `LOWERED` holds of the executors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from graphshard.ir.graph import (
    ALL_REDUCES,
    WAIT,
    aten,
    fake,
    is_collective,
    is_communication,
    is_reduced,
    launch_of,
    question,
)
from graphshard.ir.layout import collectives
from graphshard.ir.liveness import peak_gathered_bytes
from graphshard.ir.printer import describe, dtype_name
from graphshard.ir.program import Program
from graphshard.ir.sizes import numbers_in, symbols_of
from graphshard.ir.torch_internals import fake_mode_of
from graphshard.ir.tracing_internals import is_unknown
from graphshard.ir.transport import ROWS_REDUCED, reduced_over
from graphshard.lower.executor import Executor
from graphshard.lower.lines import print_line
from graphshard.pipeline.frees import faults


@dataclass(frozen=True)
class Violation:
    """What is wrong, and the node or the lines of code at which it shows, if there are any."""

    message: str
    node: Node | None = None
    excerpt: str = ""


Rule = Callable[[Program, str], Iterator[Violation]]

# What may be written into a call.
_WRITTEN = (
    Node,
    *(int, float, bool, complex, str, type(None), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    torch._ops.OpOverload,  # of a random operator that is computed again
)


def computed_before_use(program: Program, phase_name: str) -> Iterator[Violation]:
    """Every value is computed, or waited for, before it is used."""
    seen: set[Node] = set()
    for node in program.phases[phase_name].module.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield Violation(f"{source.name} is used before it is computed", node)
        seen.add(node)


def slots_match(program: Program, phase_name: str) -> Iterator[Violation]:
    """Every input and output of a graph has a meaning."""
    phase = program.phases[phase_name]
    inputs = ("inputs", phase.placeholders, phase.inputs)
    outputs = ("outputs", phase.results, phase.outputs)
    for what, values, slots in (inputs, outputs):
        if len(values) != len(slots):
            yield Violation(f"the graph has {len(values)} {what}, the phase gives a meaning to {len(slots)}")


def saved_is_returned(program: Program, phase_name: str) -> Iterator[Violation]:
    """Backward reads what forward was given and returns, tangents, buffers, what earlier backwards left: no more."""
    if phase_name != "backward" or "forward" not in program.phases:
        return
    forward, backward = program.phases["forward"], program.phases["backward"]
    given = {*forward.outputs, *forward.inputs}
    for node, slot in backward.slot_of().items():
        if slot.kind not in ("tangent", "late", "accumulated", "partial", "pending") and slot not in given:
            yield Violation(f"backward reads {slot}, which forward does not return", node)


def waited_once(program: Program, phase_name: str) -> Iterator[Violation]:
    """Every tensor that a collective makes is waited for exactly once."""
    for node in program.phases[phase_name].module.graph.nodes:
        if not is_collective(node):
            continue
        single = isinstance(node.meta["val"], torch.Tensor)
        parts = [node] if single else [user for user in node.users if user.target is operator.getitem]
        if not single and len({part.args[1] for part in parts}) != len(node.meta["val"]):
            yield Violation(f"{len(node.meta['val'])} tensors travel, {len(parts)} are picked up", node)
        for part in parts:
            waits = sum(user.target is WAIT for user in part.users)
            if waits != 1:
                yield Violation(f"{describe(part.meta['val'])} is waited for {waits} times", part)


def read_after_wait(program: Program, phase_name: str) -> Iterator[Violation]:
    """What a collective makes is read by its wait alone; everything else reads the wait."""
    for node in program.phases[phase_name].module.graph.nodes:
        for source in node.all_input_nodes:
            in_flight = is_communication(source) and source.target is not WAIT
            if in_flight and node.target not in (WAIT, operator.getitem):
                yield Violation(f"{source.name} is read while it is in flight", node)


def no_rank(program: Program, phase_name: str) -> Iterator[Violation]:
    """No value of the graph depends on the rank: constants are plain, collectives name a mesh axis and its size."""
    for node in program.phases[phase_name].module.graph.nodes:
        if is_collective(node) and not _runs_over_an_axis(node, program):
            wanted = " or ".join(f"{axis.size} ranks of axis {axis.name!r}" for axis in program.mesh.every_axis)
            size = "" if node.target in ALL_REDUCES else f"{node.args[-2]} ranks of "
            yield Violation(f"the collective runs over {size}{node.args[-1]!r}, not {wanted}", node)
        for leaf in _leaves((node.args, node.kwargs)):
            if not isinstance(leaf, _WRITTEN):
                yield Violation(f"a {type(leaf).__name__} is written into the graph", node)
        if node.op == "get_attr":
            yield Violation(f"{node.target} is read from the module instead of passed as an input", node)


def _leaves(arg: Any) -> Iterator[Any]:
    """What is written into a call; FX has lists, tuples and dicts only."""
    if isinstance(arg, (tuple, list)):
        for each in arg:
            yield from _leaves(each)
    elif isinstance(arg, dict):
        yield from _leaves(list(arg.values()))
    else:
        yield arg


def _runs_over_an_axis(node: Node, program: Program) -> bool:
    if node.target in ALL_REDUCES:  # these are not told how many ranks there are
        return node.args[-1] in [axis.name for axis in program.mesh.every_axis]
    return node.args[-2:] in [(axis.size, axis.name) for axis in program.mesh.every_axis]


def consistent_values(program: Program, phase_name: str) -> Iterator[Violation]:
    """The shape and dtype a value is said to have are what its operator makes of its inputs."""
    yield from wrong_values(program.phases[phase_name].module.graph)


def wrong_values(graph: Graph) -> Iterator[Violation]:
    """The values of a graph that are said to be others than their operators make."""
    known: dict[Hashable, str] = {}
    right: set[Hashable] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        # Copies of a block have the very values of the block.
        same = question(node.target, node.args, node.kwargs), id(node.meta.get("val"))
        if same in right or _makes_symbol(node):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        leaves, structure = pytree.tree_flatten((args, kwargs))
        # Equal blocks ask the same questions: each is answered once.
        asked = (node.target, str(structure), *map(_aspect, leaves))
        if asked not in known:
            mode = next((fake_mode_of(v) for v in [*leaves, node.meta.get("val")] if isinstance(v, torch.Tensor)), None)
            try:
                if mode is None:
                    continue
                with mode, torch.no_grad():
                    known[asked] = describe(node.target(*args, **kwargs))
            except Exception as error:
                known[asked] = f"{type(error).__name__}: {error}"
        if known[asked] != describe(node.meta.get("val")):
            said = describe(node.meta.get("val"))
            yield Violation(f"{node.name} is said to be {said}, its operator makes {known[asked]}", node)
        else:
            right.add(same)


def _makes_symbol(node: Node) -> bool:
    """Whether a size that depends on values is first known here: another call would give it another name.

    What is read of a tensor may be a number by now that something else has to be equal to.
    """
    if node.target is aten._local_scalar_dense.default:
        return True
    given = symbols_of([n.meta.get("val") for n in node.all_input_nodes])
    return any(n.node.expr.free_symbols - given for n in numbers_in(node.meta.get("val")) if is_unknown(n))


def _aspect(leaf: Any) -> Hashable:
    # As text: dynamic sizes cannot be hashed.
    return (str(leaf.shape), str(leaf.stride()), leaf.dtype) if isinstance(leaf, torch.Tensor) else str(leaf)


def sharded_inputs(program: Program, phase_name: str) -> Iterator[Violation]:
    """Every parameter comes in as its padded shard."""
    for node, slot in program.phases[phase_name].slot_of().items():
        if slot.kind == "param":
            shape, wanted = tuple(fake(node).shape), program.params[slot.name].padded_shape
            if shape != wanted:
                yield Violation(f"{slot} has shape {list(shape)}, its padded shard has {list(wanted)}", node)


def stored_dtypes(program: Program, phase_name: str) -> Iterator[Violation]:
    """Parameters come in, and their gradients go out, in the dtype the shard is stored in."""
    phase = program.phases[phase_name]
    for node, slot in [*phase.slot_of().items(), *zip(phase.results, phase.outputs)]:
        if "param" in (slot.kind, slot.of) and isinstance(node, Node):
            dtype, wanted = fake(node).dtype, program.params[slot.name].dtype
            if dtype != wanted:
                yield Violation(f"{slot} is {dtype_name(dtype)}, the stored parameter is {dtype_name(wanted)}", node)


def reduced_once(program: Program, phase_name: str) -> Iterator[Violation]:
    """The gradient of every trainable parameter is reduced once over each axis, and every reduction is one's."""
    phase = program.phases[phase_name]
    owners: dict[Reduced, str] = {}
    partial = {node for node, slot in phase.slot_of().items() if slot.kind == "partial"}
    results = set(phase.results)
    for value, slot in zip(phase.results, phase.outputs, strict=True):
        is_grad = slot.kind == "grad" and slot.of == "param"
        axes = [axis.name for axis in reduced_over(program.params[slot.name], program)] if is_grad else []
        if not axes:
            continue
        if not isinstance(value, Node):
            if slot.name in program.differentiated:
                yield Violation(f"{slot} is None, though its parameter takes part in the result")
            continue
        ways = _reductions_behind(value, len(axes), partial)
        if not ways:  # all of it was reduced over shards in earlier microbatches
            axes = axes[1:]
            ways = _reductions_behind(value, len(axes), set())
        (way, *others) = ways
        found = [_axis_of(wait) for wait, _ in reversed(way)]
        if others:
            how = f"comes out of {len(ways)} reductions"
        elif found != axes:
            how = f"is reduced over {' and '.join(found)} alone" if found else "is not reduced"
        else:
            if way[0] in owners:
                yield Violation(f"{slot} and grad:{owners[way[0]]} come out of the same reduction", value)
            owners[way[0]] = slot.name
            continue
        over = f" over each of {', '.join(axes)}" if len(axes) > 1 else ""
        yield Violation(f"{slot} {how}, it must be reduced once{over}", value)
    for node in phase.module.graph.nodes:
        if is_reduced(node) and not _reaches(node, results):
            yield Violation("the reduction belongs to no gradient that is returned", node)


# A reduction's wait, and the part of its buffer if several tensors were packed.
Reduced = tuple[Node, Node | None]


def _reductions_behind(value: Node, most: int, partial: set[Node]) -> set[tuple[Reduced, ...]]:
    """The ways on which a gradient comes about: the reductions on each, the last first, and no more than `most`.

    What was reduced over shards in earlier microbatches is no way of its own.
    """
    found: set[tuple[Reduced, ...]] = set()
    stack: list[tuple[Node, Node | None, tuple[Reduced, ...]]] = [(value, None, ())]
    while stack:
        node, part, way = stack.pop()
        sources = node.all_input_nodes
        if is_reduced(node):
            way = (*way, (node, part))
            sources = [_sent(node)]
        elif ROWS_REDUCED in node.meta:  # the first of all reductions
            found.add((*way, (node, part)))
            continue
        elif way and part is not None and node.target is torch.ops.aten.cat.default:
            index: Any = part.args[1]  # of what was packed for this reduction
            sources, part = [sources[index]], None
        if len(way) == most or not sources:
            found.add(way)
            continue
        part = node if node.target is operator.getitem else part
        stack.extend((source, part, way) for source in sources if source not in partial)
    return found


def _axis_of(reduced: Node) -> str:
    """The axis that a sum is taken over."""
    return str(reduced.meta[ROWS_REDUCED] if ROWS_REDUCED in reduced.meta else launch_of(reduced).args[-1])


def _sent(wait: Node) -> Node:
    """What the reduction that a wait completes was given."""
    source, launch = wait.all_input_nodes[0], launch_of(wait)
    index: Any = source.args[1] if source is not launch else 0
    return launch.all_input_nodes[index]


def _reaches(node: Node, ends: set[Any]) -> bool:
    stack = [node]
    while stack:
        current = stack.pop()
        if current in ends:
            return True
        stack.extend(current.users)
    return False


def planned_buckets(program: Program, phase_name: str) -> Iterator[Violation]:
    """The collectives of the graph are the buckets of the plan, each with its parameters."""
    assert program.plan is not None
    planned = {bucket.name: bucket for bucket in program.plan.buckets if bucket.phase == phase_name}
    for collective in collectives(program.phases[phase_name]):
        bucket = planned.pop(collective.node.meta.get("bucket", ""), None)
        if bucket is None:
            carried = f"the {collective.kind} of {', '.join(collective.params)}"
            yield Violation(f"{carried} is no bucket of the plan, or one that was seen before", collective.node)
        elif sorted(bucket.members) != sorted(collective.params):
            odd = sorted(set(bucket.members) ^ set(collective.params))
            yield Violation(f"plan and graph disagree about {odd[:5]} in {bucket.name!r}", collective.node)
    for name in planned:
        yield Violation(f"the graph has no collective for {name!r}")


def planned_order(program: Program, phase_name: str) -> Iterator[Violation]:
    """Collectives of a group start, and are waited for, in the order of the plan, which is that of every rank."""
    assert program.plan is not None
    found: list[tuple[str, str, Node]] = []
    for node in program.phases[phase_name].module.graph.nodes:
        action = "start" if is_collective(node) else "wait" if node.target is WAIT else ""
        event = (action, node.meta.get("bucket", node.name))
        if action and (not found or found[-1][:2] != event):
            found.append((*event, node))
    planned = [(event.action, event.bucket) for event in program.plan.events.get(phase_name, ())]
    for (action, bucket, node), wanted in zip(found, planned):
        if (action, bucket) != wanted:
            yield Violation(f"{action} of {bucket!r} where the plan has {' of '.join(map(repr, wanted))}", node)
            return
    if len(found) != len(planned):
        yield Violation(f"the graph starts and waits {len(found)} times, the plan {len(planned)} times")


def live_memory(program: Program, phase_name: str) -> Iterator[Violation]:
    """No more bytes of gathered parameters are alive at once than the plan accounts for."""
    assert program.plan is not None
    node, found = peak_gathered_bytes(program.phases[phase_name])
    planned = program.plan.gathered_bytes.get(phase_name, 0)
    if found > planned:
        yield Violation(
            f"{found} bytes of gathered parameters are alive at once, the plan accounts for {planned}", node
        )


def freed_at_last_use(program: Program, phase_name: str) -> Iterator[Violation]:
    """The executor frees every value at its last use and reads none that is freed."""
    executor = program.phases[phase_name].module
    assert isinstance(executor, Executor)
    for message, index in faults(executor.lines):
        shown = range(max(0, index - 3), min(len(executor.lines), index + 4))
        rows = ((i, row) for i in shown for row in print_line(executor.lines[i]))
        yield Violation(message, excerpt="".join(f"\n{'-->' if i == index else '   '} {row}" for i, row in rows))


ALWAYS: tuple[Rule, ...] = (
    computed_before_use,
    slots_match,
    saved_is_returned,
    waited_once,
    read_after_wait,
    no_rank,
    consistent_values,
)
_LATER: tuple[Rule, ...] = (sharded_inputs, stored_dtypes, reduced_once, planned_buckets, planned_order, live_memory)
ESTABLISHED: dict[str, Rule] = {rule.__name__: rule for rule in _LATER}
# What must hold before a program is lowered, whichever passes made it.
REQUIRED = ("sharded_inputs", "stored_dtypes", "reduced_once")
LOWERED: tuple[Rule, ...] = (
    computed_before_use,
    slots_match,
    waited_once,
    read_after_wait,
    planned_order,
    freed_at_last_use,
)
