"""From what AOTAutograd has traced to a phase: inputs and outputs with a meaning, and no attributes.

Graphs of higher-order operators become arguments of their nodes. Torch's marks of checkpointed regions become the
partitioner's: Dynamo keeps `torch.utils.checkpoint` as an operator with a graph, and AOTAutograd marks the nodes of
such a graph with the region (`ac_graph_id`) and with what the policy of a selective checkpoint says of them
(`recompute`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from graphshard.ir.graph import is_backward, is_part, is_random
from graphshard.ir.graph_break import GraphBreak
from graphshard.ir.operators import NAMING_GROUPS
from graphshard.ir.printer import print_graph
from graphshard.ir.program import Phase, Slot
from graphshard.ir.recompute import BACKWARD_OF, RECOMPUTE, REPEATED, SAVE, maker_of, save_leaving
from graphshard.ir.sizes import expression
from graphshard.ir.subgraph import Subgraph, calls_in, subgraph_of, take_attributes
from graphshard.torch_compat.aot_autograd import (
    AOTInput,
    AOTOutput,
    CheckpointPolicy,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

# Metadata that nodes of subgraphs keep.
_KEPT = ("val",)
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Flat(Protocol):
    """Function of flat tensors that AOTAutograd has traced.

    Attributes:
        slots: of what it takes.
        leaves: results that are constants; None for tensors.
        places: of the tensors among the results.
    """

    slots: list[Slot]
    leaves: list[Any]
    places: list[int]


def phase_of(joint: GraphModule, flat: Flat) -> Phase:
    """The joint graph with slots for what AOTAutograd describes.

    Raises:
        GraphBreak: there is an input or output of a kind that modules do not have.
    """
    graph = joint.graph
    graph.set_codegen(CodeGen())
    (output,) = graph.find_nodes(op="output")
    inputs = [_input_slot(node.meta["desc"], flat) for node in graph.find_nodes(op="placeholder")]
    # Inputs that need no gradient have an undescribed None among the outputs.
    described = [(v, d) for v, d in zip(output.args[0], output.meta.pop("desc"), strict=True) if d is not None]
    outputs = [(value, _output_slot(desc, flat)) for value, desc in described]
    # An input that nothing differentiates through is not connected to autograd: its own graph may be freed already.
    outputs = [(v, slot) for v, slot in outputs if v is not None or (slot.kind, slot.of) != ("grad", "input")]
    constants = [(leaf, Slot("output", str(i))) for i, leaf in enumerate(flat.leaves) if i not in flat.places]
    of_forward = [pair for pair in outputs if pair[1].kind == "output"] + constants
    others = [pair for pair in outputs if pair[1].kind not in ("output", "mutation")]
    mutations = [pair for pair in outputs if pair[1].kind == "mutation"]
    ordered = [*mutations, *sorted(of_forward, key=lambda pair: int(pair[1].name)), *others]
    output.args = (tuple(value for value, _ in ordered),)
    return Phase(joint, tuple(inputs), tuple(slot for _, slot in ordered))


def erase_boundaries(graph: Graph) -> None:
    """The nodes of autograd at the boundaries of units have left views of the same shape."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        source = node.args[0]
        shapes = [list(map(expression, each.meta["val"].shape)) for each in (node, source)]
        if shapes[0] == shapes[1] and not is_backward(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def erase_leaves(phase: Phase, names: Collection[str]) -> None:
    """Parameters that are made of parts are read nowhere: their inputs only told autograd of them."""
    slots = phase.slot_of()
    phase.inputs = tuple(slot for slot in phase.inputs if slot.kind != "param" or slot.name not in names)
    for node, slot in slots.items():
        if slot.kind == "param" and slot.name in names:
            phase.module.graph.erase_node(node)


def read_numbers_again(phase: Phase) -> None:
    """Numbers that are inputs are read in backward, too: the tensor that each is in is saved, not the number."""
    inputs = {node for node, slot in phase.slot_of().items() if slot.kind == "input"}
    for node in phase.module.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        if node.args[0] in inputs:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def lift_constants(phase: Phase) -> dict[str, torch.Tensor]:
    """Make inputs of tensors that the forward made while it was traced, or that no module holds."""
    graph, constants = phase.module.graph, {}
    first = phase.placeholders[0] if phase.inputs else next(iter(graph.nodes))
    lifted: dict[Any, Node] = {}  # forward and backward may read the same
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in lifted:
            name = f"lifted_{len(lifted)}"
            constants[name] = getattr(phase.module, node.target)
            delattr(phase.module, node.target)
            with graph.inserting_before(first):
                lifted[node.target] = graph.placeholder(name)
            lifted[node.target].meta = node.meta
        node.replace_all_uses_with(lifted[node.target])
        graph.erase_node(node)
    phase.inputs = (*(Slot("buffer", name) for name in constants), *phase.inputs)
    return constants


def _input_slot(desc: AOTInput, flat: Flat) -> Slot:
    if isinstance(desc, PlainAOTInput):
        return flat.slots[desc.idx]
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
        return Slot("tangent", str(flat.places[desc.output.idx]))
    raise _unexpected(desc)


def _output_slot(desc: AOTOutput, flat: Flat) -> Slot:
    if isinstance(desc, PlainAOTOutput):
        return Slot("output", str(flat.places[desc.idx]))
    if isinstance(desc, InputMutationAOTOutput):
        source = _input_slot(desc.mutated_input, flat)
        return Slot("mutation", source.name, source.kind)
    if isinstance(desc, GradAOTOutput):
        source = _input_slot(desc.grad_of, flat)
        return Slot("grad", source.name, source.kind)
    raise _unexpected(desc)


def _unexpected(desc: AOTInput | AOTOutput) -> GraphBreak:
    reason = f"Its trace has {desc}, which no program can be given."
    remedy = "Take operators with effects besides their results, such as printing, out of forward and backward."
    return GraphBreak("forward", reason, remedy)


# --- graphs of higher-order operators -----------------------------------------------------------------------------


def lift_subgraphs(module: GraphModule) -> None:
    """Make each graph that a higher-order operator is given an argument of its node, in place.

    Raises:
        GraphBreak: a graph has a collective, draws random numbers, or holds a tensor.
    """
    found: dict[str, Subgraph] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        attribute = getattr(module, str(node.target))
        if isinstance(attribute, GraphModule) and node.target not in found:
            operator = next(iter(node.users)).target if node.users else None
            found[str(node.target)] = _subgraph(attribute, getattr(operator, "__name__", str(operator)))
    take_attributes(module, found)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        node.args = (node.args[0], str(node.args[0]), *node.args[2:])  # its name for the graph is one of this process


def _subgraph(module: GraphModule, operator: str) -> Subgraph:
    lift_subgraphs(module)
    for node in module.graph.find_nodes(op="get_attr"):
        _inline_constant(module, node, operator)
    for node in calls_in(module.graph):
        _check(node, operator)
    graph = module.graph
    for node in graph.nodes:
        node.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    return subgraph_of(graph, print_graph)


def _inline_constant(module: GraphModule, node: Node, operator: str) -> None:
    value = getattr(module, str(node.target))
    if not isinstance(value, torch.Tensor) or value.dim() or not isinstance(node.meta.get("val", value), torch.Tensor):
        reason = f"A graph that {operator} is given holds a tensor of shape {list(getattr(value, 'shape', []))}."
        remedy = "Make it outside of the function that is passed, or register it as a buffer."
        raise GraphBreak("forward", reason, remedy)
    with module.graph.inserting_before(node):
        made = module.graph.call_function(
            torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
        )
    made.meta["val"] = node.meta.get("val")
    node.replace_all_uses_with(made)
    module.graph.erase_node(node)


def _check(node: Node, operator: str) -> None:
    target = node.target
    namespace = getattr(target, "namespace", "")
    if namespace in ("_c10d_functional", "c10d_functional", "_dtensor") or target in NAMING_GROUPS:
        reason = f"A function that is passed to {operator} has the collective {target}, which ranks must run together."
        raise GraphBreak("forward", reason, "Move it out of the function.")
    if is_random(node):
        reason = f"A function that is passed to {operator} draws by {target}, and backward would draw other numbers."
        raise GraphBreak("forward", reason, "Draw them before, and pass them as an operand.")


# --- checkpointed regions -----------------------------------------------------------------------------------------


def mark_regions(graph: Graph, traced: GraphModule) -> None:
    """Make each operator of a region saved or recomputed for certain, as eager mode does; in place.

    Torch's partitioner may save what a full checkpoint merely prefers to recompute. What leaves a region is saved.
    Torch counts regions in the process; here they are counted in the graph, so that equal traces have equal graphs.

    Args:
        traced: by Dynamo, with a graph for each region.
    """
    known = sorted({node.meta["ac_graph_id"] for node in graph.nodes if "ac_graph_id" in node.meta})
    for node in graph.nodes:
        if "ac_graph_id" in node.meta and not is_backward(node):
            node.meta["ac_graph_id"] = known.index(node.meta["ac_graph_id"])
            node.meta["recompute"] = SAVE if node.meta.get("recompute") in _SAVED else RECOMPUTE
        else:
            node.meta.pop("recompute", None)
            node.meta.pop("ac_graph_id", None)
    _count_repeats(graph, traced)
    save_leaving(graph)


def _count_repeats(graph: Graph, traced: GraphModule) -> None:
    """Mark what eager mode runs again in backward, and backward's nodes with the region that they belong to.

    Eager mode stops to run a region again where autograd has saved the last of its tensors, unless it is reentrant.
    Autograd's numbers tell which node of forward has saved what a node of backward reads.

    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not any("ac_graph_id" in node.meta for node in calls):
        return
    place = {node: index for index, node in enumerate(calls)}
    # Operators without a gradient have the number of the last one with a gradient before them.
    first: dict[int, Node] = {}
    for node in calls:
        first.setdefault(node.meta.get("seq_nr", 0), node)
    last_saved: dict[int, int] = {}
    for node in filter(is_backward, calls):
        saved_by = first[node.meta.get("seq_nr", 0)]
        region = saved_by.meta.get("ac_graph_id")
        if region is not None and not is_backward(saved_by):
            node.meta[BACKWARD_OF] = region
            if not all(map(is_backward, node.all_input_nodes)):
                last_saved[region] = max(last_saved.get(region, -1), place[saved_by])
    regions = sorted({node.meta["ac_graph_id"] for node in calls if "ac_graph_id" in node.meta})
    whole = dict(zip(regions, _run_to_the_end(traced, len(regions)) if last_saved else (), strict=bool(last_saved)))
    for node in calls:
        region = node.meta.get("ac_graph_id")
        if region in last_saved and node.meta["recompute"] != SAVE:
            maker = maker_of(node) if is_part(node) else node
            if whole[region] or place[maker] <= last_saved[region]:
                node.meta[REPEATED] = 1


def _run_to_the_end(traced: GraphModule, num_regions: int) -> list[bool]:
    """Return for each region whether eager mode runs all of it again, in the order in which they run."""
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    regions = [node for node in _calls(traced) if node.target is checkpoint]
    found = [bool(node.kwargs.get("use_reentrant")) or node.kwargs.get("early_stop") is False for node in regions]
    if len(found) != num_regions:  # some compute nothing; which is only known if all are alike
        if len(set(found)) > 1:
            reason = "Some checkpoints are reentrant, some are not, and some compute nothing."
            raise GraphBreak("forward", reason, "Give all of them use_reentrant=False.")
        found = [found[0]] * num_regions
    return found


def _calls(traced: GraphModule) -> Iterator[Node]:
    """Yield the calls of a graph and of its subgraphs, in the order in which they run."""
    for node in traced.graph.nodes:
        yield node
        for read in node.all_input_nodes if node.op == "call_function" else ():
            if read.op == "get_attr" and isinstance(body := traced.get_submodule(str(read.target)), GraphModule):
                yield from _calls(body)
