"""Whether a program that was read from a file can run as it says: all of it is compared before anything is changed.

Reading has checked the type of each field. Here they are compared with each other: slots with graphs, calls with
regions, operators with what they make, the signature with the inputs. What forged contents would break at a call, or at
the binding before it, is an error of loading.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from graphshard.capture.signature import Signature, is_constant
from graphshard.ir.errors import ArtifactError
from graphshard.ir.printer import describe
from graphshard.ir.program import Phase, Program, Region, Slot
from graphshard.ir.state import (
    NUMBER_OPERATORS,
    Counted,
    Given,
    Made,
    ModuleState,
    Result,
    Term,
    arity,
    computations_in,
    places_in,
)
from graphshard.ir.text import brief
from graphshard.ir.value_guards import ValueGuards
from graphshard.pipeline.graph_rules import Checked, consistent_values, saved_is_returned, wrong_values

_OF_PARAMETERS = ("param", "part", "gathered", "grad", "accumulated", "partial", "pending", "piece")


def check_program(
    program: Program, signature: Signature, phases: list[str], module: nn.Module, regions: Mapping[str, Region]
) -> None:
    """Raise ArtifactError for the first thing of a program that does not fit the rest.

    Args:
        signature: the calls that it serves.
        phases: that it has, as the manifest says.
        module: the one that it will run for.
        regions: those whose operators run, by the names that the program calls them by.
    """
    for fault in _faults(program, signature, phases, module, regions):
        raise ArtifactError(f"a program cannot run: {fault}. Export it again.")


def check_region(region: Region, checked: Checked) -> None:
    """Raise ArtifactError if an operator of a region cannot make what it is said to.

    Args:
        checked: what was found right in other regions of the file; regions ask the same questions.
    """
    for violation in wrong_values(region.module.graph, checked):
        raise ArtifactError(f"region {region.key} cannot run: {violation.message}. Export it again.")


def _faults(
    program: Program, signature: Signature, phases: list[str], module: nn.Module, regions: Mapping[str, Region]
) -> Iterator[str]:
    if list(program.phases) != phases or "forward" not in phases:
        yield f"its phases are {brief(list(program.phases))}, and not {brief(phases)}"
    if len(signature.inputs) != signature.structure.num_leaves:
        yield f"{len(signature.inputs)} inputs are described, the call has {signature.structure.num_leaves}"
    constants = [key for key in signature.inputs if len(key) == 2]
    if not isinstance(signature.autocast, (bool, torch.dtype)) or not all(is_constant(*key) for key in constants):
        yield f"its calls have the constants {brief(constants)} and autocast {brief(signature.autocast)}"
    if len(signature.params) != len(program.params) or len(signature.settings) != len(program.params):
        yield f"its calls have {len(signature.params)} parameters, it has {len(program.params)}"
    tensors = [key for key in signature.inputs if len(key) == 4]
    given = len(tensors) + len(program.state.inputs) + len(program.state.numbers)
    yield from _faults_of_outputs(program)
    yield from _faults_of_state(program.state, given)
    if program.decided is not None:
        yield from _faults_of_decided(program.decided, given, module)
    for name, phase in program.phases.items():
        yield from _faults_of_slots(program, phase, tensors, given, module)
        yield from _faults_of_calls(phase.module.graph, regions)
        rules = [*consistent_values(program, name), *saved_is_returned(program, name)]
        yield from (violation.message for violation in rules)


def _faults_of_outputs(program: Program) -> Iterator[str]:
    """Of what the module returns: each output once, in order, and as many as its structure has, with the checks."""
    forward = program.phases["forward"]
    results = [(value, slot) for value, slot in zip(forward.results, forward.outputs) if slot.kind == "output"]
    names = [slot.name for _, slot in results]
    if names != [str(index) for index in range(len(names))]:
        yield f"its outputs are called {brief(names)}"
    returned = program.out_spec.num_leaves
    left = {term.index for term in _terms(program.state) if isinstance(term, Result)}
    if {*range(returned), *left} != set(range(len(names) - len(program.checks))):
        yield (
            f"it has {len(names)} outputs, the structure of the output has {returned}, {len(program.checks)} are "
            f"checked, and outputs {brief(sorted(left))} are left on the module"
        )
    tensors = {slot.name for value, slot in results if isinstance(value, Node)}
    arriving = (
        {slot.name for slot in program.phases["backward"].inputs if slot.kind == "tangent"}
        if ("backward" in program.phases)
        else set()
    )
    if not arriving <= set(program.tangents) <= tensors:
        yield f"it is differentiated through {brief(program.tangents)} of the outputs {brief(sorted(tensors))}"


def _faults_of_state(state: ModuleState, given: int) -> Iterator[str]:
    """Of what is read and left on the module: it is read where it is computed with, and can be computed."""
    read = {read.place: read.text for read in state.reads}
    terms = list(_terms(state))
    counted = [term.expression for term in terms if isinstance(term, Counted)]
    for expression in (*state.numbers, *(condition.expression for condition in state.conditions), *counted):
        yield from (f"{brief(str(at))} is no number" for at in places_in(expression) if "any " not in read.get(at, ""))
        for computed in computations_in(expression):
            if computed.operation not in NUMBER_OPERATORS or len(computed.operands) != arity(computed.operation):
                yield f"{brief(str(computed))} cannot be computed"
    for places in state.inputs:
        if not places or any(place not in read for place in places):
            yield f"there is no tensor at {brief([str(place) for place in places])}"
    for term in terms:
        if isinstance(term, Given) and not 0 <= term.index < given:
            yield f"it leaves input {brief(term.index)} on the module, and has {given}"
        if isinstance(term, Made) and len(term.leaves) != term.structure.num_leaves:
            yield f"it leaves {len(term.leaves)} values in {brief(str(term.structure))}"
    wanted = {"set": 1, "delete": 0, "register": 2}
    for write in state.writes:
        if write.kind in wanted and (not write.place.path or len(write.terms) != wanted[write.kind]):
            yield f"it cannot {write.kind} {brief(str(write.place))} with {len(write.terms)} values"


def _faults_of_decided(decided: ValueGuards, given: int, module: nn.Module) -> Iterator[str]:
    """Of what is asked before a call: it is computed of what is there."""
    graph = decided.module.graph
    (output,) = graph.find_nodes(op="output")
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if len(graph.find_nodes(op="placeholder")) != len(decided.inputs) + len(decided.buffers):
        yield f"what it asks before a call takes {len(decided.inputs)} inputs and {len(decided.buffers)} buffers"
    if len(output.args[0]) != len(decided.guards) or not all(isinstance(value, Node) for value in output.args[0]):
        yield f"it asks for {len(output.args[0])} values before a call, and knows {len(decided.guards)}"
    yield from (f"it asks for input {number} of {given}" for number in decided.inputs if not 0 <= number < given)
    yield from (f"it asks for buffer {brief(name)}" for name in decided.buffers if name not in buffers)
    if any(node.op == "call_module" for node in graph.nodes):
        yield "it calls a region before a call"
    try:
        GraphModule(nn.Module(), graph)
    except (SyntaxError, RecursionError) as error:
        yield f"what it asks before a call is no code ({error})"


def _terms(state: ModuleState) -> Iterator[Term]:
    """What a program leaves on the module, and within containers, one by one."""
    waiting = [term for write in state.writes for term in write.terms]
    while waiting:
        yield (term := waiting.pop())
        if isinstance(term, Made):
            waiting += term.leaves


def _faults_of_slots(
    program: Program, phase: Phase, tensors: list[tuple[Any, ...]], given: int, module: nn.Module
) -> Iterator[str]:
    """Of what is given to a graph and what comes of it: it is there, and is a tensor where one is bound.

    Args:
        tensors: of the call, as its signature describes them.
        given: their number, with those that the module gives.
    """
    sizes, params = {size.name for size in program.sizes}, {row.name for row in program.params}
    buffers = {*program.constants, *(name for name, _ in module.named_buffers(remove_duplicate=False))}
    for value, slot in [*zip(phase.placeholders, phase.inputs), *zip(phase.results, phase.outputs)]:
        kind = slot.of if slot.kind in ("mutation", "grad") else slot.kind
        known = {"buffer": buffers, "late": buffers, "size": sizes, **dict.fromkeys(_OF_PARAMETERS, params)}
        if kind in known and slot.name not in known[kind]:
            yield f"{brief(str(slot))} is not there"
        if kind == "input" and not (slot.name.isdecimal() and int(slot.name) < given):
            yield f"{brief(str(slot))} is none of {given} inputs"
        if slot.kind in ("mutation", "saved", "accumulated", "partial", "pending", "piece") and not isinstance(
            value, Node
        ):
            yield f"{brief(str(slot))} is {brief(value)} and no tensor"
        if slot.kind == "grad" and not (value is None or isinstance(value, Node)):
            yield f"{brief(str(slot))} is {brief(value)} and no gradient"
    yield from (fault for node, slot in phase.slot_of().items() if (fault := _other_input(node, slot, tensors)))


def _other_input(node: Node, slot: Slot, tensors: list[tuple[Any, ...]]) -> str:
    """What is wrong with the size of an input of the call, if that is a number."""
    value = node.meta.get("val")
    if slot.kind != "input" or not isinstance(value, torch.Tensor) or int(slot.name) >= len(tensors):
        return ""
    shape, _, dtype, _ = tensors[int(slot.name)]
    given = [size if type(size) is int else wanted for size, wanted in zip(value.shape, shape)]
    if len(value.shape) == len(shape) and given == list(shape) and value.dtype == dtype:
        return ""
    return f"{slot} is {describe(value)}, the call has {list(shape)} of {dtype}"


def _faults_of_calls(graph: Graph, regions: Mapping[str, Region]) -> Iterator[str]:
    """Of calls of regions and of what is picked out of several values."""
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
        if region is None:  # native code, which says itself what it takes
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
    """Of tensors the number of dimensions and the dtype; sizes may be dynamic, under other names."""
    found = values if isinstance(values, (list, tuple)) else [values]
    vals = [value.meta.get("val") if isinstance(value, Node) else value for value in found]
    return [(val.dim(), val.dtype) if isinstance(val, torch.Tensor) else type(val).__name__ for val in vals]
