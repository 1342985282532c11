"""Errors of tracing."""

from __future__ import annotations

from graphshard.errors import CaptureError


class GraphBreak(CaptureError):
    """Forward cannot be traced as one graph.

    Attributes:
        where: file and line number in the model; "" if unknown.
        source: text of the line.
        reason: one sentence.
        remedy: one sentence.
        raised: text of the exception that forward raises for these inputs; "" if none.
        is_own: a statement of forward raises it, not an operator.
        differentiates: forward calls autograd in an unsupported way.
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
    """Unsupported operation, raised where it happens, so that the traceback has the line.

    Attributes:
        kind: key of the advice in the message.

    Args:
        what: name of the operator or tensor.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind
