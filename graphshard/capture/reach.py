"""What a forward can reach, and what it is given of that while it is traced.

a tensor                    this run's
a number that changes       what follows it, in a second run
a list that grows           what takes the items, in a second run
an object, a dict, a list   itself, with such things in it; put back at the end
a ContextVar                itself, with such a thing as its value
an array of other numbers   itself, if nobody changes it
an iterator                 what is an error where it is to give its next item
a function                  itself; what it closes over, its globals and defaults likewise
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch

from graphshard.capture.changes import Node
from graphshard.capture.growing import Growing
from graphshard.capture.iterators import NoNext
from graphshard.capture.learned import Learned, Rerun
from graphshard.capture.lines import user_line
from graphshard.capture.numbers import FollowedNumber, Numbers
from graphshard.capture.outer import (
    chains_of,
    descriptors_of,
    following,
    getter,
    imported,
    is_namespace,
    named_beside_classes,
    names_of,
    reached,
    reached_in,
    slots_of,
)
from graphshard.capture.outside import Generator
from graphshard.capture.unfollowed import Unfollowed
from graphshard.capture.untraceable import is_users
from graphshard.capture.witness import ARRAYS, FUNCTIONS, PLAIN, SETS, is_container, text_at, witness_of
from graphshard.ir.classes import users_class
from graphshard.ir.state import MISSING, Number, Place, Read, StepKind
from graphshard.ir.tracing_internals import is_traced

# How many functions that are globals of each other are looked into for their globals.
_GLOBALS_OF_GLOBALS = 2


class Reach:
    """What is reached in one run.

    Args:
        learned: by earlier runs.
        tensors: this run's, in the order of those that are learned; those of numbers follow.
        own: what takes the place of parameters and buffers that are held as attributes besides, by identity.
        call: what takes the place of tensors of the call that are held as attributes, with their numbers.
        names: of modules, by identity.
        watch: called with a class whose objects are reached; whether it is told what is read of them.

    Attributes:
        nodes: what has contents, by identity.
        reads: of what forward has read, by the identity of the owner and the name.
        grown: lists that are followed.
        numbers: that are followed.
        generators: of random numbers.
        unfollowed: what forward is not to change.
        same: tensors of the call, by number, and where they are held.
    """

    def __init__(
        self,
        learned: Learned,
        tensors: Sequence[torch.Tensor],
        own: Mapping[int, torch.Tensor],
        call: Mapping[int, tuple[int, torch.Tensor]],
        names: Mapping[int, str],
        watch: Callable[[type], bool],
    ) -> None:
        self._learned, self._own, self._call, self._names, self._watch = learned, own, call, names, watch
        self._tensors = dict(zip(learned.tensors, tensors))
        self._unknown: dict[int, tuple[torch.Tensor, list[Place]]] = {}
        self.nodes: dict[int, Node] = {}
        self.reads: dict[tuple[int, str], Read] = {}
        self.grown: dict[Place, Growing] = {}
        self._growing: dict[int, Growing] = {}
        self._variables: set[tuple[int, str]] = set()
        inputs = zip(learned.numbers, tensors[len(learned.tensors) :], strict=True)
        self.numbers = Numbers({number: t.item() for number, t in inputs}, may_be_inputs=learned.may_be_inputs)
        self.generators: list[Generator] = []
        self.unfollowed = Unfollowed()
        self._computed: set[type] = set()  # classes whose descriptors are known
        self.same: list[tuple[int, Place]] = []
        self._beside_classes: dict[str, None] = {}  # names in code that asks for the class of an object

    def add(self, owner: Any, place: Place, content: Any) -> Node:
        """Something with contents is reached."""
        if id(owner) not in self.nodes:
            self.nodes[id(owner)] = Node.of(owner, place, content)
        return self.nodes[id(owner)]

    def restore(self) -> None:
        """Put everything back, and let go of what is traced: it is not to outlive the trace."""
        for node in self.nodes.values():
            node.restore()
        for held in (self.nodes, self.grown, self._growing, self._tensors, self._unknown):
            held.clear()

    def witnessed(self, place: Place, value: Any) -> Read:
        """What is at a place; of what is followed only the type matters, and parameters are themselves."""
        free = tuple(p.path[len(place.path) :] for p in self._learned.followed if p.starts_with(place))
        witness = value if id(value) in self._own else witness_of(value, free=free)
        return Read(place, text_at(place, value, self._names, free), free, witness)

    def prepared(self, value: Any, place: Place) -> Any:
        """A value as forward is given it: with this run's tensors, and watched for what forward does to it."""
        if place in self._learned.followed:
            return self._followed(value, place)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, place)
        if isinstance(value, FUNCTIONS):
            self._reach_function(value, place)
        if isinstance(value, type) and is_namespace(value) and id(value) not in self.nodes:
            self._reach_namespace(value, place, [(n,) for n, v in vars(value).items() if not callable(v)])
        if isinstance(value, (*PLAIN, *FUNCTIONS, type, types.ModuleType)) or id(value) in self.nodes:
            return value
        if isinstance(value, ARRAYS):
            self.unfollowed.add_array(place, value)
            return value
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            return NoNext(place)
        if isinstance(value, ContextVar):
            now = getter(value, "context", "")("", MISSING)
            node = self.nodes[id(value)] = Node.of_variables(value, place, [("context", "", now)])
            self._reach_variables(node, node.content)
            return value
        if isinstance(value, tuple):
            items = [self.prepared(item, place.then("item", i)) for i, item in enumerate(value)]
            changed = any(new is not old for new, old in zip(items, value))
            return value if not changed else type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if is_container(value):
            self._reach_items(value, place)
        else:
            self._reach_object(value, place)
        return value

    def tensor(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """This run's tensor in the place of one that somebody holds."""
        if is_traced(tensor):  # a property has computed it, as those of parametrizations do
            return tensor
        if id(tensor) in self._own:
            return self._own[id(tensor)]
        if id(tensor) in self._call:
            number, traced = self._call[id(tensor)]
            if (number, place) not in self.same:
                self.same.append((number, place))
            return traced
        known = self._learned.tensors if id(tensor) in self._tensors else self._unknown
        _, places = known.setdefault(id(tensor), (tensor, []))
        if place not in places:
            places.append(place)
        if id(tensor) not in self._tensors:  # forward may write to it, in this run that is to be repeated
            with torch._C.DisableTorchFunction():
                return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return self._tensors[id(tensor)]

    def learn_inputs(self) -> None:
        """Raise Rerun if there were tensors, or numbers that operators were given, that were not known."""
        if self._unknown or self.numbers.unknown:
            self._learned.tensors.update(self._unknown)
            self._learned.numbers.update(self.numbers.unknown)
            raise Rerun

    def _reach_items(self, value: Any, place: Place) -> None:
        if not isinstance(value, frozenset):
            node = self.add(value, place, value)
            node.line = user_line()
            for key, item in [] if isinstance(value, SETS) else list(node.items()):
                node.set(key, self.prepared(item, place.then("item", key)))
            if hasattr(value, "__dict__"):
                self.unfollowed.add_collection(place, value)
                for name, attribute in vars(value).items():
                    if isinstance(attribute, PLAIN):
                        at = place.then("attribute", name)
                        self.reads.setdefault((id(value), name), self.witnessed(at, attribute))

    def _reach_object(self, value: Any, place: Place) -> None:
        if Generator.is_one(value):
            self.generators.append(Generator(value))
            return
        attributes = getattr(value, "__dict__", None)
        if type(value).__module__.partition(".")[0] == "torch":
            return
        if slots_of(type(value)):
            node = self.nodes[id(value)] = Node.of_variables(value, place)
        elif isinstance(attributes, dict):
            node = self.add(value, place, attributes)
        else:
            return
        self.reach_class(node, self._beside_classes)
        self.reach_descriptors(value, place)
        if not self._watch(type(value)):
            self._reach_variables(node, node.content)
            if isinstance(attributes, dict):
                self.reads[id(value), "__dict__"] = self.witnessed(place.then("names", "__dict__"), names_of(value))

    def _reach_function(self, value: Any, place: Place) -> None:
        """What a function of the user's reaches; of globals that are functions, not what globals of theirs reach."""
        if isinstance(value, types.MethodType):
            self.prepared(value.__self__, place.then("attribute", "__self__"))
            self._reach_function(value.__func__, place.then("attribute", "__func__"))
        elif isinstance(value, functools.partial):
            self._reach_function(value.func, place.then("attribute", "func"))
            for number, item in enumerate(value.args):
                at = place.then("attribute", "args").then("item", number)
                if is_container(item):
                    self.reads[id(value), f"args[{number}]"] = self.witnessed(at, item)
                    if self.prepared(item, at) is not item:
                        self.refuse(at)
            keywords = place.then("attribute", "keywords")
            self.reads[id(value), "keywords"] = self.witnessed(keywords, value.keywords)
            self._reach_items(value.keywords, keywords)
        elif isinstance(value, types.FunctionType) and id(value) not in self.nodes:
            deep = sum(kind == "global" for kind, _ in place.path)
            if is_users(value.__code__.co_filename) and deep <= _GLOBALS_OF_GLOBALS:
                node = self.nodes[id(value)] = Node.of_variables(value, place, self._new_variables(value))
                self._reach_variables(node, node.content)
                for name, item in node.content.items():
                    if is_namespace(item):
                        self._reach_namespace(item, node.step(name), chains_of(value, node.kinds[name], name))
                for module, chains in imported(value):
                    self._reach_namespace(module, Place("", (("imported", module.__name__),)), chains)
                names = dict.fromkeys(named_beside_classes(value.__code__))
                self._beside_classes |= names
                one_of_each = {type(each.owner): each for each in self.nodes.values()} if names else {}
                for each in one_of_each.values():
                    self.reach_class(each, names)

    def _new_variables(self, function: types.FunctionType) -> Iterator[tuple[StepKind, str, Any]]:
        """What a function reaches, but for variables that another function has, too: they are followed there."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        for kind, name, value in reached(function):
            variable = (id(cells[name]), "") if kind == "cell" else (id(function.__globals__), name)
            if kind in ("cell", "global") and not is_namespace(value):
                if variable in self._variables:
                    continue
                self._variables.add(variable)
            yield kind, name, value

    def reach_class(self, node: Node, names: Collection[str]) -> None:
        """What the class of a module or object has of these names, but for code: `type(self).SCALE`."""
        cls = users_class(node.owner)
        found = {name: vars(base)[name] for base in reversed(cls.__mro__) for name in names if name in vars(base)}
        chains = [(name,) for name, value in found.items() if not hasattr(type(value), "__get__")]
        if chains and is_namespace(cls):
            self._reach_namespace(cls, node.place.then("type", "__class__"), chains)

    def reach_descriptors(self, owner: Any, place: Place) -> None:
        """The objects that compute attributes of a module or object, and their code."""
        cls = users_class(owner)
        if cls in self._computed:
            return
        self._computed.add(cls)
        for name, found in descriptors_of(cls):
            at = place.then("descriptor", name)
            self.reads[id(found), "descriptor"] = self.witnessed(at, found)
            self.prepared(found, at)
            for method in ("__get__", "__set__", "__delete__"):
                self.prepared(getattr(type(found), method, None), at.then("class", method))

    def _reach_namespace(self, value: Any, place: Place, chains: Collection[tuple[str, ...]]) -> None:
        """What code names of a module or a class."""
        found = Node.of_variables(value, place, reached_in(value, chains))
        node = self.nodes.setdefault(id(value), found)
        new = [name for name in found.content if node is found or name not in node.content]
        for name in new if node is not found else ():
            node.content[name] = node.before[name] = found.content[name]
            node.kinds = {**node.kinds, name: "attribute"}
        self._reach_variables(node, new)
        for name in found.content:
            if is_namespace(found.content[name]):
                self._reach_namespace(found.content[name], place.then("attribute", name), following(chains, name))

    def _reach_variables(self, node: Node, names: Iterable[str]) -> None:
        for name in names:
            item = node.content[name]
            self.reads[id(node.owner), name] = self.witnessed(node.step(name), item)
            prepared = self.prepared(item, node.step(name))
            if prepared is not item:
                node.set(name, prepared)

    def _followed(self, value: Any, place: Place) -> Any:
        """What follows a number or a list."""
        if isinstance(value, list):
            if id(value) not in self._growing:  # or it is at another place, too
                self._growing[id(value)] = self.grown[place] = Growing(type(value), lambda: self.refuse(place))
            return self._growing[id(value)]
        return FollowedNumber(Number(place), value, self.numbers)

    def refuse(self, place: Place) -> NoReturn:
        """Raise Rerun, in which what is at a place is not followed."""
        self._learned.refuse({place})
        raise Rerun
