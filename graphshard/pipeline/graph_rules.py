"""Rules of any graph with collectives: what is read is there, travels once, and is what its operator makes."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from graphshard.ir.graph import ALL_REDUCES, WAIT, aten, is_collective, is_communication, question
from graphshard.ir.kernel_shapes import MISSING
from graphshard.ir.printer import describe
from graphshard.ir.program import Program
from graphshard.ir.sizes import numbers_in, symbols_of
from graphshard.ir.subgraph import Subgraph
from graphshard.pipeline.violations import Violation
from graphshard.torch_compat.fake_tensors import fake_mode_of
from graphshard.torch_compat.operators import OpOverload, pytree
from graphshard.torch_compat.symbolic_sizes import is_unknown, new_symbols_dropped

# What may be written into a call.
_WRITTEN = (
    Node,
    *(int, float, bool, complex, str, type(None), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    OpOverload,  # of a random operator that is computed again
    Subgraph,
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


@dataclass
class Checked:
    """Calls that were found right at earlier stages: most passes leave most of a graph as it was.

    Attributes:
        right: such calls; with the values, which stay alive, as a call tells them by their addresses.
        makes: what operators make of values of such shapes.
    """

    right: dict[Hashable, tuple[Any, ...]] = field(default_factory=dict)
    makes: dict[Hashable, str] = field(default_factory=dict)


def consistent_values(program: Program, phase_name: str, checked: Checked | None = None) -> Iterator[Violation]:
    """The shape and dtype a value is said to have are what its operator makes of its inputs."""
    yield from wrong_values(program.phases[phase_name].module.graph, checked)


def wrong_values(graph: Graph, checked: Checked | None = None) -> Iterator[Violation]:
    """The values of a graph that are said to be others than their operators make.

    Args:
        checked: what was found right at earlier stages; what is found now is added.
    """
    # A dynamic size may turn out to be one number, or to be equal to another.
    if checked is None or any(numbers_in(node.meta.get("val")) for node in graph.nodes):
        checked = Checked()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        val = node.meta.get("val")
        # Copies of a block have the very values of the block.
        same = question(node.target, node.args, node.kwargs), id(val)
        if same in checked.right or _makes_symbol(node):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        leaves, structure = pytree.tree_flatten((args, kwargs))
        # Equal blocks ask the same questions: each is answered once.
        asked = (node.target, str(structure), *map(_aspect, leaves))
        makes = checked.makes.get(asked)
        if makes is None:
            mode = next((fake_mode_of(v) for v in [*leaves, val] if isinstance(v, torch.Tensor)), None)
            if mode is None:
                continue
            try:
                kernel = MISSING.get(node.target)
                with mode, new_symbols_dropped(mode), torch.no_grad():
                    made = kernel(mode, node.target, *args, **kwargs) if kernel else node.target(*args, **kwargs)
                free = {symbol for n in numbers_in(made) if is_unknown(n) for symbol in n.node.expr.free_symbols}
                free -= symbols_of(leaves)
                makes = describe(val if free and _refines(val, made, free) else made)
            except Exception as error:
                free, makes = set(), f"{type(error).__name__}: {error}"
            if not free:
                checked.makes[asked] = makes
        if makes != describe(val):
            yield Violation(f"{node.name} is said to be {describe(val)}, its operator makes {makes}", node)
        else:
            checked.right[same] = args, kwargs, val


def _refines(said: Any, made: Any, free: set[sympy.Symbol]) -> bool:
    """Whether sizes of what an operator makes, which depend on values, may be those that a value is said to have.

    torch has found them out where the value is used: beside four columns, another tensor has four.

    Args:
        free: symbols of sizes that are first known here.
    """
    if isinstance(made, (tuple, list)):
        same_length = isinstance(said, (tuple, list)) and len(said) == len(made)
        return same_length and all(_refines(s, m, free) for s, m in zip(said, made))
    if not isinstance(made, torch.Tensor) or not isinstance(said, torch.Tensor):
        return describe(said) == describe(made)
    fits = said.dtype == made.dtype and said.dim() == made.dim()
    return fits and all(free & symbols_of(m) or str(s) == str(m) for s, m in zip(said.shape, made.shape))


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
