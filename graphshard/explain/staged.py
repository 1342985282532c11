"""A step of a pipeline: the stages of a model, each predicted as a program of its own, and the schedule that runs them.

    whole program -> cut at blocks -> for each kind of stage: plan, lower, clock -> run the stages -> one Explanation

A stage is compiled with `reshard_after_forward=False` and runs under `torch.distributed.pipelining`: its parameters are
gathered in its first forward and kept, full gradients are added up, and reduced in its last backward. What lies between
takes as long as its compute and what the model itself communicates. `tests/distributed/test_pipelines.py` counts the
collectives. What is sent between stages goes beside compute; it is the exchange of two ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphshard.cost.costs import Costs, maximum
from graphshard.cost.model_collectives import MODEL_KINDS
from graphshard.cost.multiplications import Scalar
from graphshard.cost.samples import sampled
from graphshard.errors import InfeasibleError, StageError
from graphshard.explain.advice import HIDDEN, NEGLIGIBLE
from graphshard.explain.course import ADDED, Course, Stage, saved_bytes
from graphshard.explain.cut import BlockCut, Blocks, Stages
from graphshard.explain.explanation import Explanation
from graphshard.explain.pipelined import Pipelined, StageCost
from graphshard.explain.spread import between
from graphshard.explain.training import training_cost
from graphshard.ir.program import Program
from graphshard.ir.text import format_bytes
from graphshard.schedule.stages import StageSeconds, even_counts, most_alive, run_stages
from graphshard.schedule.timeline import timed_events

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
