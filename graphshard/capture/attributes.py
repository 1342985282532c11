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
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from graphshard.capture.changes import OF_PARAMETERS, Changes, Node, attributes_of
from graphshard.capture.growing import Growing
from graphshard.capture.hooks import users_hooks
from graphshard.capture.learned import Learned, Rerun
from graphshard.capture.left_hooks import LeftHooks
from graphshard.capture.lines import user_line
from graphshard.capture.numbers import FollowedNumber
from graphshard.capture.outside import Generator
from graphshard.capture.region_effects import RegionEffects
from graphshard.capture.untraceable import Located, is_users
from graphshard.capture.witness import FUNCTIONS, PLAIN, SETS, is_container, text_at, witness_of
from graphshard.ir.state import MISSING, Condition, ModuleState, Number, Place, Read
from graphshard.ir.torch_internals import replaced
from graphshard.ir.tracing_internals import is_traced

# What torch's modules themselves keep in their instances, and their own methods.
_TORCHS = frozenset(vars(nn.Module())) | {"_graphshard"} | OF_PARAMETERS
_TORCHS_METHODS = frozenset(vars(nn.Module)) - {"forward"}
# How many functions that are globals of each other are looked into for their globals.
_GLOBALS_OF_GLOBALS = 2
_OWN = ("_parameters", "_buffers", "_modules")


class Recorder:
    """Records one forward of a module.

    Args:
        root: the module, with whatever parameters and buffers it is to be traced with.
        learned: by earlier runs.
        own: what takes the place of parameters and buffers that are held as attributes besides, by identity.
        allow: sources of random numbers that forward may draw from.
    """

    def __init__(
        self, root: nn.Module, learned: Learned, own: Mapping[int, torch.Tensor], allow: Collection[str]
    ) -> None:
        self.root, self.learned, self.own, self._allow = root, learned, own, allow
        self.state = ModuleState()
        self._names = {id(module): name for name, module in root.named_modules()}

    @contextlib.contextmanager
    def recording(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Record what runs in the block, which is given these tensors in the place of those that are learned."""
        self._tensors = dict(zip(self.learned.tensors, tensors, strict=True))
        self.nodes: dict[int, Node] = {}
        self.reads: dict[tuple[int, str], Read] = {}
        self.lines: dict[tuple[int, str], str] = {}  # of attributes that were set
        self.grown: dict[Place, Growing] = {}
        self._conditions: list[Condition] = []
        self._unknown: dict[int, tuple[torch.Tensor, list[Place]]] = {}
        self._watched: set[type] = set()
        self._generators: list[Generator] = []
        self._region: RegionEffects | None = None
        with contextlib.ExitStack() as stack:
            self._stack = stack
            stack.callback(self._restore)
            for name, module in self.root.named_modules():
                self._add(module, Place(name), attributes_of(module))
            self._hooks = LeftHooks(self.root)
            self._watch_hooks()
            self._watch(nn.Module)
            stack.enter_context(replaced(nn.Module, "__setattr__", self._noting_lines(nn.Module.__setattr__)))
            try:
                yield
            except Exception as error:
                if self.learned.followed:  # what stands in for them may be the reason
                    self.learned.refuse(set(self.learned.followed))
                    raise Rerun from error
                self._learn_tensors()
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
        self._learn_tensors()
        for generator in self._generators:
            generator.check(self._allow)
        own, label = list(self.own.values()), type(self.root).__name__
        changes = Changes(label, self.nodes, self.reads, self.lines, self.grown, own, results, given)
        writes = (*changes, *self._hooks.writes(self.nodes.keys()))
        if changes.followable - self.learned.refused:
            self.learned.followed |= changes.followable - self.learned.refused
            raise Rerun
        self.state = ModuleState(
            reads=tuple(self.reads.values()),
            conditions=tuple(self._conditions),
            inputs=tuple(tuple(places) for _, places in self.learned.tensors.values()),
            writes=writes,
            modules=tuple((name, type(module).__qualname__) for name, module in self.root.named_modules() if name),
        )
        return changes.made

    def enter_region(self) -> Callable[[], Located | None]:
        """A checkpointed region begins; what is returned is to be called at its end, see `RegionEffects.refusal`."""
        region = self._region = RegionEffects(type(self.root).__name__, self.nodes, self.lines)

        def leave() -> Located | None:
            self._region = None
            return region.refusal()

        return leave

    def _restore(self) -> None:
        for node in self.nodes.values():
            node.restore()
        for held in (self.nodes, self.grown, self._tensors, self._unknown):
            held.clear()  # what is traced is not to outlive the trace

    def _add(self, owner: Any, place: Place, content: Any) -> Node:
        if id(owner) not in self.nodes:
            self.nodes[id(owner)] = Node.of(owner, place, content)
        return self.nodes[id(owner)]

    def _watch(self, cls: type) -> None:
        """Look attributes of this class's objects up through the recorder, until the block ends."""
        find: Any = cls.__getattribute__

        def look_up(owner: Any, name: str) -> Any:
            node = self.nodes.get(id(owner))
            if node is None or name.startswith("__") or node.owner is not owner:
                return find(owner, name)
            try:
                value = find(owner, name)
            except AttributeError:
                if node.is_module and node.place.path and name not in attributes_of(owner):
                    return self._of_hidden_module(node, name)
                self._not_there(node, name)
                raise
            return self._read(node, name, value)

        self._watched.add(cls)
        self._stack.enter_context(replaced(cls, "__getattribute__", look_up))

    def _watch_hooks(self) -> None:
        """Hooks, and what is captured itself, are functions that nobody looks up."""
        for node in list(self.nodes.values()):
            for place, hook in users_hooks(node.owner, node.place):
                self._prepared(hook, place)
        method = getattr(attributes_of(self.root).get("forward"), "__wrapped__", None)
        name = "forward" if method is None else method.__name__
        self._prepared(getattr(type(self.root), name), Place("", (("class", name),)))

    def _noting_lines(self, set_attribute: Any) -> Any:
        def set_and_note(module: nn.Module, name: str, value: Any) -> None:
            if id(module) in self.nodes:
                self.lines[id(module), name] = user_line()
                if self._region is not None:
                    self._region.was_set.add((id(module), name))
            set_attribute(module, name, value)

        return set_and_note

    def _read(self, node: Node, name: str, value: Any) -> Any:
        attributes = attributes_of(node.owner)
        if node.is_module and (name in _TORCHS or (name == "forward" and _is_stand_in(value))):
            return value
        key = id(node.owner), name
        if self._region is not None:
            self._region.reads(node.owner, name)
        if name not in attributes:
            self._read_of_class(node, name)
            return self._tensor(value, node.place.then("class", name)) if isinstance(value, torch.Tensor) else value
        if key in self.lines or attributes[name] is not node.before.get(name, MISSING):
            return value  # written in this run
        if key not in self.reads:
            place = node.place.then("attribute", name)
            node.line = user_line()
            self.reads[key] = self._witnessed(place, value)
            node.set(name, self._prepared(value, place))
        return attributes[name]

    def _read_of_class(self, node: Node, name: str) -> None:
        """An attribute that objects of a class share, unless one has its own."""
        cls = type(node.owner)
        if node.is_module and name in _TORCHS_METHODS:
            return
        found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)
        plain = isinstance(found, (*PLAIN, torch.Tensor)) or is_container(found)
        if plain or (node.is_module and isinstance(found, types.FunctionType)):
            self._not_there(node, name)
            if (id(cls), name) not in self.reads:
                place = node.place.then("class", name)
                self.reads[id(cls), name] = self._witnessed(place, found)
                self._prepared(found, place)

    def _not_there(self, node: Node, name: str) -> None:
        """An object has no attribute of its own of a name. That a module has no forward of its own is the rule."""
        key = id(node.owner), name
        own = node.is_module and any(name in attributes_of(node.owner)[kind] for kind in _OWN)
        if key not in self.lines and not own and not (node.is_module and name == "forward"):
            self.reads.setdefault(key, Read(node.place.then("attribute", name), "missing", (), MISSING))

    def _of_hidden_module(self, node: Node, name: str) -> Any:
        """A parameter, buffer or child of a module that is no submodule, such as one in a list."""
        place = node.place.then("attribute", name)
        for kind in _OWN:
            found = attributes_of(node.owner)[kind].get(name)
            if isinstance(found, torch.Tensor):
                return self._tensor(found, place)
            if found is not None:
                self._add(found, place, attributes_of(found))
        self._not_there(node, name)
        raise AttributeError(name)

    def _witnessed(self, place: Place, value: Any) -> Read:
        """What is at a place; of what is followed only the type matters, and parameters are themselves."""
        free = tuple(p.path[len(place.path) :] for p in self.learned.followed if p.starts_with(place))
        witness = value if id(value) in self.own else witness_of(value, free=free)
        return Read(place, text_at(place, value, self._names, free), free, witness)

    def _prepared(self, value: Any, place: Place) -> Any:
        """A value as forward is given it: with this run's tensors, and watched for what forward does to it."""
        if place in self.learned.followed:
            return self._followed(value, place)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, FUNCTIONS):
            self._watch_function(value, place)
        if isinstance(value, (*PLAIN, *FUNCTIONS, type, types.ModuleType)) or id(value) in self.nodes:
            return value
        if isinstance(value, tuple):
            items = [self._prepared(item, place.then("item", i)) for i, item in enumerate(value)]
            changed = any(new is not old for new, old in zip(items, value))
            return value if not changed else type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if is_container(value):
            self._watch_items(value, place)
        else:
            self._watch_object(value, place)
        return value

    def _watch_items(self, value: Any, place: Place) -> None:
        if not isinstance(value, frozenset):
            node = self._add(value, place, value)
            node.line = user_line()
            for key, item in [] if isinstance(value, SETS) else list(node.items()):
                node.set(key, self._prepared(item, place.then("item", key)))

    def _watch_function(self, value: Any, place: Place) -> None:
        """What a function of the user's closes over, and its globals; of these not those of functions among them."""
        if isinstance(value, types.MethodType):
            self._prepared(value.__self__, place.then("attribute", "__self__"))
            self._watch_function(value.__func__, place.then("attribute", "__func__"))
        elif isinstance(value, functools.partial):
            self._watch_function(value.func, place.then("attribute", "func"))
            self._watch_items(value.keywords, place.then("attribute", "keywords"))
        elif isinstance(value, types.FunctionType) and id(value) not in self.nodes:
            deep = sum(kind == "global" for kind, _ in place.path)
            if is_users(value.__code__.co_filename) and deep <= _GLOBALS_OF_GLOBALS:
                node = self.nodes[id(value)] = Node.of_function(value, place)
                for name, item in node.content.items():
                    self.reads[id(value), name] = self._witnessed(node.step(name), item)
                    prepared = self._prepared(item, node.step(name))
                    if prepared is not item:
                        node.set(name, prepared)

    def _watch_object(self, value: Any, place: Place) -> None:
        if Generator.is_one(value):
            self._generators.append(Generator(value))
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and type(value).__module__.partition(".")[0] != "torch":
            self._add(value, place, attributes)
            if not isinstance(value, tuple(self._watched)):
                with contextlib.suppress(TypeError):  # of classes that are written in C
                    self._watch(type(value))

    def _followed(self, value: Any, place: Place) -> Any:
        """What follows a number or a list."""
        if isinstance(value, list):
            return self.grown.setdefault(place, Growing(type(value), lambda: self._refuse(place)))
        return FollowedNumber(Number(place), value, self._conditions)

    def _refuse(self, place: Place) -> NoReturn:
        self.learned.refuse({place})
        raise Rerun

    def _tensor(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        if is_traced(tensor):  # a property has computed it, as those of parametrizations do
            return tensor
        if id(tensor) in self.own:
            return self.own[id(tensor)]
        known = self.learned.tensors if id(tensor) in self._tensors else self._unknown
        _, places = known.setdefault(id(tensor), (tensor, []))
        if place not in places:
            places.append(place)
        if id(tensor) not in self._tensors:  # forward may write to it, in this run that is to be repeated
            with torch._C.DisableTorchFunction():
                return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return self._tensors[id(tensor)]

    def _learn_tensors(self) -> None:
        if self._unknown:
            self.learned.tensors.update(self._unknown)
            raise Rerun


def _is_stand_in(forward: Any) -> bool:
    """Whether capture itself has put another method in the place of forward."""
    code = getattr(forward, "__code__", None)
    return hasattr(forward, "__wrapped__") and code is not None and not is_users(code.co_filename)
