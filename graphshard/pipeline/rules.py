"""Rules that must hold for a program between passes, one function for each; a `PassError` names the broken one.

A rule is named after its function, and its docstring states it. `ALWAYS` holds from capture on. A rule of `ESTABLISHED`
holds from the pass on that names it in `establishes`. `LOWERED` holds for executors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from graphshard.errors import PassError
from graphshard.ir.collective_regions import collectives, peak_gathered_bytes
from graphshard.ir.graph import (
    ALL_REDUCES,
    WAIT,
    aten,
    fake,
    is_collective,
    is_communication,
    is_reduced,
    launch_of,
)
from graphshard.ir.kernel_shapes import MISSING
from graphshard.ir.printer import describe, dtype_name, print_nodes_around
from graphshard.ir.program import Program
from graphshard.ir.sizes import numbers_in, symbols_of
from graphshard.ir.subgraph import Subgraph
from graphshard.ir.transport import ROWS_REDUCED, reduced_over
from graphshard.lower.executor import Executor, Line, Variable, print_line
from graphshard.passes.base import ancestors
from graphshard.torch_compat.fake_tensors import fake_mode_of
from graphshard.torch_compat.symbolic_sizes import is_unknown, new_symbols_dropped
from graphshard.torch_compat.torch_ops import OpOverload, pytree

# Types of the constants of a call.
_CONSTANTS = (
    Node,
    *(int, float, bool, complex, str, type(None), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    OpOverload,  # a random operator that runs again
    Subgraph,
)


@dataclass(frozen=True)
class Violation:
    """A broken rule: a message, and the node or the executor lines where it shows, if there are any."""

    message: str
    node: Node | None = None
    excerpt: str = ""


Rule = Callable[..., Iterator[Violation]]
# What operators make, as text, by their arguments: equal blocks and later stages have the same calls.
Made = dict[Hashable, str]


def verify(program: Program, author: str, *, complete: bool = False, made: Made | None = None) -> None:
    """Check every rule that holds at this stage.

    Args:
        author: the pass that made the program.
        complete: no pass follows, so that every rule that lowering needs must hold.
        made: known results of operators; new ones are added.

    Raises:
        PassError: names the first broken rule, the pass, and the nodes around the fault.
    """
    later = program.established | set(REQUIRED if complete else ())
    _check(program, author, [*ALWAYS, *(rule for name, rule in ESTABLISHED.items() if name in later)], made)
    for name, phase in program.phases.items():
        try:
            phase.module.graph.lint()
        except RuntimeError as error:
            raise PassError(f"{author} left a broken {name} graph: {error}") from error


def verify_lowered(program: Program) -> None:
    """Check the executors; raise `PassError` as `verify` does."""
    _check(program, "lower", LOWERED)


def _check(program: Program, author: str, rules: Iterable[Rule], made: Made | None = None) -> None:
    for rule in rules:
        for phase_name, phase in program.phases.items():
            more = (made,) if rule is consistent_values else ()
            for violation in rule(program, phase_name, *more):
                around = f"\n{print_nodes_around(phase, violation.node)}" if violation.node is not None else ""
                raise PassError(
                    f"{author} broke the rule {rule.__name__} in {phase_name}: {violation.message}\n"
                    f"{rule.__name__}: {rule.__doc__}{around}{violation.excerpt}",
                    rule=rule.__name__,
                    author=author,
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
    """Backward reads inputs and results of forward, tangents, buffers, and what earlier backwards left: no more."""
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
    """The result of a collective is read by its wait alone; everything else reads the wait."""
    for node in program.phases[phase_name].module.graph.nodes:
        for source in node.all_input_nodes:
            in_flight = is_communication(source) and source.target is not WAIT
            if in_flight and node.target not in (WAIT, operator.getitem):
                yield Violation(f"{source.name} is read while it is in flight", node)


def no_rank(program: Program, phase_name: str) -> Iterator[Violation]:
    """No value of the graph depends on the rank: constants are plain, collectives name a mesh axis and its size."""
    axes = program.mesh.every_axis
    for node in program.phases[phase_name].module.graph.nodes:
        if is_collective(node):
            sized = node.target not in ALL_REDUCES  # all-reduces are not told how many ranks there are
            if not any(node.args[-1] == axis.name and (not sized or node.args[-2] == axis.size) for axis in axes):
                wanted = " or ".join(f"{axis.size} ranks of axis {axis.name!r}" for axis in axes)
                size = f"{node.args[-2]} ranks of " if sized else ""
                yield Violation(f"the collective runs over {size}{node.args[-1]!r}, not {wanted}", node)
        leaves: list[Any] = []
        map_aggregate((node.args, node.kwargs), leaves.append)
        for leaf in leaves:
            if not isinstance(leaf, _CONSTANTS):
                yield Violation(f"a {type(leaf).__name__} is written into the graph", node)
        if node.op == "get_attr":
            yield Violation(f"{node.target} is read from the module instead of passed as an input", node)


def consistent_values(program: Program, phase_name: str, made: Made | None = None) -> Iterator[Violation]:
    """The recorded shape and dtype of a value are what its operator makes of its inputs."""
    yield from wrong_values(program.phases[phase_name].module.graph, made)


def wrong_values(graph: Graph, made: Made | None = None) -> Iterator[Violation]:
    """Yield the nodes of a graph whose recorded value is not the one that the operator makes."""
    # A dynamic size may turn out to be one number, or to be equal to another.
    if made is None or any(numbers_in(node.meta.get("val")) for node in graph.nodes):
        made = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or _makes_symbol(node):
            continue
        val = node.meta.get("val")
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        leaves, structure = pytree.tree_flatten((args, kwargs))
        # As text: dynamic sizes cannot be hashed.
        aspects = ((str(x.shape), str(x.stride()), x.dtype) if isinstance(x, torch.Tensor) else str(x) for x in leaves)
        call = (node.target, str(structure), *aspects)
        if call not in made:
            mode = next((fake_mode_of(v) for v in [*leaves, val] if isinstance(v, torch.Tensor)), None)
            if mode is None:
                continue
            if node.target is torch.ops.higher_order.flex_attention_backward:  # torch 2.14 reads the graph of gradients
                args = tuple(arg.module if isinstance(arg, Subgraph) else arg for arg in args)
            try:
                kernel = MISSING.get(node.target)
                with mode, new_symbols_dropped(mode), torch.no_grad():
                    result = kernel(mode, node.target, *args, **kwargs) if kernel else node.target(*args, **kwargs)
                free = {symbol for n in numbers_in(result) if is_unknown(n) for symbol in n.node.expr.free_symbols}
                free -= symbols_of(leaves)
                made[call] = describe(val if free and _refines(val, result, free) else result)
            except Exception as error:
                made[call] = f"{type(error).__name__}: {error}"
        if made[call] != describe(val):
            yield Violation(f"{node.name} is said to be {describe(val)}, its operator makes {made[call]}", node)


def _refines(said: Any, made: Any, free: set[sympy.Symbol]) -> bool:
    """Return whether the recorded value may be the result of an operator that introduces data-dependent sizes, `free`.

    torch resolves such sizes where the value is used: next to four columns, another tensor has four.
    """
    if isinstance(made, (tuple, list)):
        same_length = isinstance(said, (tuple, list)) and len(said) == len(made)
        return same_length and all(_refines(s, m, free) for s, m in zip(said, made))
    if not isinstance(made, torch.Tensor) or not isinstance(said, torch.Tensor):
        return describe(said) == describe(made)
    fits = said.dtype == made.dtype and said.dim() == made.dim()
    return fits and all(free & symbols_of(m) or str(s) == str(m) for s, m in zip(said.shape, made.shape))


def _makes_symbol(node: Node) -> bool:
    """Return whether a node introduces a data-dependent size: calling it again would introduce another symbol.

    A number read from a tensor may have been resolved to a constant.
    """
    if node.target is aten._local_scalar_dense.default:
        return True
    given = symbols_of([n.meta.get("val") for n in node.all_input_nodes])
    return any(n.node.expr.free_symbols - given for n in numbers_in(node.meta.get("val")) if is_unknown(n))


def sharded_inputs(program: Program, phase_name: str) -> Iterator[Violation]:
    """Every parameter is an input as its padded shard."""
    for node, slot in program.phases[phase_name].slot_of().items():
        if slot.kind == "param":
            shape, wanted = tuple(fake(node).shape), program.params[slot.name].padded_shape
            if shape != wanted:
                yield Violation(f"{slot} has shape {list(shape)}, its padded shard has {list(wanted)}", node)


def stored_dtypes(program: Program, phase_name: str) -> Iterator[Violation]:
    """Parameters are inputs, and their gradients are outputs, in the dtype the shard is stored in."""
    phase = program.phases[phase_name]
    for node, slot in [*phase.slot_of().items(), *zip(phase.results, phase.outputs)]:
        if "param" in (slot.kind, slot.of) and isinstance(node, Node):
            dtype, wanted = fake(node).dtype, program.params[slot.name].dtype
            if dtype != wanted:
                yield Violation(f"{slot} is {dtype_name(dtype)}, the stored parameter is {dtype_name(wanted)}", node)


# A reduction's wait, and the part of its buffer if several tensors were packed.
_Reduction = tuple[Node, Node | None]


def reduced_once(program: Program, phase_name: str) -> Iterator[Violation]:
    """Every gradient of a parameter is reduced once over each axis, and every reduction is of a gradient."""
    phase = program.phases[phase_name]
    owners: dict[_Reduction, str] = {}
    partial = {node for node, slot in phase.slot_of().items() if slot.kind == "partial"}
    for value, slot in zip(phase.results, phase.outputs, strict=True):
        is_grad = slot.kind == "grad" and slot.of == "param"
        axes = [axis.name for axis in reduced_over(program.params[slot.name], program)] if is_grad else []
        if not axes:
            continue
        if not isinstance(value, Node):
            if slot.name in program.differentiated:
                yield Violation(f"{slot} is None, though its parameter takes part in the result")
            continue
        paths = _reductions_to(value, len(axes), partial)
        if not paths:  # all of it was reduced over shards in earlier microbatches
            axes = axes[1:]
            paths = _reductions_to(value, len(axes), set())
        (path, *others) = paths
        found = [str(wait.meta.get(ROWS_REDUCED) or launch_of(wait).args[-1]) for wait, _ in reversed(path)]
        if others:
            how = f"comes out of {len(paths)} reductions"
        elif found != axes:
            how = f"is reduced over {' and '.join(found)} alone" if found else "is not reduced"
        else:
            if path[0] in owners:
                yield Violation(f"{slot} and grad:{owners[path[0]]} come out of the same reduction", value)
            owners[path[0]] = slot.name
            continue
        over = f" over each of {', '.join(axes)}" if len(axes) > 1 else ""
        yield Violation(f"{slot} {how}, it must be reduced once{over}", value)
    returned = ancestors(*(value for value in phase.results if isinstance(value, Node)))
    for node in phase.module.graph.nodes:
        if is_reduced(node) and node not in returned:
            yield Violation("the reduction belongs to no gradient that is returned", node)


def _reductions_to(value: Node, most: int, partial: set[Node]) -> set[tuple[_Reduction, ...]]:
    """Return the paths to a gradient, as the reductions on each, the last first, and no more than `most`.

    Gradients that were reduced over shards in earlier microbatches (`partial`) are not paths.
    """
    found: set[tuple[_Reduction, ...]] = set()
    stack: list[tuple[Node, Node | None, tuple[_Reduction, ...]]] = [(value, None, ())]
    while stack:
        node, part, path = stack.pop()
        sources = node.all_input_nodes
        if is_reduced(node):
            path = (*path, (node, part))
            source, launch = node.all_input_nodes[0], launch_of(node)
            index: Any = source.args[1] if source is not launch else 0
            sources = [launch.all_input_nodes[index]]
        elif ROWS_REDUCED in node.meta:  # the first of all reductions
            found.add((*path, (node, part)))
            continue
        elif path and part is not None and node.target is aten.cat.default:
            packed: Any = part.args[1]
            sources, part = [sources[packed]], None
        if len(path) == most or not sources:
            found.add(path)
            continue
        part = node if node.target is operator.getitem else part
        stack.extend((source, part, path) for source in sources if source not in partial)
    return found


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
    """Collectives of a group start, and are waited for, in the order of the plan, which is the same on every rank."""
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
    node, found = peak_gathered_bytes(program.phases[phase_name])
    planned = program.gathered_bytes.get(phase_name, found)
    if found > planned:
        yield Violation(
            f"{found} bytes of gathered parameters are alive at once, the plan accounts for {planned}", node
        )


def freed_at_last_use(program: Program, phase_name: str) -> Iterator[Violation]:
    """The executor frees every value at its last use and reads none that is freed."""
    executor = program.phases[phase_name].module
    assert isinstance(executor, Executor)
    for message, index in wrong_frees(executor.lines):
        shown = range(max(0, index - 3), min(len(executor.lines), index + 4))
        rows = ((i, row) for i in shown for row in print_line(executor.lines[i]))
        yield Violation(message, excerpt="".join(f"\n{'-->' if i == index else '   '} {row}" for i, row in rows))


def wrong_frees(lines: Sequence[Line]) -> Iterator[tuple[str, int]]:
    """Yield faults in the frees of an executor, each with the index of its line: they cost memory without an error."""
    freed: dict[Variable, int] = {}
    last: dict[Variable, int] = {}
    for index, line in enumerate(lines):
        for name in line.reads:
            if name in freed:
                yield f"{name} is read after it was freed", index
            last[name] = index
        last.update(dict.fromkeys(line.results, index))
        freed.update(dict.fromkeys(line.frees, index))
    for name, index in last.items():
        if index == len(lines) - 1:  # it is returned
            continue
        if name not in freed:
            yield f"{name} is never freed", index
        elif freed[name] > index:
            yield f"{name} outlives its last use", index


ALWAYS: tuple[Rule, ...] = (
    *(computed_before_use, slots_match, saved_is_returned, waited_once, read_after_wait, no_rank),
    consistent_values,
)
_LATER: tuple[Rule, ...] = (sharded_inputs, stored_dtypes, reduced_once, planned_buckets, planned_order, live_memory)
ESTABLISHED: dict[str, Rule] = {rule.__name__: rule for rule in _LATER}
# Rules that must hold before a program is lowered, whichever passes made it.
REQUIRED = ("sharded_inputs", "stored_dtypes", "reduced_once")
LOWERED: tuple[Rule, ...] = (
    *(computed_before_use, slots_match, waited_once, read_after_wait, planned_order),
    freed_at_last_use,
)
