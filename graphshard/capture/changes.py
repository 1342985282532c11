"""What a forward has left on modules, found by comparing with before, as values without code."""

from __future__ import annotations

import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphshard.capture.contents import contents_of, put_item, refill
from graphshard.capture.growing import Growing
from graphshard.capture.numbers import expression_of, is_followed
from graphshard.capture.outer import OF_PARAMETERS, attributes_of, getter, put, reached, slots_of
from graphshard.capture.untraceable import Located
from graphshard.capture.witness import FUNCTIONS, PLAIN, is_container
from graphshard.ir.state import MISSING, Constant, Counted, Given, Made, Old, Place, Result, StepKind, Term, Write
from graphshard.ir.unbacked_internals import is_unknown


@dataclass
class Node:
    """Something with contents that forward can reach: a module, an object, a list, a dict.

    Attributes:
        content: its attributes or items as they were; what is put back at the end.
        before: the same with the tensors of this run; what is compared at the end.
        kinds: of variables, by their names.
        line: where forward read it.
        own: names that a class has itself, and not from its bases.
    """

    owner: Any
    place: Place
    content: Any
    before: Any
    is_module: bool
    kinds: Mapping[str, StepKind] = field(default_factory=dict)
    line: str = ""
    own: Collection[str] = ()

    @staticmethod
    def of(owner: Any, place: Place, content: Any) -> Node:
        """As something is now."""
        node = Node(owner, place, contents_of(content), contents_of(content), isinstance(owner, nn.Module))
        for kind in KINDS if node.is_module else ():
            node.before[kind] = dict(content[kind])
        return node

    @staticmethod
    def of_variables(owner: Any, place: Place, found: Iterable[tuple[StepKind, str, Any]] | None = None) -> Node:
        """What code reaches of a function, a module or class, or an object with slots."""
        found = list(reached(owner) if found is None else found)
        content, kinds = {name: value for _, name, value in found}, {name: kind for kind, name, _ in found}
        own = frozenset(vars(owner)) if isinstance(owner, type) else ()
        return Node(owner, place, content, dict(content), False, kinds, own=own)

    @property
    def has_variables(self) -> bool:
        """Whether only some of its contents are followed, of a function, a module or a class; or it has one value."""
        return isinstance(self.owner, (types.FunctionType, types.ModuleType, type, ContextVar))

    @property
    def has_slots(self) -> bool:
        """Whether its attributes are in no `__dict__`, or not all of them."""
        return not self.has_variables and not self.has_items and bool(slots_of(type(self.owner)))

    @property
    def has_items(self) -> bool:
        """Whether its contents are items, not attributes or variables."""
        return is_container(self.owner)

    def step(self, name: Any) -> Place:
        """Where one of its contents is."""
        return self.place.then(self.kinds.get(name, "item" if self.has_items else "attribute"), name)

    def now(self) -> Any:
        """Its contents now."""
        if self.has_variables:
            found = {name: getter(self.owner, kind, name)(name, MISSING) for name, kind in self.kinds.items()}
            return {name: value for name, value in found.items() if value is not MISSING}
        if self.has_slots:
            return {name: value for _, name, value in reached(self.owner)}
        return self.owner if self.has_items else attributes_of(self.owner)

    def set(self, name: Any, value: Any) -> None:
        """Put in something else, as it would have been before."""
        self.before[name] = value
        if self.has_variables or self.has_slots:
            put(self.owner, self.kinds.get(name, "attribute"), name, value)
        elif self.has_items:
            put_item(self.owner, name, value)
        else:
            self.now()[name] = value

    def items(self) -> Iterator[tuple[Any, Any]]:
        """What is in a list or dict, with its keys."""
        return iter(self.content.items() if isinstance(self.content, dict) else enumerate(self.content))

    def restore(self) -> None:
        """Put its contents back."""
        content = self.now()
        if self.has_variables or self.has_slots:
            for name in content.keys() - self.content.keys() if self.has_slots else ():
                object.__delattr__(self.owner, name)
            for name, value in self.content.items():
                if content.get(name, MISSING) is not value:
                    put(self.owner, self.kinds.get(name, "attribute"), name, value)
            if isinstance(self.owner, type):
                for name in self.content.keys() & vars(self.owner).keys() - self.own:
                    delattr(self.owner, name)  # what its bases have is to be seen again
            return
        if not _same(contents_of(content), self.content):
            refill(content, self.content)
        for kind in KINDS if self.is_module else ():
            content[kind].clear()
            content[kind].update(self.before[kind])


@dataclass
class Changes:
    """What differs from before, write by write.

    Attributes:
        label: what the module is called.
        nodes: what forward could reach, by identity.
        reads: of what forward has read, by the identity of the owner and the name.
        lines: where attributes were set, by the same.
        grown: lists that were followed.
        own: parameters and buffers.
        results: the leaves of forward's result.
        given: the tensors that the run was given.
        made: tensors, and numbers that depend on values, that forward left, and that are neither results nor given.
        followable: places of numbers that were read and changed, and of lists that grew.
    """

    label: str
    nodes: Mapping[int, Node]
    reads: Collection[tuple[int, str]]
    lines: Mapping[tuple[int, str], str]
    grown: Mapping[Place, Growing]
    own: Collection[torch.Tensor]
    results: Sequence[Any]
    given: Sequence[Any]
    made: list[Any] = field(default_factory=list)
    followable: set[Place] = field(default_factory=set)

    def __iter__(self) -> Iterator[Write]:
        for node in list(self.nodes.values()):
            if isinstance(node.before, dict):
                yield from self._of_dict(node)
            elif isinstance(node.owner, set):
                if node.owner != node.before:
                    yield Write(node.place, "replace", self._terms(sorted(node.owner, key=repr), node.place, node.line))
            else:
                yield from self._of_list(node)
        for place, grown in self.grown.items():
            if grown.items:
                yield Write(place, "extend", self._terms(grown.items, place, ""))

    def _of_dict(self, node: Node) -> Iterator[Write]:
        now = contents_of(node.now())
        if node.is_module:
            yield from self._of_buffers(node)
        kept = [name for name in node.before if name in now]
        if node.has_items and kept != [name for name in now if name in node.before]:
            where = f" at {node.line}" if node.line else ""
            raise Located(
                f"graphshard cannot capture {self.label}.forward{where}: it puts the items of {node.place} into "
                "another order, in which a program would not leave them. Keep the order in a list of the keys."
            )
        for name in dict.fromkeys((*node.before, *now)):
            old, new = node.before.get(name, MISSING), now.get(name, MISSING)
            if new is old or (node.is_module and (name in KINDS or name in OF_PARAMETERS or name == "forward")):
                continue
            place, key = node.step(name), (id(node.owner), name)
            if {type(old), type(new)} <= {int, float} and (key in self.reads or node.has_items):
                self.followable.add(place)
            line = self.lines.get(key, node.line)
            if old is MISSING and isinstance(node.owner, ContextVar):
                raise self._refusal(place, line, "could not be taken back. Give the variable a value, or a default")
            if new is MISSING:
                yield Write(place, "delete")
            else:
                yield Write(place, "set", (self._term(new, place, line),))

    def _of_buffers(self, node: Node) -> Iterator[Write]:
        """Buffers are attributes of another kind; parameters and modules cannot be made while forward runs."""
        now = attributes_of(node.owner)
        for kind in KINDS:
            before = node.before[kind]
            for name in dict.fromkeys((*before, *now[kind])):
                if now[kind].get(name, MISSING) is not before.get(name, MISSING):
                    place = node.place.then("attribute", name)
                    line = self.lines.get((id(node.owner), name), "")
                    if kind != "_buffers" or name not in now[kind]:
                        raise self._refusal(place, line, _OF_MODULES)
                    term = self._term(now[kind][name], place, line)
                    if name in before:
                        yield Write(place, "set", (term,))
                    else:
                        persistent = name not in now["_non_persistent_buffers_set"]
                        yield Write(place, "register", (term, Constant(persistent)))

    def _of_list(self, node: Node) -> Iterator[Write]:
        old, now = list(node.before), list(node.owner)
        kept = next((i for i, pair in enumerate(zip(old, now)) if pair[0] is not pair[1]), min(len(old), len(now)))
        if kept == len(old) == len(now):
            return
        grew = kept == len(old)
        if grew and type(node.owner) is list:
            self.followable.add(node.place)
        added = now[kept:] if grew else now
        yield Write(node.place, "extend" if grew else "replace", self._terms(added, node.place, node.line))

    def _terms(self, values: Sequence[Any], place: Place, line: str) -> tuple[Term, ...]:
        return tuple(self._term(value, place, line) for value in values)

    def _term(self, value: Any, place: Place, line: str) -> Term:
        if is_followed(value):
            return Counted(expression_of(value))
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place, line)
        if id(value) in self.nodes:
            return Old(self.nodes[id(value)].place)
        if isinstance(value, (torch.SymInt, torch.SymFloat)) and is_unknown(value):
            self.made.append(value)
            return Result(len(self.results) + len(self.made) - 1)
        if isinstance(value, torch.SymInt):
            value = int(value)
        of_module = isinstance(value, weakref.ref) and isinstance(value(), nn.Module)  # in a WeakSet
        if of_module or isinstance(value, (*PLAIN, *FUNCTIONS, type)):
            return Constant(value)
        leaves, structure = pytree.tree_flatten(value, is_leaf=lambda leaf: id(leaf) in self.nodes)
        if structure.is_leaf():
            raise self._refusal(
                place, line, f"is a {type(value).__name__}. Keep tensors and numbers there, or lists, tuples and dicts"
            )
        return Made(structure, self._terms(leaves, place, line))

    def _tensor(self, value: torch.Tensor, place: Place, line: str) -> Term:
        for index, tensor in enumerate(self.given):
            if tensor is value:
                return Given(index)
        if any(value is own for own in self.own):
            raise self._refusal(place, line, "is a parameter or buffer. Read it where it is needed")
        for index, tensor in enumerate((*self.results, *self.made)):
            if tensor is value:
                return Result(index)
        self.made.append(value)
        return Result(len(self.results) + len(self.made) - 1)

    def _refusal(self, place: Place, line: str, what: str) -> Located:
        where = f" at {line}" if line else ""
        return Located(f"graphshard cannot capture {self.label}.forward{where}: what it sets {place} to {what}.")


_OF_MODULES = (
    "is a parameter or a module. Make and exchange it outside, or call the model before compile, if only its first "
    "call does this"
)
# What modules hold in dicts of their own.
KINDS = ("_parameters", "_buffers", "_modules")


def _same(one: Any, other: Any) -> bool:
    """Whether contents are the very same objects, in order."""
    if isinstance(one, set):
        return bool(one == other)
    pairs = (one.items(), other.items()) if isinstance(one, dict) else (enumerate(one), enumerate(other))
    return len(one) == len(other) and all(a == b and x is y for (a, x), (b, y) in zip(*pairs))
