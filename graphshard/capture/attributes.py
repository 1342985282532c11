"""What a forward reads and writes on modules, recorded while it runs.

    with recorder.recording(tensors):       attributes that are tensors are these, in the order of learned.tensors
        result = module(x)
        more = recorder.finish(result, x)   tensors that forward left on modules
    recorder.state                          all of it, see ir/state.py

Inside the block attributes of modules, and of objects that are reached through them, are looked up through this
recorder. At its end everything is as it was: attributes, and what is in lists and dicts. Some things can only be known
at the end of a run: that an attribute holds a tensor, that a number is written, that a list only grows. They go into
`Learned`, and `Rerun` asks for another run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from graphshard.capture.changes import KINDS, Changes, Node
from graphshard.capture.class_settings import ClassSettings
from graphshard.capture.environment import watched_environment
from graphshard.capture.hooks import users_hooks
from graphshard.capture.learned import Learned, Rerun
from graphshard.capture.left_hooks import LeftHooks
from graphshard.capture.lines import user_line
from graphshard.capture.outer import OF_TORCH, attributes_of, is_namespace, names_of
from graphshard.capture.reach import Reach
from graphshard.capture.region_effects import RegionEffects
from graphshard.capture.torch_settings import watched_settings
from graphshard.capture.untraceable import Located, is_users
from graphshard.capture.witness import PLAIN, is_container
from graphshard.ir.classes import users_class
from graphshard.ir.state import MISSING, ModuleState, Place, Read, StepKind
from graphshard.ir.torch_internals import replaced

# Methods of torch's modules.
_TORCHS_METHODS = frozenset(vars(nn.Module)) - {"forward"}
# What runs, of what a class has.
_CODE = (types.FunctionType, staticmethod, classmethod, property)


class Recorder:
    """Records one forward of a module.

    Args:
        root: the module, with whatever parameters and buffers it is to be traced with.
        learned: by earlier runs.
        own: what takes the place of parameters and buffers that are held as attributes besides, by identity.
        call: what takes the place of tensors of the call, in the same way, with their numbers.
        allow: sources of random numbers that forward may draw from.
    """

    def __init__(
        self,
        root: nn.Module,
        learned: Learned,
        own: Mapping[int, torch.Tensor],
        call: Mapping[int, tuple[int, torch.Tensor]],
        allow: Collection[str],
    ) -> None:
        self.root, self.learned, self.own, self._call, self._allow = root, learned, own, call, allow
        self.state = ModuleState()
        self._names = {id(module): name for name, module in root.named_modules()}

    @contextlib.contextmanager
    def recording(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Record what runs in the block, which is given these tensors in the place of those that are learned."""
        self.reach = Reach(self.learned, tensors, self.own, self._call, self._names, self._watch_objects)
        self.lines: dict[tuple[int, str], str] = {}  # of attributes that were set
        self._watched: set[type] = set()
        self._region: RegionEffects | None = None
        with contextlib.ExitStack() as stack:
            self._stack = stack
            stack.enter_context(watched_settings(self.root, functools.partial(self._read_of_process, "setting")))
            self._classes = ClassSettings(self.root)
            stack.callback(self._classes.restore)
            stack.callback(self.reach.restore)
            for name, module in self.root.named_modules():
                self.reach.add(module, Place(name), attributes_of(module))
            self._hooks = LeftHooks(self.root)
            self._watch_hooks()
            self._watch(nn.Module)
            for name, module in self.root.named_modules():
                self.reach.reach_descriptors(module, Place(name))
            stack.enter_context(watched_environment(functools.partial(self._read_of_process, "environment")))
            stack.enter_context(replaced(nn.Module, "__setattr__", self._noting_lines(nn.Module.__setattr__)))
            try:
                yield
            except Exception as error:
                if self.learned.fix_numbers():
                    raise Rerun from error
                if self.learned.followed:  # what stands in for them may be the reason
                    self.learned.refuse(set(self.learned.followed))
                    raise Rerun from error
                self.reach.learn_inputs()
                raise

    def finish(self, results: Sequence[Any], given: Sequence[Any]) -> list[torch.Tensor]:
        """End a run: what forward left is in `state`; the tensors among it that are no results yet are returned.

        Args:
            results: the leaves of forward's result.
            given: the tensors that the run was given.

        Raises:
            CaptureError: forward left something that cannot be made again after each call.
            Rerun: something was learned.
        """
        self.reach.learn_inputs()
        for generator in self.reach.generators:
            generator.check(self._allow)
        own, label = list(self.own.values()), type(self.root).__name__
        self._classes.check(label, self.reach.nodes)
        self.reach.unfollowed.check(label)
        changes = Changes(label, self.reach.nodes, self.reach.reads, self.lines, self.reach.grown, own, results, given)
        writes = (*changes, *self._hooks.writes(self.reach.nodes.keys()))
        if changes.followable - self.learned.refused:
            self.learned.followed |= changes.followable - self.learned.refused
            raise Rerun
        self.state = ModuleState(
            reads=tuple(self.reach.reads.values()),
            conditions=tuple(self.reach.numbers.conditions),
            inputs=tuple(tuple(places) for _, places in self.learned.tensors.values()),
            numbers=tuple(self.learned.numbers),
            writes=writes,
            modules=classes_of(self.root),
            required=tuple(sorted(self.learned.required)),
            same=tuple(self.reach.same),
        )
        return changes.made

    def enter_region(self, *, reentrant: bool) -> Callable[[], Located | None]:
        """A checkpointed region begins; what is returned is to be called at its end, see `RegionEffects.refusal`."""
        region = self._region = RegionEffects(type(self.root).__name__, self.reach.nodes, self.lines)

        def leave() -> Located | None:
            self._region = None
            return region.refusal(reentrant=reentrant)

        return leave

    def enter_branch(self) -> Callable[[], None]:
        """A branch of torch.cond begins; what is returned raises, at its end, if it has changed anything."""
        effects = RegionEffects(type(self.root).__name__, self.reach.nodes, self.lines)

        def leave() -> None:
            if (refusal := effects.refusal_of_branch()) is not None:
                raise refusal

        return leave

    def _watch(self, cls: type) -> None:
        """Look attributes of this class's objects up through the recorder, until the block ends."""
        find: Any = cls.__getattribute__

        def look_up(owner: Any, name: str) -> Any:
            node = self.reach.nodes.get(id(owner))
            if node is None or (name.startswith("__") and name != "__dict__") or node.owner is not owner:
                return find(owner, name)
            if name == "__dict__":
                if _asks_for_all(sys._getframe(1)):
                    self._read_all(node)
                return find(owner, name)
            try:
                value = find(owner, name)
            except AttributeError:
                if node.is_module and node.place.path and name not in attributes_of(owner):
                    return self._of_hidden_module(node, name)
                self._not_there(node, name)
                cls = users_class(owner)
                if getattr(cls, name, MISSING) is MISSING:  # somebody may give one to the class
                    missing = Read(node.place.then("class", name), "missing", (), MISSING)
                    self.reach.reads.setdefault((id(cls), name), missing)
                raise
            return self._read(node, name, value)

        self._stack.enter_context(replaced(cls, "__getattribute__", look_up))
        self._watched.add(cls)

    def _watch_objects(self, cls: type) -> bool:
        """Whether attributes of this class's objects are looked up through the recorder from now on."""
        self._classes.add(cls)
        if not issubclass(cls, tuple(self._watched)):
            try:
                self._watch(cls)
            except TypeError:  # a class that is written in C
                return False
        return True

    def _watch_hooks(self) -> None:
        """Hooks, and what is captured itself, are functions that nobody looks up."""
        for node in list(self.reach.nodes.values()):
            for place, hook in users_hooks(node.owner, node.place):
                self.reach.prepared(hook, place)
        method = getattr(attributes_of(self.root).get("forward"), "__wrapped__", None)
        name = "forward" if method is None else method.__name__
        self.reach.prepared(getattr(type(self.root), name), Place("", (("class", name),)))

    def _noting_lines(self, set_attribute: Any) -> Any:
        def set_and_note(module: nn.Module, name: str, value: Any) -> None:
            if id(module) in self.reach.nodes:
                self.lines[id(module), name] = user_line()
                if self._region is not None:
                    self._region.was_set.add((id(module), name))
            set_attribute(module, name, value)

        return set_and_note

    def _read(self, node: Node, name: str, value: Any) -> Any:
        attributes = node.now()
        if node.is_module and (name in OF_TORCH or (name == "forward" and _is_stand_in(value))):
            return value
        key = id(node.owner), name
        if self._region is not None:
            self._region.reads(node.owner, name)
        if name not in attributes:
            value = self._read_of_class(node, name, value)
            place = node.place.then("class", name)
            return self.reach.tensor(value, place) if isinstance(value, torch.Tensor) else value
        if key in self.lines or attributes[name] is not node.before.get(name, MISSING):
            return value  # written in this run
        if key not in self.reach.reads:
            place = node.place.then("attribute", name)
            node.line = user_line()
            self.reach.reads[key] = self.reach.witnessed(place, value)
            node.set(name, self.reach.prepared(value, place))
        return node.before[name]

    def _read_all(self, node: Node) -> None:
        """All attributes that an object has itself are read, and which those are."""
        for name, value in list(node.now().items()):
            self._read(node, name, value)
        names = self.reach.witnessed(node.place.then("names", "__dict__"), names_of(node.owner))
        self.reach.reads.setdefault((id(node.owner), "__dict__"), names)

    def _read_of_class(self, node: Node, name: str, value: Any) -> Any:
        """An attribute that objects of a class share, unless one has its own; returns what forward is given of it."""
        cls = type(node.owner)
        if node.is_module and name in _TORCHS_METHODS:
            return value
        found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)
        plain = isinstance(found, (*PLAIN, torch.Tensor)) or is_container(found)
        is_code = isinstance(found, _CODE)
        if plain or is_code:
            self._not_there(node, name)
            of_users = users_class(node.owner)
            if is_container(found) and is_namespace(of_users):
                self.reach.reach_class(node, (name,))
                if (id(of_users), name) in self.reach.reads:
                    return getattr(of_users, name)
            if (id(cls), name) not in self.reach.reads:
                place, held = node.place.then("class", name), getattr(cls, name) if is_code else found
                self.reach.reads[id(cls), name] = self.reach.witnessed(place, held)
                if isinstance(held, property):
                    held, place = held.fget, place.then("attribute", "fget")
                self.reach.prepared(held, place)
                if place in self.learned.followed:  # nobody would give forward what follows it
                    self.reach.refuse(place)
        return value

    def _read_of_process(self, kind: StepKind, name: str, value: Any) -> None:
        """An environment variable is read, or a setting of torch."""
        place = Place("", ((kind, name),))
        self.reach.reads.setdefault((id(os.environ), f"{kind} {name}"), self.reach.witnessed(place, value))

    def _not_there(self, node: Node, name: str) -> None:
        """An object has no attribute of its own of a name. That a module has no forward of its own is the rule."""
        key = id(node.owner), name
        own = node.is_module and any(name in attributes_of(node.owner)[kind] for kind in KINDS)
        if key not in self.lines and not own and not (node.is_module and name == "forward"):
            self.reach.reads.setdefault(key, Read(node.place.then("attribute", name), "missing", (), MISSING))

    def _of_hidden_module(self, node: Node, name: str) -> Any:
        """A parameter, buffer or child of a module that is no submodule, such as one in a list."""
        place = node.place.then("attribute", name)
        for kind in KINDS:
            found = attributes_of(node.owner)[kind].get(name)
            if isinstance(found, torch.Tensor):
                return self.reach.tensor(found, place)
            if found is not None:
                self.reach.add(found, place, attributes_of(found))
        self._not_there(node, name)
        raise AttributeError(name)


def classes_of(root: nn.Module) -> tuple[tuple[str, str], ...]:
    """Names of the submodules and of their classes."""
    return tuple((name, users_class(module).__qualname__) for name, module in root.named_modules() if name)


def _asks_for_all(frame: FrameType) -> bool:
    """Whether code of the user's has asked for vars(module) or dir(module), or for its `__dict__`."""
    if frame.f_code is nn.Module.__dir__.__code__ and frame.f_back is not None:
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def _is_stand_in(forward: Any) -> bool:
    """Whether capture itself has put another method in the place of forward."""
    code = getattr(forward, "__code__", None)
    return hasattr(forward, "__wrapped__") and code is not None and not is_users(code.co_filename)
