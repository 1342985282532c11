"""A captured program as an `ExportedProgram` of torch with a joint signature, and back.

    inputs     parameters (PARAMETER), buffers (BUFFER), constants, tensors of the call and tangents (USER_INPUT)
    outputs    BUFFER_MUTATION, USER_OUTPUT, GRADIENT_TO_PARAMETER, GRADIENT_TO_USER_INPUT

It can be printed, saved with `torch.export.save` and read by other tools. Its state dict is on the meta device, so it
holds no weights. `meta["custom"]`, which torch writes into a file as JSON, has the program as a stage of a dump, which
graphshard reads instead of the graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
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

from graphshard.codec.converter import decode_structure, encode_structure
from graphshard.codec.graph_format import short_name
from graphshard.codec.program_format import program_from_json, program_to_json
from graphshard.errors import ArgumentError, ArtifactError, InputError, UnsupportedError
from graphshard.exported.exported_program import INPUT_PREFIX, OURS, facts_of, joint_inputs, joint_of, wrong_call
from graphshard.exported.program_code import qualified_name
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.subgraph import give_attributes
from graphshard.torch_compat.torch_ops import OpOverload, pytree
from graphshard.utils.json_dataclasses import typed

_OUTPUT_KINDS = {
    ("mutation", "buffer"): OutputKind.BUFFER_MUTATION,
    ("mutation", "input"): OutputKind.USER_INPUT_MUTATION,
    ("output", None): OutputKind.USER_OUTPUT,
    ("grad", "param"): OutputKind.GRADIENT_TO_PARAMETER,
    ("grad", "input"): OutputKind.GRADIENT_TO_USER_INPUT,
}
_ORDER = tuple(_OUTPUT_KINDS.values())
_PREFIXES = {"param": "p_", "buffer": "b_", "input": INPUT_PREFIX, "tangent": "tangent_"}


# --- writing -----------------------------------------------------------------------------------------------------


def to_exported(program: Program) -> ExportedProgram:
    """Return a captured program, before any pass, as torch's; raise UnsupportedError for what torch cannot say."""
    (phase,) = program.phases.values()
    _check_supported(program, phase)
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
    root = GraphModule(nn.Module(), graph)
    if give_attributes(root):
        root.recompile()
    root.meta["custom"] = {OURS: {**_facts(program), "calls": _calls(root.graph)}}
    user = [spec for spec in inputs if spec.kind is InputKind.USER_INPUT]
    computed = [spec for spec in outputs if "MUTATION" not in spec.kind.name]
    signature = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure((tuple(0 for _ in user), {})),
        out_spec=pytree.tree_structure(tuple(0 for _ in computed)),
        forward_arg_names=[spec.arg.name for spec in user],
    )
    ranges = {size.symbol: size.value.node.shape_env.var_to_range[size.symbol] for size in program.sizes}
    return ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=_state(program, slots),
        range_constraints=ranges,
        module_call_graph=[ModuleCallEntry("", signature)],
        constants=dict(program.constants),
    )


def _check_supported(program: Program, phase: Phase) -> None:
    lacks = "which an ExportedProgram has no name for"
    taken = [f"takes {s}, {lacks}" for s in phase.inputs if s.kind not in _PREFIXES and s.kind != "size"]
    made = [f"returns {s} (of {s.of}), {lacks}" for s in phase.outputs if (s.kind, s.of) not in _OUTPUT_KINDS]
    inner = [*phase.module.graph.find_nodes(op="get_attr"), *phase.module.graph.find_nodes(op="call_module")]
    for problem in (["has graphs within its graph"] if inner else []) + made + taken:
        raise UnsupportedError(
            f"exported: the program of {program.model} {problem}. Look at program.history[0].text instead."
        )


def _input(graph: Graph, known: dict[Node, Node], node: Node, slot: Slot, program: Program) -> InputSpec:
    constant = slot.name in program.constants
    prefix = "c_" if constant else _PREFIXES.get(slot.kind, "size_")
    made = known[node] = graph.placeholder(prefix + re.sub(r"\W", "_", slot.name))
    made.meta["val"] = node.meta["val"]
    if slot.kind == "size":
        return InputSpec(InputKind.USER_INPUT, SymIntArgument(made.name), None)
    kinds = {"param": InputKind.PARAMETER, "buffer": InputKind.CONSTANT_TENSOR if constant else InputKind.BUFFER}
    kind = kinds.get(slot.kind, InputKind.CONSTANT_TENSOR if constant else InputKind.USER_INPUT)
    name = None if kind is InputKind.USER_INPUT else slot.name
    return InputSpec(kind, TensorArgument(made.name), name, persistent=True if kind is InputKind.BUFFER else None)


def _output(value: Any, slot: Slot, kind: OutputKind, targets: Mapping[Slot, str]) -> OutputSpec:
    if not isinstance(value, Node):
        return OutputSpec(kind, ConstantArgument("", value), None)
    sized = isinstance(value.meta.get("val"), torch.SymInt)
    argument = SymIntArgument(value.name) if sized else TensorArgument(value.name)
    of_input = kind in (OutputKind.USER_INPUT_MUTATION, OutputKind.GRADIENT_TO_USER_INPUT)
    target = targets[Slot("input", slot.name)] if of_input else slot.name
    return OutputSpec(kind, argument, None if kind is OutputKind.USER_OUTPUT else target)


def _meta(node: Node) -> dict[str, Any]:
    """Return the meta that torch keeps in a file."""
    meta: dict[str, Any] = {key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta}
    if isinstance(meta.get("val"), list):  # a file knows tuples only, as results of operators with graphs
        meta["val"] = tuple(meta["val"])
    if calls := node.meta.get("nn_module_stack"):
        meta["nn_module_stack"] = {call: (path, qualified_name(kind)) for call, (path, kind) in calls.items()}
    return meta


def _state(program: Program, slots: Mapping[Node, Slot]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers on the meta device, under all their names."""
    state: dict[str, torch.Tensor] = {}
    for node, slot in slots.items():
        if slot.kind not in ("param", "buffer") or slot.name in program.constants:
            continue
        like = node.meta["val"]
        tensor = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device="meta")
        if slot.kind == "param":
            row = program.params[slot.name]
            state |= dict.fromkeys(row.names, nn.Parameter(tensor, requires_grad=row.trainable))
        else:
            state[slot.name] = tensor
    return state


def _facts(program: Program) -> dict[str, Any]:
    """Return what only graphshard needs; `why_not` says why the program cannot be compiled again."""
    communicates = any(axis.role in ("inner", "tensor") for axis in program.mesh.axes)
    problems = {
        "it has dynamic sizes": bool(program.sizes),
        "it checks values after each call": bool(program.checks),
        "the model communicates itself": communicates or program.mesh.experts is not None,
    }
    structure = encode_structure(program.out_spec, "outputs")
    if program.returned is not None:
        with contextlib.suppress(ArtifactError):  # a file names no user classes: a list of results
            structure = encode_structure(program.returned, "outputs")
    return {
        "stage": program_to_json(replace(program, taken=())),
        "model": program.model,
        "units": [unit for unit in program.params.units if unit],
        "out_spec": structure,
        "stored": {r.name: short_name(r.dtype) for r in program.params if r.dtype != r.compute_dtype},
        "ties": [list(row.names) for row in program.params if len(row.names) > 1],
        "why_not": next((why for why, holds in problems.items() if holds), ""),
    }


def _calls(graph: Graph) -> str:
    """Return a hash of the calls of operators in a graph, and of its results, as they are after loading, too."""
    digest = hashlib.sha256(str(graph.output_node().args).encode())
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            digest.update(f"{node.target}{node.args}{sorted(node.kwargs.items())}".encode())
    return digest.hexdigest()


# --- reading -----------------------------------------------------------------------------------------------------


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

    Raise InputError if the call differs from the captured one.

    Raises:
        InputError: the call differs from the captured one.
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


def to_program(exported: ExportedProgram, params: ParamTable, mesh: Mesh, device: torch.device) -> Program:
    """Return the program that `to_exported` was given, for a model with these parameters.

    Raise ArgumentError if it was not written by `to_exported`, or does not fit the parameters.
    """
    facts = facts_of(exported)
    assert facts is not None
    try:
        captured = program_from_json(typed(facts["stage"], str))
        structure = decode_structure(facts["out_spec"], "outputs")
        (phase,) = captured.phases.values()
        if facts["calls"] != _calls(exported.graph):
            raise ArgumentError("its graph was changed")
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
    constants = {name: value for name, value in exported.constants.items() if isinstance(value, torch.Tensor)}
    here = torch.device(device.type)
    return replace(captured, params=params, mesh=mesh, device=here, constants=constants, out_spec=structure)
