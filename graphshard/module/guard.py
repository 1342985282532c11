"""Whether a module is as it was when a program was captured.

Each place that a program depends on is looked up by one call that was prepared when the program was installed, such as
`dict.get` of a module's attributes. That the very same objects are there is all that a call asks; only where one is
another, or where it has contents, it is compared.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphshard.capture.entry import is_compiled
from graphshard.capture.hooks import HOOKS, hooks_of, users_hook_of_all_modules
from graphshard.capture.witness import Items, OfType, TensorLike, same, tensor_like, text_at, witness_of
from graphshard.ir.classes import users_class
from graphshard.ir.errors import CaptureError
from graphshard.ir.state import MISSING, UNSEEN, ModuleState, Place, Read, evaluate, number_as_tensor, places_in
from graphshard.ir.torch_internals import hooks_of_all_modules
from graphshard.module.identities import Held, Identities
from graphshard.module.places import LookUp, look_up


@dataclass
class _Watch:
    """One read, how it is looked up, and what it must be."""

    read: Read
    found: LookUp
    witness: Any

    @property
    def has_contents(self) -> bool:
        """Whether the same object may become another thing."""
        return isinstance(self.witness, (Items, OfType, TensorLike)) or bool(self.found.rest)


class Guard:
    """What a program takes for granted of a module.

    Args:
        state: of the program.
        root: the module, or submodule, that the program is for.
        label: what the module is called.

    Raises:
        CaptureError: the module is not what its program was just captured from.

    Attributes:
        moved: at the last look an object was another than before, though it may count as the same.
        number: where there was another number than before, if that is all the last look found; None otherwise.
    """

    def __init__(self, state: ModuleState, root: nn.Module, label: str) -> None:
        self.state, self._root, self._label = state, root, label
        self._names = {id(module): name for name, module in root.named_modules()}
        self._from_file = any(read.witness is UNSEEN for read in (*state.reads, *state.hooks))
        self._owners = _with_parameters(root)
        self._unbound = next(self._bind(), "")
        if self._unbound and not self._from_file:
            raise CaptureError(f"{label} is another model after its capture than before: {self._unbound}")
        self.moved = True
        self.number: Place | None = None

    def change(self, given: Sequence[torch.Tensor] | None = None) -> str:
        """What is not as it was, in words; "" if the program can run.

        Args:
            given: the tensors of a call; None where there is none.
        """
        self.moved, self.number = False, None
        why = self._unbound or next(self._changes(given), "")
        if why and self._from_file and _with_parameters(self._root) == self._owners:
            # An object of the same description may have taken a place; parameters are those of the modules they were.
            self._unbound = next(self._bind(), "")
            why = self._unbound or next(self._changes(given), "")
        return why

    def near_buffers(self, given: Sequence[torch.Tensor]) -> Iterator[tuple[int, str]]:
        """Inputs of a call, by number, that share memory with a buffer and are none, with its name."""
        # Of a file, a program may be of another state of the module, and was not bound.
        return iter(()) if self._unbound else self._identities.near_buffers(given)

    def tensors(self) -> list[torch.Tensor]:
        """The program's inputs behind those of the call."""
        numbers = [number_as_tensor(evaluate(number, self.number_at)) for number in self.state.numbers]
        return [*(places[0].now() for places in self._inputs), *numbers]

    # --- preparing look-ups ------------------------------------------------------------------------------------

    def _bind(self) -> Iterator[str]:
        """Prepare all look-ups; what is not as a file says is yielded."""
        self._numbers: dict[Place, LookUp] = {}
        modules = list(self._root.named_modules())
        classes = {name: users_class(module).__qualname__ for name, module in modules if name}
        if tuple(classes.items()) != self.state.modules:
            yield _difference(dict(self.state.modules), classes)
        self._children = [(name, m._modules, tuple(m._modules.values())) for name, m in modules if m._modules]
        self._buffers = [_Buffer(m, name, f"{p}.{name}" if p else name) for p, m in modules for name in m._buffers]
        expected = {read.place: read for read in self.state.hooks}
        held = [(Place(name, (("attribute", kind),)), vars(m)[kind]) for name, m in modules[1:] for kind in HOOKS]
        self._unhooked = [(place, hooks) for place, hooks in held if place not in expected]
        self._for_all = hooks_of_all_modules()
        self._hook_dicts = [hooks for _, hooks in self._unhooked]
        self._hooked = [
            _Watch(expected[p], LookUp(_Values(h), ""), expected[p].witness) for p, h in held if p in expected
        ]
        known = {read.place for read in self.state.reads}
        own = [Place(name, (("attribute", "forward"),)) for name, m in modules if not is_compiled(m)]
        none = [Read(place, "missing", (), MISSING) for place in own if place not in known]
        try:
            watches = [_Watch(r, look_up(self._root, r.place), r.witness) for r in (*self.state.reads, *none)]
            self._inputs = [[look_up(self._root, place) for place in places] for places in self.state.inputs]
            given = [(number, Held(look_up(self._root, place), str(place))) for number, place in self.state.same]
        except (AttributeError, TypeError) as error:
            yield f"it cannot be found out what is there now ({error})"
        for watch in (*self._hooked, *watches):
            if watch.witness is UNSEEN:
                value = watch.found.now()
                watch.witness = witness_of(value, free=watch.read.free)
                text = text_at(watch.read.place, value, self._names, watch.read.free)
                if text != watch.read.text and not watch.read.place.is_setting:
                    yield self._difference(watch)
        self._contents = [*self._hooked, *(watch for watch in watches if watch.has_contents)]
        self._fixed = [watch for watch in watches if not watch.has_contents]
        self._getters = [(watch.found.get, watch.found.key) for watch in self._fixed]
        self._objects: list[Any] = [UNSEEN] * len(self._fixed)
        of_module = [Held(looks[0], str(places[0])) for looks, places in zip(self._inputs, self.state.inputs)]
        contents = [(watch.found, watch.witness) for watch in self._contents]
        self._identities = Identities(given, of_module, contents)
        self._identities.buffers_are((buffer.name, buffer.last) for buffer in self._buffers)

    # --- at a call ---------------------------------------------------------------------------------------------

    def _changes(self, given: Sequence[torch.Tensor] | None) -> Iterator[str]:
        for name, now, modules in self._children:
            if tuple(now.values()) != modules:
                yield f"a submodule of {self._label}{name and '.'}{name} was exchanged"
        if any(self._hook_dicts):
            yield next(f"{self._label}.{place} were added" for place, hooks in self._unhooked if hooks)
        if any(self._for_all) and users_hook_of_all_modules() is not None:
            yield "a hook for all modules was registered"
        found = [get(key, MISSING) for get, key in self._getters]
        if not all(map(operator.is_, found, self._objects)):
            yield from self._of_others(found)
        for watch in self._contents:
            if not same(watch.witness, watch.found.now()):
                yield self._difference(watch)
        exchanged = [buffer for buffer in self._buffers if buffer.held.get(buffer.key) is not buffer.last]
        for buffer in exchanged:
            yield from buffer.change()
        if exchanged:
            self._identities.buffers_are((buffer.name, buffer.last) for buffer in self._buffers)
        for places in self._inputs:
            if len(places) > 1 and len({id(place.now()) for place in places}) > 1:
                yield "attributes that were one tensor are several"
        yield from self._identities.changes(given)
        for condition in self.state.conditions:
            value = evaluate(condition.expression, self.number_at)
            if value != condition.value:
                self.number = next(places_in(condition.expression), None)
                yield f"{self._label}: {condition.expression} was {condition.value} ({condition.line}) and is {value}"

    def number_at(self, place: Place) -> Any:
        """The number at a place now."""
        if place not in self._numbers:
            self._numbers[place] = look_up(self._root, place)
        return self._numbers[place].now()

    def _of_others(self, found: list[Any]) -> Iterator[str]:
        """Other objects than at the last call may be equal ones, or entries that are gone."""
        self.moved = True
        for index, (watch, value) in enumerate(zip(self._fixed, found)):
            if value is not self._objects[index]:
                if not same(watch.witness, watch.found.now()):
                    yield self._difference(watch)
                self._objects[index] = value

    def _difference(self, watch: _Watch) -> str:
        read, value = watch.read, watch.found.now()
        if type(value) is type(watch.witness) and type(value) in (int, float):
            self.number = read.place
        now = text_at(read.place, value, self._names, read.free)
        return f"{read.place.of(self._label)} was {read.text} and is {now}"


def _with_parameters(root: nn.Module) -> dict[str, nn.Module]:
    """Modules that have parameters, by name."""
    return {name: module for name, module in root.named_modules() if module._parameters}


def differences(state: ModuleState, root: nn.Module) -> Iterator[tuple[Place, str, str]]:
    """Where a module is another than a program of a file was captured from: the place, what it was, and what it is.

    What the program changes itself is left out.
    """
    names = {id(module): name for name, module in root.named_modules()}
    written = [write.place for write in state.writes]
    expected = {read.place for read in (*state.hooks, *state.reads)}
    for read in (*state.hooks, *state.reads):
        if not read.place.is_setting and not any(_concerns(place, read.place) for place in written):
            now = "missing"
            with contextlib.suppress(AttributeError, TypeError, IndexError):
                now = text_at(read.place, _found(root, read.place), names, read.free)
            if now != read.text:
                yield read.place, read.text, now
    for read in (*hooks_of(root), *_replaced_forwards(root, names)):
        if read.place not in expected:
            yield read.place, "missing", read.text


def _concerns(written: Place, read: Place) -> bool:
    """Whether what is written at a place changes what is read at another."""
    within = written.starts_with(read) and all(kind == "item" for kind, _ in written.path[len(read.path) :])
    return within or read.starts_with(written)


def _found(root: nn.Module, place: Place) -> Any:
    found = look_up(root, place).now()
    return tuple(found.values()) if place.path[-1][1] in HOOKS else found


def _replaced_forwards(root: nn.Module, names: Mapping[int, str]) -> Iterator[Read]:
    for name, _ in root.named_modules():
        place = Place(name, (("attribute", "forward"),))
        now = look_up(root, place).now()
        if now is not MISSING:
            yield Read(place, text_at(place, now, names))


@dataclass
class _Values:
    """Finds the values of a dict, as a tuple."""

    of: Mapping[Any, Any]

    def __call__(self, _: Any, __: Any) -> tuple[Any, ...]:
        return tuple(self.of.values())


class _Buffer:
    """A buffer, which may be exchanged for one like it."""

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        self.held, self.key, self.name = module._buffers, key, name
        self.last = self.held[key]
        self._like = None if self.last is None else tensor_like(self.last)

    def change(self) -> Iterator[str]:
        buffer = self.held.get(self.key)
        if not (buffer is None and self._like is None) and not same(self._like, buffer):
            yield f"buffer {self.name} is of another shape, dtype or device"
        self.last = buffer


def _difference(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    name = next(name for name in (*was, *now) if was.get(name) != now.get(name))
    return f"submodule {name} was {was.get(name, 'missing')} and is {now.get(name, 'missing')}"
