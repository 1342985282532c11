"""From what AOTAutograd has traced to a phase: inputs and outputs with a meaning, and no attributes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import is_backward
from graphshard.ir.program import Phase, Slot
from graphshard.ir.sizes import expression
from graphshard.ir.torch_internals import CheckpointPolicy


class Flat(Protocol):
    """Function of flat tensors that AOTAutograd has traced.

    Attributes:
        slots: of what it takes.
        leaves: results that are constants; None in the place of tensors.
        places: of the tensors among the results.
    """

    slots: list[Slot]
    leaves: list[Any]
    places: list[int]


def phase_of(joint: GraphModule, flat: Flat) -> Phase:
    """The joint graph with slots for what AOTAutograd describes.

    Raises:
        CaptureError: there is an input or output of another kind than those of a module.
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
    """Tensors that were made while the forward was traced, or are nobody's, become inputs."""
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


def _unexpected(desc: AOTInput | AOTOutput) -> CaptureError:
    return CaptureError(
        f"graphshard cannot capture this forward: its trace has {desc}, which no program can be given. Operators with "
        "effects besides their results, such as printing, make such values: take them out of forward and backward."
    )
