"""Graph breaks and other failures of a trace as a `CaptureError` that names the user's line, the reason and the remedy.

    torch._dynamo.exc.Unsupported, 30 lines   ->   GraphBreak: where, reason in one sentence, remedy

`module/_split_module.py` runs a module that has a graph break in Python; `explain`, `export` and `fullgraph=True` raise
the error. An exception that forward itself raises is that exception, not a graph break.
"""

from __future__ import annotations

import ast
import builtins
import logging
import re
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from graphshard.errors import CaptureError, GraphBreak, GraphshardError
from graphshard.torch_compat.dynamo import ObservedException, TorchDynamoException, TorchRuntimeError
from graphshard.torch_compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    quiet_tracing,
)
from graphshard.utils.source_lines import source_line

log = logging.getLogger(__name__)
T = TypeVar("T")

_BREAKS = (
    TorchDynamoException,
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,  # such as of a context_fn that is a function in forward
)
# Warnings of Dynamo that the error repeats, and warnings of reads that Dynamo makes itself.
_QUIET = (
    "Dynamo does not know how to trace",
    "Dynamo detected a call to a `functools.lru_cache`",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r".*should not be instantiated. Methods on autograd functions are all static",
)
# Of torch 2.11, where hooks of tensors are registered.
_IN_NO_ORDER = re.compile(r"was used before it has been defined|referenced nonexistent value")
# An operator's error for fake tensors, which eager mode does not raise.
_WITHOUT_DATA = "its data is not allocated yet"
# Characters of a reason in a message.
_LONGEST = 160

# What to do, by a part of the reason or of the source line; the first that is found holds.
_REMEDIES = (
    (
        r"_hook_installation_lock",
        "Call the model once before graphshard.compile: transformers installs hooks in the first call that asks for "
        "hidden states or attentions.",
    ),
    (
        r"backwards? hooks",
        "Register the hook on tensors of forward, or on the compiled module itself, whose hooks are not traced.",
    ),
    (
        r"[Dd]ata-dependent|reads values of tensors|TensorVariable\(\)|\.item\(|\.tolist\(",
        "Compute with tensors what depends on values (torch.where, a mask), or decide outside of forward and pass a "
        "Python value.",
    ),
    (
        r"\brandom\b|\bRandom\b|numpy\.random",
        "Draw with torch (torch.rand), or draw outside of forward and pass the number.",
    ),
    (
        r"requires_grad|autograd",
        "Differentiate with regard to an input of forward, or compute the gradient outside of the model.",
    ),
    (r"\bopen\b|\bfile\b|socket|time\.", "Do this outside of forward and pass its result."),
)
_ANY_REMEDY = "Move this out of forward, or write it with functions of torch."


def traced_or_break(function: str, trace: Callable[[], T]) -> T:
    """Return the result of a function that traces "Net.forward", say; turn errors of tracing into `GraphBreak`."""
    try:
        with quiet_tracing():
            for message in _QUIET:
                warnings.filterwarnings("ignore", message=message)
            return trace()
    except ConstraintViolationError as error:
        raise CaptureError(
            f"graphshard cannot capture {function} with these dynamic sizes: {' '.join(str(error).split())} Declare "
            "other ranges, or leave the dimension out of dynamic_shapes."
        ) from error
    except _BREAKS as error:
        log.debug("a trace of %s failed", function, exc_info=True)
        found = _checks_error(error) or _graph_break(function, error)
        if isinstance(found, GraphBreak) and not found.where:
            where, source = source_line(getattr(error, "real_stack", None) or ())
            found = GraphBreak(function, found.reason, found.remedy, where=where, source=source)
    except RuntimeError as error:
        if not _IN_NO_ORDER.search(str(error)):
            raise
        log.debug("a trace of %s failed", function, exc_info=True)
        found = GraphBreak(function, "Torch traced a value before what it is made of.", _ANY_REMEDY)
    raise found  # without the tracer's error, which holds the trace and its tensors


def raise_break(error: GraphBreak) -> NoReturn:
    """Raise what forward itself raises, as eager mode does, or else the graph break."""
    raised = _exception_of(error.raised) if error.is_own else None
    if raised is None:
        raise error
    raise raised from error  # Dynamo may be wrong about it, and the cause names the line


def _exception_of(text: str) -> Exception | None:
    """Return the exception that its text describes, such as "ValueError('3 dims')"; None if it is not a builtin."""
    name, _, rest = text.removesuffix(")").partition("(")
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        args = ast.literal_eval(f"({rest},)") if rest else ()
    except (SyntaxError, ValueError):
        args = (rest,)
    return kind(*args)


def _graph_break(function: str, error: Exception) -> GraphBreak:
    raised = _raised(error)
    where, source = source_line(getattr(error, "real_stack", None) or ())
    if raised:
        reason, remedy = f"Forward raises {raised}.", "Check the inputs."
    else:
        reason = _reason(error)
        said = f"{reason} {source} {getattr(error, 'gb_type', '')} {str(error).partition('Developer debug context')[0]}"
        remedy = next((advice for pattern, advice in _REMEDIES if re.search(pattern, said)), _ANY_REMEDY)
    is_own = not (isinstance(error, TorchRuntimeError) or _is_of_operator(error))
    return GraphBreak(function, reason, remedy, where=where, source=source, raised=raised, is_own=is_own)


def _checks_error(error: BaseException | None) -> GraphshardError | None:
    """Return an error of this package that torch has wrapped."""
    while error is not None and not isinstance(error, GraphshardError):
        error = error.__cause__ or error.__context__
    return error


def _raised(error: Exception) -> str:
    """Return the exception that forward raises, as Dynamo has seen it; "" for anything else that stops it."""
    if isinstance(error, TorchRuntimeError):
        if _WITHOUT_DATA in str(error):
            return ""
        found = re.search(r"got (\w+\(.*\))\.?$", str(error), re.MULTILINE)
        return found[1] if found else "an error"
    if _is_of_operator(error):
        found = re.search(r"debug context: TypeError <.*?>: (.+)", str(error))
        return f"TypeError({found[1] if found else ''!r})"
    if isinstance(error.__cause__, ObservedException):
        found = re.search(r"raised exception (\w+\(.*\))$", str(error), re.MULTILINE)
        return found[1] if found else "an exception"
    is_assert = str(getattr(error, "gb_type", "")).startswith("Data-dependent assertion")
    return "AssertionError()" if is_assert else ""


def _is_of_operator(error: Exception) -> bool:
    """Return whether an operator does not take what it is given."""
    return str(getattr(error, "gb_type", "")).startswith("TypeError when making fake")


def _reason(error: Exception) -> str:
    """Return the reason in one sentence."""
    text = str(error)
    if _WITHOUT_DATA in text:
        return "The operator reads values of tensors, which a trace does not have."
    if isinstance(error, GuardOnDataDependentSymNode) or re.search("Could not guard on data-dep|torch._check", text):
        return "A Python value that depends on values of tensors decides here."
    explained = re.search(r"Explanation: (\S.*)", text)
    reason = explained[1] if explained else str(getattr(error, "gb_type", "")) or text.strip().partition("\n")[0]
    reason = re.split(r"(?<=[^.][.)])\s+(?=[A-Z])", reason)[0].strip()
    mutated = re.search(r"Attempted to mutate (\S.*)", text)
    if mutated:  # Dynamo explains without saying what
        reason = f"{reason.rstrip('.')}: {mutated[1].rstrip('.')}."
    reason = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."
    return reason if reason.endswith(".") else f"{reason}."
