"""A captured program as an `ExportedProgram` of torch with a joint signature, and back.

    inputs     parameters (PARAMETER), buffers (BUFFER), constants, tensors of the call and tangents (USER_INPUT)
    outputs    BUFFER_MUTATION, USER_OUTPUT, GRADIENT_TO_PARAMETER, GRADIENT_TO_USER_INPUT

It can be printed, saved with `torch.export.save` and read by other tools. Its state dict is on the meta device, so it
holds no weights. What only graphshard needs (marks for the partitioner, the structure of the outputs) is in
`meta["custom"]`, which torch writes into a file as JSON.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node

from graphshard.codec.graphs import encode_marks
from graphshard.codec.structures import encode_structure
from graphshard.codec.values import short_name
from graphshard.errors import ArtifactError, UnsupportedError
from graphshard.exported.exported_program import OURS
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.subgraph import give_attributes
from graphshard.torch_compat.operators import pytree

FORMAT = 1
_OUTPUT_KINDS = {
    ("mutation", "buffer"): OutputKind.BUFFER_MUTATION,
    ("mutation", "input"): OutputKind.USER_INPUT_MUTATION,
    ("output", None): OutputKind.USER_OUTPUT,
    ("grad", "param"): OutputKind.GRADIENT_TO_PARAMETER,
    ("grad", "input"): OutputKind.GRADIENT_TO_USER_INPUT,
}
_PREFIXES = {"param": "p_", "buffer": "b_", "input": "input_", "tangent": "tangent_"}
_ORDER = tuple(_OUTPUT_KINDS.values())


def to_exported(program: Program, returned: pytree.TreeSpec | None = None) -> ExportedProgram:
    """Return a captured program, before any pass, as torch's; the program stays as it is.

    Args:
        returned: structure of what the module returns, with the results as its leaves; None for a list of results.

    Raises:
        UnsupportedError: torch has no signature for what the program takes or returns.
    """
    ((name, phase),) = program.phases.items()
    _check(program, phase)
    graph, known = Graph(), dict[Node, Node]()
    slots = dict(zip(phase.placeholders, phase.inputs, strict=True))
    inputs = [_input(graph, known, node, slot, program) for node, slot in slots.items()]
    for node in phase.module.graph.nodes:
        if node.op == "call_function":
            copied = known[node] = graph.node_copy(node, known.__getitem__)
            copied.meta = _meta(node)
    pairs = list(zip(phase.results, phase.outputs, strict=True))
    kinds = [_OUTPUT_KINDS[slot.kind, slot.of] for slot in phase.outputs]
    kept = [i for i, (value, slot) in enumerate(pairs) if value is not None or slot.kind == "output"]
    kept.sort(key=lambda i: _ORDER.index(kinds[i]))
    results = [known.get(value, value) for value in (pairs[i][0] for i in kept)]
    graph.output(tuple(results))
    targets = {slot: known[node].name for node, slot in slots.items()}
    outputs = [_output(value, pairs[i][1], kinds[i], targets) for value, i in zip(results, kept)]
    places = [kept.index(i) if i in kept else None for i in range(len(pairs))]
    root = GraphModule(nn.Module(), graph)
    if give_attributes(root):
        root.recompile()
    root.meta["custom"] = {OURS: _facts(program, phase, slots, name, places, returned)}
    user = [spec for spec in inputs if spec.kind is InputKind.USER_INPUT]
    computed = [spec for spec in outputs if "MUTATION" not in spec.kind.name]
    signature = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure((tuple(0 for _ in user), {})),
        out_spec=pytree.tree_structure(tuple(0 for _ in computed)),
        forward_arg_names=[spec.arg.name for spec in user],
    )
    return ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=_state(program, slots),
        range_constraints=_ranges(program),
        module_call_graph=[ModuleCallEntry("", signature)],
        constants=dict(program.constants),
    )


def _check(program: Program, phase: Phase) -> None:
    """Raise UnsupportedError for what has no place in a signature."""
    for slot in phase.inputs:
        if slot.kind not in _PREFIXES and slot.kind != "size":
            raise UnsupportedError(
                f"exported: the program of {program.model} takes {slot}, which an ExportedProgram has no name for. "
                "Look at program.history[0].text instead."
            )
    for slot in phase.outputs:
        if (slot.kind, slot.of) not in _OUTPUT_KINDS:
            raise UnsupportedError(
                f"exported: the program of {program.model} returns {slot} (of {slot.of}), which an ExportedProgram has "
                "no name for. Look at program.history[0].text instead."
            )
    if phase.module.graph.find_nodes(op="get_attr") or phase.module.graph.find_nodes(op="call_module"):
        raise UnsupportedError(
            f"exported: the program of {program.model} has graphs within its graph. Look at program.history[0].text "
            "instead."
        )


def _input(graph: Graph, known: dict[Node, Node], node: Node, slot: Slot, program: Program) -> InputSpec:
    constant = slot.name in program.constants
    prefix = "c_" if constant else _PREFIXES.get(slot.kind, "size_")
    name = prefix + re.sub(r"\W", "_", slot.name)
    made = known[node] = graph.placeholder(name)
    made.meta["val"] = node.meta["val"]
    if slot.kind == "size":
        return InputSpec(InputKind.USER_INPUT, SymIntArgument(made.name), None)
    argument = TensorArgument(made.name)
    if slot.kind == "param":
        return InputSpec(InputKind.PARAMETER, argument, slot.name)
    if constant:
        return InputSpec(InputKind.CONSTANT_TENSOR, argument, slot.name)
    if slot.kind == "buffer":
        return InputSpec(InputKind.BUFFER, argument, slot.name, persistent=True)
    return InputSpec(InputKind.USER_INPUT, argument, None)


def _output(value: Any, slot: Slot, kind: OutputKind, targets: Mapping[Slot, str]) -> OutputSpec:
    if not isinstance(value, Node):
        return OutputSpec(kind, ConstantArgument("", value), None)
    sized = isinstance(value.meta.get("val"), torch.SymInt)
    argument = SymIntArgument(value.name) if sized else TensorArgument(value.name)
    of_input = kind in (OutputKind.USER_INPUT_MUTATION, OutputKind.GRADIENT_TO_USER_INPUT)
    target = targets[Slot("input", slot.name)] if of_input else slot.name
    return OutputSpec(kind, argument, None if kind is OutputKind.USER_OUTPUT else target)


def _meta(node: Node) -> dict[str, Any]:
    """What torch keeps in a file, with our marks among what is `custom`."""
    meta: dict[str, Any] = {key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta}
    if isinstance(meta.get("val"), list):  # a file knows tuples only, as results of operators with graphs
        meta["val"] = tuple(meta["val"])
    own: dict[str, Any] = {"marks": encode_marks(node.meta)}
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        if calls := node.meta.get(key):
            own[key] = {call: path for call, (path, _) in calls.items()}
            if key == "nn_module_stack":
                meta[key] = {call: (path, _kind(kind)) for call, (path, kind) in calls.items()}
    meta["custom"] = {OURS: own}
    return meta


def _kind(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _state(program: Program, slots: Mapping[Node, Slot]) -> dict[str, torch.Tensor]:
    """Parameters and buffers on the meta device, under all their names."""
    state: dict[str, torch.Tensor] = {}
    for node, slot in slots.items():
        if slot.kind not in ("param", "buffer") or slot.name in program.constants:
            continue
        like = node.meta["val"]
        tensor = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device="meta")
        if slot.kind == "param":
            row = program.params[slot.name]
            tensor = nn.Parameter(tensor, requires_grad=row.trainable)
            state |= dict.fromkeys(row.names, tensor)
        else:
            state[slot.name] = tensor
    return state


def _ranges(program: Program) -> dict[Any, Any]:
    return {size.symbol: size.value.node.shape_env.var_to_range[size.symbol] for size in program.sizes}


def _facts(
    program: Program,
    phase: Phase,
    slots: Mapping[Node, Slot],
    name: str,
    places: list[int | None],
    returned: pytree.TreeSpec | None,
) -> dict[str, Any]:
    """What the signature does not say; `why_not` says why the program cannot be compiled from."""
    why_not = ""
    if program.sizes:
        why_not = "it has dynamic sizes"
    elif program.checks:
        why_not = "it checks values after each call"
    elif any(axis.role in ("inner", "tensor") for axis in program.mesh.axes) or program.mesh.experts is not None:
        why_not = "the model communicates itself"
    structure = encode_structure(program.out_spec, "outputs")
    if returned is not None:
        with contextlib.suppress(ArtifactError):  # a file names no classes of the user's: a list of results
            structure = encode_structure(returned, "outputs")
    return {
        "format": FORMAT,
        "phase": name,
        "model": program.model,
        "device": program.device.type,
        "units": [unit for unit in program.params.units if unit],
        "inputs": [[slot.kind, slot.name, encode_marks(node.meta)] for node, slot in slots.items()],
        "outputs": [[slot.kind, slot.name, slot.of, place] for slot, place in zip(phase.outputs, places, strict=True)],
        "out_spec": structure,
        "stored": {r.name: short_name(r.dtype) for r in program.params if r.dtype != r.compute_dtype},
        "ties": [list(row.names) for row in program.params if len(row.names) > 1],
        "rewritten": {buffer: list(outputs) for buffer, outputs in program.rewritten.items()},
        "why_not": why_not,
    }
