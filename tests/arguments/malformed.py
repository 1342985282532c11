"""Malformed values for parameters of public functions, and requirements on the errors."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.export import Dim

import graphshard
from graphshard.errors import CaptureError
from graphshard.passes import MakePlan
from graphshard.utils.text import users_class
from tests import helpers
from tests.helpers import Blocks

POLICY = MixedPrecisionPolicy()
LONG = "x" * 10_000
ESCAPES = "\x1b[31m\n"


class Hostile:
    """A value whose repr raises, and that cannot be compared."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


def fails(*_: Any) -> Any:
    """Raise an error, as a user's function."""
    raise KeyError("of the user's function")


class Failing:
    """An iterable that raises."""

    def __iter__(self) -> Iterator[Any]:
        raise KeyError("of the user's class")


# Invalid paths: of another type, empty, with a NUL, longer than file systems support.
NO_PATHS: tuple[Any, ...] = (3, b"bytes", "", "a\0b", LONG, ["a"], Hostile())
NO_BOOLS: tuple[Any, ...] = (None, "yes", 1.0, 3, [True], Hostile())
NO_COUNTS: tuple[Any, ...] = (-1, True, 1.5, math.nan, "2", [2], Hostile(), torch.ones(2))
NO_FUNCTIONS: tuple[Any, ...] = (3, "print", [print], Hostile())
NO_MODELS: tuple[Any, ...] = (None, 3, "model", nn.Linear, nn.Module(), nn.ModuleList(), torch.ones(2), Hostile())
UNCOMPILED: tuple[Any, ...] = (*NO_MODELS, Blocks(1))
NO_MESHES: tuple[Any, ...] = (
    *("8", 1.5, True, 0, -1, 10**30, 10**5000, {}, {3: 2}, {"": 2}, {"a": "2"}, {"a": 2.5}, {"a": True}, Hostile()),
    *(LONG, nn.Linear, b"8", torch.ones(2)),
)
NO_TEXTS: tuple[Any, ...] = (None, 3, b"{}", "", "{", "3", "[]", "null", '{"a": NaN}', "[" * 100_000, '{"a":' * 9_999)

NO_SECONDS: tuple[Any, ...] = (
    *(3, [1], "x", {"k": "x"}, {3: 1.0}, {"k": math.nan}, {"k": -1}, {"k": True}, {None: None}, Hostile()),
)

# Invalid values by option of `compile`.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (0.5, "yes", -1, 0, 3, 10**30, [True], math.nan, torch.ones(2), Hostile()),
    "shard_placement_fn": (
        *(1, "x", fails, lambda: None, lambda _: Shard(10**30)),
        *(lambda _: Shard("0"), Hostile(), Shard(0)),
    ),
    "mp_policy": (
        *("bf16", 3, torch.bfloat16, MixedPrecisionPolicy, {"": None}, {3: POLICY}, {None: POLICY}, {"[": POLICY}),
        *(MixedPrecisionPolicy("bf16"), MixedPrecisionPolicy(3), MixedPrecisionPolicy(torch.int32)),
        *(MixedPrecisionPolicy(reduce_dtype="x"), MixedPrecisionPolicy(reduce_dtype=torch.bool)),
        *(MixedPrecisionPolicy(output_dtype="x"), MixedPrecisionPolicy(cast_forward_inputs="no")),
        *([POLICY], {"": MixedPrecisionPolicy("bf16")}, {LONG: POLICY}, {ESCAPES: POLICY}, Hostile()),
    ),
    "offload_policy": (True, "cpu", CPUOffloadPolicy, CPUOffloadPolicy(pin_memory="no"), 3, Hostile()),
    "ignored_params": (3, nn.Parameter(torch.ones(1)), "weight", ["weight"], [None], [[]], Failing(), [Hostile()]),
    "units": (
        *("layers.*", 3, b"layers.*", [3], [None], [()], [("layers.*", 3)], [lambda: True], [fails], {"layers.*": 1}),
        *([LONG], ["[layers"], [ESCAPES], [""], [["layers.*"]], {"layers.*"}, Failing(), Hostile(), [Hostile()]),
    ),
    "backend": (None, "cuda", 3, [], LONG, ESCAPES, math.nan, Hostile()),
    "activation": (
        *("some", True, -1, 2, math.nan, [3], [torch.ops.aten.mm], [print], {}, b"full", 1j, torch.ones(2), [[]]),
        *(LONG, Hostile(), [Hostile()]),
    ),
    "memory_limit": (0, -1, True, 1.5, "4GB", math.nan, math.inf, [1], Hostile()),
    "hardware": (*NO_PATHS, "tpu", "/", "/dev/zero", graphshard.profiling.Profile, ESCAPES),
    "dynamic_shapes": ("auto", 3, Dim("b"), {0}, Hostile(), print),
    "max_captures": (0, -1, True, 1.5, "8", None, math.nan, [], Hostile()),
    "fullgraph": (None, 1, "yes", [], torch.ones(1), Hostile()),
    "passes": ([], "default", graphshard.Pipeline, MakePlan(), 3, Hostile()),
    "reduce": ("sum", 3, True, [], b"exchange", LONG, Hostile()),
    "verify": ("always", 3, True, [], LONG, Hostile()),
}
# Invalid values in combination with inputs.
DYNAMIC: tuple[Any, ...] = (
    *(({0: "x"},), ({"a": Dim("b")},), ({0: 3.5},), ({99: Dim("b")},), ({-9: Dim.AUTO},), (None, None, None)),
    *({"nope": {0: Dim.AUTO}}, {3: {}}, ([],), (3,), ({0: Hostile()},), ({0: Dim("b", min=7)},), ((Dim("a"),) * 3,)),
)
NO_INPUTS: tuple[Any, ...] = (
    *(3, "x", torch.zeros(3, 4), {"x": 1}, (torch.zeros(3, 7),), (), (torch.zeros(()),)),
    *((torch.zeros(3, 4),) * 2, ("x",), (None,), (torch.zeros(3, 4, dtype=torch.int64),), Hostile()),
    *((10**30,), iter([1])),
)
NO_KWARGS: tuple[Any, ...] = (
    *(3, "x", [1], [("x", 1)], {3: torch.zeros(3, 4)}, {"nope": torch.zeros(3, 4)}, {"x": "y"}),
    *({LONG: 1}, {ESCAPES: 1}, {None: 1}, Hostile(), {"self": 1}),
)


class Row(NamedTuple):
    """Calls of a function, each with a malformed value for a parameter.

    `good` are the other arguments; arguments that a call may change are functions that create them. `named` is a
    pattern for the parameter's name in the error.
    """

    function: Callable[..., Any]
    parameter: str
    values: Sequence[Any]
    good: Mapping[str, Any] = MappingProxyType({})
    named: str = ""

    def faults(self) -> list[str]:
        """Return the faults of the errors."""
        found = []
        for value in self.values:
            given = {name: item() if isinstance(item, Made) else item for name, item in self.good.items()}
            given[self.parameter] = value
            model = given.get("model")
            before = state_of(model) if isinstance(model, nn.Module) and model is not value else None
            error = error_of(self.function, **given)
            if fault := fault_of(error, self.named or rf"\b{self.parameter}\b", value):
                found.append(f"{shown(value)}: {fault}")
            elif before is not None and before != state_of(model):
                found.append(f"{shown(value)}: the model is another than before")
        return found


class Made(NamedTuple):
    """Creates an argument for each call."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        return self.make()


def state_of(model: nn.Module) -> Any:
    """Return the class of a module, and the identity of its parameters by name."""
    return type(model), [(name, id(param)) for name, param in model.named_parameters()], set(model.__dict__)


def error_of(function: Callable[..., Any], **given: Any) -> BaseException | None:
    """Return the exception that a call raises."""
    try:
        function(**given)
    except Exception as error:
        return error
    return None


def fault_of(error: BaseException | None, named: str, value: Any) -> str:
    """Return the fault of an error about an argument, or ""."""
    text = str(error)
    if error is not None and any(
        frame.name == "forward" and frame.filename == helpers.__file__
        for frame in traceback.extract_tb(error.__traceback__)
    ):
        return ""  # forward runs and raises as in eager mode
    if not isinstance(error, graphshard.GraphshardError):
        return f"raw {type(error).__name__}: {text[:200]}"
    if any(ord(char) < 32 and char != "\n" for char in text):
        return f"control characters: {text[:300]!r}"
    if len(text) > 2000:
        return f"{len(text)} characters: {text[:300]}"
    if isinstance(error, CaptureError) and re.search(
        r"This line cannot be traced, or it fails for these inputs|[Ff]orward raises \w+\(", text
    ):
        return ""  # it says where and why forward fails
    if not re.search(named, text):
        return f"no {named} in: {text[:300]}"
    return "" if any(part in text for part in parts_of(value)) else f"the value is not shown: {text[:300]}"


def parts_of(value: Any) -> list[str]:
    """Return accepted descriptions of a value: its class, the start of its repr, or those of its contents."""
    kind = users_class(value).__name__
    found = [kind, getattr(value, "__name__", kind), shown(value)[:12].rstrip("'"), str(getattr(value, "name", kind))]
    if isinstance(value, str) and value:
        found.append(value[:12])
    if isinstance(value, (list, tuple, set)):
        found += [part for item in value for part in parts_of(item)]
    if isinstance(value, dict):
        found += [part for pair in value.items() for item in pair for part in parts_of(item)]
    if isinstance(value, (MixedPrecisionPolicy, CPUOffloadPolicy)):
        found += [part for item in vars(value).values() if item is not None for part in parts_of(item)]
    return found


def shown(value: Any) -> str:
    try:
        return repr(value)[:60]
    except Exception:
        return type(value).__name__
