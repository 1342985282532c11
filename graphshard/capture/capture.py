"""Turn a module's forward into a joint forward/backward ATen graph with named parameters and gradients.

torch.export traces the plain module (full parameter shapes, compute dtype, fake tensors: nothing is allocated);
AOTAutograd differentiates the exported graph. Operators are not decomposed here, so that the same graph serves
`backend="eager"`, bit for bit, and Inductor, which decomposes when a region is lowered.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from graphshard.capture.casts import register_casts
from graphshard.capture.checkpoints import CheckpointRegions, interpret_submodules, mark_checkpoints, trace_checkpoints
from graphshard.capture.diagnose import check_capturable, explain_export_failure
from graphshard.capture.dynamic_shapes import for_export
from graphshard.capture.eager_path import EagerPath
from graphshard.capture.entry import without_entries
from graphshard.capture.flatten import flatten_signature, lift_constants, tie, unalias_outputs
from graphshard.capture.rounding import capture_decompositions
from graphshard.ir.errors import CaptureError
from graphshard.ir.mesh import Mesh
from graphshard.ir.params import ParamTable
from graphshard.ir.precision import Precision
from graphshard.ir.program import Phase, Program, Slot, SlotKind
from graphshard.ir.sizes import Size, find_sizes, lift_sizes


@dataclass(frozen=True)
class CaptureSpec:
    """What a capture depends on besides the module and the inputs; `dynamic_shapes` is in torch.export's format.

    `method` is what is captured, in the place of `forward`.
    """

    params: ParamTable
    units: tuple[str, ...]
    mesh: Mesh
    device: torch.device
    precision: Precision
    forward_class: type[nn.Module]
    dynamic_shapes: Any = None
    method: str = "forward"


def capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, *, grad: bool
) -> Program:
    """Capture one signature of a module whose parameters may be full, sharded or on the meta device.

    Args:
        module: the module; it is left exactly as it was.
        args, kwargs: inputs of a call; only shapes, dtypes, devices, marks and non-tensor values are used.
        spec: parameter table, units, mesh, device, precision and dynamic dimensions.
        grad: capture forward and backward; otherwise a forward that saves nothing.

    Raises:
        CaptureError: torch.export rejects the module, or a dimension that is declared dynamic cannot be; the message
            names the line of the user's code.
        ArgumentError, InputError: `dynamic_shapes` does not fit the inputs.
    """
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    # Of another mode, so that export makes its own, with dynamic sizes, in the one that it finds.
    examples = FakeTensorMode()
    fakes = [_fake_input(examples, leaf, grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    path = EagerPath()
    traced = None
    while traced is None:
        try:
            with torch.set_grad_enabled(grad):
                traced = _trace(module, (args, kwargs), pytree.tree_unflatten(fakes, in_spec), spec, path, grad=grad)
        except CaptureError:
            if not path.concede():
                raise
    graph_module, out_spec, fake_mode, checkpoints = traced
    constants = lift_constants(graph_module, module, fake_mode)
    tie(graph_module, spec.params)
    flatten_signature(graph_module, leaves)
    unalias_outputs(graph_module)
    interpret_submodules(graph_module)
    tensors = [_symbolic(n.meta["val"], f) for n, f in _tensor_inputs(graph_module, fakes)]
    with contextlib.ExitStack() as stack, torch.set_grad_enabled(grad):
        joint = aot_export_joint_with_descriptors(
            stack, graph_module, tuple(tensors), decompositions=capture_decompositions()
        )
        captured: GraphModule = joint.graph_module
    mark_checkpoints(captured, checkpoints)
    sizes = _sizes(tensors, spec.forward_class)
    phase = _phase(captured, spec.params)
    lift_sizes(phase, sizes)
    tangents = tuple(slot.name for slot in phase.inputs if slot.kind == "tangent")
    name = "joint" if tangents else "forward"
    return Program(
        {name: phase},
        spec.params,
        spec.mesh,
        torch.device(spec.device.type),
        constants,
        out_spec,
        tangents,
        differentiated=phase.differentiated,
        model=spec.forward_class.__name__,
        sizes=sizes,
        shapes=tuple((tuple(t.shape), t.stride()) for t in tensors) if sizes else (),
    )


class _Traced(NamedTuple):
    """What torch.export makes of a forward."""

    module: GraphModule
    out_spec: pytree.TreeSpec
    fake_mode: FakeTensorMode
    checkpoints: CheckpointRegions


def _trace(
    module: nn.Module, given: tuple[Any, Any], fakes: tuple[Any, Any], spec: CaptureSpec, path: EagerPath, *, grad: bool
) -> _Traced:
    """Export the forward, on a path that it may take; `given` and `fakes` are positional and keyword inputs."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)
    with _plain(module, spec, fake_mode, grad=grad):
        dynamic = for_export(module, *given, spec.dynamic_shapes)
        module.__dict__["forward"] = path.around(module.forward)
        try:
            with trace_checkpoints() as checkpoints, tracing(TracingContext(fake_mode)):
                exported = torch.export.export(module, *fakes, dynamic_shapes=dynamic, strict=False)
        except Exception as error:
            raise explain_export_failure(error, spec.forward_class) from error
        graph_module = exported.module(check_guards=False)
    assert isinstance(graph_module, GraphModule)
    check_capturable(graph_module, spec.forward_class)
    assert exported.call_spec.out_spec is not None
    return _Traced(graph_module, exported.call_spec.out_spec, fake_mode, checkpoints)


def _tensor_inputs(graph_module: GraphModule, fakes: list[Any]) -> list[tuple[torch.fx.Node, torch.Tensor]]:
    tensors = [f for f in fakes if isinstance(f, torch.Tensor)]
    return list(zip(graph_module.graph.find_nodes(op="placeholder"), tensors, strict=True))


def _symbolic(traced: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """What export took an input for: concrete inputs would make its dynamic dimensions static again."""
    return traced.detach().requires_grad_(given.requires_grad)


def _sizes(tensors: list[torch.Tensor], cls: type[nn.Module]) -> tuple[Size, ...]:
    sizes = find_sizes(dict(enumerate(tensors)))
    known = {size.symbol for size in sizes}
    for tensor in tensors:
        for size in (*tensor.shape, *tensor.stride()):
            if isinstance(size, torch.SymInt) and size.node.expr.free_symbols - known:
                raise CaptureError(
                    f"graphshard cannot capture {cls.__name__}.forward with a dimension of size {size}: declare the "
                    "dimension that it derives from in dynamic_shapes, as one of another input."
                )
    return sizes


def _fake_input(fake_mode: FakeTensorMode, tensor: torch.Tensor, grad: bool) -> torch.Tensor:
    # Each leaf gets a fake of its own: a tensor passed twice must not tie two inputs of the graph.
    fake = fake_mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake.clone().requires_grad_(tensor.requires_grad and grad)


@contextlib.contextmanager
def _plain(module: nn.Module, spec: CaptureSpec, fake_mode: FakeTensorMode, *, grad: bool) -> Iterator[None]:
    """The module as the user wrote it, with fake full parameters in the compute dtype; undone on exit.

    Units cast their inputs as FSDP2's do. Hooks of the root are left out: they run around the compiled forward.
    Backward hooks of other modules are left out, too: there is no such module in the compiled backward.
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
        for owner in module.modules():
            both = ("_backward_hooks", "_backward_pre_hooks")
            for attribute in (*both, "_forward_hooks", "_forward_pre_hooks") if owner is module else both:
                owner.__dict__[attribute] = type(getattr(owner, attribute))()
        stack.callback(setattr, module, "__class__", module.__class__)
        module.__class__ = spec.forward_class
        if spec.method != "forward":
            module.__dict__["forward"] = _as_forward(module, spec.method)
        register_casts(module, spec.units, spec.precision, stack)
        yield


def _as_forward(module: nn.Module, method: str) -> Callable[..., Any]:
    """A method of the module in the place of its forward, which it may call."""
    run = getattr(module, method)

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        module.__dict__.pop("forward")
        try:
            return run(*args, **kwargs)
        finally:
            module.__dict__["forward"] = forward

    return forward


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
