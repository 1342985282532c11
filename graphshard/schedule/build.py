"""From a partitioned program to its scheduling problem.

A transfer of the problem is one or several parameters of a unit: small ones join their neighbours, as nothing would be
gained by sending them alone. Items are the compute between the positions at which a transfer is needed or ready.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph

from graphshard.cost.collectives import computing
from graphshard.cost.costs import Costs
from graphshard.cost.kernels import Work, work_of
from graphshard.ir.collective_regions import Collective, CollectiveRegions, last_use
from graphshard.ir.graph import with_parts
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.plan import CollectiveKind
from graphshard.ir.program import Phase, Program
from graphshard.schedule.by_unit import first_use, is_scalar, last_input, next_boundary
from graphshard.schedule.copies import copied, copy_positions
from graphshard.schedule.few import Part, unfolded_chain
from graphshard.schedule.footprint import base_bytes, item_at, lasting_beside
from graphshard.schedule.known import collectives_of, layout_of, remembered
from graphshard.schedule.own import Own
from graphshard.schedule.problem import KINDS, Chain, Link, Problem, Transfer
from graphshard.schedule.shared import saved_memory
from graphshard.schedule.ways import Sent, Ways, link_of, own_collectives, ways_of


@dataclass(frozen=True)
class Constraints:
    """What the user fixes.

    Attributes:
        units: the collectives of a unit travel together, apart from other units', as FSDP2's do.
        forward_prefetch: by unit, the units whose gathers start where its parameters are first used in forward.
        backward_prefetch: the same in backward.
        keep: parameters may stay gathered between forward and backward if that pays.
    """

    units: bool = False
    forward_prefetch: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    backward_prefetch: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    keep: bool = False

    def prefetch(self, phase_name: str) -> Mapping[str, Sequence[str]]:
        """The prefetch lists of a phase."""
        return self.forward_prefetch if phase_name == "forward" else self.backward_prefetch

    @property
    def by_unit(self) -> bool:
        return self.units or bool(self.forward_prefetch or self.backward_prefetch)


@dataclass(frozen=True)
class Settings:
    """How a problem is made of a program.

    Attributes:
        constraints: what the user fixes.
        exchange: reductions of one tensor may be sent as all-to-all.
        exact_reductions: reductions are packed by unit and dtype, so that they have the bits of FSDP2's on gloo.
        pack_below: bytes of a shard below which a tensor may be packed.
        optimizer_states: tensors that the optimizer keeps for each parameter.
    """

    constraints: Constraints = field(default_factory=Constraints)
    exact_reductions: bool = False
    exchange: bool = False
    pack_below: int = 64 * 1024
    optimizer_states: int = 2


@dataclass(frozen=True)
class Atom:
    """Collectives of one kind and unit that always travel together, as `name` in the problem."""

    name: str
    unit: str
    rows: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class PhaseMap:
    """What a chain's numbers mean: the compute position of each item, the atoms of each kind in order, their axes."""

    cuts: tuple[int, ...]
    atoms: dict[CollectiveKind, tuple[Atom, ...]]
    ways: Ways


@dataclass(frozen=True)
class Built:
    """A problem and what its parts are in the program."""

    problem: Problem
    maps: dict[str, PhaseMap]

    def kept(self, names: frozenset[str]) -> tuple[str, ...]:
        """The parameters of transfers that stay gathered, as far as backward gathers them."""
        atoms = self.maps["backward"].atoms["gather"] if names else ()
        return tuple(row.name for atom in atoms if atom.name in names for row in atom.rows)


def build(program: Program, costs: Costs, settings: Settings) -> Built:
    """The scheduling problem of a program; experts that are not `on_one_link` with others count as if they were.

    Raises:
        BlocksDifferError: the program has few of many equal blocks, and those are not equal here.
    """
    first, *rest = (phase.module.graph for phase in program.phases.values())
    key = ("problems", *rest, program.mesh, program.few is None, settings)
    known: list[tuple[Costs, Built]] = remembered(first, key, list)  # costs have no hash
    found = next((built for those, built in known if those == costs), None)
    if found is None:
        found = _build(program, costs, settings)
        known.append((costs, found))
    return found


def _build(program: Program, costs: Costs, settings: Settings) -> Built:
    maker = _Maker(program, costs, settings)
    chains = [maker.chain(name, phase) for name, phase in program.phases.items()]
    if program.few is not None:
        chains = [maker.unfolded(chain) for chain in chains]
    trained = [row for row in program.all_params if row.trainable]
    if "backward" in program.phases and trained:
        chains.append(optimizer_chain(program, costs, settings.optimizer_states, trained))
    keepable: frozenset[str] = frozenset()
    # What is gathered again among neighbours is there in part anyway.
    keep = settings.constraints.keep and program.mesh.regather is None
    if keep and {"forward", "backward"} <= set(program.phases):
        names = [{t.name for t in chain.gathers} for chain in chains[:2]]
        keepable = frozenset(names[0] & names[1])
    state = settings.optimizer_states * sum(row.shard_bytes(row.dtype) for row in trained)
    chains = [replace(chain, base=tuple(b + state for b in chain.base)) for chain in chains]
    # Phases without collectives, as the optimizer, have any link.
    return Built(Problem(tuple(chains), maker.link, keepable, maker.links), maker.maps)


def optimizer_chain(program: Program, costs: Costs, states: int, trained: Iterable[ParamSpec]) -> Chain:
    """One item: reads the shard, its gradient and the states, and writes all but the gradient."""
    moved = sum(row.shard_bytes(row.dtype) for row in trained)
    seconds = float(costs.optimizer(moved, states))
    held = sum(row.stored_bytes for row in program.all_params)
    return Chain("optimizer", (seconds,), (held + moved,))


def seconds_between(graph: Graph, layout: CollectiveRegions, start: int, end: int, costs: Costs) -> float:
    """Of the compute between two positions of a phase."""

    def kernels() -> list[Work]:
        nodes = computing(n for node in layout.compute[start:end] for n in with_parts(node))
        return work_of(nodes, fused=costs.fused)

    return float(costs.kernels(remembered(graph, (start, end, costs.fused), kernels)))


class _Maker:
    def __init__(self, program: Program, costs: Costs, settings: Settings) -> None:
        self.program, self.costs, self.settings = program, costs, settings
        self.maps: dict[str, PhaseMap] = {}
        self.links: dict[str, Link] = {}
        self.made: dict[Ways, Link] = {}
        self.ways: Ways  # of the phase at hand, and the link there
        self.link: Link
        self.gathered: dict[str, str] = {}  # by parameter, its atom's name in the phase before
        self.left: tuple[tuple[int, float], ...] = ()  # copies to the host that the phase before has left

    def chain(self, phase_name: str, phase: Phase) -> Chain:
        """One phase as a chain."""
        graph = phase.module.graph
        ways = ways_of(self.program, phase)
        link = self.made.get(ways) or link_of(self.costs, ways, exchange=self.settings.exchange)
        self.ways, self.link = ways, link
        self.made[ways] = self.links[phase_name] = link
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
        own = remembered(graph, "own", lambda: tuple(own_collectives(layout)))
        # What is started at a position comes before what the model communicates there.
        model = {at for sent in own for at in (sent.at, sent.at + 1, sent.until)}
        cuts = tuple(sorted({0, end, *needs, *readies, *(at for at in model if at < end), *copy_positions(layout)}))

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
        beside = lasting_beside(self.program, phase)
        ends = {c.node: at[c.params[0]] for c in launches}
        rows = {c.node: self.program.params[c.params[0]] for c in launches}
        sent = {node: row.sent_bytes(self._sent("reduce", row)) for node, row in rows.items()}
        items = [seconds_between(graph, layout, a, b, self.costs) for a, b in itertools.pairwise(cuts)]
        copies = copied(layout, cuts, items, self.costs, self.left)
        self.left, until = copies.left, copies.until
        alive = remembered(
            graph,
            ("bytes", cuts, *ends.values(), *sent.values(), *until.values()),
            lambda: base_bytes(phase, layout, cuts, launches, ends, sent, until, saved_memory(self.program)),
        )
        base = [beside + n + left for n, left in zip(alive, copies.beside)]
        self.maps[phase_name] = PhaseMap(
            cuts,
            {"gather": tuple(order[t.name] for t in transfers), "reduce": tuple(order[t.name] for t in reduced)},
            ways,
        )
        seconds = tuple(a + b for a, b in zip(items, copies.waits))
        owns = tuple(self._own(sent, cuts) for sent in own)
        return Chain(phase_name, seconds, tuple(base), tuple(transfers), tuple(reduced), owns)

    def unfolded(self, chain: Chain) -> Chain:
        """The chain of all blocks, of one of few of them."""
        mapped, params = self.maps[chain.name], self.program.all_params
        parts = {
            kind: [
                Part(transfer, atom.unit, tuple(row.name for row in atom.rows))
                for transfer, atom in zip(chain.transfers(kind), mapped.atoms[kind], strict=True)
            ]
            for kind in KINDS
        }
        found = unfolded_chain(chain, mapped.cuts, parts["gather"], parts["reduce"], self.program)
        atoms: dict[CollectiveKind, tuple[Atom, ...]] = {
            kind: tuple(Atom(part.transfer.name, part.unit, part.rows(params)) for part in of_kind)
            for kind, of_kind in zip(KINDS, (found.gathers, found.reductions))
        }
        self.maps[chain.name] = replace(mapped, cuts=found.cuts, atoms=atoms)
        return found.chain

    def _reduction(self, collective: Collective) -> CollectiveKind:
        return self.ways.of(self.program.params[collective.params[0]]).reduction

    def _own(self, sent: Sent, cuts: Sequence[int]) -> Own:
        """What the model communicates, on the channel of its axis."""
        axis = self.program.mesh.named(sent.collective.axis)
        channel = int(self.costs.link(axis) != self.costs.link(self.ways.gather))
        seconds = float(sent.collective.seconds(self.costs, axis))
        return Own(cuts.index(sent.at), cuts.index(sent.until), seconds, channel, sent.collective.name)

    def _atoms(self, kind: CollectiveKind, at: Mapping[str, int]) -> Iterator[Atom]:
        """Parameters of a unit and dtype in order of use, cut where they are worth a collective of their own."""
        whole = self.settings.constraints.by_unit or (kind == "reduce" and self.settings.exact_reductions)
        groups: dict[tuple[str, ...], list[ParamSpec]] = {}
        order = [row for row in self.program.params.in_packing_order if row.name in at]
        place = {row.name: index for index, row in enumerate(order)}
        for row in order if whole else sorted(order, key=lambda row: at[row.name]):
            before = "" if whole or kind == "reduce" else self.gathered.get(row.name, "")
            groups.setdefault((row.unit, str(row.sent_dtype(kind)), before, str(row.expert)), []).append(row)
        for (unit, _, before, _), rows in groups.items():
            parts = [rows] if whole or before else self._parts(kind, rows)
            for part in parts:
                name = f"{'gradient of ' if kind == 'reduce' else ''}{part[0].name}"
                if kind == "gather":
                    name = before or name
                    self.gathered.update({row.name: name for row in part})
                # Packed tensors, and their gradients' bits, follow the parameter table.
                table = tuple(sorted(part, key=lambda row: place[row.name]))
                yield Atom(name, unit, table)

    def _parts(self, kind: CollectiveKind, rows: list[ParamSpec]) -> list[list[ParamSpec]]:
        parts: list[list[ParamSpec]] = [[]]
        latency = self._link(rows[0]).seconds(kind, 0, 1)
        for row in rows:
            if parts[-1] and self._moving(kind, parts[-1], latency) >= latency:
                parts.append([])
            parts[-1].append(row)
        if len(parts) > 1 and self._moving(kind, parts[-1], latency) < latency:
            rest = parts.pop()
            parts[-1] += rest
        return parts

    def _moving(self, kind: CollectiveKind, rows: list[ParamSpec], latency: float) -> float:
        num_bytes = sum(row.sent_bytes(self._sent(kind, row)) for row in rows)
        return self._link(rows[0]).seconds(kind, num_bytes, 1) - latency

    def _link(self, row: ParamSpec) -> Link:
        return self.link.of(self._way(row))

    def _way(self, row: ParamSpec) -> int:
        return int(row.expert and bool(self.link.others))

    def _sent(self, kind: CollectiveKind, row: ParamSpec) -> CollectiveKind:
        """What transfers of a kind are in the plan."""
        return self.ways.of(row).reduction if kind == "reduce" else kind

    def _transfer(self, kind: CollectiveKind, atom: Atom, at: int, last: int = -1) -> Transfer:
        exact = kind == "reduce" and self.settings.exact_reductions
        whole = exact or self.settings.constraints.by_unit
        small = [row for row in atom.rows if exact or row.piece_bytes(kind) < self.settings.pack_below]
        sent, way = self._sent(kind, atom.rows[0]), self._way(atom.rows[0])
        return Transfer(
            name=atom.name,
            num_bytes=sum(row.sent_bytes(sent) for row in atom.rows),
            at=at,
            last=last,
            group=f"{atom.rows[0].sent_dtype(kind)} {atom.name if whole else ''} {way or ''}",
            num_tensors=len(atom.rows),
            num_small=len(small),
            small_bytes=sum(row.sent_bytes(sent) for row in small),
            packed=len(small) > 1 if exact else None,
            way=way,
        )

    def _pinned(self, phase_name: str, gathers: list[Transfer], atoms: Mapping[str, Atom]) -> list[Transfer]:
        """Gathers with the start that the user's prefetch lists give them."""
        first: dict[str, int] = {}
        for gather in gathers:
            first.setdefault(atoms[gather.name].unit, gather.at)
        start: dict[str, int] = {}
        for unit, ahead in self.settings.constraints.prefetch(phase_name).items():
            for other in ahead:
                if unit in first:
                    start[other] = min(first[unit], start.get(other, first[unit]))
        pinned = []
        for gather in gathers:
            at = start.get(atoms[gather.name].unit)
            pinned.append(gather if at is None else replace(gather, start=min(at, gather.at)))
        return pinned
