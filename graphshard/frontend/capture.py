"""Capture one call of a module: Dynamo's graph of it, differentiated, as a `Program` for the passes.

The module is traced as the user wrote it, with full fake parameters in the places of its shards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import sympy
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node

from graphshard.errors import CaptureError
from graphshard.exported.program_module import ProgramModule
from graphshard.frontend._joint_graph import (
    FlatGraph,
    erase_boundaries,
    erase_leaves,
    joint_graph,
    lift_constants,
    lift_subgraphs,
    mark_regions,
    name_calls,
    phase_of,
    read_numbers_again,
)
from graphshard.frontend.dynamo_capture import TRACING, GraphInput, TracedFunction, trace_call
from graphshard.frontend.dynamo_patches import without_torchs_hooks
from graphshard.frontend.inputs import constraints_of, dynamic_dims, stand_in_inputs
from graphshard.frontend.signature import CaptureSpec
from graphshard.frontend.unit_boundaries import boundary_class, unit_boundaries
from graphshard.guards.value_branches import without_warnings
from graphshard.ir.gpus import is_pretended
from graphshard.ir.graph import aten, is_random, module_of, place_of
from graphshard.ir.kernel_shapes import missing_kernels, new_tracing_mode
from graphshard.ir.param_table import REPLACED, ParamTable, named_parameters
from graphshard.ir.program import EagerForward, Program, Size, Slot
from graphshard.ir.recompute import overwritten_buffers, write_again
from graphshard.ir.repeats import BlocksDifferError, RepeatedBlocks, Repeats, captured_params
from graphshard.ir.sizes import expression, find_sizes, lift_sizes
from graphshard.ir.submodule_entry_points import method_of, tracing, without_entries
from graphshard.repeats.find_repeats import HOOKS, MARKS_OF_HOOKS
from graphshard.repeats.repeated_blocks import check_changes, few_blocks
from graphshard.subclasses.extensions import Extensions, settle_gathers
from graphshard.subclasses.results import Layout
from graphshard.subclasses.tensor_parallel import distributed, settle_collectives, take_off_last_sums, take_off_wrapping
from graphshard.torch_compat.fake_tensors import FakeTensorMode, fake_kernels, fake_tensor, guarded_as_real
from graphshard.torch_compat.fsdp2 import MANAGED
from graphshard.torch_compat.symbolic_sizes import hint
from graphshard.torch_compat.torch_ops import pytree

# Products whose operands must have one dtype.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default)


@dataclass
class ModuleTensor:
    """A parameter or buffer, and the attributes that hold it: (module, "_parameters" or "_buffers", name)."""

    slot: Slot
    tensor: torch.Tensor
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)


def module_tensors(module: nn.Module, params: ParamTable) -> list[ModuleTensor]:
    """Return the parameters of a module in the order of the table, then its buffers, each once."""
    rows = {row.name: ModuleTensor(Slot("param", row.name), torch.empty(0)) for row in params}
    found: dict[int, ModuleTensor] = {}
    for kind in ("_parameters", "_buffers"):
        for prefix, owner in module.named_modules():
            for name, tensor in getattr(owner, kind).items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is not None:
                    new = (
                        rows[params[full].name] if kind == "_parameters" else ModuleTensor(Slot("buffer", full), tensor)
                    )
                    entry = found.setdefault(id(tensor), new)
                    entry.tensor = tensor
                    entry.places.append((owner, kind, name))
    return [*rows.values(), *(entry for entry in found.values() if entry.slot.kind != "param")]


@contextlib.contextmanager
def as_written(module: nn.Module, method: str) -> Iterator[Callable[..., Any]]:
    """Let a module be as the user wrote it while the block is open; yield the method that is traced.

    Hooks of the root are left out, because they run around the compiled forward.
    """
    found = method_of(module, method)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing())
        for owner in module.modules():
            stack.callback(_restore, owner, dict(owner.__dict__))
            _restore(owner, without_entries(owner))
            for attribute in ("_parameters", "_buffers"):
                owner.__dict__[attribute] = copy.copy(owner.__dict__[attribute])
        for attribute in (*HOOKS, *MARKS_OF_HOOKS):
            module.__dict__[attribute] = type(getattr(module, attribute))()
        module.__dict__.pop(MANAGED, None)  # Dynamo would take it for a module of FSDP2
        yield found


def check_registered(values: Iterable[Any], function: str) -> None:
    """Check that other inputs of a graph are no parameters: those that lists and closures hold are not trained."""
    for value in values:
        name = getattr(value, REPLACED, None) if isinstance(value, nn.Parameter) else None
        if name is not None:
            raise CaptureError(
                f"graphshard cannot capture {function}: it reads the parameter {name} from a list, dict or closure, "
                "which holds the full one that graphshard.compile has replaced by its shard. Read it from its module "
                "in forward."
            )


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    module.__dict__.clear()
    module.__dict__.update(attributes)


def fake_state(
    slot: Slot, originals: dict[str, torch.Tensor], params: ParamTable, device: torch.device, fake_mode: FakeTensorMode
) -> torch.Tensor:
    """Return a full parameter in the compute dtype, or a buffer."""
    with fake_mode:
        if slot.kind == "param":
            row = params[slot.name]
            full = torch.empty_strided(row.shape, row.stride_of(row.shape), dtype=row.compute_dtype, device=device)
            full.requires_grad_(row.trainable)
            if row.trainable and row.grad_dtype != row.compute_dtype:
                full.grad_dtype = row.grad_dtype
            return full
        tensor = originals[slot.name]
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: CaptureSpec,
    traced: TracedFunction,
    class_of: Callable[[nn.Module], type],
    *,
    grad: bool,
    repeats: Repeats | None = None,
) -> Program:
    """Capture a call of a module whose parameters may be full, sharded or on the meta device.

    Args:
        class_of: the class that the root, or a module of a unit, has in a compiled model.
        repeats: equal blocks, of which a few are traced; BlocksDifferError if they are not called alike.
    """
    few = None
    if repeats is not None:
        few = RepeatedBlocks(repeats, spec.params)
        spec = _of_traced_blocks(module, spec, repeats)
    if is_pretended() or any(isinstance(x, torch.Tensor) and x.is_meta for x in pytree.tree_leaves((args, kwargs))):
        args, kwargs = stand_in_inputs(args, kwargs, spec.device)
    if isinstance(module, ProgramModule) and (wrong := module.wrong_inputs(args, kwargs)) is not None:
        raise wrong
    with contextlib.ExitStack() as stack:
        stack.enter_context(TRACING)
        stack.enter_context(without_torchs_hooks())
        stack.enter_context(torch.set_grad_enabled(grad))
        forward = stack.enter_context(as_written(module, spec.method))
        dims = dynamic_dims(forward, args, kwargs, spec.dynamic_shapes)
        without_warnings(module)
        blocks = stack.enter_context(few_blocks(module, repeats)) if repeats is not None else {}
        held = module_tensors(module, spec.params)
        originals = {entry.slot.name: entry.tensor for entry in held}
        found = _found_parameters(held, originals, spec)
        boundaries = unit_boundaries(module, spec.units, spec.params, spec.precision, class_of, blocks)
        root = stack.enter_context(boundaries)
        for entry in held:  # `as_written` puts the old ones back
            for owner, kind, name in entry.places if entry.slot.name in found else ():
                owner.__dict__[kind][name] = found[entry.slot.name]
        constraints = stack.enter_context(constraints_of(forward, args, kwargs, dims))
        stack.enter_context(fake_kernels(missing_kernels()))
        trace = trace_call(traced, module, args, kwargs, forward, root, constraints)
        returned = trace.structure(module, args, kwargs)
        if constraints:
            trace.check_constraints()
        name_calls(trace.graph, module)
    if repeats is not None:
        check_changes(trace.changed, module, blocks)
    trace.repeats, trace.method = repeats, spec.method
    slots = {id(found.get(entry.slot.name, entry.tensor)): entry.slot for entry in held}
    slot_at = {index: slots[id(each.value)] for index, each in enumerate(trace.inputs) if id(each.value) in slots}
    used = set(slot_at.values())
    others = [(index, each) for index, each in enumerate(trace.inputs) if index not in slot_at]
    inputs = [(index, each) for index, each in others if isinstance(each.fake, torch.Tensor)]
    slot_at |= {index: Slot("input", str(number)) for number, (index, _) in enumerate(inputs)}
    check_registered((each.value for _, each in inputs), f"{spec.forward_class.__name__}.{spec.method}")
    mode = new_tracing_mode(trace.sizes)
    extensions = Extensions(spec.extended, mode)
    given: list[tuple[Slot, Any]] = []
    for entry in held:
        if entry.slot.kind == "param" or entry.slot in used:
            given.append((entry.slot, fake_state(entry.slot, originals, spec.params, spec.device, mode)))
    given += extensions.tensors.items()
    fakes = [_fake_input(each, mode, spec.device) for _, each in inputs]
    given += zip((slot_at[index] for index, _ in inputs), fakes)
    sizes = list(find_sizes(dict(enumerate(fakes))))
    for number, (_, each) in enumerate(inputs):
        if _is_dynamic_float(each) and not each.fake.item_memo.node.expr.is_number:
            sizes.append(Size(f"s{len(sizes)}", (number, -1), each.fake.item_memo))
    scalars: list[int] = []
    nodes = trace.graph.graph.find_nodes(op="placeholder")
    # Symbols that the graph does not use, such as where in its memory a dynamic tensor begins.
    unused = {e.fake.node.expr for e, node in zip(trace.inputs, nodes) if _is_symbol(e.fake) and not node.users}
    for index, each in enumerate(trace.inputs):
        if _is_symbol(each.fake) and each.fake.node.expr not in {*unused, *(size.symbol for size in sizes)}:
            sizes.append(Size(f"s{len(sizes)}", (len(fakes) + len(scalars), -1), each.fake))
            scalars.append(index)
    names = {size.symbol: size.name for size in sizes}
    numbers = [each.fake for each in trace.inputs if _is_symbol(each.fake) and each.fake.node.expr in names]
    given += [(Slot("size", names[number.node.expr]), number) for number in numbers]
    order = [slot_at.get(index, _number_or_object(each, names)) for index, each in enumerate(trace.inputs)]
    layouts = {
        slot_at[index]: Layout(
            each.fake.device_mesh,
            each.fake.placements,
            torch.Size(map(expression, each.fake.shape)),
            tuple(map(expression, each.fake.stride())),
        )
        for index, each in inputs
        if isinstance(each.fake, DTensor)
    }
    # Meshes are found here: the trace would take the tensor of ranks that a mesh is made of for fake.
    unsharded = functools.partial(_unsharded, extensions, spec.params, spec.communicating)
    data = frozenset(name for row in spec.params if row.split is not None for name in row.split.around)
    flat = FlatGraph(trace.graph, [slot for slot, _ in given], order, unsharded, layouts, data)
    with TRACING, without_torchs_hooks(), torch.set_grad_enabled(grad):
        joint = joint_graph(flat, [fake for _, fake in given], mode)
    _check_products(joint.graph)
    lift_subgraphs(joint)
    erase_boundaries(joint.graph)
    mark_regions(joint.graph, trace.graph)
    for node in joint.graph.nodes:
        node.meta.pop("custom", None)
    phase = phase_of(joint, flat)
    read_numbers_again(phase)
    draws = any(is_random(node) for node in joint.graph.nodes)
    eager = EagerForward(lambda: flat.in_eager_mode, draws, overwritten_buffers(phase))
    flat.prepare_eager_mode()
    rewritten = write_again(phase, spec.forward_class.__name__)
    if spec.extended:
        settle_gathers(phase, spec.mesh.shard, spec.extended[0].mesh.get_group().group_name)
        erase_leaves(phase, {param.row.name for param in spec.extended})
    mesh = settle_collectives(joint.graph, spec.mesh, spec.groups, spec.forward_class.__name__)
    take_off_wrapping(phase, spec.params)
    params = take_off_last_sums(phase, spec.params, spec.mesh)
    constants = lift_constants(phase)
    tangents = tuple(slot.name for slot in phase.inputs if slot.kind == "tangent")
    # The partitioner computes floats again from the tensors that hold them.
    lift_sizes(phase, tuple(size for size in sizes if not tangents or isinstance(size.value, torch.SymInt)))
    assert flat.out_spec is not None
    return Program(
        {"joint" if tangents else "forward": phase},
        params,
        mesh,
        torch.device(spec.device.type),
        constants,
        flat.out_spec,
        tangents,
        differentiated=phase.differentiated,
        rewritten=rewritten,
        model=spec.forward_class.__name__,
        sizes=tuple(sizes),
        checks=flat.checks,
        few=few,
        trace=trace,
        returned=returned,
        taken=(*(index for index, _ in inputs), *scalars),
        eager=eager,
    )


def capture_example(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, repeats: Repeats | None = None
) -> Program:
    """Capture a call, with gradients, of a module that is not to run; see `capture` for the arguments."""
    traced = TracedFunction("example")
    return capture(module, args, kwargs, spec, traced, boundary_class, grad=True, repeats=repeats)


def _of_traced_blocks(module: nn.Module, spec: CaptureSpec, repeats: Repeats) -> CaptureSpec:
    """Return a spec without the parameters and units of blocks that are left out."""
    params = captured_params(spec.params, repeats)
    known = {name for row in params for name in row.names}
    for name in (name for names in named_parameters(module) for name in names):
        if name not in known and not repeats.has_left_out(name):
            raise BlocksDifferError(f"{name} is of a block that is left out")
    return replace(spec, params=params, units=tuple(unit for unit in spec.units if not repeats.has_left_out(unit)))


def _is_symbol(value: Any) -> bool:
    """Return whether a number is another one in other calls."""
    return isinstance(value, torch.SymInt) and not value.node.expr.is_number


def _check_products(graph: Graph) -> None:
    """Raise a RuntimeError, as the operators do, for a product of tensors of different dtypes, which fakes accept."""
    for node in (node for node in graph.nodes if node.target in _PRODUCTS):
        operands = [arg.meta["val"] for arg in node.args if isinstance(arg, Node)]
        dtypes = dict.fromkeys(operand.dtype for operand in operands if isinstance(operand, torch.Tensor))
        if len(dtypes) > 1:
            where = place_of(node) or f" in the module {module_of(node)}"
            raise RuntimeError(
                f"the operands of {node.target} must have the same dtype, but got {' and '.join(map(str, dtypes))}"
                f"{where}. Cast one of them, or use mp_policy=MixedPrecisionPolicy(param_dtype=...)."
            )


def _is_dynamic_float(each: GraphInput) -> bool:
    """Return whether an input of the graph is a Python float, which the graph reads from a tensor."""
    return isinstance(each.value, float) and each.fake.item_memo is not None


def _number_or_object(each: GraphInput, names: Mapping[Any, str]) -> Any:
    """Return the slot or value of a number among the graph's inputs, or an object such as a device mesh."""
    if not isinstance(each.fake, torch.SymInt):
        return each.value
    symbol = each.fake.node.expr
    if symbol.is_number:  # a guard says which number it is
        return int(symbol)
    return Slot("size", names[symbol]) if symbol in names else hint(each.fake)


def _unsharded(
    extensions: Extensions,
    params: ParamTable,
    meshes: Mapping[tuple[str, ...], DeviceMesh],
    given: Mapping[Slot, torch.Tensor],
) -> dict[Slot, torch.Tensor]:
    """Return what the module finds for the tensors that a program is given."""
    return distributed(extensions.used(given), params, meshes)


def _found_parameters(
    held: Sequence[ModuleTensor], originals: dict[str, torch.Tensor], spec: CaptureSpec
) -> dict[str, torch.Tensor]:
    """Return fake tensors as the module finds them during the trace, by name.

    All parameters are fake, and buffers that are not on the device of the program.
    """
    mode = new_tracing_mode()
    extensions = Extensions(spec.extended, mode)
    given = {
        entry.slot: fake_state(entry.slot, {}, spec.params, spec.device, mode)
        for entry in held
        if entry.slot.kind == "param"
    }
    with torch.no_grad():
        used = _unsharded(extensions, spec.params, spec.communicating, {**given, **extensions.tensors})
    found: dict[str, torch.Tensor] = {}
    for slot in given:
        found[slot.name] = nn.Parameter(used[slot].detach(), given[slot].requires_grad)
        found[slot.name].__dict__.update(vars(originals[slot.name]))
    for entry in held:
        if entry.slot.kind == "buffer" and (is_pretended() or entry.tensor.is_meta):
            fake = fake_state(entry.slot, originals, spec.params, spec.device, mode)
            found[entry.slot.name] = fake if is_pretended() else guarded_as_real(fake)
    return found


def _fake_input(each: GraphInput, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    fake: Any = each.fake._local_tensor if isinstance(each.fake, DTensor) else each.fake
    where = device if is_pretended() else fake.device
    shape, stride = list(map(_number, fake.shape)), list(map(_number, fake.stride()))
    made: Any = fake_tensor(mode, shape, stride, fake.dtype, where)
    if _is_dynamic_float(each):  # reading it gives the symbol that guards know
        made.item_memo = fake.item_memo
    made.requires_grad_(fake.requires_grad)
    return cast(torch.Tensor, made)


def _number(size: Any) -> Any:
    """Return a size; a number where the trace has found out that it is one."""
    return size if isinstance(expression(size), sympy.Basic) else expression(size)
