"""From a partitioned program to its scheduling problem.

A transfer of the problem is one or several parameters of a unit: small ones join their neighbors, as nothing would be
gained by sending them alone. Items are the compute between the positions at which a transfer is needed or ready.

Values that forward saves may be copied to the host and back, next to the compute of a phase:

    to the host     a0..a0 a1..a1         launched where a unit ends; the value is held until its copy has ended
    compute         item | item | wait item
    from the host          a1..a1         launched where the unit before begins, after all copies to the host

Collectives that hold compute up give copies more time, and are not counted: waits are no shorter than predicted here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch.fx import Graph, Node

from graphshard.cost.costs import Costs, computing
from graphshard.cost.kernels import Work, num_bytes, work_of
from graphshard.ir.collective_regions import Collective, CollectiveRegions, is_scalar, last_use
from graphshard.ir.graph import with_parts
from graphshard.ir.operators import ARRIVED, COPIES, DOWNLOAD, RELOAD
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.plan import CollectiveKind
from graphshard.ir.program import Phase, Program
from graphshard.schedule._program_memory import base_bytes, item_at, lasting_beside, saved_memory
from graphshard.schedule.axis_links import PhaseAxes, Sent, axes_of, link_of, model_collectives
from graphshard.schedule.fsdp2_order import first_use, last_input, next_boundary
from graphshard.schedule.graph_facts import collectives_of, layout_of, remembered
from graphshard.schedule.problem import KINDS, Chain, FixedCollective, Link, Problem, Transfer
from graphshard.schedule.template_schedule import unfolded_chain

# Copies to the host that a phase has left: bytes, and seconds from its end on.
Left = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Constraints:
    """Constraints by the user."""

    units: bool = False  # the collectives of a unit travel together, apart from other units', as FSDP2's do
    # By unit, the units whose gathers start where its parameters are first used.
    forward_prefetch: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    backward_prefetch: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    keep: bool = False  # parameters may stay gathered between forward and backward if that pays

    def prefetch(self, phase_name: str) -> Mapping[str, Sequence[str]]:
        """Return the prefetch lists of a phase."""
        return self.forward_prefetch if phase_name == "forward" else self.backward_prefetch

    @property
    def by_unit(self) -> bool:
        return self.units or bool(self.forward_prefetch or self.backward_prefetch)


@dataclass(frozen=True)
class Settings:
    """Choices of how a problem is made of a program."""

    constraints: Constraints = field(default_factory=Constraints)  # of the user
    # Reductions are packed by unit and dtype, so that they have the bits of FSDP2's on gloo.
    exact_reductions: bool = False
    exchange: bool = False  # reductions of one tensor may be sent as all-to-all
    pack_below: int = 64 * 1024  # bytes of a shard below which a tensor may be packed
    optimizer_states: int = 2  # tensors that the optimizer keeps for each parameter

    @property
    def by_units(self) -> Settings:
        """The same with units that travel together."""
        return replace(self, constraints=replace(self.constraints, units=True))


@dataclass(frozen=True)
class Atom:
    """Collectives of one kind and unit that always travel together, as `name` in the problem."""

    name: str
    unit: str
    rows: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class PhaseMap:
    """A chain's numbers in the program: compute position of each item, atoms of each kind in order, their axes."""

    cuts: tuple[int, ...]
    atoms: dict[CollectiveKind, tuple[Atom, ...]]
    axes: PhaseAxes


@dataclass(frozen=True)
class Built:
    """A problem, and its parts in the program."""

    problem: Problem
    maps: dict[str, PhaseMap]

    def kept(self, names: frozenset[str]) -> tuple[str, ...]:
        """Return the parameters of transfers that stay gathered, as far as backward gathers them."""
        atoms = self.maps["backward"].atoms["gather"] if names else ()
        return tuple(row.name for atom in atoms if atom.name in names for row in atom.rows)


def build(program: Program, costs: Costs, settings: Settings) -> Built:
    """Return the scheduling problem of a program; experts not `on_one_link` with others count as if they were.

    Raises:
        BlocksDifferError: the program has few of many equal blocks, and those are not equal here.
    """
    first, *rest = (phase.module.graph for phase in program.phases.values())
    key = ("problems", *rest, program.mesh, program.few is None, settings)
    known: list[tuple[Costs, Built]] = remembered(first, key, list)  # costs have no hash
    found = next((built for others, built in known if others == costs), None)
    if found is None:
        found = _build(program, costs, settings)
        known.append((costs, found))
    return found


def _build(program: Program, costs: Costs, settings: Settings) -> Built:
    builder = _Builder(program, costs, settings)
    chains = [builder.chain(name, phase) for name, phase in program.phases.items()]
    if program.few is not None:
        chains = [builder.unfolded(chain) for chain in chains]
    trained = [row for row in program.all_params if row.trainable]
    if "backward" in program.phases and trained:
        # One item reads the shard, its gradient and the states, and writes all but the gradient.
        moved = sum(row.shard_bytes(row.dtype) for row in trained)
        held = sum(row.stored_bytes for row in program.all_params)
        seconds = float(costs.optimizer(moved, settings.optimizer_states))
        chains.append(Chain("optimizer", (seconds,), (held + moved,)))
    keepable: frozenset[str] = frozenset()
    # What is gathered again among neighbors is there in part anyway.
    keep = settings.constraints.keep and program.mesh.regather is None
    if keep and {"forward", "backward"} <= set(program.phases):
        names = [{t.name for t in chain.gathers} for chain in chains[:2]]
        keepable = frozenset(names[0] & names[1])
    state = settings.optimizer_states * sum(row.shard_bytes(row.dtype) for row in trained)
    chains = [replace(chain, base=tuple(b + state for b in chain.base)) for chain in chains]
    # Phases without collectives, such as the optimizer, have any link.
    return Built(Problem(tuple(chains), builder.link, keepable, builder.links), builder.maps)


def seconds_between(graph: Graph, layout: CollectiveRegions, start: int, end: int, costs: Costs) -> float:
    """Return the seconds of the compute between two positions of a phase."""

    def kernels() -> list[Work]:
        nodes = computing(n for node in layout.compute[start:end] for n in with_parts(node))
        return work_of(nodes, fused=costs.fused)

    return float(costs.kernels(remembered(graph, (start, end, costs.fused), kernels)))


class _Builder:
    def __init__(self, program: Program, costs: Costs, settings: Settings) -> None:
        self.program, self.costs, self.settings = program, costs, settings
        self.maps: dict[str, PhaseMap] = {}
        self.links: dict[str, Link] = {}
        self.made: dict[PhaseAxes, Link] = {}
        self.axes: PhaseAxes  # of the phase at hand, and the link there
        self.link: Link
        self.gathered: dict[str, str] = {}  # by parameter, its atom's name in the phase before
        self.left: Left = ()

    def chain(self, phase_name: str, phase: Phase) -> Chain:
        graph = phase.module.graph
        self.axes = axes = axes_of(self.program, phase)
        self.link = self.made.get(axes) or link_of(self.costs, axes, exchange=self.settings.exchange)
        self.made[axes] = self.links[phase_name] = self.link
        layout = layout_of(phase)
        position = {**layout.index, graph.output_node(): len(layout.compute)}
        found = collectives_of(phase)
        launches = [c for c in found if c.kind == self._reduction(c) and not is_scalar(self.program, c)]
        of_row = {(c.kind, c.params[0]): c for c in found}
        final = max(len(layout.compute) - 1, 0)
        used = {c.params[0]: min(first_use([c], layout), final) for c in found if c.kind == "gather"}
        ready = {c.params[0]: last_input([c], layout) for c in launches}
        gathers = list(self._atoms("gather", used))
        reductions = list(self._atoms("reduce", ready))
        needs = [min(used[row.name] for row in atom.rows) for atom in gathers]
        readies = [max(max(ready[row.name] for row in atom.rows), 1) for atom in reductions]
        if self.settings.constraints.by_unit:  # regions as large as they can be
            readies = [next_boundary(at, needs) for at in readies]
        end = max(len(layout.compute), 1)
        fixed = remembered(graph, "own", lambda: tuple(model_collectives(layout)))
        # What is started at a position comes before the model's own collectives there.
        model = {at for sent in fixed for at in (sent.at, sent.at + 1, sent.until)}
        cuts = tuple(sorted({0, end, *needs, *readies, *(at for at in model if at < end), *_copy_positions(layout)}))

        def gather(atom: Atom, need: int) -> Transfer:
            waits = [w for row in atom.rows for w in of_row["gather", row.name].waits]
            last = max(need, min(last_use(waits, layout, position), end - 1))
            return self._transfer("gather", atom, item_at(cuts, need), item_at(cuts, last))

        transfers = sorted((gather(a, n) for a, n in zip(gathers, needs)), key=lambda t: t.at)
        order = {atom.name: atom for atom in (*gathers, *reductions)}
        reduced = [self._transfer("reduce", atom, cuts.index(at)) for atom, at in zip(reductions, readies)]
        reduced.sort(key=lambda t: t.at)
        transfers = self._pinned(phase_name, transfers, order)
        at = {row.name: t.at for t in reduced for row in order[t.name].rows}
        ends = {c.node: at[c.params[0]] for c in launches}
        rows = {c.node: self.program.params[c.params[0]] for c in launches}
        sent = {node: row.sent_bytes(self._sent("reduce", row)) for node, row in rows.items()}
        items = [seconds_between(graph, layout, a, b, self.costs) for a, b in itertools.pairwise(cuts)]
        copies = host_copies(layout, cuts, items, self.costs, self.left)
        self.left, until = copies.left, copies.until
        alive = remembered(
            graph,
            ("bytes", cuts, *ends.values(), *sent.values(), *until.values()),
            lambda: base_bytes(phase, layout, cuts, launches, ends, sent, until, saved_memory(self.program)),
        )
        beside = lasting_beside(self.program, phase)
        self.maps[phase_name] = PhaseMap(
            cuts,
            {"gather": tuple(order[t.name] for t in transfers), "reduce": tuple(order[t.name] for t in reduced)},
            axes,
        )
        return Chain(
            phase_name,
            seconds=tuple(a + b for a, b in zip(items, copies.waits)),
            base=tuple(beside + n + left for n, left in zip(alive, copies.beside)),
            gathers=tuple(transfers),
            reductions=tuple(reduced),
            fixed=tuple(self._own(sent, cuts) for sent in fixed),
        )

    def unfolded(self, chain: Chain) -> Chain:
        mapped, params = self.maps[chain.name], self.program.all_params
        parts = {
            kind: [
                (transfer, atom.unit, tuple(row.name for row in atom.rows))
                for transfer, atom in zip(chain.transfers(kind), mapped.atoms[kind], strict=True)
            ]
            for kind in KINDS
        }
        whole, cuts, found = unfolded_chain(chain, mapped.cuts, parts, self.program)
        atoms = {
            kind: tuple(Atom(made.name, unit, tuple(params[name] for name in names)) for made, unit, names in part)
            for kind, part in found.items()
        }
        self.maps[chain.name] = replace(mapped, cuts=cuts, atoms=atoms)
        return whole

    def _reduction(self, collective: Collective) -> CollectiveKind:
        return self.axes.of(self.program.params[collective.params[0]]).reduction

    def _own(self, sent: Sent, cuts: Sequence[int]) -> FixedCollective:
        axis = self.program.mesh.named(sent.collective.axis)
        channel = int(self.costs.link(axis) != self.costs.link(self.axes.gather))
        seconds = float(sent.collective.seconds(self.costs, axis))
        return FixedCollective(cuts.index(sent.at), cuts.index(sent.until), seconds, channel, sent.collective.name)

    def _atoms(self, kind: CollectiveKind, at: Mapping[str, int]) -> Iterator[Atom]:
        """Yield parameters of a unit and dtype in order of use, cut where they are worth a collective."""
        whole = self.settings.constraints.by_unit or (kind == "reduce" and self.settings.exact_reductions)
        groups: dict[tuple[str, ...], list[ParamSpec]] = {}
        order = [row for row in self.program.params.in_packing_order if row.name in at]
        place = {row.name: index for index, row in enumerate(order)}
        for row in order if whole else sorted(order, key=lambda row: at[row.name]):
            before = "" if whole or kind == "reduce" else self.gathered.get(row.name, "")
            groups.setdefault((row.unit, str(row.sent_dtype(kind)), before, str(row.expert)), []).append(row)
        for (unit, _, before, _), rows in groups.items():
            for part in [rows] if whole or before else self._parts(kind, rows):
                name = f"{'gradient of ' if kind == 'reduce' else ''}{part[0].name}"
                if kind == "gather":
                    name = before or name
                    self.gathered.update({row.name: name for row in part})
                # Packed tensors, and their gradients' bits, follow the parameter table.
                yield Atom(name, unit, tuple(sorted(part, key=lambda row: place[row.name])))

    def _parts(self, kind: CollectiveKind, rows: list[ParamSpec]) -> list[list[ParamSpec]]:
        link = self.link.of(self._link_index(rows[0]))
        latency = link.seconds(kind, 0, 1)

        def moving(part: list[ParamSpec]) -> float:
            num_bytes = sum(row.sent_bytes(self._sent(kind, row)) for row in part)
            return link.seconds(kind, num_bytes, 1) - latency

        parts: list[list[ParamSpec]] = [[]]
        for row in rows:
            if parts[-1] and moving(parts[-1]) >= latency:
                parts.append([])
            parts[-1].append(row)
        if len(parts) > 1 and moving(parts[-1]) < latency:
            rest = parts.pop()
            parts[-1] += rest
        return parts

    def _link_index(self, row: ParamSpec) -> int:
        return int(row.expert and bool(self.link.others))

    def _sent(self, kind: CollectiveKind, row: ParamSpec) -> CollectiveKind:
        """Return the kind in the plan of transfers of a kind."""
        return self.axes.of(row).reduction if kind == "reduce" else kind

    def _transfer(self, kind: CollectiveKind, atom: Atom, at: int, last: int = -1) -> Transfer:
        exact = kind == "reduce" and self.settings.exact_reductions
        whole = exact or self.settings.constraints.by_unit
        small = [row for row in atom.rows if exact or row.piece_bytes(kind) < self.settings.pack_below]
        sent, link_index = self._sent(kind, atom.rows[0]), self._link_index(atom.rows[0])
        return Transfer(
            name=atom.name,
            num_bytes=sum(row.sent_bytes(sent) for row in atom.rows),
            at=at,
            last=last,
            group=f"{atom.rows[0].sent_dtype(kind)} {atom.name if whole else ''} {link_index or ''}",
            num_tensors=len(atom.rows),
            num_small=len(small),
            small_bytes=sum(row.sent_bytes(sent) for row in small),
            packed=len(small) > 1 if exact else None,
            link_index=link_index,
        )

    def _pinned(self, phase_name: str, gathers: list[Transfer], atoms: Mapping[str, Atom]) -> list[Transfer]:
        """Return gathers with the start that the user's prefetch lists give them."""
        first: dict[str, int] = {}
        for gather in gathers:
            first.setdefault(atoms[gather.name].unit, gather.at)
        start: dict[str, int] = {}
        for unit, ahead in self.settings.constraints.prefetch(phase_name).items():
            for other in ahead if unit in first else ():
                start[other] = min(first[unit], start.get(other, first[unit]))
        pinned = []
        for gather in gathers:
            at = start.get(atoms[gather.name].unit)
            pinned.append(gather if at is None else replace(gather, start=min(at, gather.at)))
        return pinned


class HostCopies(NamedTuple):
    """Costs of a phase's copies to and from the host."""

    waits: tuple[float, ...]  # by item the seconds that compute waits for copies from the host before it
    beside: tuple[int, ...]  # by item the bytes of an earlier phase's copies
    until: Mapping[Node, int]  # by copy to the host, the last position at which the value is held for it
    left: Left  # copies that have not ended when the phase has


def host_copies(
    layout: CollectiveRegions, cuts: Sequence[int], seconds: Sequence[float], costs: Costs, left: Left = ()
) -> HostCopies:
    """Run the copies of a phase, and those `left` by an earlier one, next to the compute of items between `cuts`."""
    now, up = 0.0, 0.0
    down = max((end for _, end in left), default=0.0)
    ends: dict[Node, float] = {}
    waits, begins = [], []
    for (start, end), taken in zip(itertools.pairwise(cuts), seconds):
        wait = 0.0
        for node in layout.compute[start:end]:
            if node.target is DOWNLOAD:
                ends[node] = down = max(now + wait, down) + float(costs.host_copy(num_bytes(node)))
            elif node.target is RELOAD:
                ends[node] = up = max(now + wait, up, down) + float(costs.host_copy(num_bytes(node)))
            elif node.target is ARRIVED and node.all_input_nodes[0] in ends:
                wait = max(wait, ends[node.all_input_nodes[0]] - now)
        waits.append(wait)
        begins.append(now + wait)
        now += wait + taken
    until = {}
    for node in (node for node in ends if node.target is DOWNLOAD):
        item = sum(begin < ends[node] for begin in begins) - 1
        until[node] = cuts[max(item, 0) + 1] - 1
    rest = tuple((int(num_bytes(n)), end - now) for n, end in ends.items() if n.target is DOWNLOAD and end > now)
    beside = tuple(sum(size for size, end in left if end > begin) for begin in begins)
    return HostCopies(tuple(waits), beside, until, rest)


def _copy_positions(layout: CollectiveRegions) -> Iterator[int]:
    """Yield where copies of saved values are launched or waited for, the first of neighbors.

    Copies of parameters have an upload instead.
    """
    for at, node in enumerate(layout.compute):
        reloaded = node.target is ARRIVED and node.all_input_nodes[0].target is RELOAD
        first = at == 0 or layout.compute[at - 1].target not in COPIES
        if first and (node.target in (DOWNLOAD, RELOAD) or reloaded):
            yield at
