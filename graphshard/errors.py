"""Every error a user can meet, in one place.

A message names the culprit (argument, parameter, module or line) and the remedy. The classes also derive from
the built-in exception that fits, so that code which catches `ValueError` keeps working.
"""

from __future__ import annotations

import unicodedata

__all__ = [
    "AnomalyError",
    "ArgumentError",
    "ArtifactError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "DivergenceError",
    "GraphshardError",
    "InfeasibleError",
    "InputError",
    "MaterializationError",
    "ParameterError",
    "PassError",
    "PeerError",
    "StageError",
    "UnsupportedError",
]

# Characters of a message about a file.
_LONGEST = 2000
# Unicode categories that a terminal acts on: control characters, direction marks, surrogates, separators.
_OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(text: str, *, lines: bool = True) -> str:
    """Escape the characters that a terminal acts on: the escape character becomes `\\x1b`.

    Args:
        lines: keep line breaks and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        char if char in kept or unicodedata.category(char) not in _OBEYED else repr(char)[1:-1] for char in text
    )


class GraphshardError(Exception):
    """Base of all errors graphshard raises on purpose."""


class ArgumentError(GraphshardError, ValueError):
    """An argument of a public function is wrong."""


class InfeasibleError(ArgumentError):
    """No schedule fits in the memory limit.

    Attributes:
        smallest: the least bytes with which a schedule exists.
    """

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str, int]]:
        """Made again from both arguments, in another process."""
        return type(self), (str(self), self.smallest)


class BatchError(ArgumentError):
    """A mesh does not divide the batch of a step, or is larger than it."""


class StageError(ArgumentError):
    """A model or a batch cannot be cut into the mesh's number of pipeline stages."""


class UnsupportedError(GraphshardError, NotImplementedError):
    """A setting of FSDP2 that graphshard does not have; the message says what to do instead."""


class CaptureError(GraphshardError, RuntimeError):
    """The module's forward cannot be turned into a graph that does the same."""


class MaterializationError(GraphshardError, RuntimeError):
    """A parameter or buffer is still on the meta device when the module is called."""


class ParameterError(GraphshardError, RuntimeError):
    """A parameter is not what it was when the module was compiled."""


class AnomalyError(GraphshardError, RuntimeError):
    """Backward makes nan in gradients of parameters, in anomaly mode."""


class InputError(GraphshardError, ValueError):
    """An input of the call cannot be used: wrong device, or a type that pytree does not know."""


class CheckpointError(GraphshardError, RuntimeError):
    """A checkpoint cannot be saved, or is incomplete or damaged, or belongs to another model."""


class ArtifactError(GraphshardError, RuntimeError):
    """A `.gshard` file is damaged or not one, does not fit the model, the mesh or the machine, or lacks a program.

    Attributes:
        field: what of the fingerprint differs, such as "mesh"; "" if it is something else.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        shown = visible(message)  # a file's own words are in it
        super().__init__(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}...")
        self.field = field


class DivergenceError(GraphshardError, RuntimeError):
    """Two ranks made different programs."""


class PeerError(GraphshardError, RuntimeError):
    """Another rank failed, ended or does not come, so this one cannot go on.

    Attributes:
        rank: which.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class PassError(GraphshardError, RuntimeError):
    """A pass broke its contract; addressed to the author of the pass.

    Attributes:
        rule: name of the rule of `graphshard.pipeline.rules` that was broken; "" if it was none of them.
        author: name of the pass.
    """

    def __init__(self, message: str, *, rule: str = "", author: str = "") -> None:
        super().__init__(message)
        self.rule = rule
        self.author = author


class GraphBreak(CaptureError):
    """Forward cannot be traced as one graph.

    Attributes:
        where: file and line number in the model; "" if unknown.
        at: place and text of the line, to follow a sentence; "" if unknown.
        source: text of the line.
        reason: one sentence.
        remedy: one sentence.
        raised: text of the exception that forward raises for these inputs; "" if none.
        is_own: a statement of forward raises it, not an operator.
    """

    def __init__(
        self,
        function: str,
        reason: str,
        remedy: str,
        *,
        where: str = "",
        source: str = "",
        raised: str = "",
        is_own: bool = False,
    ) -> None:
        self.where, self.source, self.reason, self.remedy, self.raised = where, source, reason, remedy, raised
        self.is_own, self.at = is_own, f" at {where} ({source})" if where else ""
        at = f" at {where}\n    {source}\n" if where else ": "
        super().__init__(f"graphshard cannot capture {function}{at}{reason} {remedy}")
