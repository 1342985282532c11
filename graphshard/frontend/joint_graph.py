"""Joint graph: AOTAutograd differentiates the torch-level graph as a function of flat tensors.

    parameters, buffers, inputs, sizes  ->  results, gradients, writes      named by `Slot`s

Operators are not decomposed, so that the same graph serves `backend="eager"`, bit for bit, and Inductor, which
decomposes when a region is lowered.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta

from graphshard.errors import CaptureError
from graphshard.frontend.eager_operators import OperatorWatch, WatchedGraph, capture_decompositions, eager_kernels
from graphshard.ir.graph import place_of
from graphshard.ir.graph_break import GraphBreak
from graphshard.ir.kernel_shapes import MISSING, WITHOUT_GPU
from graphshard.ir.program import LinalgCheck, RuntimeAssert, Slot
from graphshard.subclasses.results import in_parts
from graphshard.subclasses.tensor_parallel import OneCast
from graphshard.torch_compat.aot_autograd import (
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
    """The torch-level graph as a function of flat tensors and sizes; it has no parameters itself.

    Args:
        graph: of Dynamo.
        slots: of what the function takes, in order.
        order: slots of the graph's inputs, in order; or objects that it is given, such as a device mesh.
        unsharded: what the module finds for the tensors that the function takes, by slot: DTensors, or what a
            parameter's `fsdp_post_all_gather` makes.

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
        data: Collection[str],
    ) -> None:
        super().__init__()
        self.slots = list(slots)
        self.leaves: list[Any] = []
        self.places: list[int] = []
        self.checks: tuple[LinalgCheck | RuntimeAssert, ...] = ()
        self.out_spec: pytree.TreeSpec | None = None
        self.__dict__["_graph"] = graph  # not a submodule, whose tensors AOTAutograd would look for
        self._order, self._unsharded, self._data = order, unsharded, data
        self._cached = torch.is_autocast_cache_enabled()

    def forward(self, *given: Any) -> list[torch.Tensor]:
        """Run the graph, operator by operator; results share no memory with inputs or each other."""
        found = dict(zip(self.slots, given, strict=True))
        tensors = {slot: each for slot, each in found.items() if isinstance(each, torch.Tensor)}
        watch = OperatorWatch(tensors)
        with cached_casts(self._cached), preserve_node_meta(), watch:
            used = {**found, **self._unsharded(tensors)}
            params = [each for slot, each in used.items() if slot.kind == "param"]
            with OneCast(used, next(iter(tensors.values())).device.type) if tensors else contextlib.nullcontext():
                results = WatchedGraph(self.__dict__["_graph"], watch, params).run(
                    *(used[each] if isinstance(each, Slot) else each for each in self._order)
                )
        parts = [in_parts(each, self._data) if isinstance(each, torch.Tensor) else each for each in results]
        leaves, self.out_spec = pytree.tree_flatten(parts)
        self.places = [place for place, leaf in enumerate(leaves) if _is_computed(leaf)]
        self.leaves = [None if _is_computed(leaf) else leaf for leaf in leaves]
        self.checks = tuple(check for check, _ in watch.checks)
        computed = _without_aliases([leaves[place] for place in self.places], given)
        self.places += range(len(self.leaves), len(self.leaves) + len(self.checks))
        return [*computed, *(status.clone() for _, status in watch.checks)]


def joint_graph(flat: FlatGraph, given: Sequence[Any], mode: FakeTensorMode, *, stands_in: bool) -> GraphModule:
    """Differentiate a flat graph; return the graph with AOTAutograd's descriptors.

    Args:
        given: fake tensors and symbolic sizes for what the graph takes.
        mode: of the fake tensors.
        stands_in: the program is for a GPU that is not here.
    """
    with leave_modes_on_error(), contextlib.ExitStack() as stack, tracing(TracingContext(mode)), quiet_tracing():
        stack.enter_context(leaves_stay_leaves())
        stack.enter_context(draws_stay())
        stack.enter_context(eager_kernels())
        stack.enter_context(fake_kernels(MISSING | WITHOUT_GPU if stands_in else MISSING))
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
            operator_of = re.match(r"Trying to backward through (\S+) but no autograd formula", str(error))
            if operator_of is None:
                raise
            raise CaptureError(
                f"graphshard cannot capture forward: gradients flow through {operator_of[1]}"
                f"{_place_of_call(flat, operator_of[1])}. It has no autograd formula. Register one with "
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


def _place_of_call(flat: FlatGraph, operator_name: str) -> str:
    """Return where the model calls an operator, as the end of a sentence; "" if it is not known."""
    nodes = _nodes_of(flat.__dict__["_graph"])
    return next((place_of(node) for node in nodes if str(node.target) == operator_name), "")


def _nodes_of(graph: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of the graphs in it, such as checkpointed regions."""
    for each in graph.modules():
        if isinstance(each, GraphModule):
            yield from each.graph.nodes


def _split_sums(joint: GraphModule) -> None:
    """Add sizes two by two: torch.export saves no `torch.sym_sum`."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.sym_sum):
        first, *others = node.args[0]
        total = first
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
