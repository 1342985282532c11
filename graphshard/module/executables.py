"""Which of a module's programs runs a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphshard.capture.fit import misfit
from graphshard.capture.signature import Signature
from graphshard.runtime.step import Executable

# How many shapes are remembered to fit a program with dynamic sizes; finding it again costs under a millisecond.
REMEMBERED_SHAPES = 1024


@dataclass
class Executables:
    """Bound programs by the signature they were captured for.

    Attributes:
        misfits: why those with dynamic sizes did not fit the last call that none was found for.
    """

    known: dict[Signature, Executable] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    _fits: dict[Signature, Executable] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.known)

    def find(self, signature: Signature, leaves: Sequence[Any]) -> Executable | None:
        """The program for a call: captured for its signature, or with dynamic sizes that its inputs fit."""
        return self.known.get(signature) or self._fitting(signature, leaves)

    def _fitting(self, signature: Signature, leaves: Sequence[Any]) -> Executable | None:
        if signature in self._fits:
            return self._fits[signature]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found = None
        self.misfits = []
        for known, executable in self.known.items():
            if executable.program.sizes and known.loose() == signature.loose():
                why = misfit(executable.program, tensors)
                found = executable if not why else found
                self.misfits += [why] if why else []
        if found is not None:
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
        reason = signature.changes_from(list(self.known)[-1])
        return f"{reason} ({'; '.join(self.misfits)})" if self.misfits else reason
