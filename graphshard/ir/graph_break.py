"""Errors of a trace: what cannot be traced as one graph, and what no program can keep."""

from __future__ import annotations

from graphshard.errors import CaptureError


class GraphBreak(CaptureError):
    """Forward cannot be traced as one graph.

    Attributes:
        where: file and number of the line in the model; "" if it is not known.
        source: the line.
        reason: in one sentence.
        remedy: in one sentence.
        raised: the exception that forward raises for these inputs, as text; "" if it raises none.
        is_own: a statement of forward raises it, and not an operator.
        differentiates: forward calls autograd in a way that is not traced.
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
        self.is_own = is_own
        self.differentiates = "autograd.grad" in reason or "requires_grad" in reason
        at = f" at {where}\n    {source}\n" if where else ": "
        super().__init__(f"graphshard cannot capture {function}{at}{reason} {remedy}")


class UntraceableError(Exception):
    """Operation that no program can keep, raised where it happens, so that the traceback leads to the line.

    Attributes:
        kind: a key of the advice.

    Args:
        what: names the operator or the tensor.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind
