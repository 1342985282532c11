"""What each option may be by itself, whatever the model and the mesh; found before anything is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from torch import nn
from torch._ops import OpOverload
from torch.distributed.fsdp import OffloadPolicy
from torch.export import Dim
from torch.utils import _pytree as pytree

from graphshard.ir.errors import ArgumentError
from graphshard.ir.given import check_bool, check_choice, check_count, is_int
from graphshard.ir.precision import check_policy
from graphshard.ir.text import brief
from graphshard.lower.backends import Backend
from graphshard.passes import ActivationCheckpointing
from graphshard.pipeline.observe import Level
from graphshard.pipeline.pipeline import Pipeline

_VERIFY = "GRAPHSHARD_VERIFY"


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the first option that is wrong by itself; the message names it and the remedy.

    Args:
        options: all fields of `Options` by name.
    """
    for name, check in CHECKS.items():
        check(options[name])
    if options["activation"] == "auto" and options["memory_limit"] is None:
        raise ArgumentError(
            'activation="auto" is decided under a limit of memory. Give memory_limit= in bytes, such as what the '
            "device has less what other things on it take."
        )
    if options["activation"] is not None and options["passes"] is not None:
        name = ActivationCheckpointing.name
        if name in {step.name for step in options["passes"]}:
            raise ArgumentError(f"activation: passes has {name!r} already. Give one of the two.")


def level_of(verify: Any) -> Any:
    """When rules are verified: as given, or by GRAPHSHARD_VERIFY."""
    return verify if verify is not None else os.environ.get(_VERIFY, "ends")


def _reshard_after_forward(value: Any) -> None:
    if not (value is None or isinstance(value, int)):
        raise ArgumentError(
            "reshard_after_forward must be True, False, None, or a number of ranks that gather again in backward, "
            f"got {brief(value)}."
        )


def _shard_placement_fn(value: Any) -> None:
    if not (value is None or callable(value)):
        raise ArgumentError(
            f"shard_placement_fn must be a function from a parameter to Shard(dim) or None, got {type(value).__name__}."
        )


def _mp_policy(value: Any) -> None:
    if isinstance(value, Mapping):
        for unit, policy in value.items():
            if not isinstance(unit, str):
                raise ArgumentError(f"mp_policy must have patterns of names of units for keys, got {brief(unit)}.")
            check_policy(policy, f"mp_policy[{brief(unit)}]")
    elif value is not None:
        check_policy(value, "mp_policy")


def _offload_policy(value: Any) -> None:
    if not (value is None or isinstance(value, OffloadPolicy)):
        raise ArgumentError(
            f"offload_policy must be a torch.distributed.fsdp.CPUOffloadPolicy or None, got {type(value).__name__}."
        )
    if value is not None:
        check_bool("offload_policy.pin_memory", getattr(value, "pin_memory", True))


def _ignored_params(value: Any) -> None:
    if isinstance(value, (nn.Parameter, str)) or not (value is None or isinstance(value, Iterable)):
        raise ArgumentError(f"ignored_params must be a set of the model's parameters, got a {type(value).__name__}.")


def _units(value: Any) -> None:
    if isinstance(value, str):
        raise ArgumentError(f"units must be a sequence of name patterns, got one string. Pass [{brief(value)}].")
    if not (value is None or (isinstance(value, Sequence) and not isinstance(value, bytes))):
        raise ArgumentError(f"units must be a sequence of name patterns such as ['layers.*'], got {brief(value)}.")


def _backend(value: Any) -> None:
    check_choice("backend", value, get_args(Backend))


def _activation(value: Any) -> None:
    if isinstance(value, (list, tuple, set, frozenset)):
        for op in value:
            if not isinstance(op, OpOverload):
                raise ArgumentError(
                    "activation lists operators whose results are saved, such as torch.ops.aten.mm.default, got "
                    + (str(op)[:60] if hasattr(op, "overloads") else brief(op))
                    + (f". Choose one of its overloads: {_overloads(op)}." if hasattr(op, "overloads") else ".")
                )
        return
    share = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
    if not (value is None or (isinstance(value, str) and value in ("full", "auto")) or share):
        raise ArgumentError(
            "activation must be None, 'full', 'auto', a list of operators to save, or the share of memory from 0 to 1 "
            f"that activations may take, got {brief(value)}."
        )


def _overloads(packet: Any) -> str:
    return ", ".join(f"torch.ops.{packet}.{name}" for name in packet.overloads())


def _memory_limit(value: Any) -> None:
    if not (value is None or (is_int(value) and value > 0)):
        raise ArgumentError(f"memory_limit must be a positive number of bytes, got {brief(value)}.")


def _dynamic_shapes(value: Any) -> None:
    if not (value is None or isinstance(value, (tuple, list, Mapping))):
        raise ArgumentError(
            "dynamic_shapes must be a tuple with an entry for each input, or a dict by the inputs' names, as for "
            f"torch.export.export, got {type(value).__name__}."
        )
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, (int, type(None), Dim, type(Dim.AUTO))):
            raise ArgumentError(
                f"dynamic_shapes: {brief(leaf)} is no dimension. Give None, an int, a torch.export.Dim, Dim.AUTO, "
                "Dim.STATIC or Dim.DYNAMIC."
            )


def _max_captures(value: Any) -> None:
    check_count("max_captures", value)


def _fullgraph(value: Any) -> None:
    check_bool("fullgraph", value)


def _passes(value: Any) -> None:
    if not (value is None or isinstance(value, Pipeline)):
        raise ArgumentError(
            f"passes must be a graphshard.Pipeline, got {type(value).__name__}. Start from graphshard.Pipeline() and "
            "use insert, replace and disable."
        )


def _verify(value: Any) -> None:
    check_choice("verify" if value is not None else _VERIFY, level_of(value), get_args(Level))


# By option, what raises ArgumentError if a value is wrong by itself. `hardware` is checked where its file is read.
CHECKS: Mapping[str, Callable[[Any], None]] = {
    "reshard_after_forward": _reshard_after_forward,
    "shard_placement_fn": _shard_placement_fn,
    "mp_policy": _mp_policy,
    "offload_policy": _offload_policy,
    "ignored_params": _ignored_params,
    "units": _units,
    "backend": _backend,
    "activation": _activation,
    "memory_limit": _memory_limit,
    "dynamic_shapes": _dynamic_shapes,
    "max_captures": _max_captures,
    "fullgraph": _fullgraph,
    "passes": _passes,
    "verify": _verify,
}
