"""`graphshard.schedule_graph`: bucket and reorder the collectives of any ATen graph, and report what is predicted."""

from __future__ import annotations

import bisect
import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule, Node

from graphshard.cost.costs import Costs
from graphshard.cost.profile import Hardware, Profile, load_profile
from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.schedule._graph_problem import (
    GraphProblem,
    GraphRun,
    GraphSchedule,
    Writer,
    cuts_of,
    graph_problem_of,
    run,
)
from graphshard.schedule._graph_search import Best, frugal, graph_bound, search
from graphshard.schedule._reordering_windows import windows
from graphshard.schedule._solver import STEPS
from graphshard.schedule.graph_collectives import Group, GroupCosts, GroupsLike, bytes_of, check_groups, messages
from graphshard.schedule.problem import Budget
from graphshard.utils.argument_validation import check_choice, check_count
from graphshard.utils.text import brief, format_bytes, format_seconds, new_table, plain_table, styled


@dataclass(frozen=True)
class GraphBucket:
    """Collectives that start as one.

    Attributes:
        kind: gather, reduce (reduce-scatter), all_reduce or all_to_all.
        group: name of their process group.
        link: name of their link; buckets on the same link queue.
        members: names of their launches in the graph that was given.
        num_bytes: of the full tensors.
        start: predicted seconds from the beginning to when it is on its link.
        seconds: predicted, on the link.
        exposed: predicted seconds in which compute waits for it.
    """

    kind: str
    group: str
    link: str
    members: tuple[str, ...]
    num_bytes: int
    start: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class ScheduledGraph:
    """A rescheduled graph and what is predicted of it, in seconds and bytes; `print` shows a table of the buckets.

    Attributes:
        module: the graph, which takes and returns what the given one does.
        seconds_before, seconds_after: of one run.
        exposed_before, exposed_after: in which compute waits for collectives.
        lower_bound: seconds that no other order and no other buckets of the collectives beat within the memory limit:
            where a collective by itself does not fit, it does not start. That several together may not fit is not in
            it.
        peak_before, peak_after: most bytes alive at once, inputs included, estimated from the order of nodes.
        buckets: in the order of their starts.
        groups: by name, as they were counted with.
    """

    module: GraphModule
    seconds_before: float
    seconds_after: float
    exposed_before: float
    exposed_after: float
    lower_bound: float
    peak_before: int
    peak_after: int
    buckets: tuple[GraphBucket, ...]
    groups: Mapping[str, Group] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a fraction of it."""
        return self.seconds_after / self.lower_bound - 1 if self.lower_bound else 0.0

    def __str__(self) -> str:
        lines = [
            f"predicted {format_seconds(self.seconds_before)} -> {format_seconds(self.seconds_after)}, bound "
            f"{format_seconds(self.lower_bound)}",
            f"exposed   {format_seconds(self.exposed_before)} -> {format_seconds(self.exposed_after)}",
            f"memory    {format_bytes(self.peak_before)} -> {format_bytes(self.peak_after)}",
        ]
        table = new_table(("bucket", "group", "link"), ("collectives", "bytes", "seconds", "exposed"))
        for bucket in self.buckets:
            seconds = map(format_seconds, (bucket.seconds, bucket.exposed))
            numbers = len(bucket.members), format_bytes(bucket.num_bytes), *seconds
            table.add_row(*map(styled, (bucket.kind, bucket.group, bucket.link, *numbers)))
        return "\n".join([*lines, "", plain_table(table)] if self.buckets else lines)


log = logging.getLogger(__name__)


def schedule_graph(
    gm: GraphModule,
    groups: GroupsLike = None,
    *,
    hardware: Hardware = "h100",
    network: str = "isolated",
    memory_limit: float | None = None,
    steps: int = STEPS,
) -> ScheduledGraph:
    """Bucket and reorder the functional collectives of any FX graph of ATen operators, so that compute hides them.

    The graph may come from `make_fx`, AOTAutograd, AutoParallel, SimpleFSDP or torchtitan. Nothing is assumed about
    gradients or parameters. Collectives are known by their group: collectives of one kind, group, reduction and dtype
    may travel together. Compute, writes and random operators keep their order, and every result keeps its bits. `gm` is
    not changed. The same graph gives the same schedule on all ranks.

    Args:
        gm: a graph whose nodes have fake values in `meta["val"]`, as `make_fx` leaves them.
        groups: the ranks of process groups by name: their number, or a `Group` that says how far apart they are and
            which link carries them; or a DeviceMesh. Groups that are not named must exist in this process.
        hardware: the machine: "a100", "h100", "h200", "b200", "cpu-gloo", a file that `graphshard calibrate` wrote, or
            a `Profile`.
        network: the profile's model of the network between nodes: "isolated", "in-training" or "no-rails".
        memory_limit: bytes that inputs and values may take at once, as estimated from the order of nodes. If the graph
            as it is takes more, the result may be slower than it. None is what the graph takes as it is; `math.inf`
            is no limit.
        steps: what the search may take, about a microsecond each; equal on all machines.

    Raises:
        ArgumentError: an argument is wrong, a group is not known, a value has no size, or nothing waits for a
            collective.
        InfeasibleError: no order that was found fits in memory_limit; it says the least. It is an ArgumentError.
        UnsupportedError: a node communicates in a way that is not known, or a size depends on values.
    """
    profile = _check(gm, hardware, network, memory_limit, steps)
    given = check_groups(groups)
    module = GraphModule(gm, copy.deepcopy(gm.graph), type(gm).__name__)
    module.meta.update(gm.meta)
    _name_constants(module)
    return _Task.of(module, given, profile, network, memory_limit).solve(steps)


@dataclass(frozen=True)
class _Task:
    """A copy of a graph, and its problem."""

    module: GraphModule
    groups: Mapping[str, Group]  # that its collectives run over
    writer: Writer
    problem: GraphProblem
    memory_limit: float | None  # bytes; None is what the graph takes as it is
    reread: Callable[[], _Task]  # reads a module as this one was read

    @staticmethod
    def of(
        module: GraphModule, given: Mapping[str, Group], profile: Profile, network: str, memory_limit: float | None
    ) -> _Task:
        found, groups = messages(module.graph, given)
        group_costs = {name: GroupCosts(group, profile, network) for name, group in groups.items()}
        placed = windows(module.graph, found)
        cuts = cuts_of(placed)
        problem = graph_problem_of(module.graph, found, placed, cuts, Costs(profile, network), group_costs)
        reread = functools.partial(_Task.of, module, given, profile, network, memory_limit)
        return _Task(module, groups, Writer(module.graph, found, placed, cuts), problem, memory_limit, reread)

    @functools.cached_property
    def given(self) -> GraphRun:
        outcome = run(self.problem, self.problem.as_given(), as_given=True)
        assert outcome is not None, "the graph's own order is one"
        return outcome

    @functools.cached_property
    def peak(self) -> int:
        return self.writer.peak(self.writer.given)

    @property
    def limit(self) -> float:
        return self.peak if self.memory_limit is None else self.memory_limit

    @property
    def _within_limit(self) -> GraphProblem:
        """The problem in which nothing starts where it fits in no order."""
        if self.limit == math.inf:
            return self.problem
        firsts = [bisect.bisect_left(self.writer.cuts, count) for count in self.writer.earliest(self.limit)]
        pairs = zip(self.problem.transfers, firsts)
        transfers = (replace(one, first=max(one.first, min(at, one.last))) for one, at in pairs)
        return replace(self.problem, transfers=tuple(transfers))

    @property
    def _names(self) -> dict[Node, tuple[str, ...]]:
        return {message.node: (message.node.name,) for message in self.writer.messages}

    def solve(self, steps: int) -> ScheduledGraph:
        """Search, and write the schedule into the module if it is shorter, or if the graph does not fit as it is."""
        names = self._names
        before, given = self.given, list(self.writer.given)
        bound, peak = graph_bound(self._within_limit), self.peak
        problem, schedule, outcome = self._found(steps)
        after = self
        if outcome is not None and (outcome.seconds < before.seconds or peak > self.limit):
            kept = GraphModule(self.module, copy.deepcopy(self.module.graph), type(self.module).__name__)
            names = self.writer.write(self.writer.order(problem, schedule, outcome), schedule)
            # The report is about the graph that is returned.
            after = self.reread()
            if peak <= self.limit < after.peak or (peak <= self.limit and after.given.seconds > before.seconds):
                self.module.graph = kept.graph
                after = self.reread()
                names = after._names
            self.module.recompile()
        log.info("%d nodes, %d collectives in %d buckets", len(given), len(self.problem.transfers), len(names))
        return ScheduledGraph(
            module=self.module,
            seconds_before=before.seconds,
            seconds_after=after.given.seconds,
            exposed_before=before.exposed,
            exposed_after=after.given.exposed,
            lower_bound=min(bound, after.given.seconds),
            peak_before=peak,
            peak_after=after.peak,
            buckets=tuple(after.bucket(number, names) for number in range(len(after.writer.messages))),
            groups=dict(self.groups),
        )

    def _found(self, steps: int) -> tuple[GraphProblem, GraphSchedule, GraphRun | None]:
        """Return the best schedule that fits, from the graph's own or from the one that takes least."""
        budget = Budget(steps)
        peaks = [self.peak]
        prompt, least = replace(self.problem, prompt=True), frugal(self.problem, self._grows)
        starts = [(self.problem, least), (prompt, least), (prompt, self.problem.as_given())]
        if self.peak <= self.limit:
            starts.insert(0, (self.problem, self.problem.as_given()))
        for problem, start in starts:
            outcome = None if start is None else run(problem, start)
            if start is None or outcome is None:
                continue
            peaks.append(self.writer.peak_of(problem, start, outcome))
            if peaks[-1] <= self.limit:
                best = Best(problem, functools.partial(self._fits, problem, budget), budget, start, outcome)
                search(best)
                return problem, best.schedule, best.outcome
        if self.peak <= self.limit:
            return self.problem, self.problem.as_given(), None
        smallest = min(peaks)
        inputs = sum(bytes_of(node.meta.get("val")) for node in self.module.graph.find_nodes(op="placeholder"))
        raise InfeasibleError(
            f"no order that was found fits in a memory_limit of {self.limit:,.0f} bytes. The least is {smallest:,} "
            f"bytes, of which {inputs:,} are the graph's inputs. Give that much, or use smaller inputs.",
            smallest,
        )

    def _grows(self, index: int) -> bool:
        """Return whether the results of a message are larger than its inputs."""
        message = self.writer.messages[index]
        return bytes_of(message.node.meta["val"]) > sum(bytes_of(tensor.meta["val"]) for tensor in message.tensors)

    def _fits(self, problem: GraphProblem, budget: Budget, schedule: GraphSchedule, outcome: GraphRun) -> bool:
        if self.limit == math.inf:
            return True
        budget.spend(10 * len(self.writer.given))
        return self.writer.peak_of(problem, schedule, outcome) <= self.limit

    def bucket(self, number: int, names: Mapping[Node, tuple[str, ...]]) -> GraphBucket:
        """Return one launch of the graph as it is, with its prediction."""
        message, (start, end) = self.writer.messages[number], self.given.starts[number]
        return GraphBucket(
            kind=message.kind,
            group=message.group,
            link=self.problem.links[self.problem.transfers[number].group],
            members=names[message.node],
            num_bytes=message.num_bytes,
            start=start,
            seconds=end - start,
            exposed=self.given.waits[number][1],
        )


def _check(gm: object, hardware: Hardware, network: object, memory_limit: object, steps: object) -> Profile:
    if not isinstance(gm, GraphModule):
        raise ArgumentError(
            f"gm must be a torch.fx.GraphModule of ATen operators, got {brief(gm)}. Trace one with "
            "torch.fx.experimental.proxy_tensor.make_fx."
        )
    profile = load_profile(hardware)
    check_choice("network", network, sorted(profile.outside))
    # A type first: the `==` of other values is not ours to call.
    if memory_limit is not None and not (isinstance(memory_limit, float) and memory_limit == math.inf):
        check_count("memory_limit", memory_limit, what="number of bytes")
    check_count("steps", steps, least=0, what="number of steps")
    return profile


def _name_constants(module: GraphModule) -> None:
    """Give values to nodes of tensors that the module holds."""
    for node in module.graph.find_nodes(op="get_attr"):
        value: object = module
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        if isinstance(value, torch.Tensor):
            node.meta.setdefault("val", value)
