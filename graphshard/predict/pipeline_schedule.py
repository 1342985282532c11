"""What ranks of a pipeline do in which order, and a stage as a program of its own: its seconds and its bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphshard.cost.collectives import MODEL_KINDS
from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.cost.profile import sampled
from graphshard.cost.scalars import Scalar, maximum
from graphshard.errors import ArgumentError, InfeasibleError, StageError
from graphshard.ir.graph import base_of, is_alias
from graphshard.ir.mesh import Axis
from graphshard.ir.program import Program
from graphshard.options.options import Options
from graphshard.predict.advice import HIDDEN, NEGLIGIBLE
from graphshard.predict.explanation import Explanation, Pipelined, StageCost
from graphshard.predict.pipeline_stages import BlockCut, Blocks, Stages
from graphshard.predict.step_prediction import between
from graphshard.predict.training_config import Training, training_cost
from graphshard.schedule.clock import Event, Launch, run
from graphshard.schedule.stages import StageSeconds, Turn, even_counts, most_alive, rounds_of, run_stages, turns_of
from graphshard.schedule.timeline import timed_events
from graphshard.utils.text import format_bytes

# Of a stage's memory what is there all the time.
STATE, GATHERED, ADDED = "optimizer state", "gathered parameters", "gradients of earlier microbatches"


@dataclass(frozen=True)
class Course:
    """Who does what in a pipeline, in which order.

    Attributes:
        axis: of the stages.
        training: says which schedule.
    """

    axis: Axis
    training: Training
    microbatches: int

    @property
    def per_rank(self) -> int:
        """Stages of a rank."""
        return self.training.stages_per_rank if self.training.pipeline == "interleaved" else 1

    @property
    def stages(self) -> int:
        """All of them."""
        return self.axis.size * self.per_rank

    def of_rank(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, self.stages, self.axis.size)

    @cached_property
    def turns(self) -> list[list[Turn]]:
        """By rank."""
        given = self.axis.size, self.microbatches, self.per_rank
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

    def room(self, limit: int, stage: int, program: Program) -> int:
        """Bytes of a limit that other microbatches leave to the one that runs in a stage.

        Raises:
            InfeasibleError: they leave none.
        """
        saved = saved_bytes(program)
        others = most_alive(self.turns[stage], {stage: saved}, {stage: 0})[0]
        others += added_bytes(program) if self.microbatches > 1 else 0
        if others >= limit:
            raise InfeasibleError(
                f"memory_limit={limit}: other microbatches alone hold {others} bytes in stage {stage}. Give more, "
                "fewer sequences in a microbatch, or more stages.",
                others + 1,
            )
        return limit - others


@dataclass(frozen=True)
class Stage:
    """A stage as a program, predicted alone for one microbatch.

    Attributes:
        blocks: how many it has.
        found: the prediction.
        saved: bytes that a microbatch leaves to its backward.
    """

    blocks: int
    found: Explanation
    saved: int

    @property
    def trained(self) -> int:
        """Bytes of the shards of trained parameters."""
        return self.found._program.params.trained_bytes

    def seconds(self, costs: Costs, microbatches: int, events: Sequence[Event] | None = None) -> StageSeconds:
        """What its turns take.

        Args:
            events: what its program does, with seconds by the same costs; None are those of the prediction.
        """
        events = self.found._timeline.events if events is None else events
        first, last = _phases(events, costs.profile.contention)
        forward, backward = _phases([_for_nothing(event) for event in events], costs.profile.contention)
        added = costs.addition(added_bytes(self.found._program)) if microbatches > 1 else 0.0
        return StageSeconds(first, forward, backward, last, added)

    def memory(self, microbatches: int, *, at_peak: bool) -> Counter[str]:
        """Bytes by what they are: at the peak of one microbatch's turns, or what is there all the time."""
        program, found = self.found._program, Counter[str]()
        if at_peak:
            for value in self.found._memory.alive:
                found[value.what] += value.num_bytes
        else:
            found["shards"] = self.found.memory["shards"]
            found[GATHERED] = gathered_bytes(program)
        found[STATE] = self.found.memory[STATE]
        found[ADDED] = added_bytes(program) if microbatches > 1 else 0
        return found


def added_bytes(program: Program) -> int:
    """Bytes of full gradients, in the dtype in which those of microbatches are added up."""
    return sum(row.sent_bytes("reduce") for row in program.params if row.trainable)


def gathered_bytes(program: Program) -> int:
    """Bytes of full parameters that are not the shards themselves."""
    made = (row for row in program.params if row.num_shards > 1 or row.dtype != row.compute_dtype)
    return sum(row.sent_bytes("gather") for row in made)


def saved_bytes(program: Program) -> int:
    """Bytes of what a microbatch leaves to its backward, but for full parameters."""
    phase = program.phases["forward"]
    results = zip(phase.results, phase.outputs, strict=True)
    saved = {base_of(value, is_alias) for value, slot in results if slot.kind == "saved" and not slot.is_full}
    return sum(map(num_bytes, saved))


def _phases(events: Sequence[Event], contention: Scalar) -> tuple[Scalar, Scalar]:
    """Seconds of forward and of backward."""
    ends: dict[str, Scalar] = {"forward": 0.0}
    for event, end in zip(events, run(events, contention).ends):
        if not isinstance(event, Launch):
            ends[event.phase] = end
    return ends["forward"], ends.get("backward", ends["forward"]) - ends["forward"]


def _for_nothing(event: Event) -> Event:
    """An event between the first and the last microbatch: parameters are there, and gradients stay."""
    return replace(event, seconds=0.0) if isinstance(event, Launch) and event.kind not in MODEL_KINDS else event


# What takes less memory.
_LESS = 'activation="full", fewer sequences in a microbatch, more ranks that shard, or more stages'


def stages_of(whole: Program, blocks: Blocks, course: Course, costs: Costs) -> Stages:
    """The stages of a partitioned program: as even as whole blocks allow.

    Raises:
        StageError: there are more stages than blocks, or several stages use a parameter.
    """
    if course.stages > blocks.count:
        each = f" with {course.per_rank} stages each" if course.per_rank > 1 else ""
        name = course.axis.name
        raise StageError(
            f"mesh has {name} {course.axis.size}{each}, and {whole.model}.{blocks.path} has {blocks.count} blocks to "
            f"cut into stages. Give {name} of at most {blocks.count // course.per_rank}."
        )
    cut = BlockCut(whole, blocks)
    return Stages(cut, even_counts(cut.seconds(replace(costs, mesh=whole.mesh)), course.stages))


@dataclass(frozen=True)
class PipelineStep:
    """A step of all stages.

    Attributes:
        parts: by stage; equal stages are one object.
        stages: the same as programs.
        course: what ranks do, in which order.
        costs: on the whole mesh.
    """

    parts: Sequence[Stage]
    stages: Stages
    course: Course
    costs: Costs

    @classmethod
    def of(
        cls,
        stages: Stages,
        course: Course,
        costs: Costs,
        limit: int | None,
        predict: Callable[[Hashable, Program, int | None], Explanation],
    ) -> PipelineStep:
        """Predict each stage, equal ones once.

        Args:
            costs: for any mesh.
            limit: bytes that a rank may use; each stage is planned with what other microbatches leave of them.
            predict: a program, for what it is the only one of, in so many bytes.
        """
        mesh = stages.cut.program.mesh.with_pipeline(course.axis.name, course.axis.size)
        known: dict[Hashable, Stage] = {}
        parts = []
        for number, count in enumerate(stages.counts):
            key: Hashable = stages.kind(number)
            if key not in known or limit is not None:
                program = replace(stages.program_of(number), mesh=mesh)
                room = None if limit is None else course.room(limit, number, program)
                try:
                    found = predict(key, program, room)
                except InfeasibleError as error:
                    others = 0 if limit is None or room is None else limit - room
                    raise InfeasibleError(
                        f"stage {number}, of which other microbatches hold {others:,} bytes of memory_limit={limit}: "
                        f"{error}",
                        error.smallest + others,
                    ) from error
                known[key] = Stage(count, found, saved_bytes(program))
            parts.append(known[key])
        return cls(parts, stages, course, replace(costs, mesh=mesh))

    def explained(self, flop: Mapping[str, float], mesh: dict[str, int]) -> Explanation:
        """One prediction of those of all stages.

        Args:
            flop: of the whole model, by dtype.
            mesh: sizes by axis.
        """
        profile, training, microbatches = self.costs.profile, self.course.training, self.course.microbatches
        seconds, updates = [part.seconds(self.costs, microbatches) for part in self.parts], self._updates(self.costs)
        step = float(self._step(self.costs, seconds, updates))
        least = [replace(each, first_forward=each.forward, last_backward=each.backward) for each in seconds]
        bound = max(float(self._step(self.costs, least, updates)), *(part.found.lower_bound_s for part in self.parts))
        held, alive = zip(*map(self._memory, self._ranks))
        pipeline = self._pipelined(seconds, updates, step, [each.total() for each in held], alive)
        memory, slow = held[pipeline.largest], self.course.of_rank(pipeline.slowest)
        mine = [self.parts[stage].found for stage in slow]
        head = max(mine, key=lambda each: each.step_time_s)
        added = float(sum(seconds[stage].added for stage in slow)) * (microbatches - 1)
        compute = microbatches * sum(each._timeline.compute for each in mine) + added
        exposed = pipeline.rank_s[pipeline.slowest] - float(updates[pipeline.slowest]) - compute
        times = dict.fromkeys(MODEL_KINDS, microbatches)
        links: dict[str, float] = {}
        for each in (each for one in mine for each in one._timeline.steps if each.link):
            links[each.link] = links.get(each.link, 0.0) + times.get(each.kind, 1) * each.seconds  # type: ignore[call-overload]
        limit, advice = self._limit(head, pipeline, step, exposed)
        ideal = sum(count / profile.rate(dtype).peak for dtype, count in flop.items())
        around = self._range(step)
        tokens = microbatches * head.tokens
        return replace(
            head,
            mesh=mesh,
            tokens=tokens,
            microbatches=microbatches,
            step_time_s=step,
            step_range_s=around,
            compute_s=compute,
            optimizer_s=float(updates[pipeline.slowest]),
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
            cost=training_cost(
                training,
                step_tokens=tokens * head.data_ranks,
                seconds=step,
                between=around,
                ranks=math.prod(mesh.values()),
            ),
            pipeline=pipeline,
        )

    @property
    def _ranks(self) -> range:
        return range(self.course.axis.size)

    def _step(self, costs: Costs, seconds: Sequence[StageSeconds], updates: Sequence[Scalar]) -> Scalar:
        """Seconds until the last rank has updated its parameters."""
        times = run_stages(self.course.turns, seconds, self._sending(costs), self.course.microbatches)
        return maximum(*(end + update for end, update in zip(times.finish, updates)))

    def _sending(self, costs: Costs) -> list[tuple[Scalar, Scalar]]:
        """Seconds over each border, ahead and back: two ranks exchange twice the bytes, each keeps half of its own."""
        pair = replace(self.course.axis, size=2)

        def seconds(border: int, *, backward: bool) -> Scalar:
            return costs.collective("all_to_all", 2.0 * self.stages.sent(border, backward=backward), 1, pair)

        return [(seconds(b, backward=False), seconds(b, backward=True)) for b in range(len(self.parts) - 1)]

    def _updates(self, costs: Costs) -> list[Scalar]:
        """By rank, seconds of what follows its last backward."""
        mesh = self.parts[0].found._program.mesh
        trained = [sum(self.parts[stage].trained for stage in self.course.of_rank(rank)) for rank in self._ranks]
        return [self.course.training.update_seconds(costs, mesh, size) for size in trained]

    def _memory(self, rank: int) -> tuple[Counter[str], int]:
        """Bytes that a rank holds at its peak, by what they are, and how many microbatches are alive then."""
        microbatches, training = self.course.microbatches, self.course.training
        own = {stage: self.parts[stage] for stage in self.course.of_rank(rank)}
        held = {stage: part.memory(microbatches, at_peak=False) for stage, part in own.items()}
        peaks = {}
        for stage, part in own.items():
            peaks[stage] = part.memory(microbatches, at_peak=True)
            for other in own:
                peaks[stage] += held[other] if other != stage else Counter()
        saved = {stage: part.saved for stage, part in own.items()}
        most, stage, alive = most_alive(self.course.turns[rank], saved, {s: peak.total() for s, peak in peaks.items()})
        found = peaks[stage] + Counter({"saved for backward": most - peaks[stage].total()})
        trained = sum(part.trained for part in own.values())
        program = self.parts[rank].found._program
        temporary = 0 if program.offloaded else training.temporary_bytes(trained)
        update = sum(held.values(), Counter({"gradients": trained, "optimizer temporaries": temporary}))
        update.pop(ADDED, None)
        return (update, 0) if temporary and update.total() > found.total() else (found, alive)

    def _pipelined(
        self,
        seconds: Sequence[StageSeconds],
        updates: Sequence[Scalar],
        step: float,
        held: Sequence[int],
        alive: Sequence[int],
    ) -> Pipelined:
        microbatches, ranks = self.course.microbatches, len(self._ranks)
        busy = [sum(float(seconds[stage].busy(microbatches)) for stage in self.course.of_rank(r)) for r in self._ranks]
        rank_s = tuple(own + float(update) for own, update in zip(busy, updates))
        sent, longest = max(
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
                alive=alive[stage % ranks],
            )
            for stage, (part, each) in enumerate(zip(self.parts, seconds))
        ]
        own = [(self.parts[i].found, seconds[i]) for i in self.course.of_rank(rank_s.index(max(rank_s)))]
        waits = sum(float(each.forward + each.backward) - found._timeline.compute for found, each in own)
        return Pipelined(
            schedule=self.course.training.pipeline,
            stages=tuple(costs),
            bubble_s=step - max(rank_s),
            model_comm_s=microbatches * waits,
            sent_bytes=longest,
            sending_s=sent,
            rank_s=rank_s,
            rank_bytes=tuple(held),
        )

    def _limit(self, head: Explanation, found: Pipelined, step: float, exposed: float) -> tuple[str, tuple[str, ...]]:
        """What limits a step, and what would help."""
        room, need = self.costs.profile.memory_capacity, found.rank_bytes[found.largest]
        if need > room:
            where = found.named(found.largest)
            return "memory", (f"{where} needs {format_bytes(need)}, {format_bytes(room)} are there: {_LESS}",)
        once = head.limit if head.limit in ("head", "tail", "link") else "link"
        lost = {"bubble": found.bubble_s, "model": found.model_comm_s, once: exposed - found.model_comm_s}
        worst, share = max(lost, key=lost.__getitem__), sum(lost.values()) / step
        limit = worst if share > HIDDEN else "compute"
        if worst == "bubble" and share > NEGLIGIBLE:
            count, stages = self.course.microbatches, self.course.stages
            return limit, (
                f"ranks wait for other stages for {found.bubble_s / step:.1%} of the step, with {count} microbatches "
                f"for {stages} stages: more microbatches (a larger batch, or fewer sequences in each), or fewer stages",
            )
        return limit, head.advice if head.limit in (limit, worst) else ()

    def _range(self, step: float) -> tuple[float, float]:
        """Between which seconds the step lies, as far as constants of the profile are known."""
        if not self.costs.profile.ranges:
            return step, step
        drawn = replace(self.costs, profile=sampled(self.costs.profile))
        known: dict[int, StageSeconds] = {}
        for part in self.parts:
            if id(part) not in known:
                events = timed_events(part.found._program, part.found._costs, drawn)
                known[id(part)] = part.seconds(drawn, self.course.microbatches, events)
        return between(self._step(drawn, [known[id(part)] for part in self.parts], self._updates(drawn)), step)
