"""From a joint `ExportedProgram` that `joint_program.py` made back to the program that capture returned."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from graphshard.codec.graphs import check_phase, decode_marks
from graphshard.codec.structures import decode_structure
from graphshard.codec.values import Decoder
from graphshard.errors import ArgumentError, InputError
from graphshard.exported.exported_program import OURS, facts_of, joint_of
from graphshard.frontend.phase import lift_subgraphs
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamTable
from graphshard.ir.plain import typed
from graphshard.ir.program import Phase, Program, Slot
from graphshard.torch_compat.operators import pytree
from graphshard.utils.text import brief


def joint_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    params: ParamTable,
    mesh: Mesh,
    device: torch.device,
    *,
    grad: bool,
) -> Program | None:
    """Return the program of a call of a module that was made of a joint program; None for any other module.

    Raises:
        InputError: the call differs from the one that was captured.
        ArgumentError: the parameters differ.
    """
    exported = joint_of(module)
    if exported is None:
        return None
    program = to_program(exported, params, mesh, device)
    (phase,) = program.phases.values()
    wrong = wrong_call(joint_inputs(exported), pytree.tree_leaves((args, dict(kwargs))))
    if grad != any(slot.kind == "tangent" for slot in phase.inputs):
        wrong = f"the call is {'with' if grad else 'without'} gradients"
    if wrong:
        raise InputError(f"{program.model}: {wrong}, unlike the call that the joint program was captured for.")
    return program


def joint_inputs(exported: ExportedProgram) -> list[tuple[torch.Size, torch.dtype, bool]]:
    """Return shape, dtype and requires_grad of the inputs of the call that was captured."""
    facts = facts_of(exported)
    assert facts is not None
    trained = {name for kind, name, of, _ in facts["outputs"] if (kind, of) == ("grad", "input")}
    nodes = zip(facts["inputs"], exported.graph.find_nodes(op="placeholder"))
    found = {int(name): (node.meta["val"], name in trained) for (kind, name, _), node in nodes if kind == "input"}
    return [(value.shape, value.dtype, needs_grad) for _, (value, needs_grad) in sorted(found.items())]


def wrong_call(expected: Sequence[tuple[torch.Size, torch.dtype, bool]], leaves: Sequence[Any]) -> str:
    """Say how a call differs from the one that was captured; "" if it does not."""
    if len(leaves) != len(expected) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return f"the inputs are {brief(leaves)}, and {len(expected)} tensors are expected"
    for number, (leaf, (shape, dtype, needs_grad)) in enumerate(zip(leaves, expected)):
        if (leaf.shape, leaf.dtype) != (shape, dtype):
            return f"input {number} is {leaf.dtype}{list(leaf.shape)}, not {dtype}{list(shape)}"
        if leaf.requires_grad != needs_grad:
            return f"input {number} has requires_grad={leaf.requires_grad}"
    return ""


def to_program(exported: ExportedProgram, params: ParamTable, mesh: Mesh, device: torch.device) -> Program:
    """Return the program that capture would return; inverse of `to_exported`.

    Args:
        params: table of the model that is compiled from it.

    Raises:
        ArgumentError: nothing is written so, or it does not fit the parameters.
    """
    facts = facts_of(exported)
    assert facts is not None
    try:
        phase = _phase(exported, facts)
        structure = decode_structure(facts["out_spec"], "outputs")
        rewritten = {name: tuple(outputs) for name, outputs in typed(facts["rewritten"], dict).items()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArgumentError(
            f"model: the joint program cannot be read: {type(error).__name__}: {error}. Save it again from "
            "graphshard.programs(model)[0].exported."
        ) from error
    for node, slot in phase.slot_of().items():
        if slot.kind == "param" and node.meta["val"].dtype != params[slot.name].compute_dtype:
            raise ArgumentError(
                f"model: parameter {slot.name} is used in {node.meta['val'].dtype} in the joint program, and in "
                f"{params[slot.name].compute_dtype} by these arguments. Give the mp_policy that it was captured with."
            )
    return Program(
        {facts["phase"]: phase},
        params,
        mesh,
        torch.device(device.type),
        {name: value for name, value in exported.constants.items() if isinstance(value, torch.Tensor)},
        structure,
        tuple(slot.name for slot in phase.inputs if slot.kind == "tangent"),
        differentiated=phase.differentiated,
        rewritten=rewritten,
        model=typed(facts["model"], str),
    )


def _phase(exported: ExportedProgram, facts: dict[str, Any]) -> Phase:
    decoder, graph, known = Decoder(), Graph(), dict[Node, Node]()
    inputs = tuple(Slot(kind, typed(name, str)) for kind, name, _ in facts["inputs"])
    marks = iter([marks for _, _, marks in facts["inputs"]])  # torch keeps those of operators only
    for place, node in enumerate(exported.graph.nodes):
        if node.op == "output":
            continue
        if node.op == "placeholder":  # torch's partitioner knows tangents by their names
            copied = graph.placeholder(f"{'tangents' if inputs[place].kind == 'tangent' else 'primals'}_{place + 1}")
        else:
            copied = graph.node_copy(node, known.__getitem__)
        known[node] = copied
        copied.meta = {"val": _in_mode(node.meta["val"], decoder)} if "val" in node.meta else {}
        own = (node.meta.get("custom") or {}).get(OURS, {})
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if key in own:
                copied.meta[key] = {call: (typed(path, str), "") for call, path in own[key].items()}
        found = next(marks) if node.op == "placeholder" else own.get("marks", {})
        copied.meta.update(decode_marks(typed(found, dict), decoder))
    results = exported.graph.output_node().args[0]
    values, outputs = [], []
    for kind, name, of, place in facts["outputs"]:
        value = None if place is None else results[place]
        values.append(known[value] if isinstance(value, Node) else value)
        outputs.append(Slot(kind, typed(name, str), of))
    graph.output(tuple(values))
    module = GraphModule(exported.graph_module, graph)
    for name, subgraph in list(module.named_modules()):
        if name and isinstance(subgraph, GraphModule):
            subgraph = copy.deepcopy(subgraph)
            for node in subgraph.graph.nodes:
                node.meta = {"val": _in_mode(node.meta["val"], decoder)} if "val" in node.meta else {}
            module.set_submodule(name, subgraph)
    lift_subgraphs(module)
    return check_phase(Phase(GraphModule(nn.Module(), module.graph), inputs, tuple(outputs)))


def _in_mode(value: Any, decoder: Decoder) -> Any:
    """Values of one mode: those of a program may be of another, or of a file."""
    with decoder.mode:
        return pytree.tree_map_only(
            torch.Tensor,
            lambda t: torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device),
            value,
        )
