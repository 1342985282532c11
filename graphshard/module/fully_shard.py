"""Models that become parts of another one: how `graphshard.fully_shard` shards a model from the inside out.

    fully_shard(block)      the block is a compiled model: its parameters are shards, and it can be called
    fully_shard(model)      the block is a unit of the model, with the same shards and what was chosen for them

Whatever was sharded last, and is not inside anything that was, is a model with programs of its own. So nothing has to
be known of the calls to come, and a block that nobody wraps is a model, as it is with FSDP2.
"""

from __future__ import annotations

import glob
import itertools
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.entry import without_entries
from graphshard.ir.mesh import ExpertMeshes, Mesh
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.units import MODULE_SEPARATOR, modules_of
from graphshard.module.compiled_module import device_of, make_runner, prepare, shard
from graphshard.module.fsdp_module import GraphshardFSDPModule
from graphshard.module.program_compiler import Cache
from graphshard.module.runner import Runner, take_over_plan
from graphshard.module.tracer import Tracer
from graphshard.options.mesh_axes import check_meshes, experts_of, params_of, tensor_axis
from graphshard.options.options import Options
from graphshard.options.validate import check_ignored, check_mesh, placements_of
from graphshard.pipeline.observe import Recorder
from graphshard.runtime.shards import ParamRef
from graphshard.torch_compat.dtensor import is_part, mesh_of_both
from graphshard.utils.argument_validation import is_int
from graphshard.utils.text import brief, users_class

# Options that FSDP2's fully_shard has: each call is for its own unit. The others are for the whole model.
OF_UNITS = {"reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params", "units"}

# What became of parameters that somebody still holds, as others may be tied to them: owner, attribute, row, data axes.
# A DTensor may be its own shard, so nothing here keeps the owner.
_sharded_as: MutableMapping[nn.Parameter, tuple[weakref.ref[nn.Module], str, ParamSpec, DeviceMesh]]
_sharded_as = WeakIdKeyDictionary()


class Group(nn.ModuleList):
    """Modules that are sharded together and have no parent yet."""


@dataclass(frozen=True)
class Part:
    """What was sharded before, in a model that is sharded now.

    Attributes:
        units: names of the modules of each unit in the model, by the name of the unit in the part.
    """

    runner: Runner
    units: dict[str, list[str]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What it is called."""
        return next(iter(self.units.values()))[0]

    def names(self, unit: str) -> str:
        """The name of one of its units in the model."""
        return MODULE_SEPARATOR.join(self.units[unit])

    def rows(self, mesh: DeviceMesh) -> dict[nn.Parameter, ParamSpec]:
        """Its rows in a model over a mesh, by parameter; on another one it is as experts are.

        As FSDP2 does it, what nobody chose is gathered again where it is no root.
        """
        runner = self.runner
        automatic = runner.tracer.options.reshard_after_forward is None
        apart = runner.mesh != mesh
        found = {}
        for ref in runner.tracer.params:
            again = automatic and not ref.row.unit and ref.row.name not in runner.reshard_chosen
            row = replace(ref.row, expert=ref.row.expert or (apart and not ref.row.ignored))
            found[ref.param] = replace(row, reshard=True) if again else row
        return found


def parts_of(model: nn.Module) -> tuple[Part, ...]:
    """The parts of a model that were sharded, in the order of its modules.

    Raises:
        ArgumentError: only some modules of a group are in the model.
    """
    found: dict[int, Part] = {}
    for path, module in model.named_modules():
        unit = module.__dict__.get("_graphshard_unit")
        if unit is not None:
            unit.runner.unsharded.shown.hide()
            part = found.setdefault(id(unit.runner), Part(unit.runner))
            part.units.setdefault(unit.name, []).append(path)
    for part in found.values():
        for unit, paths in part.units.items():
            if len(paths) < len(modules_of(unit)):
                raise ArgumentError(
                    f"module: {', '.join(paths)} of {type(model).__name__} was sharded together with modules that are "
                    "not in it. Give fully_shard lists of modules of one model."
                )
    return tuple(found.values())


def tie_again(model: nn.Module, mesh: DeviceMesh) -> dict[nn.Parameter, ParamSpec]:
    """Let what is still tied to a parameter that another call has sharded mean the shards; their rows."""
    known: dict[nn.Parameter, ParamSpec] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            found = None if param is None else _sharded_as.get(param)
            owner = None if found is None else found[0]()
            if found is None or owner is None:
                continue
            _, attribute, row, over = found
            shard_of = ParamRef(row, owner, attribute).param
            if isinstance(shard_of, DTensor) and over == mesh:
                module._parameters[name] = shard_of
                known[shard_of] = row
    return known


def options_with(options: Options, parts: Sequence[Part], model: nn.Module) -> Options:
    """The options of a model with parts: their units and policies beside those of its own.

    Raises:
        ArgumentError: a part was sharded with other options for the whole model.
    """
    for part, option in itertools.product(parts, fields(Options)):
        theirs, ours = getattr(part.runner.tracer.options, option.name), getattr(options, option.name)
        if option.name not in OF_UNITS and theirs not in (option.default, ours):
            raise ArgumentError(
                f"{option.name}: {part.label} of {type(model).__name__} was sharded with {brief(theirs)}, the whole is "
                f"to be with {brief(ours)}. Give it in the outermost call of fully_shard."
            )
    own = options.mp_policy if isinstance(options.mp_policy, MixedPrecisionPolicy) else MixedPrecisionPolicy()
    units: dict[tuple[str, ...], MixedPrecisionPolicy] = {}
    if isinstance(model, Group):
        units[tuple(name for name, _ in model.named_children())] = own
    for part in parts:
        precision = part.runner.tracer.spec.precision
        used = {row.unit for row in part.runner.tracer.spec.params}
        units.update({tuple(paths): precision.of(unit) for unit, paths in part.units.items() if unit in used})
    patterns = [tuple(map(glob.escape, paths)) for paths in units]
    policies = {glob.escape(MODULE_SEPARATOR.join(paths)): policy for paths, policy in units.items()}
    return replace(
        options,
        units=[paths[0] if len(paths) == 1 else paths for paths in patterns],
        mp_policy={"": own, **policies},
    )


def mesh_with(axes: Mesh, options: Options, parts: Sequence[Part]) -> Mesh:
    """The axes of a model with parts: with neighbours among which backward gathers again, where a part has some.

    Raises:
        UnsupportedError: its neighbours are others.
    """
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


def tensor_of_parts(own: DeviceMesh | None, parts: Sequence[Part], mesh: DeviceMesh) -> DeviceMesh | None:
    """The tensor axes of a model with parts: those of its own parameters, and of the parts'.

    Raises:
        UnsupportedError: parts are on different ones.
    """
    for part in parts:
        theirs = part.runner.tracer.spec.tensor if part.runner.mesh == mesh else None
        if own is None or theirs is None or is_part(theirs, own):
            own = own or theirs
            continue
        try:
            own = mesh_of_both(own, theirs)
        except (RuntimeError, KeyError):
            raise UnsupportedError(
                f"mesh: parameters of {part.label} are distributed over {theirs}, others over {own}. Distribute all "
                "over axes of one mesh."
            ) from None
    return own


def experts_of_parts(own: ExpertMeshes | None, parts: Sequence[Part], mesh: DeviceMesh) -> ExpertMeshes | None:
    """Where the experts of a model with parts are: its own, the parts', or parts that were sharded over another mesh.

    Raises:
        ArgumentError: a part's mesh does not fit that of the whole.
        UnsupportedError: there is more than one mesh besides that of the whole.
    """
    for part in parts:
        runner = part.runner
        theirs = runner.tracer.spec.experts
        if runner.mesh != mesh:
            if theirs is not None:
                raise UnsupportedError(
                    f"mesh: parameters of {part.label} are on {runner.mesh} and on {theirs.data}, and the whole is to "
                    f"be over {mesh}. One mesh besides that of the whole is supported."
                )
            if runner.tracer.spec.mesh.regather is not None:
                raise UnsupportedError(
                    f"reshard_after_forward: {part.label} is sharded over another mesh than the whole, and gathers "
                    "again among neighbours on it. Give True or False."
                )
            theirs = ExpertMeshes(runner.mesh, runner.tracer.spec.tensor)
            check_meshes(theirs, mesh, part.label)
        if theirs is None:
            continue
        if own is not None and (own.data, own.axis) != (theirs.data, theirs.axis):
            raise UnsupportedError(
                f"mesh: {part.label} was sharded over {theirs.data}, others over {own.data}, and the whole is to be "
                f"over {mesh}. One mesh besides that of the whole is supported."
            )
        own = own or ExpertMeshes(theirs.data, theirs.axis)
    return own


def check_storage(tracer: Tracer, parts: Sequence[Part]) -> None:
    """Raise UnsupportedError for a part whose shards are kept elsewhere."""
    for part in parts:
        if part.runner.tracer.storage != tracer.storage:
            raise UnsupportedError(
                f"offload_policy: shards of {part.label} are kept on {part.runner.tracer.storage.device}, those of the "
                f"whole on {tracer.storage.device}. Give all calls of fully_shard one policy."
            )


def release(model: nn.Module) -> None:
    """Let the parts of a model be modules of the user's again, whose parameters are shards."""
    for module in model.modules():
        if isinstance(module, GraphshardFSDPModule):
            object.__setattr__(module, "__class__", users_class(module))
        attributes = without_entries(module)
        if len(attributes) < len(module.__dict__):
            module.__dict__.clear()
            module.__dict__.update(attributes)


def take_over(runner: Runner, parts: Sequence[Part]) -> None:
    """Let the runner of a model go on with what was chosen and left in its parts."""
    names = {id(ref.param): ref.row.name for ref in runner.tracer.params}
    for part in parts:
        old = part.runner
        new = {ref.row.name: names[id(ref.param)] for ref in old.tracer.params}
        for ours, theirs in (
            (runner.accumulation.unsynced, old.accumulation.unsynced),
            (runner.accumulation.unreplicated, old.accumulation.unreplicated),
            (runner.unsharded.kept, old.unsharded.kept),
            (runner.reshard_chosen, old.reshard_chosen),
        ):
            ours.update(new[name] for name in theirs)
        sums = {left._replace(name=new[left.name]): value for left, value in old.accumulation.sums.items()}
        runner.accumulation.sums.update(sums)
        runner.unsharded.full.update({new[name]: value for name, value in old.unsharded.full.items()})
        runner.methods += [f"{part.label}.{method}" for method in old.methods]
        runner.event = runner.event or old.event
        take_over_plan(runner, old, {unit: part.names(unit) for unit in part.units})


def shard_unit(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    tensor: DeviceMesh | None,
    options: Options,
    recorder: Callable[[str], Recorder | None],
    cache: Cache | None = None,
    experts: ExpertMeshes | None = None,
) -> None:
    """Shard modules as one unit, and let what was sharded inside be units of theirs.

    Args:
        mesh: the data axes.
        tensor: the tensor axis, if it was given; if not, parameters say it.
        recorder: what records a program, by its name.
        cache: programs of earlier launches.
        experts: what the axes of the mesh say about experts by their names.

    Raises:
        ArgumentError: an argument does not fit the modules; nothing was changed.
        UnsupportedError: units inside are on different other meshes, or one is kept on another device.
    """
    model = modules[0] if len(modules) == 1 else Group(_outermost(modules))
    options = replace(options, ignored_params=_ignored_in(model, options.ignored_params))
    parts = parts_of(model)
    tied = tie_again(model, mesh)
    axes = mesh_with(check_mesh(mesh), options, [part for part in parts if part.runner.mesh == mesh])
    known = {**tied, **{param: row for part in parts for param, row in part.rows(mesh).items()}}
    leave = {*known, *check_ignored(model, options.ignored_params)}
    answers = placements_of(model, options.shard_placement_fn, leave)
    own = experts_of(model, mesh, experts, answers, leave, whole_model=False)
    tensor = tensor_axis(model, mesh, tensor, {*known, *params_of(model, own)}, whole_model=False)
    tensor, experts = tensor_of_parts(tensor, parts, mesh), experts_of_parts(own, parts, mesh)
    whole = options_with(options, parts, model)
    # What needs units is found out when a program is made: those of other calls may be still to come.
    fitting = whole if whole.units else replace(whole, activation=None)
    theirs = (part.runner.tracer.spec.whole for part in parts)
    on_whole = next((each for each in theirs if each is not None), None)
    tracer = prepare(model, fitting, axes, device_of(mesh), known, tensor, experts, answers, on_whole)
    tracer.options = whole
    check_storage(tracer, parts)
    runner = make_runner(model, tracer, mesh, recorder, cache)
    plain = [
        (ref.param, ref, experts.data if ref.row.expert and experts is not None else mesh)
        for ref in tracer.params
        if not (ref.row.ignored or ref.param in known)
    ]
    release(model)
    shard(model, runner, known)
    take_over(runner, parts)
    for param, ref, over in plain:
        _sharded_as[param] = weakref.ref(ref.owner), ref.attribute, ref.row, over


def _ignored_in(model: nn.Module, ignored: Iterable[nn.Parameter] | None) -> list[nn.Parameter] | None:
    """Without the parameters of other modules: FSDP2's users give one set to all calls."""
    if ignored is None:
        return None
    own = {id(param) for param in model.parameters()}
    return [param for param in ignored if id(param) in own or not isinstance(param, nn.Parameter)]


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules that are not inside one of the others, each once."""
    inner = {id(sub) for module in modules for sub in module.modules() if sub is not module}
    return list({id(module): module for module in modules if id(module) not in inner}.values())
