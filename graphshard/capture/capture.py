"""Turn a module's forward into a joint forward/backward ATen graph with named parameters and gradients.

AOTAutograd traces the module itself, under fake full parameters in the compute dtype, as a function of flat tensors
(`flat.py`): nothing is allocated, and the graph has what autograd does with the forward.
Operators are not decomposed here, so that the same graph serves `backend="eager"`, bit for bit, and Inductor, which
decomposes when a region is lowered.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from graphshard.capture.backward_effects import no_effects_of_backward
from graphshard.capture.bare import bare
from graphshard.capture.checkpoints import mark_checkpoints
from graphshard.capture.collectives import settle_collectives
from graphshard.capture.cuda_constants import settle_constants
from graphshard.capture.cuda_operators import check_for_cuda
from graphshard.capture.diagnose import explain_failure, is_raised_by_user
from graphshard.capture.eager_kernels import eager_kernels
from graphshard.capture.eager_path import EagerPath
from graphshard.capture.extensions import Extended, Extensions
from graphshard.capture.fakes import fake_attribute, fake_inputs, fake_state
from graphshard.capture.flat import FlatForward
from graphshard.capture.hooks import hooks_of, refuse_hooks_of_all_modules, without_hooks_of_all_modules
from graphshard.capture.late_gathers import settle_gathers
from graphshard.capture.learned import Learned, Rerun
from graphshard.capture.phase import (
    erase_boundaries,
    erase_leaves,
    lift_constants,
    phase_of,
    read_numbers_again,
    read_sizes_in_forward,
)
from graphshard.capture.remembered import remembering_functions
from graphshard.capture.rounding import capture_decompositions
from graphshard.capture.tensor_axis import take_off_last_sums, take_off_wrapping
from graphshard.capture.untraceable import Located, Untraceable
from graphshard.capture.watch import check_nothing_kept
from graphshard.capture.written_again import write_again
from graphshard.ir.device_meshes import ExpertMeshes, axes_of_mesh
from graphshard.ir.driver_internals import stands_in
from graphshard.ir.errors import CaptureError, DivergenceError, PeerError
from graphshard.ir.kernel_strides import new_tracing_mode
from graphshard.ir.make_table import named_parameters
from graphshard.ir.mesh import Mesh
from graphshard.ir.missing_kernels import MISSING, WITHOUT_GPU
from graphshard.ir.params import ParamTable
from graphshard.ir.precision import Precision
from graphshard.ir.program import Program
from graphshard.ir.sizes import Size, find_sizes, lift_sizes
from graphshard.ir.state import Place, number_as_tensor
from graphshard.ir.subclasses import PRE, is_extended, shard_in
from graphshard.ir.torch_internals import draws_stay
from graphshard.ir.tracing_internals import fake_kernels, leaves_stay_leaves, quiet_tracing
from graphshard.ir.unbacked_internals import makes_size, numbers_found


@dataclass(frozen=True)
class CaptureSpec:
    """What a capture depends on besides the module and the inputs; `dynamic_shapes` is in torch.export's format.

    `method` is what is captured, in the place of `forward`; `extended` are the parameters that decide themselves what
    is gathered of them; `allow` names what is not torch's and may be kept; `followed` are places of numbers that change
    from call to call; `tensor` is the mesh of the tensor axis, on which the program is that of this rank's place, and
    `experts` are those of parameters that lie otherwise on the ranks; `whole` is the mesh of all axes, if the
    model finds DTensors on it;
    `groups` are names of this rank's process groups by axis, to which capture adds those of the model's own that it
    finds.
    """

    params: ParamTable
    units: tuple[str, ...]
    mesh: Mesh
    device: torch.device
    precision: Precision
    forward_class: type[nn.Module]
    dynamic_shapes: Any = None
    method: str = "forward"
    extended: tuple[Extended, ...] = ()
    allow: tuple[str, ...] = ()
    followed: tuple[Place, ...] = ()
    tensor: DeviceMesh | None = None
    experts: ExpertMeshes | None = None
    whole: DeviceMesh | None = None
    groups: dict[str, str] = field(default_factory=dict)

    @property
    def communicating(self) -> dict[tuple[str, ...], DeviceMesh]:
        """The meshes that parameters are DTensors on, by the names of their axes."""
        found = {}
        for row in self.params:
            mesh, whole = self.tensor, self.whole
            if row.expert and self.experts is not None:
                mesh, whole = self.experts.axis, self.experts.whole
            if row.split is not None and row.split.around:
                mesh = whole
            if row.split is not None and mesh is not None:
                found[row.split.found_on] = axes_of_mesh(mesh, row.split.found_on)
        return found


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
        CaptureError: the forward cannot be traced, or a dimension that is declared dynamic cannot be; the message
            names the line of the user's code.
        Exception: what forward itself raises.
        ArgumentError, InputError: `dynamic_shapes` does not fit the inputs.
    """
    _check_extended(module, spec)
    refuse_hooks_of_all_modules()
    path, learned, remembering = EagerPath(), Learned(followed=set(spec.followed)), remembering_functions()
    hooks = hooks_of(module)
    traced, reason = None, None
    while traced is None:
        try:
            with torch.set_grad_enabled(grad):
                traced = _trace(module, args, kwargs, spec, path, learned, remembering)
        except Rerun:
            continue
        except CaptureError as error:
            if learned.fix_numbers():  # an operator may have to know one
                continue
            if error.__cause__ is None:  # forward ran to its end, on whatever path
                raise
            if reason is None or isinstance(error.__cause__, Untraceable):  # others may come of the path
                reason = error
            if _says_nested(error) or not path.concede():  # the other path has other values, not other bits
                if learned.decide_more():
                    path, reason = EagerPath(), None
                    continue
                cause = reason.__cause__
                if cause is not None and is_raised_by_user(cause):
                    raise cause from None
                raise reason from cause
    joint, flat, inputs = traced
    if stands_in():
        settle_constants(joint.graph)
        check_for_cuda(joint.graph.nodes, spec.forward_class.__name__)
    erase_boundaries(joint.graph)
    mark_checkpoints(joint, flat.regions)
    phase = phase_of(joint, flat)
    read_numbers_again(phase)
    read_sizes_in_forward(phase)
    rewritten = write_again(phase, spec.forward_class.__name__, flat.regions.written)
    if spec.extended:
        settle_gathers(phase, spec.mesh.shard, spec.extended[0].mesh.get_group().group_name)
        erase_leaves(phase, {param.row.name for param in spec.extended})
    mesh = settle_collectives(joint.graph, spec.mesh, spec.groups, spec.forward_class.__name__)
    take_off_wrapping(phase, spec.params)
    params = take_off_last_sums(phase, spec.params, spec.mesh)
    constants = lift_constants(phase)
    sizes = _sizes(inputs, spec.forward_class)
    if sizes and any(map(makes_size, joint.graph.nodes)):
        raise CaptureError(
            f"graphshard cannot capture {spec.forward_class.__name__}.forward with dynamic dimensions, because it has "
            "sizes that depend on values, too, such as those of nonzero. Leave out dynamic_shapes and marks on the "
            "inputs: each shape of the inputs is captured."
        )
    lift_sizes(phase, sizes)
    tangents = tuple(slot.name for slot in phase.inputs if slot.kind == "tangent")
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
        sizes=sizes,
        shapes=tuple((tuple(t.shape), t.stride()) for t in inputs) if sizes else (),
        checks=flat.checks,
        state=replace(flat.in_backward.state(flat.state), hooks=hooks),
        decided=flat.deciding.guards(),
    )


def _says_nested(error: CaptureError) -> bool:
    return isinstance(error.__cause__, Untraceable) and error.__cause__.kind == "nested"


def _check_extended(module: nn.Module, spec: CaptureSpec) -> None:
    """Raise CaptureError for a parameter that would become a plain tensor: what it is told is not there."""
    for (name, *_), param in named_parameters(module).items():
        if is_extended(param) and spec.params[name].extension is None:
            raise CaptureError(
                f"parameter {name} ({type(shard_in(param)).__name__}) decides in {PRE} what is gathered of it, which "
                "is told the mesh of this process. graphshard.compile captures it where there is one; explain, export "
                "and load cannot."
            )


class _Traced(NamedTuple):
    """What AOTAutograd makes of a forward; `inputs` are the fake tensors of the call."""

    joint: GraphModule
    flat: FlatForward
    inputs: list[torch.Tensor]


def _trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: CaptureSpec,
    path: EagerPath,
    learned: Learned,
    remembering: Mapping[CodeType, list[Any]],
) -> _Traced:
    """Trace the forward on a path that it may take, with what is known of its attributes."""
    as_written = functools.partial(bare, module, spec.method)
    call = pytree.tree_flatten((args, kwargs))
    fake_mode = new_tracing_mode()
    extensions = Extensions(spec.extended, fake_mode)
    flat = FlatForward(
        module,
        call,
        params=spec.params,
        units=spec.units,
        precision=spec.precision,
        bare=as_written,
        path=path,
        extensions=extensions,
        meshes=spec.communicating,
        learned=learned,
        allow=spec.allow,
        remembering=remembering,
    )
    with as_written():
        inputs, check_sizes = fake_inputs(
            module, args, kwargs, spec.dynamic_shapes, spec.device, fake_mode, learned.required
        )
    state = [
        extensions.tensors[slot]
        if slot.kind == "part"
        else fake_state(slot, flat.originals, spec.params, spec.device, fake_mode)
        for slot in flat.slots
        if slot.kind != "input"
    ]
    held = [*(tensor for tensor, _ in learned.tensors.values()), *map(number_as_tensor, learned.numbers.values())]
    attributes = [fake_attribute(tensor, spec.device, fake_mode) for tensor in held]
    try:
        with contextlib.ExitStack() as stack, tracing(TracingContext(fake_mode)), quiet_tracing():
            stack.enter_context(without_hooks_of_all_modules())
            stack.enter_context(leaves_stay_leaves())
            stack.enter_context(draws_stay())
            stack.enter_context(numbers_found(lambda expression: flat.deciding.find(expression)))
            stack.enter_context(eager_kernels())
            stack.enter_context(fake_kernels(MISSING | WITHOUT_GPU if stands_in() else MISSING))
            stack.enter_context(no_effects_of_backward(module, spec.forward_class.__name__))
            stack.enter_context(flat.in_backward.watching())
            traced = aot_export_joint_with_descriptors(
                stack, flat, (*state, *inputs, *attributes), decompositions=capture_decompositions()
            )
        flat.regions.forget_saved()
        check_nothing_kept(flat.made)
        joint: GraphModule = traced.graph_module
        check_sizes(joint)
        flat.regions.check_effects()
    except Located as error:
        raise CaptureError(str(error)) from None
    except (DivergenceError, PeerError):  # of another rank
        raise
    except Exception as error:
        raise explain_failure(error, spec.forward_class) from error
    return _Traced(joint, flat, inputs)


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
