"""Instantiate the missing blocks of a program that holds only the captured ones.

    forward    0  1       N-3  N-2  N-1          0  1  2 ... N-4  N-3  N-2  N-1
    backward   N-1  N-2  N-3       1  0    ->    N-1  N-2  N-3  N-4 ... 2  1  0

The missing groups become copies of group 1, which `repeated_block_matcher.py` has checked. This works on graphs of
operators, and on the much shorter graphs of region calls and collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.fx import Node

from graphshard.ir.expand_repeats import Frame
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.repeated_block_matcher import (
    STACKS,
    TEXTS,
    BlockMatcher,
    Member,
    Of,
    Output,
    Ref,
    Segment,
    Shared,
    groups_of,
)
from graphshard.ir.repeats import TEMPLATE, BlocksDifferError, Repeats

T = TypeVar("T")

# Stack of modules: name and class by a key that names the module.
_Stack = tuple[tuple[str, tuple[Any, ...]], ...]
_Naming = tuple[tuple[str, "str | _Stack"], ...]


def instantiate_blocks(
    program: Program, repeats: Repeats, params: ParamTable, saved: Mapping[str, Any] | None = None
) -> Program:
    """Return the program of all blocks; `program`, which has the captured ones, is consumed.

    Args:
        saved: values that forward saves in groups, for a scheduled program; inferred for a partitioned one.

    Raises:
        BlocksDifferError: the groups differ.
    """
    if any(map(repeats.place_of, program.rewritten)):
        raise BlocksDifferError("backward writes buffers of blocks")
    known = {name: Member(*member) for name, member in (saved or {}).items()}
    for name, phase in program.phases.items():
        _BlockInstantiator(phase, repeats, known, descending=name == "backward", scheduled=saved is not None).run()
    found = {name for name in program.differentiated if (repeats.place_of(name) or (-1, ""))[0] == TEMPLATE}
    names = program.differentiated.union(repeats.name_at(group, name) for name in found for group in repeats.missing)
    return replace(program, params=params, differentiated=names, few=None)


def instantiate_all_blocks(program: Program) -> Program:
    """Return the program of all blocks for one that has the captured ones (`Program.few`) and stays unchanged."""
    assert program.few is not None
    copy = replace(program, phases={name: phase.clone() for name, phase in program.phases.items()})
    return instantiate_blocks(copy, program.few.repeats, program.few.params)


def instantiate_backward(program: Program) -> Phase:
    """Return the backward of all blocks; the partitioned program of captured blocks stays unchanged."""
    assert program.few is not None
    few, saved = program.few, dict[str, Member]()
    _BlockInstantiator(program.phases["forward"], few.repeats, saved, descending=False).name_saved()
    backward = program.phases["backward"].clone()
    _BlockInstantiator(backward, few.repeats, saved, descending=True).run()
    return backward


@dataclass
class _BlockInstantiator(BlockMatcher):
    """Instantiation of the missing groups of one phase."""

    _texts: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _named_by: dict[tuple[str, int], Callable[[int], str]] = field(default_factory=dict)
    # Metadata that copies of a node share, and metadata that names blocks, which most nodes have in common.
    _metas: dict[Node, dict[str, Any]] = field(default_factory=dict)
    _naming: dict[Node, _Naming] = field(default_factory=dict)
    _distinct: dict[_Naming, _Naming] = field(default_factory=dict)
    _named_at: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Rewrite the phase."""
        outputs = self.find()
        self._add_inputs()
        for number, segment in enumerate(self.segments):
            self._copy_nodes(number, segment)
        for segment in self.segments:
            self._connect(segment)
        self._add_outputs(outputs)

    def name_saved(self) -> None:
        """Fill `saved` as `run` does, without changing the phase."""
        for _ in self._with_names(self.find()):
            pass

    @cached_property
    def _all(self) -> Frame:
        return Frame(self.repeats, range(self.repeats.groups))

    def _resolved(self, ref: Ref, group: int) -> Node:
        if isinstance(ref, Shared):
            return ref.node
        member = Member(ref.family, group + ref.distance)
        if member not in self.by_member:
            raise BlocksDifferError(f"a block reads {ref.family}, which does not exist")
        return self.by_member[member]

    def _add_inputs(self) -> None:
        """Add the inputs of the missing groups next to the template's."""
        graph = self.phase.module.graph
        slots = self.phase.slot_of()
        names = {member: name for name, member in self.saved.items()}
        result: list[Slot] = []
        anchor: Node | None = None
        for node, group in _with_copies([(node, self.members.get(node)) for node in slots], self.repeats):
            slot = slots[node]
            if group is not None:
                member = Member(self.members[node].family, group)
                is_saved = slot.kind == "saved" and slot.of is None
                name = names[member] if is_saved else self.repeats.name_at(group, slot.name)
                slot = slot.named(name)
                stem = re.sub(r"\W", "_", slot.name if slot.kind in ("param", "buffer", "saved") else str(slot))
                with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
                    copied = graph.create_node("placeholder", stem, name=stem)
                if copied.target != copied.name:
                    copied.target = copied.name
                self._describe(copied, node, group)
                self.by_member[member] = node = copied
            result.append(slot)
            anchor = node
        self.phase.inputs = tuple(result)

    def _copy_nodes(self, number: int, segment: Segment) -> None:
        graph = self.phase.module.graph
        is_down = segment.order[0] > segment.order[-1]
        template = segment.window(TEMPLATE)
        with graph.inserting_before(segment.window(TEMPLATE if is_down else self.behind)[0]):
            for group in reversed(self.repeats.missing) if is_down else self.repeats.missing:
                for place, node in enumerate(template):
                    args, kwargs = self._arguments(node, segment.refs[place], group)
                    # Not necessarily unique: it is not requested from the graph.
                    copied = graph.create_node(node.op, node.target, name=f"{node.name}_of_{group}")
                    # Node.__setattr__ would look up each argument and enter the node in its graph's table again.
                    object.__setattr__(copied, "args", args)
                    if kwargs:
                        copied.kwargs = kwargs
                    self._describe(copied, node, group)
                    self.by_member[Member((self.descending, number, place), group)] = copied

    def _connect(self, segment: Segment) -> None:
        """Connect the captured groups to the new ones, and rename blocks in metadata."""
        for group in self.inner:
            for node, refs in zip(segment.window(group), segment.refs, strict=True):
                node.args, node.kwargs = self._arguments(node, refs, group)
        for node, group in groups_of(segment):
            node.meta.update(self._named(node, group, group))

    def _arguments(self, node: Node, refs: list[Ref], group: int) -> Any:
        """Return the arguments of a group's corresponding node; the first group keeps inputs from before all groups."""
        left = iter(refs)

        def argument(own: Node) -> Node:
            ref = next(left)
            outside = isinstance(ref, Of) and group + ref.distance < 0
            return own if outside else self._resolved(ref, group)

        return torch.fx.map_arg((node.args, node.kwargs), argument)

    def _describe(self, copied: Node, node: Node, group: int) -> None:
        """Copy the metadata of a template node to its copy in a group."""
        if node not in self._metas:
            self._metas[node] = {key: value for key, value in node.meta.items() if key not in ("number", "desc")}
        copied.meta.update(self._metas[node])
        copied.meta.update(self._named(node, TEMPLATE, group))

    def _named(self, node: Node, window: int, group: int) -> dict[str, Any]:
        """Return the metadata that names blocks, renamed from `window` to `group`."""
        if node not in self._naming:
            texts = ((key, node.meta[key]) for key in TEXTS if key in node.meta)
            stacks = ((key, tuple(node.meta[key].items())) for key in STACKS if node.meta.get(key))
            found = *texts, *stacks
            self._naming[node] = self._distinct.setdefault(found, found)
        naming = self._naming[node]
        known = id(naming), window, group
        if known not in self._named_at:
            self._named_at[known] = {key: self._renamed(value, window, group) for key, value in naming}
        return self._named_at[known]

    def _renamed(self, value: str | _Stack, window: int, group: int) -> Any:
        if isinstance(value, str):
            return self._text(value, window, group)
        parts = ((key, name, rest) for key, (name, *rest) in value)
        return {self._text(key, window, group): (self._text(name, window, group), *rest) for key, name, rest in parts}

    def _text(self, text: str, window: int, group: int) -> str:
        known = text, window, group
        if known not in self._texts:
            if (text, window) not in self._named_by:
                try:
                    relative = self.few.relative(text, window)
                except BlocksDifferError:  # compared windows do not name blocks that are far away
                    relative = text
                self._named_by[text, window] = self._all.absolutes(relative)
            self._texts[known] = self._named_by[text, window](group)
        return self._texts[known]

    def _free(self, name: str) -> str:
        """Return a name that no saved value has; a node of the graph may have it."""
        while name in self.saved:
            name += "_"
        return name

    def _add_outputs(self, outputs: list[Output]) -> None:
        results, slots = [], []
        for output, group, slot in self._with_names(outputs):
            value = output.value
            at = output.member.group if output.member and group is None else group
            if output.ref is not None and at is not None and at > TEMPLATE:
                value = self._resolved(output.ref, at)
            results.append(value)
            slots.append(slot)
        self.phase.set_results(results)
        self.phase.outputs = tuple(slots)

    def _with_names(self, outputs: list[Output]) -> Iterator[tuple[Output, int | None, Slot]]:
        """Yield outputs with their slots, and the template's outputs again for each missing group."""
        for output, group in _with_copies([(output, output.member) for output in outputs], self.repeats):
            slot = output.slot
            if group is not None and output.member is not None:
                is_saved = slot.kind == "saved" and slot.of is None
                name = self._free(f"{slot.name}_of_{group}") if is_saved else self.repeats.name_at(group, slot.name)
                slot = slot.named(name)
                if is_saved:
                    self.saved[name] = Member(output.member.family, group)
            yield output, group, slot


def _with_copies(entries: list[tuple[T, Member | None]], repeats: Repeats) -> Iterator[tuple[T, int | None]]:
    """Yield entries in order, and the template's again for each missing group, in the order of groups."""
    groups = repeats.missing
    index = 0
    while index < len(entries):
        end = index
        while end < len(entries) and _of_template(entries[end][1]):
            end += 1
        run = [entry for entry, _ in entries[index:end]]
        before = entries[index - 1][1] if index else None
        descending = before is not None and before.group == repeats.captured[TEMPLATE + 1]
        if descending:
            yield from ((entry, group) for group in groups[::-1] for entry in run)
        yield from ((entry, None) for entry in run)
        if not descending:
            yield from ((entry, group) for group in groups for entry in run)
        if end == index:
            yield entries[index][0], None
            end += 1
        index = end


def _of_template(member: Member | None) -> bool:
    return member is not None and member.group == TEMPLATE
