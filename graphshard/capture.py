"""Turn a module's forward into a joint forward/backward ATen graph with named parameters and gradients.

torch.export traces the plain module (full parameter shapes, compute dtype, fake tensors: nothing is allocated);
AOTAutograd differentiates the exported graph. Operators are not decomposed here, so that the same graph serves
`backend="eager"`, bit for bit, and Inductor, which decomposes when a region is lowered.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from graphshard.decompose import capture_decompositions
from graphshard.diagnose import check_capturable, explain_export_failure
from graphshard.entry import without_entries
from graphshard.graph import is_view
from graphshard.params import ParamTable
from graphshard.program import Axis, Phase, Program, Slot, SlotKind
from graphshard.units import modules_of


@dataclass(frozen=True)
class CaptureSpec:
    """What a capture depends on besides the module and the inputs."""

    params: ParamTable
    units: tuple[str, ...]
    axis: Axis
    device: torch.device
    mp_policy: MixedPrecisionPolicy
    forward_class: type[nn.Module]


def capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, *, grad: bool
) -> Program:
    """Capture one signature of a module whose parameters may be full, sharded or on the meta device.

    Args:
        module: the module; it is left exactly as it was.
        args, kwargs: inputs of a call; only shapes, dtypes, devices and non-tensor values are used.
        spec: parameter table, units, mesh axis, device and precision.
        grad: capture forward and backward; otherwise a forward that saves nothing.

    Raises:
        CaptureError: torch.export rejects the module; the message names the line of the user's code.
    """
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    fakes = [_fake_input(fake_mode, leaf, grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    fake_args, fake_kwargs = pytree.tree_unflatten(fakes, in_spec)
    with _plain(module, spec, fake_mode, grad=grad), torch.set_grad_enabled(grad):
        try:
            exported = torch.export.export(module, fake_args, fake_kwargs, strict=False)
        except Exception as error:
            raise explain_export_failure(error, spec.forward_class) from error
        graph_module = exported.module(check_guards=False)
    assert isinstance(graph_module, GraphModule)
    check_capturable(graph_module, spec.forward_class)
    out_spec = exported.call_spec.out_spec
    assert out_spec is not None
    constants = _lift_constants(graph_module, module, fake_mode)
    _tie(graph_module, spec.params)
    _flatten_signature(graph_module, leaves)
    _unalias_outputs(graph_module)
    tensors = [f for f in fakes if isinstance(f, torch.Tensor)]
    with contextlib.ExitStack() as stack, torch.set_grad_enabled(grad):
        joint = aot_export_joint_with_descriptors(
            stack, graph_module, tuple(tensors), decompositions=capture_decompositions()
        )
        captured: GraphModule = joint.graph_module
    phase = _phase(captured, spec.params)
    tangents = tuple(slot.name for slot in phase.inputs if slot.kind == "tangent")
    name = "joint" if tangents else "forward"
    return Program(
        {name: phase},
        spec.params,
        spec.axis,
        torch.device(spec.device.type),
        constants,
        out_spec,
        tangents,
        differentiated=phase.differentiated,
        model=spec.forward_class.__name__,
    )


def _fake_input(fake_mode: FakeTensorMode, tensor: torch.Tensor, grad: bool) -> torch.Tensor:
    # Each leaf gets a fake of its own: a tensor passed twice must not tie two inputs of the graph.
    fake = fake_mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake.clone().requires_grad_(tensor.requires_grad and grad)


@contextlib.contextmanager
def _plain(module: nn.Module, spec: CaptureSpec, fake_mode: FakeTensorMode, *, grad: bool) -> Iterator[None]:
    """The module as the user wrote it, with fake full parameters in the compute dtype; undone on exit.

    Units cast their inputs as FSDP2's do. Hooks of the root are left out: they run around the compiled forward.
    """
    with contextlib.ExitStack() as stack:
        copies: dict[int, torch.Tensor] = {}
        for owner in module.modules():
            stack.callback(_restore, owner, dict(owner.__dict__))
            _restore(owner, without_entries(owner))
            for name, value in owner.__dict__.items():
                if isinstance(value, torch.Tensor):
                    # Forward may write to it while it is traced.
                    owner.__dict__[name] = copies.setdefault(id(value), value.detach().clone())
        buffers = {b: _fake_buffer(b, spec.device, fake_mode) for b in module.buffers()}
        fakes = {row.name: _fake_parameter(row.name, spec, fake_mode, grad) for row in spec.params}
        for prefix, owner in module.named_modules():
            dot = f"{prefix}." if prefix else ""
            owner.__dict__["_parameters"] = {
                name: None if param is None else fakes[spec.params[f"{dot}{name}"].name]
                for name, param in owner._parameters.items()
            }
            owner.__dict__["_buffers"] = {
                name: None if buffer is None else buffers[buffer] for name, buffer in owner._buffers.items()
            }
        for attribute in ("_forward_hooks", "_forward_pre_hooks"):
            module.__dict__[attribute] = type(getattr(module, attribute))()
        stack.callback(setattr, module, "__class__", module.__class__)
        module.__class__ = spec.forward_class
        _register_casts(module, spec, stack)
        yield


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Undo what tracing the forward did to a module's attributes."""
    module.__dict__.clear()
    module.__dict__.update(attributes)


def _fake_parameter(name: str, spec: CaptureSpec, fake_mode: FakeTensorMode, grad: bool) -> nn.Parameter:
    row = spec.params[name]
    with fake_mode:
        full = torch.empty_strided(row.shape, row.stride_of(row.shape), dtype=row.compute_dtype, device=spec.device)
        return nn.Parameter(full, requires_grad=row.trainable and grad)


def _fake_buffer(buffer: torch.Tensor, device: torch.device, fake_mode: FakeTensorMode) -> torch.Tensor:
    with fake_mode:
        return torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=device)


def _register_casts(module: nn.Module, spec: CaptureSpec, stack: contextlib.ExitStack) -> None:
    policy = spec.mp_policy
    owners = [module, *(module.get_submodule(name) for unit in spec.units for name in modules_of(unit))]
    if policy.param_dtype is not None and policy.cast_forward_inputs:

        def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return _cast((args, kwargs), policy.param_dtype)

        for owner in owners:
            handle = owner.register_forward_pre_hook(cast_inputs, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
    if policy.output_dtype is not None:
        for owner in owners:
            handle = owner.register_forward_hook(lambda _module, _args, output: _cast(output, policy.output_dtype))
            stack.callback(handle.remove)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, tree)


def _lift_constants(graph_module: GraphModule, module: nn.Module, fake_mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Tensors held as plain attributes become buffers of the graph, and inputs of the program.

    The program reads the module's own tensor where there is one; others were made while the forward was traced.
    """
    constants: dict[str, torch.Tensor] = {}
    originals = {name: sub.__dict__ for name, sub in module.named_modules()}
    for prefix, owner in graph_module.named_modules():
        for name, value in list(owner.__dict__.items()):
            if isinstance(value, torch.Tensor):
                own = originals.get(prefix, {}).get(name)
                constants[f"{prefix}.{name}" if prefix else name] = own if isinstance(own, torch.Tensor) else value
                delattr(owner, name)
                owner.register_buffer(name, fake_mode.from_tensor(value, static_shapes=True))
    return constants


def _tie(graph_module: GraphModule, params: ParamTable) -> None:
    """One parameter per row: export leaves tied weights as one attribute per name."""
    names = {name: row.name for row in params for name in row.names}
    first: dict[str, torch.fx.Node] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        name = names.get(node.target)
        if name is None:
            continue
        if name in first:
            node.replace_all_uses_with(first[name])
            graph_module.graph.erase_node(node)
        else:
            node.target = name
            first[name] = node
    for name, canonical in names.items():
        if name != canonical:
            owner, _, attribute = name.rpartition(".")
            delattr(graph_module.get_submodule(owner), attribute)
    graph_module.recompile()


def _flatten_signature(graph_module: GraphModule, leaves: list[Any]) -> None:
    """Take a flat list of tensors and return a flat list: other inputs were captured by value."""
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)  # export states dtypes that hold by construction
    graph.set_codegen(CodeGen())
    for node, leaf in zip(graph.find_nodes(op="placeholder"), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            graph.erase_node(node)
    graph_module.recompile()


def _unalias_outputs(graph_module: GraphModule) -> None:
    """Copy outputs that share memory with an input or with another output.

    The program is a function of its inputs. FSDP2 would hand out the alias; writing to it in place is the only
    way to tell the difference.
    """
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    seen = set()
    for index, node in enumerate(results):
        if not isinstance(node, torch.fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        base = _owner(node)
        if base.op != "call_function" or base in seen:
            with graph.inserting_before(output):
                results[index] = graph.call_function(torch.ops.aten.clone.default, (node,))
                results[index].meta = copy.copy(node.meta)
        seen.add(base)
    output.args = (tuple(results),)
    graph_module.recompile()


def _owner(node: torch.fx.Node) -> torch.fx.Node:
    """The value whose memory a value of the exported graph may share, through views and writes in place."""
    while node.op == "call_function" and (is_view(node) or _writes(node)):
        node = node.all_input_nodes[0]
    return node


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _phase(joint: GraphModule, params: ParamTable) -> Phase:
    graph = joint.graph
    graph.set_codegen(CodeGen())
    (output,) = graph.find_nodes(op="output")
    inputs = tuple(_input_slot(node.meta["desc"], params) for node in graph.find_nodes(op="placeholder"))
    # Inputs that need no gradient have an undescribed None among the outputs.
    described = [(v, d) for v, d in zip(output.args[0], output.meta["desc"], strict=True) if d is not None]
    outputs = tuple(_output_slot(desc, params) for _, desc in described)
    output.args = (tuple(value for value, _ in described),)
    return Phase(joint, inputs, outputs)


def _input_slot(desc: AOTInput, params: ParamTable) -> Slot:
    if isinstance(desc, ParamAOTInput):
        return Slot("param", params[desc.target].name)
    if isinstance(desc, BufferAOTInput):
        return Slot("buffer", desc.target)
    if isinstance(desc, PlainAOTInput):
        return Slot("input", str(desc.idx))
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
        return Slot("tangent", str(desc.output.idx))
    raise AssertionError(f"unexpected input {desc} of the joint graph")


def _output_slot(desc: AOTOutput, params: ParamTable) -> Slot:
    if isinstance(desc, PlainAOTOutput):
        return Slot("output", str(desc.idx))
    kinds: dict[type[AOTOutput], SlotKind] = {InputMutationAOTOutput: "mutation", GradAOTOutput: "grad"}
    if isinstance(desc, (InputMutationAOTOutput, GradAOTOutput)):
        of = desc.mutated_input if isinstance(desc, InputMutationAOTOutput) else desc.grad_of
        source = _input_slot(of, params)
        return Slot(kinds[type(desc)], source.name, source.kind)
    raise AssertionError(f"unexpected output {desc} of the joint graph")
