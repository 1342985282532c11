"""Calls of a module, of its submodules and methods, run by programs that are made, or loaded, when first needed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import GraphBreak, UnsupportedError
from graphshard.frontend.inputs import flat_call
from graphshard.frontend.signature import Signature
from graphshard.ir.program import Program
from graphshard.ir.subclasses import is_extended
from graphshard.ir.submodule_entry_points import EntryPoint, install_entries, present
from graphshard.lower.regions import drop_regions
from graphshard.module._call_checks import (
    check_materialized,
    check_same_modules,
    check_still_trained,
    guard_of,
    seen_by_python_alone,
)
from graphshard.module._full_parameters import FullParameters, ParameterHolder
from graphshard.module._replaced_forward import ReplacedForward
from graphshard.module._split_module import SplitModule, SplitState
from graphshard.module.installed_programs import Installed, InstalledPrograms
from graphshard.module.program_compiler import EqualProgram, LoweredProgram, ProgramCompiler
from graphshard.module.tracer import ModuleCall, Tracer, entry_name
from graphshard.options.resolve import Direction, planned_by_unit, with_prefetch
from graphshard.pipeline.pipeline import Pipeline
from graphshard.runtime.bound_program import BoundProgram, SlotValues
from graphshard.runtime.collective_launches import MemoryKind, UserCollectives
from graphshard.runtime.cuda_graphs import ModelGraphs
from graphshard.runtime.executable import Executable
from graphshard.runtime.gradient_accumulation import Accumulation
from graphshard.runtime.gradient_graphs import EagerCalls
from graphshard.runtime.parameter_writes import changed_on_any_rank
from graphshard.runtime.process_groups import whole_mesh
from graphshard.runtime.shards import ParamRef
from graphshard.runtime.shown_gradients import ShownCall
from graphshard.runtime.shown_parameters import ShownParameter
from graphshard.runtime.unsharded import Unsharded, UnshardHandle, start_gathering
from graphshard.torch_compat.dtensor import high_priority, process_group
from graphshard.torch_compat.torch_ops import forget_sources, pytree

# What the user has chosen for a model, and a copy of it starts with.
_CHOICES = ("methods", "reshard_chosen", "prefetched", "reductions_under_way")
# Name of the program that gathers all parameters of a module, after the module's.
_GATHER_ALL = "full_parameters()"


@dataclass(kw_only=True)
class Runner(ProgramCompiler):
    """Runs calls of one module, or of one entry into it, on a mesh, by the programs that it makes.

    Attributes:
        groups: names of the process groups by mesh axis.
        programs: of the model and all its entries, newest last.
        entries: runners of submodules and methods that were called directly, by name.
        holders: of the entries that reduce gradients of shown parameters.
        methods: registered by the user.
        reshard_chosen: parameters for which `set_reshard_after_forward` was called.
        prefetched: units that are gathered when another one has arrived, by direction and that one's name.
        reductions_under_way: how many units' gradients may be reduced at once, as chosen for units.
        event: that the next call waits for before it gathers.
        model_runner: of the whole model; None for the model's own.
        join_parts: shards a changed model again if that is safe, which gives it another runner.
        is_uncompiled: the model is in a block of `uncompiled`, and methods run as they were written.
    """

    mesh: DeviceMesh
    groups: dict[str, str]
    programs: list[Program] = field(default_factory=list)
    entries: dict[str, Runner] = field(default_factory=dict)
    holders: dict[str, FullParameters] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    materialized: bool = False
    accumulation: Accumulation = field(default_factory=Accumulation)
    reshard_chosen: set[str] = field(default_factory=set)
    prefetched: dict[tuple[Direction, str], tuple[str, ...]] = field(default_factory=dict)
    reductions_under_way: dict[str, int] = field(default_factory=dict)
    custom: UserCollectives = field(default_factory=UserCollectives)
    event: torch.Event | None = None
    replaying: ModelGraphs | None = None
    path: str = ""
    model_runner: Runner | None = None
    join_parts: Callable[[nn.Module], bool] = lambda _: False
    split_state: SplitState = field(default_factory=SplitState)
    is_uncompiled: bool = False

    def __post_init__(self) -> None:
        if self.model_runner is None:
            self.unsharded.shown.connector = self.connect
            self.accumulation.own = {ref.name: ref for ref in self.tracer.params}

    # --- calls ---------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of the compiled module by the program whose guards hold; make one if there is none."""
        if self.split_state.is_open(module):
            return self.split.call(module, args, kwargs)
        tracer = self.tracer
        if not tracer.name:  # the model's own runner does it for its entries
            self._follow_unsharded(tracer)
        is_replaced = not tracer.name and "forward" in module.__dict__
        if is_replaced and self.around.covers(module):
            return self.around.call(module, args, kwargs)
        params = [ref.checked() for ref in tracer.params]
        if tracer.tree(module).changed():
            if not tracer.name and self.join_parts(module):
                return module.__dict__["_graphshard"].call(module, args, kwargs)
            check_same_modules(module, tracer.params)
        leaves, structure = flat_call(args, kwargs)
        reason = seen_by_python_alone(leaves, refused=self.sealed or tracer.options.fullgraph)
        if reason:
            return self.split.call_in_python(reason, module, args, kwargs)
        # Where Python runs forward, objects of any type may go from one unit to the next.
        moved = leaves if self.split_state.open else tracer.on_device(leaves, structure)
        if any(leaf is not was for leaf, was in zip(moved, leaves)):
            args, kwargs = pytree.tree_unflatten(moved, structure)
        signature = tracer.signature(module, params=params)
        if tracer.tree(module).find_forwards():
            install_entries(module, self.of_model.call_entry, self.path)
            tracer.tree(module).find_forwards()
        if not self.materialized:
            check_materialized(module, tracer.params, tracer.spec.device, tracer.storage.device)
            self.materialized = True
        if signature.grad and (added_up := self.accumulation.added_up):
            check_still_trained(added_up, tracer.params)
        scope = {"module": module, "args": args, "kwargs": kwargs}
        found = self.executables.find(signature, scope)
        if found is None:
            call = ModuleCall(module, args, kwargs, signature.grad)
            if not is_replaced and self.split.covers(signature, call):
                return self.split.run(call)
            made = self.build_or_break(call, signature)
            if isinstance(made, GraphBreak):
                if is_replaced:
                    return self.around.begin(f"It has a graph break{made.at}: {made.reason}", module, args, kwargs)
                return self.split.begin(made, signature, call)
            found = self.install(module, signature, made)
        by_program = "backward" in found.executable.program.phases and not found.executable.runs_eagerly
        result = found.guard.run(module, args, kwargs)
        if by_program:
            self.unsharded.calls[tracer.name] += 1
        if self.unsharded.full and not self.split_state.open:
            self.unsharded.show_after_call(self.of_model.tracer.params)
        return result

    @forget_sources()
    def install(self, module: nn.Module, signature: Signature, made: LoweredProgram | EqualProgram) -> Installed:
        """Bind a program to a module, if the other ranks made the same; evict programs over the limit.

        An equal program serves calls of another trace, such as with another tag, or a longer list.
        """
        if isinstance(made, EqualProgram):
            guard = guard_of(made.traced, self.tracer.tree(module), made.installed.executable)
            # If it is of a file, that program stays, and the one with this guard may be evicted.
            installed = replace(made.installed, guard=guard, loaded=False)
        else:
            # Ctrl-C on one rank is an error of all ranks, which otherwise would begin to run the program.
            with self.agreement.together(self.tracer.label, made.program.reason):
                self.agreement.check(made.program)
                installed = self._bind(module, signature, made)
                self.agreement.bound()
            self.programs.append(made.program)
        self.executables.add(installed)
        self._evict()
        return installed

    def _bind(self, module: nn.Module, signature: Signature, made: LoweredProgram) -> Installed:
        program, make_backward, of_file = made.program, made.make_backward, made.of_file
        tracer = self.tracer
        follows_strides = not of_file and make_backward is not None and tracer.options.backend == "eager"
        bound = BoundProgram(program, self.mesh, self.groups, self.agreement.peers, self.custom, self.replaying)
        values = SlotValues(program, module, tracer.params, self.mesh, self.unsharded, tracer.spec.experts)
        gathers, eager = tracer.spec.forward_class is ParameterHolder, None
        extended = any(is_extended(ref.param) for ref in tracer.params)
        if program.eager is not None and make_backward is not None and not (gathers or extended or self.sealed):
            eager = EagerCalls(program.eager, values, self._full_parameters)
        executable = Executable(
            *(bound, values, make_backward, self.accumulation),
            follows_strides=follows_strides,
            defers=not of_file,
            eager=eager,
            gathers=gathers,
        )
        trace = program.trace
        guard = guard_of(program, tracer.tree(module), executable)
        if made.remember is not None and trace is not None:
            made.remember(program, trace)
        return Installed(signature, executable, guard, of_file)

    @functools.cached_property
    def _full_parameters(self) -> FullParameters:
        """All parameters that the module's programs gather."""
        refs = [ref for ref in self.tracer.params if not ref.row.ignored]
        return FullParameters(self, refs, f"{self.tracer.name}.{_GATHER_ALL}" if self.tracer.name else _GATHER_ALL)

    def _evict(self) -> None:
        """Evict programs over `max_captures`, with regions and CUDA graphs that no other program uses."""
        most, label = self.tracer.options.max_captures, self.tracer.label
        evicted = self.executables.evict(most, self.accumulation.may_be_left(), label)
        if not evicted:
            return
        used = [one.executable for one in self.executables.programs]
        unused = [one.executable for one in evicted if one.executable not in used]  # equal traces share one
        gone = [program for executable in unused for program in executable.programs]
        self.programs[:] = [program for program in self.programs if not any(program is other for other in gone)]
        drop_regions(self.tracer.compiled, gone)
        if self.replaying is not None:
            self.replaying.forget(gone)

    # --- entries and copies --------------------------------------------------------------------------------------

    def call_entry(self, entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of a submodule's method, or of a method of the model (name ""), on the same shards."""
        name, module, state = entry.name, entry.module, self.split_state
        state.keep_in_region()
        was_replaced = module.__dict__.get(entry.method) is not entry
        in_python = state.runs_in_python(name, self.tracer.spec.units) or (was_replaced and state.is_open(module))
        if in_python or self.is_uncompiled:
            return entry.original(*args, **kwargs)
        called, full_name = self, entry_name(name, entry.method)
        if full_name:
            if full_name not in self.entries:
                tracer = self.tracer.entry(name, entry.method, module)
                self.entries[full_name] = self.entry_runner(tracer, name)
            called = self.entries[full_name]
            self._follow_unsharded(called.tracer)
        with present(module, entry.method, entry):
            return called.call(module, args, kwargs)

    def entry_runner(self, tracer: Tracer, path: str) -> Runner:
        """Return a runner of programs for a submodule, under its path in the model."""
        return self._with_tracer(tracer, path=path, model_runner=self)

    @property
    def of_model(self) -> Runner:
        """The runner of the whole model."""
        return self.model_runner or self

    @functools.cached_property
    def split(self) -> SplitModule:
        """Calls that Python runs."""
        return SplitModule(self)

    @functools.cached_property
    def around(self) -> ReplacedForward:
        """Calls of functions that replace the model's forward, and that Python runs."""
        return ReplacedForward(self)

    def for_copy(self, module: nn.Module) -> Runner:
        """Return a runner for a copy of the module: no programs yet, compiled regions and loaded programs shared."""
        custom = UserCollectives()
        custom.update(self.custom)
        twin = self._with_tracer(
            self.tracer.for_copy(module),
            programs=[],
            accumulation=copy.deepcopy(self.accumulation),
            unsharded=Unsharded(kept=set(self.unsharded.kept), read_outside=set(self.unsharded.read_outside)),
            custom=custom,
            **{name: copy.copy(getattr(self, name)) for name in _CHOICES},
            event=None,
            split_state=SplitState(),
        )
        twin.change(list(self.unsharded.full), held=False)
        return twin

    def _with_tracer(self, tracer: Tracer, **changes: Any) -> Runner:
        """Return a runner under the same options that has no programs yet."""
        return replace(
            self,
            tracer=tracer,
            executables=InstalledPrograms(),
            entries={},
            holders={},
            materialized=False,
            agreement=self.agreement.anew(),
            **changes,
        )

    # --- gathered parameters -------------------------------------------------------------------------------------

    def change(self, names: Collection[str], **choices: Any) -> None:
        """Change rows of parameters; the next call captures the program for them."""
        if "reshard" in choices:
            self.reshard_chosen.update(names)
            choices["shown"] = not choices["reshard"]
            self.unsharded.read_outside.difference_update(names)
        self.tracer.change(names, **choices)
        for entry in self.entries.values():
            entry.tracer.change({ref.row.name for ref in entry.tracer.params if ref.name in names}, **choices)

    def unshard(self, names: Collection[str]) -> UnshardHandle:
        """Start to gather parameters; the programs of the next calls read them.

        Parameters with `fsdp_pre_all_gather` are gathered by programs only.
        """
        given = (ref for ref in self.tracer.params if ref.row.name in names and not ref.row.ignored)
        chosen = [ref for ref in given if not is_extended(ref.param)]
        missing = [ref for ref in chosen if ref.row.name not in self.unsharded.full]
        if missing:
            current = {row.name: row for row in self.tracer.current_spec().params}
            pairs = [(current[ref.row.name], ref.param) for ref in missing]
            spec = self.tracer.spec
            gathering = start_gathering(pairs, spec.mesh, self.groups, spec.device)
            for ref in missing:
                self.unsharded.add(ref, gathering[ref.row.name])
            self.change({ref.row.name for ref in missing if ref.row.num_shards > 1}, held=True)
        return UnshardHandle(self.unsharded, chosen)

    def reshard(self, names: Collection[str]) -> None:
        """Free parameters that were gathered by hand, or that forward left to a backward, which gathers them again."""
        self.accumulation.drop_prefetch()
        self.accumulation.free_gathered(names)
        self.unsharded.shown.hide_left(names)
        held = [name for name in names if name in self.unsharded.full]
        if held:
            self.unsharded.free(held)
            self.change(held, held=False)

    def reshard_all(self) -> None:
        """Free all that was gathered by hand or ahead, and let modules hold their shards."""
        self.accumulation.drop_prefetch()
        self.unsharded.shown.forget()
        if self.unsharded.full:
            self.reshard(list(self.unsharded.full))

    def _follow_unsharded(self, called: Tracer) -> None:
        """Gather what is to stay gathered, for the model or an entry; programs read what is there from now on."""
        if self.event is not None:
            self.event.wait()
            self.event = None
            self.accumulation.drop_prefetch()
        calls, before = self.unsharded.calls[called.name], self.unsharded.several.get(called.name, 0)
        several = torch.is_grad_enabled() and calls < before  # other calls follow before a backward, as last time
        if not several:
            self.unsharded.free(list(self.unsharded.left))
        if self.unsharded.full and not (self.split_state.open or self.around.is_open):  # they were looked at before
            self._gather_what_changed()
        if self.unsharded.kept:
            self.unshard(self.unsharded.kept)
        if several:  # gather once what stays gathered from each of these calls to backward
            chosen = {ref.name for ref in called.params if not ref.row.reshard}
            new = chosen - self.unsharded.full.keys()
            self.unshard(new)
            self.unsharded.left |= new & self.unsharded.full.keys()
        if self.unsharded.read_outside and not self.sealed:
            read = self.unsharded.read_outside
            called.change([ref.row.name for ref in called.params if ref.name in read and not ref.row.shown], shown=True)
        rows = [ref.row for ref in self.tracer.params]
        freed = [row.name for row in rows if row.held and row.name not in self.unsharded.full]
        if freed:
            self.change(freed, held=False)

    def _gather_what_changed(self) -> None:
        """Gather parameters again whose shards were written to on any rank since they were gathered."""
        refs = [ref for ref in self.tracer.params if ref.name in self.unsharded.full]
        changed = changed_on_any_rank(refs, self.unsharded.sums, self.groups.values(), self.tracer.spec.device)
        left = self.unsharded.left.intersection(changed)
        self.unsharded.free(changed)
        self.unshard(changed)
        self.unsharded.left |= left

    def connect(self, shown: Mapping[str, ShownParameter]) -> None:
        """Let gradients of full parameters that modules show reach the shards, by units."""
        units: dict[str, dict[str, ParamRef]] = {}
        for ref in self.tracer.params:
            if ref.name in shown:
                units.setdefault(ref.row.unit, {})[ref.name] = ref
        for refs in units.values():
            ShownCall(refs, self.accumulation, self._reduction).connect([shown[name] for name in refs])

    def _reduction(self, names: Sequence[str]) -> Executable:
        """Return the program that reduces gradients of full parameters of a unit."""
        entry = f"gradients({', '.join(names)})"
        if entry not in self.holders:
            refs = [ref for ref in self.tracer.params if ref.name in names]
            self.holders[entry] = FullParameters(self, refs, entry, Unsharded())
        return self.holders[entry].executable()

    def executable_of(self, module: nn.Module) -> Executable:
        """Return the program for a call without inputs, without running it."""
        signature = self.tracer.signature(module)
        found = self.executables.find(signature, {"module": module, "args": (), "kwargs": {}})
        if found is None:
            made = self.build_or_break(ModuleCall(module, (), {}, torch.is_grad_enabled()), signature)
            if isinstance(made, GraphBreak):
                raise made
            found = self.install(module, signature, made)
        return found.executable

    @property
    def whole_mesh(self) -> DeviceMesh:
        """All axes that lay out the ranks: the data axes and the tensor axis."""
        return whole_mesh(self.mesh, self.tracer.spec.tensor)

    def finish(self) -> None:
        """Reduce accumulated gradients, unless the user has asked to leave them."""
        state = self.accumulation
        unreduced = state.unsynced | state.unreplicated
        left = {
            each.name
            for each in state.sums
            if each.name not in (state.unsynced if each.kind == "accumulated" else unreduced)
        }
        chosen = []
        for runner in (self, *self.entries.values()):
            executables = [installed.executable for installed in runner.executables.programs]
            trained = [(executable, left & executable.trained.keys()) for executable in executables]
            executable, names = max(trained, key=lambda pair: len(pair[1]), default=(None, set()))
            if executable is not None and names:
                chosen.append(executable)
                left -= names
        if left:
            raise UnsupportedError(
                f"finalize_backward: the gradient of {min(left)} was added up and is to be reduced, and the model has "
                "no program that computes it: it was copied, or planned anew, within a step. Call backward once more, "
                "or do that after a step."
            )
        for executable in chosen:
            executable.reduce_left()
        self.unsharded.end()

    # --- plans ---------------------------------------------------------------------------------------------------
    # These raise UnsupportedError where a planner in `passes=`, a memory limit or a file decides.

    def replan(self, pipeline: Pipeline) -> None:
        """Make programs by other passes from the next call on; forget the programs made or loaded before."""
        self.tracer.pipeline = pipeline
        self.agreement, self.executables, self.library = self.agreement.anew(), InstalledPrograms(), None
        self.entries.clear()

    def _pipeline(self, setter: str) -> Pipeline:
        if self.sealed:
            raise UnsupportedError(f"{setter}: a loaded file has its plan. Use compile.")
        return self.tracer.pipeline

    def prefetch(self, direction: Direction, unit: str, following: tuple[str, ...]) -> None:
        """Start the all-gathers of `following` when a unit's has arrived."""
        pipeline = self._pipeline(f"set_modules_to_{direction}_prefetch")
        self.replan(with_prefetch(pipeline, direction, unit, following))
        self.prefetched[direction, unit] = following

    def limit_reductions(self, units: Collection[str], most: int) -> None:
        """Let the gradients of `most` units be reduced at once; of several choices the largest counts."""
        name = "set_reduce_scatter_max_input_buffers"
        chosen = {**self.reductions_under_way, **dict.fromkeys(units, most)}
        self.replan(planned_by_unit(self._pipeline(name), name, reductions_under_way=max(chosen.values(), default=1)))
        self.reductions_under_way = chosen

    def customize(self, setter: str, chosen: UserCollectives, names: Mapping[str, str] | None = None) -> None:
        """Let the user run collectives of units, which may have other names here; each bucket is then of one unit."""
        if self.tracer.spec.experts is not None:
            raise UnsupportedError(
                f"{setter}: parameters of this model lie on two meshes, as those of experts do, and units have "
                "collectives in two process groups. Leave it out."
            )
        self.replan(planned_by_unit(self._pipeline(setter), setter))
        self.custom.update(chosen, names)

    def place_gathers(self, setter: str, units: Collection[str], kind: MemoryKind | None) -> None:
        """Let units' gathers write to registered memory, or to torch's."""
        self.replan(self._pipeline(setter))
        self.custom.place(units, kind)

    def separate_reductions(self, units: Collection[str], *, enable: bool) -> None:
        """Reduce units' gradients in a separate group, which the first call of all ranks makes, or in the gathers'."""
        name, mesh, peers = "set_separate_reduce_scatter_group", self.tracer.spec.mesh, self.agreement.peers
        self.customize(name, UserCollectives())
        if enable and not self.custom.group and mesh.shard.size > 1:
            shards = process_group(self.groups[mesh.shard.name])
            if peers is not None:
                peers.agree(name, lambda first, theirs, mine: f"{theirs} is called on rank {first}")
            ranks, options = dist.get_process_group_ranks(shards), high_priority(shards, self.mesh.device_type)
            group = dist.new_group(ranks, pg_options=options, use_local_synchronization=True)
            self.custom.group = str(group.group_name)
            if peers is not None:
                peers.monitor.groups.add(self.custom.group)
        separate = self.custom.separate
        (separate.update if enable and self.custom.group else separate.difference_update)(units)

    def take_over_plan(self, old: Runner, names: dict[str, str]) -> None:
        """Plan with what was chosen for units of another runner; `names` maps them to the model's."""
        for (direction, unit), following in old.prefetched.items():
            if unit in names:
                self.prefetch(direction, names[unit], tuple(names[name] for name in following if name in names))
        for unit, most in old.reductions_under_way.items():
            self.limit_reductions([names[unit]] if unit in names else [], most)
        if old.custom.chosen or old.custom.separate:
            self.customize("fully_shard", UserCollectives())
        self.custom.update(old.custom, names)
