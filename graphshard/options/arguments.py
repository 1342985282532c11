"""Public functions that take options: their signatures, and the error for an argument that there is not.

    @takes_options
    def load(path, model, mesh=None, **options: Unpack[CompileArguments]): ...

    load(path, model, mesh=None, *, reshard_after_forward: bool | int | None = None, ..., verify: Level | None = None)

mypy and IDEs read the `TypedDict`; `help`, notebooks and documentation read the signature, which has the defaults, too.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from graphshard.ir.errors import ArgumentError
from graphshard.ir.text import brief
from graphshard.options.options import Options

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def takes_options(function: FunctionT, without: Collection[str] = (), also: Sequence[type] = ()) -> FunctionT:
    """Write out the options in the signature of a function that takes them as `**options`, behind its own arguments.

    Args:
        without: names of options that it does not take.
        also: dataclasses whose fields it takes, too.
    """
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {*signature.parameters, *without}
    fields = [f for kind in (*also, Options) for f in dataclasses.fields(kind) if f.name not in known]
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type) for f in fields
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def options_given(function: Callable[..., Any], given: Mapping[str, Any]) -> Options:
    """The options that a function was given as `**options`.

    Raises:
        ArgumentError: one of them is none, or its value is wrong.
    """
    check_names(function, given)
    return Options(**given)


def check_names(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the first name that is no argument of a function; it says which one may be meant."""
    check_known(f"{function.__name__}()", given, list(inspect.signature(function).parameters))


def check_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ArgumentError for the first of the names given to something that it does not know."""
    for name in given:
        if name not in known:
            longer = [other for other in known if other.startswith(name)]
            close = [*longer, *difflib.get_close_matches(name, known, 1)]
            hint = f"Did you mean {close[0]!r}?" if close else f"It takes {', '.join(known)}."
            raise ArgumentError(f"{what} got an unexpected keyword argument {brief(name)}. {hint}")
