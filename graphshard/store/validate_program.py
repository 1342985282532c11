"""Consistency of a program that was read: a program that loads can be called.

Reading has checked the type of each field. Here fields are compared with each other: slots with graphs, calls with
regions, operators with their values. Thus forged contents with the right digest are an error of loading, before
anything is changed. Inputs are compared with the inputs of the trace that selects the program.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from graphshard.errors import ArtifactError
from graphshard.ir.printer import describe
from graphshard.ir.program import Phase, Program, Region
from graphshard.pipeline.rules import Checked, consistent_values, saved_is_returned, wrong_values
from graphshard.utils.text import brief

_OF_PARAMETERS = ("param", "part", "gathered", "grad", "accumulated", "partial", "pending", "piece")
_OF_TENSORS = ("mutation", "saved", "accumulated", "partial", "pending", "piece")


def check_program(program: Program, phases: list[str], module: nn.Module, regions: Mapping[str, Region]) -> None:
    """Raise ArtifactError for the first inconsistency of a program.

    Args:
        phases: of the program, as the manifest says.
        module: the one that it will run for.
        regions: the regions that run by their operators, by the names that the program calls them by.
    """
    for fault in _faults(program, phases, module, regions):
        raise ArtifactError(f"a program cannot run: {fault}. Export it again.")


def check_region(region: Region, checked: Checked) -> None:
    """Raise ArtifactError if a value of a region is not what its operator makes.

    Args:
        checked: calls that were found right in other regions of the file.
    """
    for violation in wrong_values(region.module.graph, checked):
        raise ArtifactError(f"region {region.key} cannot run: {violation.message}. Export it again.")


def differs_from_trace(program: Program, traced: Program) -> str:
    """Return how a program's inputs and outputs differ from a trace's, before passes; "" if they do not."""
    for what, found, wanted in (
        ("structure of the output", program.out_spec, traced.out_spec),
        ("outputs with gradients", program.tangents, traced.tangents),
        ("device", program.device, traced.device),
        ("dynamic sizes", [(s.name, s.source) for s in program.sizes], [(s.name, s.source) for s in traced.sizes]),
    ):
        if found != wanted:
            return f"its {what}: {brief(str(found))}, and not {brief(str(wanted))}"
    ((_, phase),) = traced.phases.items()
    given = {slot: _described(node) for node, slot in phase.slot_of().items() if slot.kind == "input"}
    for node, slot in program.phases["forward"].slot_of().items():
        if slot.kind == "input" and _described(node) != given.get(slot):
            return f"{slot} is {_described(node)}, and not {given.get(slot, 'there')}"
    return ""


def _described(node: Node) -> str:
    """Return dtype and shape of an input; symbols of dynamic sizes differ between programs."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return describe(value)
    return f"{value.dtype}{[size if type(size) is int else None for size in value.shape]}"


def _faults(program: Program, phases: list[str], module: nn.Module, regions: Mapping[str, Region]) -> Iterator[str]:
    if list(program.phases) != phases or "forward" not in phases:
        yield f"its phases are {brief(list(program.phases))}, and not {brief(phases)}"
    yield from _faults_of_outputs(program)
    for name, phase in program.phases.items():
        yield from _faults_of_slots(program, phase, module)
        yield from _faults_of_calls(phase.module.graph, regions)
        rules = [*consistent_values(program, name), *saved_is_returned(program, name)]
        yield from (violation.message for violation in rules)


def _faults_of_outputs(program: Program) -> Iterator[str]:
    """Outputs are numbered in order, and match the structure, the checks and the tangents."""
    forward = program.phases["forward"]
    results = [(value, slot) for value, slot in zip(forward.results, forward.outputs) if slot.kind == "output"]
    names = [slot.name for _, slot in results]
    if names != [str(index) for index in range(len(names))]:
        yield f"its outputs are called {brief(names)}"
    returned, checks = program.out_spec.num_leaves, len(program.checks)
    if returned != len(names) - checks:
        yield f"it has {len(names)} outputs, the structure of the output has {returned}, and {checks} are checked"
    tensors = {slot.name for value, slot in results if isinstance(value, Node)}
    inputs = program.phases["backward"].inputs if "backward" in program.phases else ()
    arriving = {slot.name for slot in inputs if slot.kind == "tangent"}
    if not arriving <= set(program.tangents) <= tensors:
        yield f"it is differentiated through {brief(program.tangents)} of the outputs {brief(sorted(tensors))}"


def _faults_of_slots(program: Program, phase: Phase, module: nn.Module) -> Iterator[str]:
    """Every slot names something that exists, and is a tensor where one is bound."""
    sizes, params = {size.name for size in program.sizes}, {row.name for row in program.params}
    buffers = {*program.constants, *(name for name, _ in module.named_buffers(remove_duplicate=False))}
    known = {"buffer": buffers, "late": buffers, "size": sizes, **dict.fromkeys(_OF_PARAMETERS, params)}
    for value, slot in [*zip(phase.placeholders, phase.inputs), *zip(phase.results, phase.outputs)]:
        kind = slot.of if slot.kind in ("mutation", "grad") else slot.kind
        if kind in known and slot.name not in known[kind]:
            yield f"{brief(str(slot))} is not there"
        if slot.kind in _OF_TENSORS and not isinstance(value, Node):
            yield f"{brief(str(slot))} is {brief(value)} and no tensor"
        if slot.kind == "grad" and not (value is None or isinstance(value, Node)):
            yield f"{brief(str(slot))} is {brief(value)} and no gradient"


def _faults_of_calls(graph: Graph, regions: Mapping[str, Region]) -> Iterator[str]:
    """Calls fit their regions, and parts that are picked exist."""
    for node in graph.nodes:
        if node.target is operator.getitem:
            several, index = node.args[0].meta.get("val"), node.args[1]
            if not isinstance(several, (list, tuple)) or type(index) is not int or not 0 <= index < len(several):
                yield f"{brief(node.name)} is part {brief(index)} of {describe(several)}"
        if node.op != "call_module":
            continue
        given = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(given, (list, tuple)) or not all(isinstance(item, Node) for item in given):
            yield f"{brief(node.name)} calls {brief(node.target)} with {brief(node.args)}"
            continue
        region = regions.get(str(node.target))
        if region is None:  # native code, which checks its inputs itself
            continue
        (output,) = region.module.graph.find_nodes(op="output")
        for what, here, there in (
            ("takes", given, region.module.graph.find_nodes(op="placeholder")),
            ("makes", node.meta.get("val"), output.args[0]),
        ):
            said, wanted = (brief(_ranks(values)) for values in (here, there))
            if said != wanted:
                yield f"{brief(node.name)}: its region {what} tensors of {wanted} dimensions, it has {said}"


def _ranks(values: Any) -> list[Any]:
    """Return number of dimensions and dtype of tensors; sizes may be dynamic, under other names."""
    found = values if isinstance(values, (list, tuple)) else [values]
    vals = [value.meta.get("val") if isinstance(value, Node) else value for value in found]
    return [(val.dim(), val.dtype) if isinstance(val, torch.Tensor) else type(val).__name__ for val in vals]
