"""A step of a pipeline: each stage predicted as a separate program, and the schedule that runs them.

    whole program -> cut at blocks -> for each kind of stage: plan, lower, clock -> run the stages -> one Explanation

A stage is compiled with `reshard_after_forward=False` and runs under `torch.distributed.pipelining`: its parameters are
gathered in its first forward and kept, full gradients are added up, and reduced in its last backward. Microbatches in
between take as long as their compute and the model's own communication. `tests/distributed/test_pipelines.py` counts
the collectives. Sending between stages overlaps with compute; it costs as much as an exchange of two ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphshard.cost.costs import MODEL_KINDS, Costs
from graphshard.cost.kernels import num_bytes
from graphshard.cost.profile import sampled
from graphshard.cost.scalars import Scalar, maximum
from graphshard.errors import ArgumentError, InfeasibleError, StageError
from graphshard.ir.graph import base_of, is_alias
from graphshard.ir.mesh import Axis
from graphshard.ir.program import Program
from graphshard.options.options import Options
from graphshard.predict._pipeline_stages import Blocks, Stages
from graphshard.predict.explanation import Explanation, PipelineCost, StageCost, training_cost
from graphshard.predict.step_prediction import (
    EARLIER_GRADIENTS,
    HIDDEN,
    NEGLIGIBLE,
    OPTIMIZER_STATE,
    OPTIMIZER_TEMPORARIES,
    range_of,
)
from graphshard.predict.training_config import Training
from graphshard.schedule.clock import Launch, TimedEvent, run
from graphshard.schedule.stages import StageSeconds, Turn, even_counts, most_alive, rounds_of, run_stages, turns_of
from graphshard.schedule.timeline import timed_events
from graphshard.utils.text import format_bytes

_REMEDIES = 'activation="full", fewer sequences in a microbatch, more ranks that shard, or more stages'


@dataclass(frozen=True)
class RankOrder:
    """Order in which ranks along the axis of stages run forwards and backwards."""

    axis: Axis
    training: Training
    microbatches: int

    @property
    def stages_per_rank(self) -> int:
        return self.training.stages_per_rank if self.training.pipeline == "interleaved" else 1

    @property
    def num_stages(self) -> int:
        return self.axis.size * self.stages_per_rank

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank."""
        return range(rank, self.num_stages, self.axis.size)

    @cached_property
    def turns(self) -> list[list[Turn]]:
        """Turns by rank."""
        given = self.axis.size, self.microbatches, self.stages_per_rank
        return [turns_of(self.training.pipeline, rank, *given) for rank in range(self.axis.size)]

    def check(self, options: Options, symbols: Mapping[str, int] | None) -> None:
        """Raise ArgumentError for arguments that do not go with a pipeline."""
        ranks, name = self.axis.size, self.axis.name
        if symbols:
            raise ArgumentError(f"symbols: there are no formulas of a pipeline. Leave symbols, or {name}, out.")
        if options.reshard_after_forward not in (None, False):
            raise ArgumentError(
                f"reshard_after_forward={options.reshard_after_forward} on a mesh with {name}: parameters of a stage "
                "are gathered once a step, as with reshard_after_forward=False. Leave it out."
            )
        if options.activation == "auto":
            raise ArgumentError(
                f'activation="auto" on a mesh with {name}: stages save as units of the whole model do. Give "full", a '
                "share or operators."
            )
        if self.training.pipeline != "interleaved":
            return
        rounds = rounds_of(ranks, self.microbatches)
        if self.microbatches % rounds:
            raise StageError(
                f'pipeline="interleaved" on {name} {ranks} takes {self.microbatches} microbatches in {rounds} rounds, '
                f"and torch.distributed.pipelining wants rounds of one size. Give a multiple of {ranks} microbatches."
            )
        if options.memory_limit is not None:
            raise ArgumentError(
                'memory_limit with pipeline="interleaved": stages of a rank share its memory, and each is planned by '
                'itself. Leave memory_limit out, or take pipeline="1f1b".'
            )

    def held_by_others(self, limit: int, stage: int, program: Program) -> int:
        """Return the bytes that other microbatches hold while one runs; InfeasibleError if that is the whole limit."""
        others = most_alive(self.turns[stage], {stage: _saved_bytes(program)}, {stage: 0})[0]
        others += _added_bytes(program) if self.microbatches > 1 else 0
        if others >= limit:
            raise InfeasibleError(
                f"memory_limit={limit}: other microbatches alone hold {others} bytes in stage {stage}. Give more, "
                "fewer sequences in a microbatch, or more stages.",
                others + 1,
            )
        return others


@dataclass(frozen=True)
class StageStep:
    """A stage, predicted alone for one microbatch, which saves `saved` bytes for its backward."""

    blocks: int
    found: Explanation
    saved: int

    def seconds(self, costs: Costs, microbatches: int, events: Sequence[TimedEvent] | None = None) -> StageSeconds:
        """Return the seconds of the stage's turns, by events with seconds of the same costs, or the prediction's."""
        events = self.found._timeline.events if events is None else events
        first, last = _phase_seconds(events, costs.profile.contention)
        # Between the first and the last microbatch, parameters are gathered already, and gradients stay.
        free = [
            replace(event, seconds=0.0) if isinstance(event, Launch) and event.kind not in MODEL_KINDS else event
            for event in events
        ]
        forward, backward = _phase_seconds(free, costs.profile.contention)
        added = costs.addition(_added_bytes(self.found._program)) if microbatches > 1 else 0.0
        return StageSeconds(first, forward, backward, last, added)

    def memory(self, microbatches: int, *, at_peak: bool) -> Counter[str]:
        """Return bytes by kind: at the peak of one microbatch's turns, or those held throughout."""
        program = self.found._program
        if at_peak:
            found = self.found._memory.by_kind()
        else:
            gathered = (row for row in program.params if row.num_shards > 1 or row.dtype != row.compute_dtype)
            kept = sum(row.sent_bytes("gather") for row in gathered)
            found = Counter({"shards": self.found.memory["shards"], "gathered parameters": kept})
        found[OPTIMIZER_STATE] = self.found.memory[OPTIMIZER_STATE]
        found[EARLIER_GRADIENTS] = _added_bytes(program) if microbatches > 1 else 0
        return found


def _added_bytes(program: Program) -> int:
    """Return the bytes of full gradients, in the dtype in which microbatches accumulate."""
    return sum(row.sent_bytes("reduce") for row in program.params if row.trainable)


def _saved_bytes(program: Program) -> int:
    """Return the bytes that a microbatch saves for its backward, except full parameters."""
    phase = program.phases["forward"]
    results = zip(phase.results, phase.outputs, strict=True)
    saved = {base_of(value, is_alias) for value, slot in results if slot.kind == "saved" and not slot.is_full}
    return sum(map(num_bytes, saved))


def _phase_seconds(events: Sequence[TimedEvent], contention: Scalar) -> tuple[Scalar, Scalar]:
    ends: dict[str, Scalar] = {"forward": 0.0}
    for event, end in zip(events, run(events, contention).ends):
        if not isinstance(event, Launch):
            ends[event.phase] = end
    return ends["forward"], ends.get("backward", ends["forward"]) - ends["forward"]


@dataclass(frozen=True)
class PipelineStep:
    """A step of all stages; equal stages are one object in `parts`. `costs` are on the whole mesh."""

    parts: Sequence[StageStep]
    stages: Stages
    order: RankOrder
    costs: Costs

    @classmethod
    def of(
        cls,
        whole: Program,
        blocks: Blocks,
        order: RankOrder,
        costs: Costs,
        limit: int | None,
        predict: Callable[[Hashable, Program, int | None], Explanation],
    ) -> PipelineStep:
        """Cut a partitioned program into stages, as even as whole blocks allow, and predict each; equal ones once.

        A stage is planned with the bytes of `limit` that other microbatches leave free. `predict` takes a key of the
        program, the program and its limit.
        """
        name, ranks, per_rank = order.axis.name, order.axis.size, order.stages_per_rank
        if order.num_stages > blocks.count:
            each = f" with {per_rank} stages each" if per_rank > 1 else ""
            raise StageError(
                f"mesh has {name} {ranks}{each}, and {whole.model}.{blocks.path} has {blocks.count} blocks to "
                f"cut into stages. Give {name} of at most {blocks.count // per_rank}."
            )
        on_mesh = replace(costs, mesh=whole.mesh)
        stages = Stages(whole, blocks, lambda cut: even_counts(cut.seconds(on_mesh), order.num_stages))
        mesh = whole.mesh.with_pipeline(name, ranks)
        known: dict[Hashable, StageStep] = {}
        parts = []
        for number, count in enumerate(stages.counts):
            key: Hashable = stages.counts, stages.kind(number)
            if key not in known or limit is not None:
                program = replace(stages.program_of(number), mesh=mesh)
                others = 0 if limit is None else order.held_by_others(limit, number, program)
                try:
                    found = predict(key, program, None if limit is None else limit - others)
                except InfeasibleError as error:
                    raise InfeasibleError(
                        f"stage {number}, of which other microbatches hold {others:,} bytes of memory_limit={limit}: "
                        f"{error}",
                        error.smallest + others,
                    ) from error
                known[key] = StageStep(count, found, _saved_bytes(program))
            parts.append(known[key])
        return cls(parts, stages, order, replace(costs, mesh=mesh))

    def explained(self, flop: Mapping[str, float], mesh: dict[str, int]) -> Explanation:
        """Combine the predictions of all stages; `flop` is of the whole model by dtype, `mesh` has sizes by axis."""
        microbatches = self.order.microbatches
        seconds, updates = [part.seconds(self.costs, microbatches) for part in self.parts], self._updates(self.costs)
        step = float(self._step(self.costs, seconds, updates))
        least = [replace(each, first_forward=each.forward, last_backward=each.backward) for each in seconds]
        bound = max(float(self._step(self.costs, least, updates)), *(part.found.lower_bound_s for part in self.parts))
        held, alive = zip(*map(self._memory, self._ranks))
        pipeline = self._pipeline_cost(seconds, updates, step, [each.total() for each in held], alive)
        memory, slow = held[pipeline.largest], self.order.stages_of(pipeline.slowest)
        mine = [self.parts[stage].found for stage in slow]
        head = max(mine, key=lambda each: each.step_time_s)
        added = float(sum(seconds[stage].added for stage in slow)) * (microbatches - 1)
        compute = microbatches * sum(each._timeline.compute for each in mine) + added
        optimizer = float(updates[pipeline.slowest])
        exposed = pipeline.rank_s[pipeline.slowest] - optimizer - compute
        links = defaultdict[str, float](float)
        for event in (event for each in mine for event in each._timeline.steps if event.link):
            links[event.link] += (microbatches if event.kind in MODEL_KINDS else 1) * event.seconds
        limit, advice = self._limit(head, pipeline, step, exposed)
        ideal = sum(count / self.costs.profile.rate(dtype).peak for dtype, count in flop.items())
        between = self._range(step)
        tokens = microbatches * head.tokens
        found = replace(
            head,
            mesh=mesh,
            tokens=tokens,
            microbatches=microbatches,
            step_time_s=step,
            step_range_s=between,
            compute_s=compute,
            optimizer_s=optimizer,
            communication_s=sum(links.values()),
            exposed_comm_s=exposed,
            lower_bound_s=bound,
            gap=step / bound - 1,
            search_stopped=any(part.found.search_stopped for part in self.parts),
            peak_memory_bytes=memory.total(),
            memory=dict(memory.most_common()),
            flop=microbatches * float(sum(flop.values())) / len(self._ranks),
            mfu=microbatches * ideal / len(self._ranks) / step,
            limit=limit,
            advice=advice,
            waits=tuple(sorted((wait for each in mine for wait in each.waits), key=lambda wait: -wait.seconds)),
            busy={"compute": compute / step, **{link: total / step for link, total in links.items()}},
            pipeline=pipeline,
        )
        return replace(found, cost=training_cost(self.order.training, found))

    @property
    def _ranks(self) -> range:
        return range(self.order.axis.size)

    def _step(self, costs: Costs, seconds: Sequence[StageSeconds], updates: Sequence[Scalar]) -> Scalar:
        """Return the seconds until the last rank has updated its parameters."""
        times = run_stages(self.order.turns, seconds, self._sending(costs), self.order.microbatches)
        return maximum(*(end + update for end, update in zip(times.finish, updates)))

    def _sending(self, costs: Costs) -> list[tuple[Scalar, Scalar]]:
        """Return seconds over each border, ahead and back: two ranks exchange twice the bytes, and keep half."""
        pair = replace(self.order.axis, size=2)

        def seconds(border: int, *, backward: bool) -> Scalar:
            return costs.collective("all_to_all", 2.0 * self.stages.sent(border, backward=backward), 1, pair)

        return [(seconds(b, backward=False), seconds(b, backward=True)) for b in range(len(self.parts) - 1)]

    def _trained(self, rank: int) -> int:
        return sum(self.parts[stage].found._program.params.trained_bytes for stage in self.order.stages_of(rank))

    def _updates(self, costs: Costs) -> list[Scalar]:
        """Return the seconds after the last backward, by rank."""
        mesh = self.parts[0].found._program.mesh
        return [self.order.training.update_seconds(costs, mesh, self._trained(rank)) for rank in self._ranks]

    def _memory(self, rank: int) -> tuple[Counter[str], int]:
        """Return a rank's bytes at its peak, by kind, and how many microbatches are alive then."""
        microbatches, training = self.order.microbatches, self.order.training
        own = {stage: self.parts[stage] for stage in self.order.stages_of(rank)}
        held = {stage: part.memory(microbatches, at_peak=False) for stage, part in own.items()}
        peaks = {
            stage: sum((held[other] for other in own if other != stage), part.memory(microbatches, at_peak=True))
            for stage, part in own.items()
        }
        saved = {stage: part.saved for stage, part in own.items()}
        most, stage, alive = most_alive(self.order.turns[rank], saved, {s: peak.total() for s, peak in peaks.items()})
        found = peaks[stage] + Counter({"saved for backward": most - peaks[stage].total()})
        trained = self._trained(rank)
        temporary = 0 if self.parts[rank].found._program.offloaded else training.temporary_bytes(trained)
        update = sum(held.values(), Counter({"gradients": trained, OPTIMIZER_TEMPORARIES: temporary}))
        update.pop(EARLIER_GRADIENTS, None)
        return (update, 0) if temporary and update.total() > found.total() else (found, alive)

    def _pipeline_cost(
        self,
        seconds: Sequence[StageSeconds],
        updates: Sequence[Scalar],
        step: float,
        held: Sequence[int],
        alive: Sequence[int],
    ) -> PipelineCost:
        microbatches, order = self.order.microbatches, self.order
        busy = [sum(float(seconds[stage].busy(microbatches)) for stage in order.stages_of(r)) for r in self._ranks]
        rank_s = tuple(own + float(update) for own, update in zip(busy, updates))
        sending, sent = max(
            (float(each), self.stages.sent(border, backward=bool(back)))
            for border, both in enumerate(self._sending(self.costs))
            for back, each in enumerate(both)
        )
        costs = [
            StageCost(
                blocks=part.blocks,
                forward_s=float(each.forward),
                backward_s=float(each.backward),
                gathers_s=float(each.first_forward - each.forward),
                reductions_s=float(each.last_backward - each.backward),
                alive=alive[stage % len(self._ranks)],
            )
            for stage, (part, each) in enumerate(zip(self.parts, seconds))
        ]
        slow = [(self.parts[stage].found, seconds[stage]) for stage in order.stages_of(rank_s.index(max(rank_s)))]
        waits = sum(float(each.forward + each.backward) - found._timeline.compute for found, each in slow)
        return PipelineCost(
            schedule=order.training.pipeline,
            stages=tuple(costs),
            bubble_s=step - max(rank_s),
            model_comm_s=microbatches * waits,
            sent_bytes=sent,
            sending_s=sending,
            rank_s=rank_s,
            rank_bytes=tuple(held),
        )

    def _limit(self, head: Explanation, cost: PipelineCost, step: float, exposed: float) -> tuple[str, tuple[str, ...]]:
        room, need = self.costs.profile.memory_capacity, max(cost.rank_bytes)
        if need > room:
            where = cost.named(cost.largest)
            return "memory", (f"{where} needs {format_bytes(need)}, {format_bytes(room)} are there: {_REMEDIES}",)
        once = head.limit if head.limit in ("head", "tail", "link") else "link"
        lost = {"bubble": cost.bubble_s, "model": cost.model_comm_s, once: exposed - cost.model_comm_s}
        worst, share = max(lost, key=lost.__getitem__), sum(lost.values()) / step
        limit = worst if share > HIDDEN else "compute"
        if worst == "bubble" and share > NEGLIGIBLE:
            count, stages = self.order.microbatches, self.order.num_stages
            return limit, (
                f"ranks wait for other stages for {cost.bubble_s / step:.1%} of the step, with {count} microbatches "
                f"for {stages} stages: more microbatches (a larger batch, or fewer sequences in each), or fewer stages",
            )
        return limit, head.advice if head.limit in (limit, worst) else ()

    def _range(self, step: float) -> tuple[float, float]:
        """Return the range of the step, as far as constants of the profile have ranges."""
        if not self.costs.profile.ranges:
            return step, step
        drawn = replace(self.costs, profile=sampled(self.costs.profile))
        known: dict[int, StageSeconds] = {}
        for part in {id(part): part for part in self.parts}.values():
            events = timed_events(part.found._program, part.found._costs, drawn)
            known[id(part)] = part.seconds(drawn, self.order.microbatches, events)
        return range_of(self._step(drawn, [known[id(part)] for part in self.parts], self._updates(drawn)), step)
