"""Programs that are bound to a module, and the reason why a call needs another one.

    model(tokens)  after  model(shorter)        args[0] was int64[2, 17] and is int64[2, 24]
    model(x, step=2)  after  model(x, step=1)   step was 1 and is 2
    model(x, labels=y)  after  model(x)         newly passed: labels

Each capture is logged with its reason: as information first, as a warning from the fourth recapture on.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphshard.frontend.inputs import input_path
from graphshard.frontend.signature import Signature
from graphshard.module._call_checks import JointGuard, TracedGuard
from graphshard.pipeline.instrumentation import trace_recapture
from graphshard.runtime.executable import Executable
from graphshard.torch_compat.torch_ops import pytree, recompiles_log
from graphshard.utils.text import brief

log = logging.getLogger(__name__)

# Training and evaluation, with gradients and without, take three.
_EXPECTED_RECAPTURES = 3
# The number of inputs that a reason names; further ones are counted.
_NAMED = 3

_OF_SIZES = (
    "Declare sizes that vary (dynamic_shapes=, or torch._dynamo.mark_dynamic on the inputs of the first call), or pad "
    "inputs to a few sizes."
)
_OF_NUMBERS = (
    "Pass a number that changes as a tensor (torch.tensor(value)), or leave it out if forward does not need it."
)
_OF_CONSTANTS = "Leave the input out if forward does not need it, or give it a few values."
_OF_STRUCTURE = "Pass the same inputs in each call, by the same names and in the same order."
_OF_VALUES = "Compute with tensors what depends on values: torch.where, a mask, index_copy or gather."
_OF_ATTRIBUTES = "Keep a number that changes in a buffer (register_buffer), or pass it into the call as a tensor."
_WITHOUT_GRADIENTS = "Calls without gradients run without programs within `with graphshard.uncompiled(model):`."
_OF_LIMIT = "Raise max_captures in graphshard.compile to keep more."


@dataclass(frozen=True)
class Reason:
    """Reason why a program is captured: an input or attribute with its old and new value, and how to need fewer."""

    text: str
    remedy: str = ""
    first: bool = False


@dataclass(eq=False)
class Installed:
    """A program that is bound to a module, the signature of its calls, and its guards.

    Attributes:
        loaded: the program is from a file, and is not evicted.
        call: signature, with all inputs, of the call that it was captured for.
    """

    signature: Signature
    executable: Executable
    guard: TracedGuard | JointGuard
    loaded: bool = False
    call: Signature | None = None


@dataclass
class InstalledPrograms:
    """Bound programs, the most recently used first.

    Attributes:
        added: the number of programs so far, including evicted ones.
        changes: why those with the signature of the last call did not serve it.
        captured: signature, with all inputs, of the last call that a program was captured for.
    """

    programs: list[Installed] = field(default_factory=list)
    added: int = 0
    changes: list[str] = field(default_factory=list)
    captured: Signature | None = None
    _recaptures: int = 0
    _last: Reason = field(default_factory=lambda: Reason(""))
    _remedies: set[str] = field(default_factory=set)
    _warned_of_limit: bool = False

    def add(self, installed: Installed) -> None:
        """Add a program, which is the most recently used one."""
        self.added += 1
        installed.call = self.captured or installed.signature
        self.programs.insert(0, installed)

    def find(self, signature: Signature, scope: Mapping[str, Any]) -> Installed | None:
        """Return the program for a call."""
        self.changes = []
        for place, installed in enumerate(self.programs):
            if installed.signature == signature:
                change = installed.guard.change(scope)
                if not change:
                    if place:
                        self.programs.insert(0, self.programs.pop(place))
                    return installed
                self.changes.append(change)
        return None

    def with_digest(self, signature: Signature, digest: str) -> Installed | None:
        """Return a program for calls with a signature whose trace had a digest."""
        known = (one for one in self.programs if one.signature == signature)
        return next((one for one in known if one.executable.program.digest == digest), None)

    def evict(self, most: int, accumulated: Collection[str], label: str) -> list[Installed]:
        """Remove the least recently used programs over `most`; the most recent one, and programs of files, stay.

        A call that is still to be differentiated holds its program, so its backward runs as before. The only program
        that reduces some of the parameters whose gradients microbatches have `accumulated` stays until that is done.
        """
        candidates = [installed for installed in self.programs if not installed.loaded]
        evicted: list[Installed] = []
        for installed in reversed(candidates[1:]):
            needed = installed.executable.trained.keys() & accumulated
            others = (other for other in self.programs if other is not installed and other not in evicted)
            replaced = not needed or any(needed <= other.executable.trained.keys() for other in others)
            if len(evicted) < len(candidates) - most and replaced:
                evicted.append(installed)
        if not evicted:
            return []
        self.programs = [installed for installed in self.programs if installed not in evicted]
        for installed in evicted:
            log.info("evicted %s, the least recently used program", installed.executable.program.title)
        if not self._warned_of_limit:
            self._warned_of_limit = True
            log.warning(
                "%s has more than max_captures=%d programs: from now on the least recently used one is evicted, and "
                "captured again when a call needs it. The last capture: %s. %s",
                *(label, most, self._last.text, " ".join(filter(None, [self._last.remedy, _OF_LIMIT]))),
            )
        return evicted

    def log_capture(self, label: str, reason: Reason) -> None:
        """Log one capture; a warning says a remedy once."""
        number, self._last = self.added, reason
        self._recaptures += not reason.first
        if self._recaptures <= _EXPECTED_RECAPTURES:
            log.info("capture %d of %s: %s", number, label, reason.text)
        else:
            remedy = "" if reason.remedy in self._remedies or not reason.remedy else f". {reason.remedy}"
            self._remedies.add(reason.remedy)
            log.warning("capture %d of %s: %s%s", number, label, reason.text, remedy)
        if not reason.first:
            recompiles_log.debug("Recompiling %s in graphshard (capture %d)\n    - %s", label, number, reason.text)
            trace_recapture(label, number, reason.text)

    def reason(self, call: Signature) -> Reason:
        """Return why a call needs another program: how it differs from the nearest one."""
        self.captured = call
        if not self.programs:
            return Reason("first call", first=True)
        before = [installed.call for installed in self.programs if installed.call is not None]
        if not self.changes:
            return reason_of(call, before)
        change = self.changes[0]
        for other in before:
            found = reason_at(change, call, other)
            if found is not None:
                return replace(found, text=f"{found.text} ({change})")
        if "by the values of" in change:
            return Reason(change, _OF_VALUES)
        return Reason(change, _OF_ATTRIBUTES if re.search(r" was -?\d\S* and is -?\d", change) else "")


def reason_of(now: Signature, known: Iterable[Signature]) -> Reason:
    """Return how a signature differs from the nearest one that has programs; the first of equally near ones."""

    def distance(before: Signature) -> tuple[int, bool, int]:
        inputs = itertools.zip_longest(before.inputs, now.inputs)
        other = now.structure != before.structure
        return len(now.changes_besides_inputs(before)), other, sum(was != key for was, key in inputs)

    before = min(known, key=distance)
    texts, remedies = _input_changes(now, before)
    if now.inputs != before.inputs and not now.grad:
        remedies.append(_WITHOUT_GRADIENTS)
    return Reason(", ".join([*texts, *now.changes_besides_inputs(before)]), " ".join(remedies))


def reason_at(guard: str, now: Signature, before: Signature) -> Reason | None:
    """Return how the inputs that a failed guard names differ from another call's; None if it names none."""
    texts, remedies = _input_changes(now, before, guard)
    if not texts:
        return None
    if now.structure == before.structure and not now.grad:
        remedies.append(_WITHOUT_GRADIENTS)
    return Reason(", ".join(texts), " ".join(remedies))


def _input_changes(now: Signature, before: Signature, guard: str = "") -> tuple[list[str], list[str]]:
    """Return how inputs differ between calls, those that a guard names if one is given, and the remedies."""
    if now.structure != before.structure:
        if guard and not re.search(r"\bargs\b|\bkwargs\b", guard):
            return [], []
        return [_structures(before.structure, now.structure)], [_OF_STRUCTURE]
    pairs = enumerate(zip(before.inputs, now.inputs, strict=True))
    changed = [(input_path(now.structure, index), was, key) for index, (was, key) in pairs if was != key]
    if guard:
        changed = [each for each in changed if re.search(rf"(?<![\w.]){re.escape(each[0])}(?![\w\[])", guard)]
    texts = [_described(*each) for each in changed[:_NAMED]]
    if len(changed) > _NAMED:
        texts.append(f"{len(changed) - _NAMED} more inputs changed")
    return texts, list(dict.fromkeys(_remedy(was, key) for _, was, key in changed))


# The key of an input is (shape, strides, dtype, requires_grad) of a tensor, or (type, value).
_Key = tuple[Any, ...]


def _described(path: str, was: _Key, now: _Key) -> str:
    both = _is_tensor(was) and _is_tensor(now)

    def shown(key: _Key) -> str:
        if not _is_tensor(key):
            kind, value = key
            return value if isinstance(value, str) and kind is not str else brief(value)  # "nan" stands for a float
        shape, stride, dtype, requires_grad = key
        text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        if both and was[0] == now[0] and was[1] != now[1]:
            text += f" with strides {list(stride)}"
        if both and was[3] != now[3]:
            text += f" {'with' if requires_grad else 'without'} a gradient"
        return text

    return f"{path} was {shown(was)} and is {shown(now)}"


def _is_tensor(key: _Key) -> bool:
    return len(key) == 4


def _remedy(was: _Key, now: _Key) -> str:
    if _is_tensor(was) and _is_tensor(now):
        return _OF_SIZES
    return _OF_NUMBERS if now[0] in (int, float) and not _is_tensor(now) else _OF_CONSTANTS


def _structures(before: pytree.TreeSpec, now: pytree.TreeSpec) -> str:
    """Return the first difference of two calls' structures, outermost first."""
    (args, kwargs), (other_args, other_kwargs) = before.children(), now.children()
    old, new = _argument_names(args, kwargs), _argument_names(other_args, other_kwargs)
    if added := [name for name in new if name not in old]:
        return f"newly passed: {_listed(added)}"
    if removed := [name for name in old if name not in new]:
        return f"not passed any more: {_listed(removed)}"
    if old != new:
        return f"the inputs were in the order {_listed(old)} and are in the order {_listed(new)}"
    pairs = zip(new, (*args.children(), *kwargs.children()), (*other_args.children(), *other_kwargs.children()))
    return next((text for pair in pairs for text in _within(*pair)), "the inputs have another structure")


def _argument_names(args: pytree.TreeSpec, kwargs: pytree.TreeSpec) -> list[str]:
    return [*(f"args[{index}]" for index in range(args.num_children)), *kwargs.context]


def _within(path: str, before: pytree.TreeSpec, now: pytree.TreeSpec) -> Iterator[str]:
    """Yield the differences inside an argument, the first one first."""
    if before == now:
        return
    if before.type is not now.type:
        old, new = ("one value" if s.is_leaf() else f"a {getattr(s.type, '__name__', s.type)}" for s in (before, now))
        yield f"{path} was {old} and is {new}"
    elif before.type is dict and before.context != now.context:
        yield f"the keys of {path} were [{_listed(before.context)}] and are [{_listed(now.context)}]"
    elif before.num_children != now.num_children:
        old, new = (f"{s.num_children} {'entry' if s.num_children == 1 else 'entries'}" for s in (before, now))
        yield f"{path} had {old} and has {new}"
    else:
        # How each child of a container is reached, such as `[0]` or `.mask`.
        marks, count = pytree.tree_unflatten(range(now.num_leaves), now), now.num_children
        found, _ = pytree.tree_flatten_with_path(marks, is_leaf=lambda value: value is not marks)
        steps = [pytree.keystr(path) for path, _ in found] if len(found) == count else [f"[{i}]" for i in range(count)]
        for step, was, child in zip(steps, before.children(), now.children()):
            yield from _within(f"{path}{step}", was, child)
        yield f"what {path} holds besides tensors and numbers was {brief(before.context)} and is {brief(now.context)}"


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
