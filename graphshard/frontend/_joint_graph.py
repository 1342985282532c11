"""Joint graph: AOTAutograd differentiates the torch-level graph as a function of flat tensors.

    parameters, buffers, inputs, sizes  ->  results, gradients, writes      named by `Slot`s

Operators are not decomposed, so that the same graph serves `backend="eager"`, bit for bit, and Inductor, which
decomposes when a region is lowered.

The graph becomes a phase: inputs and outputs with a meaning, and no attributes. Graphs of higher-order operators become
arguments of their nodes. AOTAutograd marks the nodes of a checkpointed region (`ac_graph_id`) and what the policy of a
selective checkpoint says of them (`recompute`); these marks become the partitioner's.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.traceback import preserve_node_meta

from graphshard.errors import CaptureError, GraphBreak
from graphshard.frontend._eager_functions import differentiate_functions_again
from graphshard.frontend._eager_operators import OperatorWatch, WatchedGraph, capture_decompositions, eager_kernels
from graphshard.ir.graph import is_backward, is_part, is_random, place_of
from graphshard.ir.kernel_shapes import missing_kernels
from graphshard.ir.operators import NAMING_GROUPS
from graphshard.ir.printer import print_graph
from graphshard.ir.program import LinalgCheck, Phase, RuntimeAssert, Slot
from graphshard.ir.recompute import BACKWARD_OF, RECOMPUTE, REPEATED, SAVE, maker_of, save_leaving
from graphshard.ir.sizes import expression
from graphshard.ir.subgraph import Subgraph, calls_in, subgraph_of, take_attributes
from graphshard.subclasses.dtensor_conversions import convert_differentiably
from graphshard.subclasses.results import Layout, in_parts
from graphshard.subclasses.tensor_parallel import OneCast
from graphshard.torch_compat.aot_autograd import (
    AOTInput,
    AOTOutput,
    CheckpointPolicy,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    TracingContext,
    aot_export_joint_with_descriptors,
    cached_casts,
    draws_stay,
    leaves_stay_leaves,
    tracing,
)
from graphshard.torch_compat.autograd_state import leave_modes_on_error
from graphshard.torch_compat.fake_tensors import FakeTensorMode, fake_kernels, is_traced, quiet_tracing
from graphshard.torch_compat.torch_ops import memory_of, pytree
from graphshard.utils.text import users_class

Unsharded: TypeAlias = Callable[[Mapping[Slot, torch.Tensor]], Mapping[Slot, torch.Tensor]]


class FlatGraph(nn.Module):
    """Dynamo's torch-level graph as a function of flat tensors and sizes.

    Args:
        slots: of what the function takes, in order.
        order: slots of the graph's inputs, in order; or objects that it is given, such as a device mesh.
        unsharded: returns DTensors, or what `fsdp_post_all_gather` makes, for the tensors that the function takes.
        layouts: of inputs that are DTensors.
        data: names of the data axes that parameters are DTensors on, too.

    Attributes:
        leaves: results that are constants; None where a result is computed.
        places: of the computed results among the leaves; the places of the checks follow.
        checks: of statuses that follow the results.
        out_spec: structure of the results; tensor subclasses are their parts.
    """

    def __init__(
        self,
        graph: GraphModule,
        slots: Sequence[Slot],
        order: Sequence[Any],
        unsharded: Unsharded,
        layouts: Mapping[Slot, Layout],
        data: Collection[str],
    ) -> None:
        super().__init__()
        self.slots = list(slots)
        self.leaves: list[Any] = []
        self.places: list[int] = []
        self.checks: tuple[LinalgCheck | RuntimeAssert, ...] = ()
        self.out_spec: pytree.TreeSpec | None = None
        self.__dict__["_graph"] = graph  # not a submodule, whose tensors AOTAutograd would look for
        self._order, self._unsharded, self._layouts, self._data = order, unsharded, layouts, data
        self._cached = torch.is_autocast_cache_enabled()

    def forward(self, *given: Any) -> list[torch.Tensor]:
        """Run the graph, operator by operator; results share no memory with inputs or each other."""
        found = dict(zip(self.slots, given, strict=True))
        tensors = {slot: each for slot, each in found.items() if isinstance(each, torch.Tensor)}
        watch = OperatorWatch(tensors)
        with cached_casts(self._cached), preserve_node_meta(), watch:
            used = {**found, **self._unsharded(tensors), **self._as_dtensors(tensors)}
            params = [each for slot, each in used.items() if slot.kind == "param"]
            with OneCast(used, next(iter(tensors.values())).device.type) if tensors else contextlib.nullcontext():
                results = WatchedGraph(self.__dict__["_graph"], watch, params).run(
                    *(used[each] if isinstance(each, Slot) else each for each in self._order)
                )
        leaves, self.out_spec = pytree.tree_flatten(self._in_parts(results))
        self.places = [place for place, leaf in enumerate(leaves) if _is_computed(leaf)]
        self.leaves = [None if _is_computed(leaf) else leaf for leaf in leaves]
        self.checks = tuple(check for check, _ in watch.checks)
        computed = _without_aliases([leaves[place] for place in self.places], given)
        self.places += range(len(self.leaves), len(self.leaves) + len(self.checks))
        return [*computed, *(status.clone() for _, status in watch.checks)]

    def in_eager_mode(self, value_of: Callable[[Slot], Any]) -> list[Any]:
        """Run the graph under autograd, for parameters as modules find them; return the leaves of the results."""
        used = {slot: value_of(slot) for slot in self._order if isinstance(slot, Slot)}
        used |= self._as_dtensors(used)
        results = self.__dict__["_graph"](*(used[each] if isinstance(each, Slot) else each for each in self._order))
        return pytree.tree_leaves(self._in_parts(results))

    def _as_dtensors(self, values: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        return {slot: layout.around(values[slot]) for slot, layout in self._layouts.items()}

    def _in_parts(self, results: Sequence[Any]) -> list[Any]:
        return [in_parts(each, self._data) if isinstance(each, torch.Tensor) else each for each in results]

    def prepare_eager_mode(self) -> None:
        """Let eager mode differentiate functions of the graph twice, and forget what its nodes were traced with."""
        graph = self.__dict__["_graph"]
        differentiate_functions_again(graph)
        convert_differentiably(graph)
        for node in _nodes_of(graph):
            node.meta.clear()


def joint_graph(flat: FlatGraph, given: Sequence[Any], mode: FakeTensorMode) -> GraphModule:
    """Differentiate a flat graph for fake tensors and symbolic sizes; the result has AOTAutograd's descriptors."""
    with leave_modes_on_error(), contextlib.ExitStack() as stack, tracing(TracingContext(mode)), quiet_tracing():
        stack.enter_context(leaves_stay_leaves())
        stack.enter_context(draws_stay())
        stack.enter_context(eager_kernels())
        stack.enter_context(fake_kernels(missing_kernels()))
        try:
            traced = aot_export_joint_with_descriptors(
                stack, flat, tuple(given), decompositions=capture_decompositions()
            )
        except TypeError as error:
            if "tangents_token" not in str(error):
                raise
            raise GraphBreak(
                "forward",
                "A function of torch.cond, or of another operator with graphs, has an operator that checks what it "
                "computes, such as torch.linalg.inv.",
                "Call it outside of the function, or one that returns the status, such as torch.linalg.inv_ex.",
            ) from error
        except RuntimeError as error:
            found = re.match(r"Trying to backward through (\S+) but no autograd formula", str(error))
            if found is None:
                raise
            calls = (node for node in _nodes_of(flat.__dict__["_graph"]) if str(node.target) == found[1])
            raise CaptureError(
                f"graphshard cannot capture forward: gradients flow through {found[1]}"
                f"{next(map(place_of, calls), '')}. It has no autograd formula. Register one with "
                "torch.library.register_autograd, or pass x.detach() to it."
            ) from error
        except AssertionError as error:
            if "Encountered a set_" not in str(error):
                raise
            raise CaptureError(
                "graphshard cannot capture forward: it sets `.data` of a tensor that it is given. Compute with the new "
                "value, or write it in place (copy_)."
            ) from None
        joint: GraphModule = traced.graph_module
    _check_backward(joint, flat.slots)
    _split_sums(joint)
    return joint


def _nodes_of(graph: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of the graphs in it, such as checkpointed regions."""
    for each in graph.modules():
        if isinstance(each, GraphModule):
            yield from each.graph.nodes


def _split_sums(joint: GraphModule) -> None:
    """Add sizes two by two: torch.export saves no `torch.sym_sum`."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.sym_sum):
        total, *others = node.args[0]
        with joint.graph.inserting_before(node):
            for other in others:
                values = [each.meta["val"] if isinstance(each, Node) else each for each in (total, other)]
                total = joint.graph.call_function(operator.add, (total, other))
                total.meta = {**node.meta, "val": values[0] + values[1]}
        node.replace_all_uses_with(total)
        joint.graph.erase_node(node)


def _check_backward(joint: GraphModule, slots: Sequence[Slot]) -> None:
    """Check that backward writes to nothing: AOTAutograd leaves such writes in the graph, without a result."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written = node.args[0]
        if isinstance(written, Node) and written.op == "placeholder":
            index = getattr(written.meta.get("desc"), "idx", None)
            slot = slots[index] if isinstance(index, int) and index < len(slots) else None
            name = f"{slot.kind} {slot.name}" if slot is not None else str(written.name)
            reason = f"A hook, or the backward of a torch.autograd.Function, writes {name}."
            remedy = "Write it in forward, or after backward."
            if slot is not None and slot.kind == "param":  # modules hold the full one while Python runs forward
                raise CaptureError(f"graphshard cannot capture forward: {reason} {remedy}")
            raise GraphBreak("forward", reason, remedy)


def name_calls(graph: GraphModule, module: nn.Module) -> None:
    """Mark nodes with the calls of submodules that make them, in place: "layers.0@2" is the third call.

    Dynamo marks them by the identity of the submodule, and "@" with the number of the call from the second on.
    """
    names = {str(id(each)): (name, users_class(each)) for name, each in module.named_modules() if name}
    for node in _nodes_of(graph):
        calls: dict[str, tuple[str, type]] = {}
        for key in node.meta.pop("nn_module_stack", None) or ():
            submodule, _, number = key.partition("@")
            if submodule in names:
                calls[f"{names[submodule][0]}@{number or 0}"] = names[submodule]
        node.meta["nn_module_stack"] = calls


def _is_computed(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))


def _without_aliases(results: list[Any], given: Sequence[Any]) -> list[Any]:
    """Copy results that share memory with an input or with another result: the program is a function of its inputs."""
    seen = {memory_of(each) for each in given if isinstance(each, torch.Tensor)}
    for index, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            if not is_traced(result) or memory_of(result) in seen:
                results[index] = result.clone()
            else:
                seen.add(memory_of(result))
    return results


_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
# Order of results; others follow.
_ORDER = {"mutation": 0, "output": 1}


def phase_of(joint: GraphModule, flat: FlatGraph) -> Phase:
    """Return the joint graph with slots for what AOTAutograd describes."""
    graph = joint.graph
    graph.set_codegen(CodeGen())
    (output,) = graph.find_nodes(op="output")
    inputs = [_input_slot(node.meta["desc"], flat) for node in graph.find_nodes(op="placeholder")]
    # Inputs that need no gradient have an undescribed None among the outputs.
    described = [(v, d) for v, d in zip(output.args[0], output.meta.pop("desc"), strict=True) if d is not None]
    outputs = [(value, _output_slot(desc, flat)) for value, desc in described]
    # An input that nothing differentiates through is not connected to autograd: its own graph may be freed already.
    outputs = [(v, slot) for v, slot in outputs if v is not None or (slot.kind, slot.of) != ("grad", "input")]
    outputs += [(leaf, Slot("output", str(i))) for i, leaf in enumerate(flat.leaves) if i not in flat.places]

    def place(pair: tuple[Any, Slot]) -> tuple[int, int]:
        kind = pair[1].kind
        return _ORDER.get(kind, 2), int(pair[1].name) if kind == "output" else 0

    outputs.sort(key=place)
    output.args = (tuple(value for value, _ in outputs),)
    return Phase(joint, tuple(inputs), tuple(slot for _, slot in outputs))


def erase_boundaries(graph: Graph) -> None:
    """Erase the views of the same shape that autograd's nodes at the boundaries of units leave."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        source = node.args[0]
        shapes = [list(map(expression, each.meta["val"].shape)) for each in (node, source)]
        if shapes[0] == shapes[1] and not is_backward(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def erase_leaves(phase: Phase, names: Collection[str]) -> None:
    """Erase parameters that are made of parts: their inputs only told autograd of them."""
    phase.erase_inputs(lambda _, slot: slot.kind == "param" and slot.name in names)


def read_numbers_again(phase: Phase) -> None:
    """Let backward read numbers that are inputs again: the tensor of each is saved, not the number."""
    inputs = {node for node, slot in phase.slot_of().items() if slot.kind == "input"}
    for node in phase.module.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        if node.args[0] in inputs:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def lift_constants(phase: Phase) -> dict[str, torch.Tensor]:
    """Make inputs of tensors that forward made while it was traced, or that no module holds; return them."""
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


def _input_slot(desc: AOTInput, flat: FlatGraph) -> Slot:
    if isinstance(desc, PlainAOTInput):
        return flat.slots[desc.idx]
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
        return Slot("tangent", str(flat.places[desc.output.idx]))
    raise _unexpected(desc)


def _output_slot(desc: AOTOutput, flat: FlatGraph) -> Slot:
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

    A graph that has a collective, draws random numbers, or holds a tensor is a GraphBreak.
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
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
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
