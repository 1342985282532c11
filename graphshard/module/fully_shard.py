"""Models that become parts of another one: `graphshard.fully_shard` shards a model from the inside out.

    fully_shard(block)      the block is a compiled model: its parameters are shards, and it can be called
    fully_shard(model)      the block is a unit of the model, with the same shards and the choices made for them

What was sharded last, and is not inside anything that was, is a model with programs, as it is with FSDP2.
"""

from __future__ import annotations

import fnmatch
import glob
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.mesh import ExpertMeshes, Mesh, seen_axes
from graphshard.ir.param_table import ParamSpec, memory_order
from graphshard.ir.units import MODULE_SEPARATOR, UnitSpec, exact_units, find_units, modules_of
from graphshard.module._fsdp_module import strip_module
from graphshard.module.compiled_module import make_runner, make_tracer, shard
from graphshard.module.program_compiler import Cache
from graphshard.module.runner import Runner
from graphshard.options.annotations import with_annotations
from graphshard.options.mesh_axes import (
    MeshAxes,
    check_meshes,
    data_and_tensor,
    experts_by_name,
    find_experts,
    tensor_axis,
)
from graphshard.options.options import Options
from graphshard.options.resolve import device_of, request_for
from graphshard.options.validate import ModelContents, check_ignored, check_mesh, check_model, placements_of
from graphshard.pipeline.instrumentation import Recorder
from graphshard.runtime.shards import ParamRef, shard_of
from graphshard.torch_compat.dtensor import mesh_of_both
from graphshard.utils.argument_validation import is_int
from graphshard.utils.text import brief, users_class

# Options that FSDP2's fully_shard has: each call is for its own unit. The others are for the whole model.
UNIT_OPTIONS = {"reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params", "units"}

# Owner, attribute, row and data axes of the shards of parameters that are still alive, as others may be tied to them.
# A DTensor may be its own shard, so nothing here keeps the owner.
_sharded_as: MutableMapping[nn.Parameter, tuple[weakref.ref[nn.Module], str, ParamSpec, DeviceMesh]]
_sharded_as = WeakIdKeyDictionary()


class ModuleGroup(nn.ModuleList):
    """Modules that are sharded together and have no parent yet."""


@dataclass(frozen=True)
class ShardedPart:
    """A part of a model that an earlier call has sharded: the modules of its units, by their names in the part.

    It is the whole model if that has changed and is sharded again (`is_whole`).
    """

    runner: Runner
    units: dict[str, list[str]] = field(default_factory=dict)
    is_whole: bool = False

    @property
    def label(self) -> str:
        """Name of its first module in the model."""
        return next(iter(self.units.values()))[0]

    def params(self) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
        """Yield its parameters that modules still hold; others were exchanged or removed."""
        for ref in self.runner.tracer.params:
            for owner, attribute in ref.places:
                param = shard_of(owner._parameters.get(attribute))
                is_shard = isinstance(param, DTensor) and param.shape == ref.row.whole_shape
                if param is not None and (is_shard or ref.row.ignored):
                    yield ref.row, param

    def rows(self, mesh: DeviceMesh) -> dict[nn.Parameter, ParamSpec]:
        """Return its rows in a model over a mesh, by parameter; on another mesh they are like experts.

        As in FSDP2, its root is gathered again in backward where the user did not choose: it is no root any more.
        """
        automatic = self.runner.tracer.options.reshard_after_forward is None and not self.is_whole
        found = {}
        for row, param in self.params():
            again = automatic and not row.unit and row.name not in self.runner.reshard_chosen
            expert = row.expert or (self.runner.mesh != mesh and not row.ignored)
            found[param] = replace(row, expert=expert, reshard=again or row.reshard)
        return found


def shard_unit(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    dp_mesh_dims: Any,
    options: Options,
    recorder: Callable[[str], Recorder | None],
    cache: Cache | None,
) -> None:
    """Shard modules as one unit, with what was sharded inside as further units; nothing is changed if that fails."""
    by_name = experts_by_name(mesh, dp_mesh_dims)
    mesh, given = data_and_tensor(mesh, dp_mesh_dims)
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    outermost = {id(module): module for module in modules if id(module) not in inner}
    model = modules[0] if len(modules) == 1 else ModuleGroup(outermost.values())
    parts = _parts_of(model)
    known = _tie_again(model, mesh)
    options = _options_with(_own_ignored(options, model), parts, model)
    runner = _runner_with(
        model, MeshAxes(check_mesh(mesh), mesh, given, by_name), options, parts, known, recorder, cache
    )
    experts = runner.tracer.spec.experts
    plain = [(ref.param, ref) for ref in runner.tracer.params if not (ref.row.ignored or ref.param in known)]
    _exchange_runner(model, runner, known, parts)
    for param, ref in plain:
        over = experts.data if ref.row.expert and experts is not None else mesh
        _sharded_as[param] = weakref.ref(ref.owner), ref.attribute, ref.row, over


def shard_again(model: nn.Module, old: Runner) -> None:
    """Shard what is new in a model that was sharded, and give it another runner; nothing is changed if that fails.

    Parameters that were there stay the same objects, and options and choices of the user hold. Modules that
    `fully_shard` has sharded meanwhile become units. All ranks call this together.
    """
    check_not_loaded(old)
    check_model(model, in_parts=True, again=True)
    old.reshard_all()
    added, mesh = _parts_of(model, without=old), old.mesh
    whole = ShardedPart(old, {unit: modules_of(unit) for unit in ("", *old.tracer.spec.units)}, is_whole=True)
    options = _options_again(model, old.tracer.options, added)
    known, axes = _shards_in(model, mesh, options), MeshAxes(check_mesh(mesh), mesh)
    runner = _runner_with(model, axes, options, (whole, *added), known, old.recorder, old.cache)
    runner.replaying, runner.tracer.compiled = old.replaying, old.tracer.compiled
    _exchange_runner(model, runner, known, (whole, *added))


def check_not_loaded(runner: Runner) -> None:
    """Raise UnsupportedError if a model that is to change runs programs of a file only."""
    if runner.sealed:
        raise UnsupportedError(
            f"{runner.tracer.label} runs programs that graphshard.load has read, which a changed model would not fit. "
            "Change the model first, and compile it, or export it again."
        )


def join_parts(model: nn.Module) -> bool:
    """Shard a changed model again if all that is new in it was sharded by `fully_shard`; return whether it did."""
    old: Runner = model.__dict__["_graphshard"]
    ignored = {id(ref.param) for ref in old.tracer.params if ref.row.ignored}
    is_sharded = all(isinstance(param, DTensor) or id(param) in ignored for param in model.parameters())
    if not (is_sharded and _parts_of(model, without=old)):
        return False
    shard_again(model, old)
    return True


def _own_ignored(options: Options, model: nn.Module) -> Options:
    """Return options that ignore a model's own parameters only: FSDP2's users give one set to all calls."""
    if options.ignored_params is None:
        return options
    own = {id(param) for param in model.parameters()}
    ignored = [p for p in options.ignored_params if id(p) in own or not isinstance(p, nn.Parameter)]
    return replace(options, ignored_params=ignored)


def _runner_with(
    model: nn.Module,
    axes: MeshAxes,
    options: Options,
    parts: Sequence[ShardedPart],
    known: dict[nn.Parameter, ParamSpec],
    recorder: Callable[[str], Recorder | None],
    cache: Cache | None,
) -> Runner:
    """Return the runner of a model with parts, whose parameters it adds to `known`; the model is not changed.

    `axes` are the given ones; parts and parameters may need others.
    """
    mesh, contents = axes.data, ModelContents.of(model)
    assert mesh is not None
    data = _with_regather(axes.mesh, options, [part for part in parts if part.runner.mesh == mesh])
    for part in parts:
        known |= part.rows(mesh)
    left_out = {*known, *check_ignored(contents, options.ignored_params)}
    placements = placements_of(contents, options.shard_placement_fn, left_out)
    contents = with_annotations(contents, mesh, axes.tensor, left_out)
    experts = find_experts(contents, mesh, axes.experts, placements, left_out, whole_model=False)
    tensor = tensor_axis(contents, mesh, axes.tensor, experts, known, whole_model=False)
    tensor, experts = _tensor_of_parts(tensor, parts, mesh), _experts_of_parts(experts, parts, mesh)
    # An option that needs units is checked when a program is made: units of other calls may be still to come.
    fitting = options if options.units else replace(options, activation=None)
    whole = next((part.runner.tracer.spec.whole for part in parts if part.runner.tracer.spec.whole is not None), None)
    found = MeshAxes(data, mesh, tensor, experts, placements)
    tracer = make_tracer(request_for(contents, found, fitting, device_of(mesh), known, whole))
    tracer.options = options
    for part in parts:
        if part.runner.tracer.storage != tracer.storage:
            raise UnsupportedError(
                f"offload_policy: shards of {part.label} are kept on {part.runner.tracer.storage.device}, those of the "
                f"whole on {tracer.storage.device}. Give all calls of fully_shard one policy."
            )
    return replace(make_runner(tracer, mesh, recorder, cache), join_parts=join_parts)


def _exchange_runner(
    model: nn.Module, runner: Runner, known: Container[nn.Parameter], parts: Sequence[ShardedPart]
) -> None:
    """Let a runner run a model instead of the runners of its parts; parameters stay shards."""
    for part in parts:
        runner.methods += _methods_of(part, model)  # installed with the runner
    for module in model.modules():
        strip_module(module)
    shard(model, runner, known, again=any(part.is_whole for part in parts))
    _take_over(runner, parts)


def _methods_of(part: ShardedPart, model: nn.Module) -> list[str]:
    """Return the methods that the user has registered for a part, by their names in the model, if it has them still."""
    prefix = "" if part.is_whole else f"{part.label}."
    owners, found = dict(model.named_modules()), []
    for method in part.runner.methods:
        owner, _, name = f"{prefix}{method}".rpartition(".")
        if callable(getattr(users_class(owners.get(owner)), name, None)):
            found.append(f"{prefix}{method}")
    return found


def _parts_of(model: nn.Module, without: Runner | None = None) -> tuple[ShardedPart, ...]:
    """Return the parts of a model that were sharded, in the order of its modules; leave out one runner's."""
    found: dict[int, ShardedPart] = {}
    for path, module in model.named_modules():
        unit = module.__dict__.get("_graphshard_unit")
        if unit is not None and unit.runner is not without:
            unit.runner.unsharded.shown.hide()
            part = found.setdefault(id(unit.runner), ShardedPart(unit.runner))
            part.units.setdefault(unit.name, []).append(path)
    for part in found.values():
        for unit, paths in part.units.items():
            if len(paths) < len(modules_of(unit)):
                raise ArgumentError(
                    f"module: {', '.join(paths)} of {type(model).__name__} was sharded together with modules that are "
                    "not in it. Give fully_shard lists of modules of one model."
                )
    return tuple(found.values())


def _tie_again(model: nn.Module, mesh: DeviceMesh) -> dict[nn.Parameter, ParamSpec]:
    """Replace parameters that another call has sharded under another name by the shards, and return their rows."""
    known: dict[nn.Parameter, ParamSpec] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            found = None if param is None else _sharded_as.get(param)
            owner = None if found is None else found[0]()
            if found is None or owner is None:
                continue
            _, attribute, row, over = found
            shard_of = ParamRef(row, owner, attribute, row.name).param
            if isinstance(shard_of, DTensor) and over == mesh:
                module._parameters[name] = shard_of
                known[shard_of] = row
    return known


def _options_with(options: Options, parts: Sequence[ShardedPart], model: nn.Module) -> Options:
    """Return the options of a model with parts: with their units and policies."""
    for part in parts:
        for option in fields(Options):
            theirs, ours = getattr(part.runner.tracer.options, option.name), getattr(options, option.name)
            if option.name not in UNIT_OPTIONS and theirs not in (option.default, ours):
                raise ArgumentError(
                    f"{option.name}: {part.label} of {type(model).__name__} was sharded with {brief(theirs)}, the "
                    f"whole is to be with {brief(ours)}. Give it in the outermost call of fully_shard."
                )
    own = options.mp_policy if isinstance(options.mp_policy, MixedPrecisionPolicy) else MixedPrecisionPolicy()
    units: dict[tuple[str, ...], MixedPrecisionPolicy] = {}
    if isinstance(model, ModuleGroup):
        units[tuple(name for name, _ in model.named_children())] = own
    patterns, policies = exact_units(units | _units_of_parts(parts))
    return replace(options, units=patterns, mp_policy={"": own, **policies})


def _units_of_parts(parts: Sequence[ShardedPart]) -> dict[tuple[str, ...], MixedPrecisionPolicy]:
    """Return the modules of each unit of parts, with its policy."""
    units: dict[tuple[str, ...], MixedPrecisionPolicy] = {}
    for part in parts:
        precision = part.runner.tracer.spec.precision
        used = {row.unit for row in part.runner.tracer.spec.params}
        units.update({tuple(paths): precision.of(unit) for unit, paths in part.units.items() if unit in used})
    return units


def _options_again(model: nn.Module, options: Options, parts: Sequence[ShardedPart]) -> Options:
    """Return the options of a model that has changed: with new parts as units, without what matches no module now."""
    options = _own_ignored(options, model)
    added, policies = exact_units(_units_of_parts(parts))
    specs = options.units
    if specs is None and added:
        specs = [glob.escape(name) for name in find_units(model)]
    if specs is not None:
        left = (_matching(model, spec) for spec in specs)
        specs = [*(spec for spec in left if spec is not None), *added]
    mp_policy = options.mp_policy
    if isinstance(mp_policy, Mapping) or policies:
        units = ["", *find_units(model, specs)]
        given = mp_policy if isinstance(mp_policy, Mapping) else {"*": mp_policy or MixedPrecisionPolicy()}
        mp_policy = {name: policy for name, policy in given.items() if fnmatch.filter(units, name)} | policies
    return replace(options, units=specs, mp_policy=mp_policy)


def _matching(model: nn.Module, spec: UnitSpec) -> UnitSpec | None:
    """Return an entry of `units=` with only its patterns that match modules; None if nothing does."""

    def matches(pattern: UnitSpec) -> bool:
        try:
            return bool(find_units(model, [pattern]))
        except ArgumentError:
            return False

    if isinstance(spec, tuple):
        return tuple(pattern for pattern in spec if matches(pattern)) or None
    return spec if matches(spec) else None


def _shards_in(model: nn.Module, mesh: DeviceMesh, options: Options) -> dict[nn.Parameter, ParamSpec]:
    """Return rows of parameters that are DTensors like shards of graphshard: moved, put back, or made by the user."""
    axes, seen = Mesh.of(mesh), seen_axes(mesh)
    again = options.reshard_after_forward is not False
    found: dict[nn.Parameter, ParamSpec] = {}
    for param in model.parameters():
        if not isinstance(param, DTensor) or param.device_mesh != seen:
            continue
        dim = next((placement.dim for placement in param.placements if isinstance(placement, Shard)), None)
        if tuple(param.placements) == tuple(axes.placements(dim, None)):
            found[param] = ParamSpec(
                names=(),
                shape=tuple(param.shape),
                dtype=param.dtype,
                compute_dtype=param.dtype,
                reduce_dtype=param.dtype,
                trainable=param.requires_grad,
                num_shards=1 if dim is None else axes.shard.size,
                unit="",
                reshard=again,
                shown=not again,
                dim=dim or 0,
                order=memory_order(param),
            )
    return found


def _with_regather(axes: Mesh, options: Options, parts: Sequence[ShardedPart]) -> Mesh:
    """Return the data axes, with the neighbors among which backward of a part gathers again."""
    number = options.reshard_after_forward
    own = number if is_int(number) and 1 < number < axes.shard.size else 0
    sizes = {part.label: regather.size if (regather := part.runner.tracer.spec.mesh.regather) else 0 for part in parts}
    chosen = {size for size in (own, *sizes.values()) if size}
    if not chosen:
        return axes
    others = [
        part.label
        for part in parts
        if not sizes[part.label] and any(row.reshard for row in part.rows(part.runner.mesh).values())
    ]
    if len(chosen) > 1 or others or number is True:
        raise UnsupportedError(
            f"reshard_after_forward={max(chosen)} of one unit, and {others[0] if others else 'another'} gathers again "
            "among other ranks. Give all units one number, or False."
        )
    return axes if own else axes.with_regather(max(chosen))


def _tensor_of_parts(own: DeviceMesh | None, parts: Sequence[ShardedPart], mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the tensor axes of a model with parts."""
    for part in parts:
        theirs = part.runner.tracer.spec.tensor if part.runner.mesh == mesh else None
        try:
            own = mesh_of_both(own, theirs) if own is not None and theirs is not None else own or theirs
        except (RuntimeError, KeyError):
            raise UnsupportedError(
                f"mesh: parameters of {part.label} are distributed over {theirs}, others over {own}. Distribute all "
                "over axes of one mesh."
            ) from None
    return own


def _experts_of_parts(own: ExpertMeshes | None, parts: Sequence[ShardedPart], mesh: DeviceMesh) -> ExpertMeshes | None:
    """Return the meshes of experts of a model with parts; a part over another mesh than the whole is like experts."""
    for part in parts:
        runner = part.runner
        theirs = runner.tracer.spec.experts
        if runner.mesh != mesh:
            if theirs is not None:
                raise UnsupportedError(
                    f"mesh: parameters of {part.label} are on {runner.mesh} and on {theirs.data}, and the whole is to "
                    f"be over {mesh}. One other mesh is supported."
                )
            if runner.tracer.spec.mesh.regather is not None:
                raise UnsupportedError(
                    f"reshard_after_forward: {part.label} is sharded over another mesh than the whole, and gathers "
                    "again among neighbors on it. Give True or False."
                )
            theirs = ExpertMeshes(runner.mesh, runner.tracer.spec.tensor)
            check_meshes(theirs, mesh, part.label)
        if theirs is None:
            continue
        if own is not None and (own.data, own.axis) != (theirs.data, theirs.axis):
            raise UnsupportedError(
                f"mesh: {part.label} was sharded over {theirs.data}, others over {own.data}, and the whole is to be "
                f"over {mesh}. One other mesh is supported."
            )
        own = own or ExpertMeshes(theirs.data, theirs.axis)
    return own


def _take_over(runner: Runner, parts: Sequence[ShardedPart]) -> None:
    """Give the runner of a model the choices and the state of its parts."""
    names = {id(ref.param): ref.row.name for ref in runner.tracer.params}
    for part in parts:
        old = part.runner
        new = {row.name: names[id(param)] for row, param in part.params() if id(param) in names}
        for ours, theirs in (
            (runner.accumulation.unsynced, old.accumulation.unsynced),
            (runner.accumulation.unreplicated, old.accumulation.unreplicated),
            (runner.unsharded.kept, old.unsharded.kept),
            (runner.reshard_chosen, old.reshard_chosen),
        ):
            ours.update(new[name] for name in theirs if name in new)
        sums = {
            left._replace(name=new[left.name]): value
            for left, value in old.accumulation.sums.items()
            if left.name in new
        }
        runner.accumulation.sums.update(sums)
        runner.unsharded.full.update({new[name]: value for name, value in old.unsharded.full.items()})
        runner.unsharded.sums.update({new[name]: value for name, value in old.unsharded.sums.items()})
        runner.event = runner.event or old.event
        units = {unit: MODULE_SEPARATOR.join(paths) for unit, paths in part.units.items()}
        runner.take_over_plan(old, {was: now for was, now in units.items() if now in ("", *runner.tracer.spec.units)})
