"""Which of a module's programs runs a call."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphshard.frontend.signature import Signature
from graphshard.module.joint_guard import JointGuard
from graphshard.module.recapture_log import RecaptureLog
from graphshard.module.recapture_reason import FIRST_CALL, Reason, reason_at, reason_of, remedy_of
from graphshard.module.traced_guard import TracedGuard
from graphshard.runtime.step import Executable


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
