"""Why a call needs another program: which input changed, from which value to which, and what to do about it.

model(tokens)  after  model(shorter)        args[0] was int64[2, 17] and is int64[2, 24]
model(x, step=2)  after  model(x, step=1)   step was 1 and is 2
model(x, labels=y)  after  model(x)         newly passed: labels
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
from graphshard.module.program_guard import JointGuard, TracedGuard
from graphshard.pipeline.trace import trace_recapture
from graphshard.runtime.step import Executable
from graphshard.torch_compat.fx_code import recompiles_log
from graphshard.torch_compat.operators import pytree
from graphshard.utils.text import brief

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


@dataclass(frozen=True)
class Reason:
    """Why a program is captured.

    Attributes:
        text: names the input or attribute with its old and new value.
        remedy: sentences that say how to need fewer programs; "" where nothing is to be done.
        first: no program was there before.
    """

    text: str
    remedy: str = ""
    first: bool = False


FIRST_CALL = Reason("first call", first=True)


def reason_of(now: Signature, known: Iterable[Signature]) -> Reason:
    """Return how a signature differs from the nearest of those that have programs; the first of equally near ones."""
    return difference(now, min(known, key=lambda before: _distance(now, before)))


def reason_at(where: str, now: Signature, before: Signature) -> Reason | None:
    """Return how the inputs that a failed guard names differ from those of another call; None if it names none.

    Args:
        where: the guard, with inputs by their paths.
    """
    if now.structure != before.structure:
        text = _structures(before.structure, now.structure)
        return Reason(text, _OF_STRUCTURE) if re.search(r"\bargs\b|\bkwargs\b", where) else None
    changed = [each for each in _changed(now, before) if re.search(rf"(?<![\w.]){re.escape(each[0])}(?![\w\[])", where)]
    if not changed:
        return None
    remedies = dict.fromkeys(_remedy(was, key) for _, was, key in changed)
    if not now.grad:
        remedies[_WITHOUT_GRADIENTS] = None
    return Reason(", ".join(_described(*each) for each in changed[:_NAMED]), " ".join(remedies))


def remedy_of(change: str) -> str:
    """Return what to do about a guard that failed and is not about inputs; "" if there is nothing to do."""
    if "by the values of" in change:
        return _OF_VALUES
    return _OF_ATTRIBUTES if re.search(r" was -?\d\S* and is -?\d", change) else ""


def difference(now: Signature, before: Signature) -> Reason:
    """Return how a call differs from another one."""
    remedies: list[str] = []
    if now.structure != before.structure:
        texts = [_structures(before.structure, now.structure)]
        remedies.append(_OF_STRUCTURE)
    else:
        changed = _changed(now, before)
        texts = [_described(*each) for each in changed[:_NAMED]]
        if len(changed) > _NAMED:
            texts.append(f"{len(changed) - _NAMED} more inputs changed")
        remedies += dict.fromkeys(_remedy(was, key) for _, was, key in changed)
    if now.inputs != before.inputs and not now.grad:
        remedies.append(_WITHOUT_GRADIENTS)
    return Reason(", ".join([*texts, *now.changes_besides_inputs(before)]), " ".join(remedies))


def _distance(now: Signature, before: Signature) -> tuple[int, bool, int]:
    return (
        len(now.changes_besides_inputs(before)),
        now.structure != before.structure,
        sum(was != key for was, key in itertools.zip_longest(before.inputs, now.inputs)),
    )


# --- inputs ------------------------------------------------------------------------------------------------------


def _changed(now: Signature, before: Signature) -> list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    """Return path, old and new key of each input that differs, of two calls with the same structure."""
    pairs = enumerate(zip(before.inputs, now.inputs, strict=True))
    return [(input_path(now.structure, index), was, key) for index, (was, key) in pairs if was != key]


def _described(path: str, was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    if not (_is_tensor(was) and _is_tensor(now)):
        return f"{path} was {_shown(was)} and is {_shown(now)}"
    strides = was[0] == now[0] and was[1] != now[1]
    gradient = was[3] != now[3]
    old, new = (_tensor(key, strides=strides, gradient=gradient) for key in (was, now))
    return f"{path} was {old} and is {new}"


def _is_tensor(key: tuple[Any, ...]) -> bool:
    return len(key) == 4


def _shown(key: tuple[Any, ...]) -> str:
    if _is_tensor(key):
        return _tensor(key)
    kind, value = key
    return value if isinstance(value, str) and kind is not str else brief(value)  # "nan" stands for a float


def _tensor(key: tuple[Any, ...], *, strides: bool = False, gradient: bool = False) -> str:
    shape, stride, dtype, requires_grad = key
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    if strides:
        text += f" with strides {list(stride)}"
    if gradient:
        text += f" {'with' if requires_grad else 'without'} a gradient"
    return text


def _remedy(was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    if _is_tensor(was) and _is_tensor(now):
        return _OF_SIZES
    return _OF_NUMBERS if now[0] in (int, float) and not _is_tensor(now) else _OF_CONSTANTS


# --- structure ---------------------------------------------------------------------------------------------------


def _structures(before: pytree.TreeSpec, now: pytree.TreeSpec) -> str:
    """Return the first difference of two calls' structures, outermost first."""
    (args, kwargs), (other_args, other_kwargs) = before.children(), now.children()
    old, new = _names_of(args, kwargs), _names_of(other_args, other_kwargs)
    if added := [name for name in new if name not in old]:
        return f"newly passed: {_listed(added)}"
    if removed := [name for name in old if name not in new]:
        return f"not passed any more: {_listed(removed)}"
    if old != new:
        return f"the inputs were in the order {_listed(old)} and are in the order {_listed(new)}"
    pairs = zip(new, (*args.children(), *kwargs.children()), (*other_args.children(), *other_kwargs.children()))
    return next((text for pair in pairs for text in _within(*pair)), "the inputs have another structure")


def _names_of(args: pytree.TreeSpec, kwargs: pytree.TreeSpec) -> list[str]:
    """Return the names of a call's arguments: `args[0]` by position, `labels` by name."""
    return [*(f"args[{index}]" for index in range(args.num_children)), *kwargs.context]


def _within(path: str, before: pytree.TreeSpec, now: pytree.TreeSpec) -> Iterator[str]:
    if before == now:
        return
    if before.type is not now.type:
        yield f"{path} was {_kind(before)} and is {_kind(now)}"
    elif before.type is dict and before.context != now.context:
        yield f"the keys of {path} were [{_listed(before.context)}] and are [{_listed(now.context)}]"
    elif before.num_children != now.num_children:
        yield f"{path} had {_counted(before)} and has {_counted(now)}"
    else:
        marks = pytree.tree_unflatten(range(now.num_leaves), now)
        steps = _steps(marks, now.num_children)
        for step, old, new in zip(steps, before.children(), now.children()):
            yield from _within(f"{path}{step}", old, new)
        yield f"what {path} holds besides tensors and numbers was {brief(before.context)} and is {brief(now.context)}"


def _steps(marks: Any, count: int) -> list[str]:
    """Return how each child of a container is reached, such as `[0]` or `.mask`."""
    found, _ = pytree.tree_flatten_with_path(marks, is_leaf=lambda value: value is not marks)
    return [pytree.keystr(path) for path, _ in found] if len(found) == count else [f"[{i}]" for i in range(count)]


def _kind(spec: pytree.TreeSpec) -> str:
    return "one value" if spec.is_leaf() else f"a {getattr(spec.type, '__name__', spec.type)}"


def _counted(spec: pytree.TreeSpec) -> str:
    return f"{spec.num_children} {'entry' if spec.num_children == 1 else 'entries'}"


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))


log = logging.getLogger(__name__)

# Training and evaluation, with gradients and without, take three.
_EXPECTED_RECAPTURES = 3
_MORE = "Raise max_captures in graphshard.compile to keep more."


@dataclass
class RecaptureLog:
    """Log of the captures of one model, or of one entry into it.

    Attributes:
        recaptures: the number of captures after the first.
        last: the reason of the last capture.
    """

    recaptures: int = 0
    last: Reason = field(default_factory=lambda: Reason(""))
    _remedies: set[str] = field(default_factory=set)
    _warned_of_limit: bool = False

    def capture(self, label: str, number: int, reason: Reason) -> None:
        """Log one capture; a warning says a remedy once."""
        self.last = reason
        self.recaptures += not reason.first
        if self.recaptures <= _EXPECTED_RECAPTURES:
            log.info("capture %d of %s: %s", number, label, reason.text)
        else:
            log.warning("capture %d of %s: %s%s", number, label, reason.text, self._remedy(reason))
        if not reason.first:
            recompiles_log.debug("Recompiling %s in graphshard (capture %d)\n    - %s", label, number, reason.text)
            trace_recapture(label, number, reason.text)

    def _remedy(self, reason: Reason) -> str:
        if not reason.remedy or reason.remedy in self._remedies:
            return ""
        self._remedies.add(reason.remedy)
        return f". {reason.remedy}"

    def eviction(self, label: str, titles: list[str], most: int) -> None:
        """Log which programs were evicted for the last capture, the first time as a warning."""
        for title in titles:
            log.info("evicted %s, the least recently used program", title)
        if not self._warned_of_limit:
            self._warned_of_limit = True
            log.warning(
                "%s has more than max_captures=%d programs: from now on the least recently used one is evicted, and "
                "captured again when a call needs it. The last capture: %s. %s",
                *(label, most, self.last.text, " ".join(filter(None, [self.last.remedy, _MORE]))),
            )


@dataclass(eq=False)
class Installed:
    """A program that is bound to a module, and what it takes for granted of calls.

    Attributes:
        loaded: the program is from a file. It stays, whatever the limit of programs.
        call: signature of the call that it was captured for, with all inputs.
        used: position of its last call among the calls of all programs.
    """

    executable: Executable
    guard: TracedGuard | JointGuard
    loaded: bool = False
    call: Signature | None = None
    used: int = 0


@dataclass
class Executables:
    """Bound programs by the signature they were captured for, the most recently used first.

    Attributes:
        added: the number of programs so far, with those that were evicted.
        changes: why those with the signature of the last call did not serve it.
        log: of the captures.
        captured: signature of the last call that a program was captured for, with all inputs.
    """

    known: dict[Signature, list[Installed]] = field(default_factory=dict)
    added: int = 0
    changes: list[str] = field(default_factory=list)
    log: RecaptureLog = field(default_factory=RecaptureLog)
    captured: Signature | None = None
    _calls: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.known.values()))

    def add(self, signature: Signature, installed: Installed) -> None:
        """Add a program, which is the most recently used one."""
        self.added += 1
        installed.call = self.captured or signature
        self.known.setdefault(signature, []).append(installed)
        self._use(installed, self.known[signature])

    def find(self, signature: Signature, scope: Mapping[str, Any]) -> Installed | None:
        """Return the program for a call.

        Args:
            scope: module, args and kwargs of the call.
        """
        self.changes = []
        programs = self.known.get(signature, [])
        for installed in programs:
            change = installed.guard.change(scope)
            if not change:
                self._use(installed, programs)
                return installed
            self.changes.append(change)
        return None

    def with_digest(self, signature: Signature, digest: str) -> Installed | None:
        """Return a program for calls with a signature whose trace had a digest."""
        known = self.known.get(signature, ())
        return next((one for one in known if one.executable.program.digest == digest), None)

    def _use(self, installed: Installed, programs: list[Installed]) -> None:
        self._calls += 1
        installed.used = self._calls
        if programs[0] is not installed:
            programs.remove(installed)
            programs.insert(0, installed)

    def reason(self, signature: Signature, call: Signature) -> Reason:
        """Return why a call needs another program: how it differs from the nearest one.

        Args:
            signature: that programs of the call have.
            call: the signature with all inputs, of which guards may decide.
        """
        self.captured = call
        if not self.known:
            return FIRST_CALL
        recent = sorted(itertools.chain.from_iterable(self.known.values()), key=lambda installed: -installed.used)
        if self.changes:
            for before in (installed.call for installed in recent):
                found = reason_at(self.changes[0], call, before) if before is not None else None
                if found is not None:
                    return replace(found, text=f"{found.text} ({self.changes[0]})")
            return Reason(self.changes[0], remedy_of(self.changes[0]))
        return reason_of(call, [installed.call for installed in recent if installed.call is not None])

    def evict(self, most: int, left: Collection[str]) -> list[Installed]:
        """Remove the least recently used programs until there are at most so many; the most recent one stays.

        A call that is still to be differentiated holds its program, so its backward runs as before.

        Args:
            most: the number of programs besides those of files.
            left: names of parameters of which earlier microbatches have left gradients. A program that is the only one
                to reduce some of these stays until that is done.
        """
        by_age = sorted(itertools.chain.from_iterable(self.known.values()), key=lambda installed: installed.used)
        candidates = [installed for installed in by_age if not installed.loaded]
        excess, evicted = len(candidates) - most, list[Installed]()
        for installed in candidates[:-1]:
            if len(evicted) < excess and not self._only_one_for(left, installed, evicted):
                evicted.append(installed)
        if evicted:
            kept = {
                signature: [installed for installed in programs if installed not in evicted]
                for signature, programs in self.known.items()
            }
            self.known = {signature: programs for signature, programs in kept.items() if programs}
        return evicted

    def _only_one_for(self, left: Collection[str], installed: Installed, evicted: Collection[Installed]) -> bool:
        """Return whether no other program that stays computes all gradients that are left and that this one does."""
        needed = installed.executable.trained.keys() & left
        others = itertools.chain.from_iterable(self.known.values())
        stay = (other for other in others if other is not installed and other not in evicted)
        return bool(needed) and not any(needed <= other.executable.trained.keys() for other in stay)
