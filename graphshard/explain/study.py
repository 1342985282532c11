"""A model under study: its programs for each mesh (`programs.py`), and a step of them predicted on any machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import Work
from graphshard.cost.profile import Profile
from graphshard.errors import ArgumentError
from graphshard.explain.course import Course
from graphshard.explain.cut import blocks_of
from graphshard.explain.explanation import Explanation
from graphshard.explain.formulas import formulas_of
from graphshard.explain.microbatches import microbatches_of
from graphshard.explain.predict import bound_of, explained
from graphshard.explain.programs import Programs, whose
from graphshard.explain.scheduled import Scheduled, schedule_regions
from graphshard.explain.staged import PipelineStep, stages_of
from graphshard.explain.subject import Place, at_place, device_given, place_of, sizes_of, standing_in, without_pipeline
from graphshard.frontend.inputs import count_tokens
from graphshard.frontend.signature import check_alike
from graphshard.ir.collector import collector_paused
from graphshard.ir.given import check_bool, check_function, check_seconds, is_int
from graphshard.ir.mesh import Axis, Mesh, MeshLike
from graphshard.ir.precision import precision_of
from graphshard.ir.program import Program
from graphshard.ir.stamp import all_blocks
from graphshard.ir.text import brief
from graphshard.ir.units import find_units
from graphshard.options.resolve import example_of, resolve_model
from graphshard.options.validate import check_examples, check_model
from graphshard.schedule.known import while_unchanged
from graphshard.torch_compat.operators import pytree

# No tensor has more dims.
_MOST_DIMS = 64


@dataclass
class Study(Programs):
    """Predicts steps of a model under one setting."""

    _of_stages: dict[tuple[Place, str], Program] = field(default_factory=dict, init=False)
    _kernels: Scheduled = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.model, self.options = resolve_model(self.model, self.options)
        if self.example_inputs is None and self.example_kwargs is None:
            self.example_inputs, self.example_kwargs = example_of(self.model)
        check_model(self.model)
        check_examples(self.model, self.example_inputs, self.example_kwargs)
        precision_of(self.options.mp_policy, find_units(self.model, self.options.units))
        if self.example_inputs is None and self.example_kwargs is None:
            raise ArgumentError("explain needs example_inputs or example_kwargs, the inputs of one rank's call.")
        symbols = self.symbols
        if symbols is not None and not (isinstance(symbols, Mapping) and all(map(_is_symbol, symbols.items()))):
            raise ArgumentError(
                f'symbols must name dims of the inputs such as {{"batch": 0, "seq": 1}}, got {brief(symbols)}.'
            )
        if not callable(self.show):
            check_function("show", self.show, "print")
        check_bool("every_block", self.every_block)
        device_given(self.device)
        if self.parallelize is not None:
            check_function("parallelize", self.parallelize, "a function of (model, mesh)")

    @collector_paused()
    def explain(
        self, shape: MeshLike, profile: Profile, network: str, *, measured: Mapping[str, float] = MappingProxyType({})
    ) -> Explanation:
        """Predict a step on one mesh and machine."""
        if not isinstance(network, str) or network not in profile.outside:
            known = ", ".join(map(repr, profile.outside))
            raise ArgumentError(f"network must be one of {known} for {profile.name}, got {brief(network)}.")
        check_seconds("measured", measured)
        with standing_in(device_given(self.device)):
            return self._explain(shape, profile, network, measured)

    def _explain(self, shape: MeshLike, profile: Profile, network: str, measured: Mapping[str, float]) -> Explanation:
        of_stage, axis = without_pipeline(shape)
        place = place_of(of_stage, self.parallelize)
        sizes = {**({axis.name: axis.size} if axis else {}), **sizes_of(place)}
        microbatches = microbatches_of(sizes, (self.example_inputs, self.example_kwargs), self.training)
        if axis is not None and axis.size > 1:
            return self._in_stages(place, axis, sizes, microbatches, Costs(profile, network, measured=dict(measured)))
        if self.symbols and microbatches > 1:
            raise ArgumentError(
                "symbols: formulas are of one microbatch. Leave symbols, or accumulate and global_batch, out."
            )
        before_plan = self._prepared(place, Costs(profile, network))
        costs = Costs(profile, network, before_plan.mesh, dict(measured))
        subject = self._subjects[whose(place)]
        found = self._predicted(
            place,
            before_plan,
            costs,
            flop=subject.flop,
            mesh=None if axis is None and isinstance(place, Mesh) else sizes,
            microbatches=microbatches,
        )
        _check_measured(measured, found)
        if self.symbols:
            self._showing(found._program.mesh, profile.name)("formulas")
            found = replace(
                found, formulas=formulas_of(found._program, found._costs, subject.at, training=self.training)
            )
        return found

    def _predicted(
        self,
        place: Hashable,
        before_plan: Program,
        costs: Costs,
        *,
        flop: Mapping[str, float],
        mesh: dict[str, int] | None = None,
        microbatches: int = 1,
    ) -> Explanation:
        """The prediction of a program.

        Args:
            place: what the program is the only one of.
            flop: of the model, by dtype.
        """
        planning = replace(costs, measured={})
        program = self._program(place, before_plan, planning)
        show = self._showing(program.mesh, costs.profile.name)
        scheduled = self._schedule(program, costs.profile, costs.measured, show)
        show("predict")
        with while_unchanged(self._known):
            bound = bound_of(
                before_plan,
                planning,
                program.plan,
                limit=self.options.memory_limit,
                states=self.training.optimizer_states,
            )
        return explained(
            program,
            # Plans are the same for all backends, so that the program is.
            replace(costs, scheduled=scheduled, fused=self.options.backend != "eager"),
            flop,
            bound,
            tokens=count_tokens(pytree.tree_leaves((self.example_inputs, self.example_kwargs))),
            training=self.training,
            label=self.label,
            mesh=mesh,
            microbatches=microbatches,
        )

    def _in_stages(
        self, place: Place, axis: Axis, sizes: dict[str, int], microbatches: int, costs: Costs
    ) -> Explanation:
        """Predict a step of a pipeline.

        Args:
            axis: of its stages.
            sizes: of the whole mesh, by axis.
        """
        course = Course(axis, self.training, microbatches)
        course.check(self.options, self.symbols)
        study = replace(self, options=replace(self.options, reshard_after_forward=False))
        study._subjects, study._before_plan = self._subjects, self._of_stages
        whole = study._prepared(place, costs)
        whole = whole if whole.few is None else all_blocks(whole)
        subject = self._subjects[whose(place)]
        blocks = blocks_of(subject.lists, subject.repeats, whole.model)
        stages = stages_of(whole, blocks, course, costs)

        def predict(stage: Hashable, program: Program, limit: int | None) -> Explanation:
            at = replace(study, options=replace(study.options, memory_limit=limit))
            at._scheduled, at._known, at._kernels = study._scheduled, study._known, self._kernels
            flop = {dtype: total / course.stages for dtype, total in subject.flop.items()}
            on = replace(costs, mesh=program.mesh)
            return at._predicted((place, stages.counts, stage, limit), program, on, flop=flop, mesh=sizes)

        step = PipelineStep.of(stages, course, costs, self.options.memory_limit, predict)
        _check_measured(costs.measured, *(part.found for part in step.parts))
        return step.explained(subject.flop, sizes)

    def _schedule(
        self, program: Program, profile: Profile, measured: Mapping[str, float], show: Callable[[str], None]
    ) -> dict[str, tuple[Work, ...]]:
        """Kernels of the regions that Inductor compiles for a GPU; with formulas by rules, as those take symbols."""
        if device_given(self.device).type == "cpu" or self.options.backend == "eager" or self.symbols:
            return {}
        regions = {key: region for key, region in program.regions.items() if key not in measured}
        return schedule_regions(regions, profile, self._kernels, show)

    @collector_paused()
    def capture(self, shape: MeshLike) -> None:
        """Capture the model for a mesh, unless it was; of equal blocks a few.

        Raises:
            Uneven, GraphshardError: it cannot be; `explain` may yet, with every block, or says what is wrong.
        """
        place = place_of(without_pipeline(shape)[0], self.parallelize)
        device = device_given(self.device)
        with standing_in(device), at_place(self.model, self.options, place, self.parallelize, device) as (model, spec):
            subject = self._subject(place, model)
            if subject.repeats is not None:
                check_alike(spec, subject.repeats)
            subject.capture(model, spec)

    def forget(self, shape: MeshLike) -> None:
        """Let go of the programs of a mesh, which are made again if they are asked for."""
        place = place_of(without_pipeline(shape)[0], self.parallelize)
        self._before_plan = {key: kept for key, kept in self._before_plan.items() if key[0] != place}
        self._of_stages = {key: kept for key, kept in self._of_stages.items() if key[0] != place}
        self._scheduled = {key: kept for key, kept in self._scheduled.items() if key[0] != place}


def _check_measured(measured: Mapping[str, float], *found: Explanation) -> None:
    """Raise ArgumentError for a region that no program has."""
    unknown = sorted(set(measured).difference(*(each._program.regions for each in found)))
    if unknown:
        raise ArgumentError(
            f"measured has {brief(unknown[0])}, which is no region of this program. Measure with the same model, "
            "inputs, mesh and settings."
        )


def _is_symbol(item: tuple[Any, Any]) -> bool:
    name, dim = item
    return isinstance(name, str) and name.isidentifier() and is_int(dim) and 0 <= dim < _MOST_DIMS
