"""Which of a module's programs runs a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from graphshard.capture.fit import misfit
from graphshard.capture.signature import Signature
from graphshard.ir.state import Place
from graphshard.module.guard import Guard
from graphshard.module.value_checks import ValueChecks
from graphshard.runtime.step import Executable

# How many shapes are remembered to fit a program with dynamic sizes; finding it again costs under a millisecond.
REMEMBERED_SHAPES = 1024


@dataclass(frozen=True)
class Installed:
    """A program that is bound to a module, and what it takes for granted of that module's attributes, and of values."""

    executable: Executable
    guard: Guard
    values: ValueChecks | None = None


@dataclass
class Executables:
    """Bound programs by the signature they were captured for.

    Attributes:
        misfits: why those with dynamic sizes did not fit the last call that none was found for.
        changes: of the module, why those with the signature of that call did not.
        number: where a number is that was another one, if that is why the last of them did not.
        by_values: values of inputs or buffers are why.
    """

    known: dict[Signature, list[Installed]] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    number: Place | None = None
    by_values: bool = False
    _fits: dict[Signature, list[Installed]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.known.values()))

    def add(self, signature: Signature, installed: Installed) -> None:
        """One more program."""
        self.known.setdefault(signature, []).append(installed)
        self._fits.clear()

    def find(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> Installed | None:
        """The program for a call with these tensors: captured for its signature, or with sizes that they fit."""
        self.misfits, self.changes, self.number, self.by_values = [], [], None, False
        for one in self.known.get(signature, ()):
            if self._holds(one, tensors):
                return one
        fitting = self._fitting(signature, tensors)
        return next((one for one in fitting if self._holds(one, tensors)), None)

    def _holds(self, installed: Installed, tensors: Sequence[torch.Tensor]) -> bool:
        change = installed.guard.change(tensors)
        self.by_values = not change and installed.values is not None
        if not change and installed.values is not None:
            change = installed.values.change([*tensors, *installed.guard.tensors()])
        if change:
            self.changes.append(change)
            self.number = installed.guard.number
        return not change

    def _fitting(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> list[Installed]:
        if signature in self._fits:
            return self._fits[signature]
        found = []
        for known, programs in self.known.items():
            for installed in programs:
                if known != signature and installed.executable.program.sizes and known.loose() == signature.loose():
                    why = misfit(installed.executable.program, tensors)
                    if why:
                        self.misfits.append(why)
                    else:
                        found.append(installed)
        if found:
            if len(self._fits) >= REMEMBERED_SHAPES:
                self._fits.clear()
            self._fits[signature] = found
        return found

    def conditions_changed(self) -> None:
        """Compilation may have found conditions on dynamic sizes: what fitted is asked again."""
        self._fits.clear()

    def reason(self, signature: Signature) -> str:
        """Why a call with this signature needs another program."""
        if not self.known:
            return "first call"
        if self.changes:
            return self.changes[-1]
        reason = signature.changes_from(list(self.known)[-1])
        return f"{reason} ({'; '.join(self.misfits)})" if self.misfits else reason
