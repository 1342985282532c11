"""FSDP2's protocol for tensor subclasses, run while a forward is traced: before the gather, and after it.

    parts -> shard -> fsdp_pre_all_gather -> subclass_all_gather -> fsdp_post_all_gather -> parameter of the module

What both methods compute is part of the program. The result is a leaf, as FSDP2's unsharded parameter is: nothing is
differentiated through the methods, and the gradient of their result is the parameter's. A program makes the result
again wherever it gathers, so `out=` is never passed.

Methods of all parameters are traced before the forward. `settle_gathers` moves them to where the parameter is needed,
because otherwise every parameter would be gathered first:

    %s = mul(%part, 2)                            %y = mm(%x, %v)
    %g = subclass_all_gather([%s], 2, w)          %s = mul(%part, 2)
    %w = _to_copy(%g[0], float32)                 %g = subclass_all_gather([%s], 2, w)
    %y = mm(%x, %v)                               %w = _to_copy(%g[0], float32)
    %z = mm(%y, %w)                               %z = mm(%y, %w)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.fx import Node

from graphshard.errors import CaptureError
from graphshard.ir.graph import c10d, emit, is_backward
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import ALL_REDUCE, SUBCLASS_ALL_GATHER
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Slot
from graphshard.ir.subclasses import (
    POST,
    PRE,
    Extension,
    is_subclass,
    method_of,
    missing_methods,
    padded_to,
    parts_of,
    piece_of,
    rebuilt,
    shard_in,
)
from graphshard.ir.units import reduced_in
from graphshard.subclasses.closure_variables import read_by
from graphshard.torch_compat.fake_tensors import FakeTensor, FakeTensorMode, new_fake_mode
from graphshard.torch_compat.torch_ops import TorchDispatchMode
from graphshard.utils.source_lines import line_of

COMMUNICATION = (
    "it communicates by {}. Only functional all-reduces over the mesh that it is told are supported: "
    "torch.distributed._functional_collectives.all_reduce"
)

# Operators that are not element by element, but keep elements in front of the padding.
_KEEP_ORDER = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_zeros", "zeros", "zeros_like", "full"),
        *("_to_copy", "clone", "copy_", "copy", "detach", "alias", "lift_fresh", "constant_pad_nd"),
        *("slice", "slice_scatter", "split", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "as_strided"),
    }
)


@dataclass(frozen=True)
class Extended:
    """A parameter that follows the protocol, sharded or not yet, and what its methods are told.

    `row` is its spec with the policy's dtypes, which `described` completes; `mesh` the axis it is sharded along.
    """

    row: ParamSpec
    param: nn.Parameter
    module: nn.Module
    policy: MixedPrecisionPolicy
    mesh: DeviceMesh
    device: torch.device

    def stand_in(self) -> torch.Tensor:
        """Return a padded shard like this rank's, without values; within a fake mode."""
        shard, row = shard_in(self.param), self.row
        held = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=self.device) for p in parts_of(shard)]
        stand_in = rebuilt(shard, held)
        if not isinstance(self.param, DTensor):
            stand_in = piece_of(stand_in, row.dim, row.num_shards, 0)
        return padded_to(stand_in, row.padded_shape, row.dim)

    def described(self) -> ParamSpec:
        """Return the spec with the gathered tensors and the dtype of the result."""
        self._check()
        with new_fake_mode(), torch.no_grad():
            stand_in = self.stand_in()
            with ShardOperators() as watch:
                sent, metadata = self._before(stand_in)
            self._check_operators(PRE, watch)
            self._check_sizes(sent)
            with ShardOperators() as watch:
                full = self._after(stand_in, sent, metadata)
            self._check_operators(POST, watch)
            stored = sum(part.nbytes for part in parts_of(stand_in))
            reduce_dtype = reduced_in(self.policy, self.row.dtype, full.dtype)
            extension = Extension(tuple((tuple(t.shape), t.dtype) for t in sent), stored)
            return replace(self.row, compute_dtype=full.dtype, reduce_dtype=reduce_dtype, extension=extension)

    @torch.no_grad()
    def unsharded(self, like: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter that the model uses, given the parts of a padded shard, and a stand-in for the shard."""
        shard = rebuilt(like, parts)
        return self._after(shard, *self._before(shard))

    def _before(self, stand_in: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Return the tensors to gather, and the metadata."""
        method = method_of(shard_in(self.param), PRE, stand_in)
        count = len(inspect.signature(method).parameters)
        if count not in (1, 5):
            raise self._error(PRE, "it takes neither (mesh) nor (mesh, outer_size, outer_stride, module, mp_policy)")
        row = self.row
        told = (torch.Size(row.shape), row.stride_of(row.shape), self.module, self.policy)
        result = self._run(PRE, method, self.mesh, *(told if count == 5 else ()))
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (tuple, list))):
            raise self._error(PRE, "it must return a tuple of tensors, and metadata")
        sent, metadata = result
        if not sent or not all(isinstance(tensor, torch.Tensor) for tensor in sent):
            raise self._error(PRE, "it must return one tensor at least to gather, and tensors only")
        return [as_plain(tensor) for tensor in sent], metadata

    def _after(self, stand_in: torch.Tensor, sent: list[torch.Tensor], metadata: Any) -> torch.Tensor:
        """Return the parameter that the model uses."""
        joined = tuple(SUBCLASS_ALL_GATHER(sent, self.row.num_shards, self.row.name))
        method = method_of(shard_in(self.param), POST, stand_in)
        result = self._run(POST, method, joined, metadata, self.row.compute_dtype)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
            raise self._error(POST, "it must return the parameter and the tensors that it is made of")
        return self._run(POST, self._without_padding, result[0])

    def _without_padding(self, full: torch.Tensor) -> torch.Tensor:
        """Return what FSDP2 takes with `as_strided`: the memory of the parameter, without gathered padding."""
        shape = self.row.shape
        if full.is_contiguous() and full.shape[1:] == shape[1:] and full.shape[0] >= shape[0]:
            return full if full.shape == shape else full.narrow(0, 0, shape[0])
        if full.is_contiguous() and full.numel() == math.prod(shape):
            return full.view(shape)
        raise self._error(
            POST,
            f"it returns a tensor of shape {list(full.shape)}, strides {list(full.stride())}; the parameter has shape "
            f"{list(shape)} and is contiguous",
        )

    def _run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        before = read_by(function)
        try:
            result = function(*args)
        except CaptureError:
            raise
        except Exception as error:
            raise self._error(name, f"{type(error).__name__}: {error}{line_of(error)}") from error
        if read_by(function) != before:
            raise self._error(
                name,
                "it changes a variable that it reads, which FSDP2 would do at each gather, and a program does not. "
                "Change it between the calls of the model",
            )
        return result

    def _check(self) -> None:
        row, missing = self.row, missing_methods(shard_in(self.param))
        if missing:
            raise self._error(
                missing,
                "there is none, so nothing says how the parameter is gathered. Give its class, or its shard, "
                "both methods of FSDP2's protocol, or replace the parameter by a plain tensor",
            )
        if row.order:
            raise self._error(PRE, "the parameter must be contiguous")
        if row.dim != 0 and not row.is_even:
            raise self._error(
                PRE,
                f"the parameter is sharded along dim {row.dim}, whose size {row.shape[row.dim]} the number of ranks, "
                f"{row.num_shards}, must divide. Choose such a size, or shard it along dim 0",
            )

    def _check_sizes(self, sent: Sequence[torch.Tensor]) -> None:
        dim, numel = self.row.dim, math.prod(self.row.padded_shape)
        for tensor in sent if dim != 0 and self.row.num_shards > 1 else ():
            if tensor.numel() != numel:
                raise self._error(
                    PRE,
                    f"the parameter is sharded along dim {dim}, so what is gathered must have as many elements as "
                    f"the shard, {numel}, and a tensor has {tensor.numel()}. Shard along dim 0",
                )

    def _check_operators(self, name: str, watch: ShardOperators) -> None:
        """Reject operators that a program cannot run as FSDP2 does: random ones, and ones that count padding."""
        if watch.communicating:
            raise self._error(name, COMMUNICATION.format(watch.communicating))
        if watch.random:
            raise self._error(
                name,
                f"{watch.random} draws random numbers, and FSDP2 draws them at each gather, among those of the "
                "forward. Draw them between the calls of the model, and set them as an attribute of the shard",
            )
        if name == PRE and watch.mixing and not self.row.is_even:
            raise self._error(
                name,
                f"the parameter's {self.row.shape[self.row.dim]} rows are uneven over {self.row.num_shards} ranks, and "
                f"{watch.mixing} computes across rows, so that padding would count. Choose a size that the number of "
                "ranks divides",
            )

    def _error(self, name: str, why: str) -> CaptureError:
        return CaptureError(f"{name} of parameter {self.row.name} ({type(shard_in(self.param)).__name__}): {why}.")


class Extensions:
    """The parameters of a module that follow the protocol, while its forward is traced.

    `tensors` are fake parts of their shards by slot, which the traced function takes.
    """

    def __init__(self, extended: Iterable[Extended], fake_mode: FakeTensorMode) -> None:
        self.tensors: dict[Slot, torch.Tensor] = {}
        self._known: dict[str, tuple[Extended, torch.Tensor, list[Slot]]] = {}
        for param in extended:
            with fake_mode:
                stand_in = param.stand_in()
            parts = {Slot("part", param.row.name, index=i): part for i, part in enumerate(parts_of(stand_in))}
            self.tensors.update(parts)
            self._known[param.row.name] = param, stand_in, list(parts)

    def used(self, given: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Return what a module uses instead of the tensors that the function was given."""
        if not self._known:
            return dict(given)
        used = {}
        for slot, tensor in given.items():
            if slot.kind == "param" and slot.name in self._known:
                param, like, slots = self._known[slot.name]
                value = param.unsharded(like, [given[part] for part in slots])
                used[slot] = Leaf.apply(tensor, value) if tensor.requires_grad else value
            else:
                if slot.kind == "param" and tensor.requires_grad:
                    tensor.register_hook(as_plain)
                used[slot] = tensor
        return used


class Leaf(torch.autograd.Function):
    """Value of a parameter, instead of the leaf that its gradient belongs to; a gradient becomes a plain tensor."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return as_plain(grad), None


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to a plain one, as FSDP2 does with what it gathers and reduces."""
    if not is_subclass(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# --- operators that the methods run -------------------------------------------------------------------------------


class ShardOperators(TorchDispatchMode):
    """Mode that notes the first operator that is random, that computes across rows, and that communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.random = self.mixing = self.communicating = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not FakeTensor for kind in types):  # what a subclass makes of it comes here again
            return NotImplemented
        if func.namespace == "c10d":
            self.communicating = self.communicating or str(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = self.random or str(func)
        if torch.Tag.pointwise not in func.tags and func._opname not in _KEEP_ORDER and func.namespace != "prim":
            self.mixing = self.mixing or str(func)
        return func(*args, **(kwargs or {}))


# --- gathers where the parameter is needed ------------------------------------------------------------------------


def settle_gathers(phase: Phase, axis: Axis, group: str) -> None:
    """Move what is computed of shards to where it is used, and let it name the mesh axis that it reduces over.

    `group` is the name of the axis's process group. Other communication, and a write to a shard, is a CaptureError.
    """
    graph = phase.module.graph
    for node in [n for n in _of_parts(phase) if getattr(n.target, "namespace", "") == "_c10d_functional"]:
        if node.target is c10d.all_reduce.default and node.args[2] == group:
            with graph.inserting_before(node):
                reduced = emit(graph, ALL_REDUCE, *node.args[:2], axis.name, like=node)
            for old in (*node.users, node):
                old.replace_all_uses_with(reduced)
                graph.erase_node(old)
        elif node.target is not c10d.wait_tensor.default:
            raise CaptureError(f"{PRE}: {COMMUNICATION.format(node.target)}.")
    for slot in phase.outputs:
        if slot.of == "part":
            raise CaptureError(
                f"{PRE} of parameter {slot.name} writes to its shard. Keep what changes from step to "
                "step in an attribute, and set it between the calls of the model."
            )
    for node in reversed(_of_parts(phase)):
        if node.users:
            min(node.users).prepend(node)


def _of_parts(phase: Phase) -> list[Node]:
    """Return the calls of forward that depend on parts of shards alone, in order."""
    known = {node for node, slot in phase.slot_of().items() if slot.kind == "part"}
    found = []
    for node in phase.module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and known.issuperset(inputs) and not is_backward(node):
            known.add(node)
            found.append(node)
    return found
