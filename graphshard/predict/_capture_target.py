"""The capture of a study: for all meshes of data axes, or for one mesh along which the model communicates itself."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from graphshard.codec.joint_export import joint_program
from graphshard.cost.flops import flop_of
from graphshard.errors import ArgumentError, GraphBreak
from graphshard.frontend.capture import capture_example
from graphshard.frontend.graph_breaks import raise_break, traced_or_break
from graphshard.frontend.inputs import apart, moved_to, stand_in
from graphshard.frontend.signature import CaptureSpec, check_alike
from graphshard.ir.gpus import USUAL
from graphshard.ir.graph import aten, fake
from graphshard.ir.mesh import MOST_RANKS, PIPELINE, Axis, Mesh, MeshLike
from graphshard.ir.operators import ALL_TO_ALL
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Program
from graphshard.ir.repeat_windows import group_of
from graphshard.ir.repeats import TEMPLATE, Repeats
from graphshard.options.mesh_axes import MeshAxes, dims_of
from graphshard.options.options import Options
from graphshard.options.resolve import capture_spec, find_axes
from graphshard.options.simulated_mesh import Parallelize, needs_parallelize, options_for, shape_of, simulated_mesh
from graphshard.options.validate import ModelContents
from graphshard.pipeline.instrumentation import Level, Observer
from graphshard.predict._symbolic_cost import Inputs, symbolize
from graphshard.runtime.process_groups import make_groups, whole_mesh
from graphshard.torch_compat.symbolic_sizes import assume_total, hint
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.argument_validation import check_choice, check_count, is_int
from graphshard.utils.text import brief

# Data axes that need not exist; an existing mesh; or sizes by name of a mesh that need not exist, for which the model
# is parallelized.
Place = Mesh | DeviceMesh | tuple[tuple[str, int], ...]


def without_pipeline(mesh: MeshLike) -> tuple[MeshLike, Axis | None]:
    """Split a mesh into the mesh of one stage's ranks, and the axis of stages if there is one."""
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else mesh if isinstance(mesh, Mapping) else ()
    found = [name for name in names if name in PIPELINE]
    if not found:
        return mesh, None
    if isinstance(mesh, DeviceMesh):
        others = ", ".join(repr(name) for name in names if name not in found)
        raise ArgumentError(
            f"mesh has a pipeline axis, {found[0]!r}, and is a DeviceMesh, whose model is one stage. Give sizes by "
            f"name, such as {{'pp': 4, 'dp': 16}}, and the whole model; or explain a stage on its "
            f"own ranks: mesh[{others}]."
        )
    assert isinstance(mesh, Mapping)
    if len(found) > 1:
        raise ArgumentError(f"mesh has {len(found)} pipeline axes: {', '.join(map(repr, found))}. Give one.")
    size = mesh[found[0]]
    check_count(f"mesh[{found[0]!r}]", size, what="number of stages such as 4")
    if math.prod(filter(is_int, mesh.values())) > MOST_RANKS:
        raise ArgumentError(f"mesh must have at most {MOST_RANKS} ranks, got {brief(mesh)}.")
    rest = {name: size for name, size in mesh.items() if name not in found}
    return rest or {"dp": 1}, Axis(found[0], size, "pipeline")


def place_of(mesh: MeshLike, parallelize: Parallelize | None) -> Place:
    """Return the key under which a study keeps the captures and programs of a mesh."""
    if parallelize is not None:
        return tuple(shape_of(mesh).items())
    if isinstance(mesh, DeviceMesh):
        return mesh
    if needs_parallelize(mesh):
        shape = shape_of(mesh)
        raise ArgumentError(
            f"mesh {shape}: a model communicates along some of these axes, and is made for them by parallelize=, a "
            "function of (model, mesh) such as one that calls parallelize_module(model, mesh['tp'], plan). Give it."
        )
    return Mesh.of_shape(mesh)


def sizes_of(place: Place) -> dict[str, int]:
    """Return sizes by axis; axes without names have numbers."""
    if isinstance(place, Mesh):
        return place.shape
    if isinstance(place, DeviceMesh):
        return dict(zip(place.mesh_dim_names or map(str, range(place.ndim)), place.shape))
    return dict(place)


@contextmanager
def at_place(
    model: nn.Module, options: Options, place: Place, parallelize: Parallelize | None, device: torch.device
) -> Iterator[tuple[nn.Module, CaptureSpec]]:
    """Provide the mesh, and yield the model to capture and the rest that the capture depends on."""
    if isinstance(place, Mesh):
        yield model, capture_spec(ModelContents.of(model), MeshAxes(place), options, device)
    elif isinstance(place, DeviceMesh):
        if device.type != "cpu":
            raise ArgumentError(
                f"device={device.type!r}: a program is captured for a GPU on meshes that need not exist, and mesh is a "
                "DeviceMesh. Give its shape by name, and parallelize=; or leave device out."
            )
        yield model, _spec_on(model, options, place, device)
    else:
        assert parallelize is not None
        with simulated_mesh(model, dict(place), parallelize, device.type) as (parallelized, mesh):
            chosen = options_for(parallelized, model, options)
            yield parallelized, _spec_on(parallelized, chosen, mesh, device, dims_of(dict(place)))


def _spec_on(
    model: nn.Module, options: Options, device_mesh: DeviceMesh, device: torch.device, dims: Any = None
) -> CaptureSpec:
    contents = ModelContents.of(model)
    contents, axes = find_axes(contents, device_mesh, options, dims)
    assert axes.data is not None
    spec = capture_spec(contents, axes, options, device)
    return replace(spec, groups=make_groups(spec.mesh, whole_mesh(axes.data, axes.tensor), axes.experts))


def with_splits(rows: ParamTable, captured: Program) -> ParamTable:
    """Add the reductions over a tensor axis that the capture found; blocks not captured are like the template."""
    found = {row.name: row.split for row in captured.params}
    if captured.few is not None:
        repeats = captured.few.repeats
        found |= {row.name: found[repeats.name_at(TEMPLATE, row.name)] for row in rows if row.name not in found}
    return ParamTable(tuple(replace(row, split=found[row.name]) for row in rows))


def device_given(device: Any) -> torch.device:
    """Return the device that a program is captured for; None is a CPU."""
    if device is not None:
        check_choice("device", device, ("cpu", "cuda"))
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


def standing_in(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which programs can be captured for a GPU, even where there is none."""
    if device.type == "cpu" or torch.cuda.is_available():
        return contextlib.nullcontext()
    from graphshard.cross.driver import stand_in as stand_in_for

    return stand_in_for(USUAL)


@dataclass
class CaptureTarget:
    """A model that is captured once, without blocks that equal others if `repeats` is given.

    `symbols` are dims of the inputs by name, with the values `at`; `lists` are lengths of lists of modules.
    """

    inputs: Inputs
    repeats: Repeats | None
    symbols: Mapping[str, int]
    level: Level
    show: Callable[[str], None]
    lists: Mapping[str, int]
    program: Program | None = None
    flop: dict[str, float] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)

    def capture(self, model: nn.Module, spec: CaptureSpec) -> Program:
        """Return the program of the first mesh; raise BlocksDifferError if equal blocks differ on this mesh."""
        if self.repeats is not None:
            check_alike(spec, self.repeats)
        if self.program is not None:
            return self.program
        self.show("capture")
        repeats = self.repeats
        leaves, structure = pytree.tree_flatten(pytree.tree_map_only(torch.Tensor, stand_in, self.inputs))
        inputs = pytree.tree_unflatten(moved_to(spec.device, apart(leaves), structure), structure)

        def trace(inputs: Inputs) -> Program:
            program = joint_program(model, *inputs, spec.params, spec.mesh, spec.device, grad=True)
            if program is None or repeats is not None:
                traced = functools.partial(capture_example, model, *inputs, spec, repeats)
                try:
                    program = traced_or_break(f"{spec.forward_class.__name__}.{spec.method}", traced)
                except GraphBreak as error:
                    raise_break(error)
            (phase,) = program.phases.values()
            _assume_equal_parts(phase.module.graph)
            return program

        start = time.perf_counter()
        self.program = trace(inputs)
        Observer(self.level).after(self.program, "capture", 0, time.perf_counter() - start)
        if self.symbols:
            self.show("capture at other sizes")
            self.at = symbolize(self.program, inputs, self.symbols, trace)
        (phase,) = self.program.phases.values()
        nodes = list(phase.module.graph.nodes)
        self.flop = flop_of(nodes)
        if repeats is not None:
            template = flop_of(node for node in nodes if group_of(node, repeats) == TEMPLATE)
            for dtype, flop in template.items():
                self.flop[dtype] += flop * len(repeats.missing)
        return self.program


def _assume_equal_parts(graph: Graph) -> None:
    """Let estimates assume that value-dependent sizes are equal: experts and ranks get equally many tokens.

    all_to_all(f32[24, 8], [u0, u1], [u2, u3], ep) -> f32[u0 + u1, 8]        12 from each of two ranks
    split_with_sizes(f32[u0 + u1, 8], [u4, u5])                             12 for each of two experts
    """
    for node in graph.nodes:
        if node.target is ALL_TO_ALL:
            given, made = fake(node.all_input_nodes[0]).shape[0], fake(node).shape[0]
            assume_total([given], hint(made))
            assume_total([made], hint(given))
        elif node.target is aten.split_with_sizes.default:
            dim = node.args[2] if len(node.args) > 2 else 0
            parts = [part.shape[dim] for part in node.meta["val"]]
            assume_total(parts, hint(fake(node.all_input_nodes[0]).shape[dim]))
