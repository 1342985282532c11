"""A module as it is traced: as the user wrote it, with full fake parameters in the places of its shards."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphshard.errors import CaptureError
from graphshard.ir.param_table import REPLACED, ParamTable
from graphshard.ir.program import Slot
from graphshard.ir.submodule_entry_points import is_compiled, without_entries
from graphshard.repeats.find_repeats import HOOKS, MARKS_OF_HOOKS
from graphshard.torch_compat.fake_tensors import FakeTensorMode
from graphshard.utils.text import users_class


@dataclass
class ModuleTensor:
    """A parameter or buffer of a module, and the attributes that hold it.

    Attributes:
        slot: its name in programs.
        tensor: what the module holds.
        places: (module, "_parameters" or "_buffers", name) of each attribute.
    """

    slot: Slot
    tensor: torch.Tensor
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)


def module_tensors(module: nn.Module, params: ParamTable) -> list[ModuleTensor]:
    """Return the parameters of a module in the order of the table, then its buffers, each once."""
    rows = {row.name: ModuleTensor(Slot("param", row.name), torch.empty(0)) for row in params}
    found: dict[int, ModuleTensor] = {}
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, param in owner._parameters.items():
            if param is not None:
                entry = rows[params[f"{dot}{name}"].name]
                entry.tensor = param
                entry.places.append((owner, "_parameters", name))
                found[id(param)] = entry
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                entry = found.setdefault(id(buffer), ModuleTensor(Slot("buffer", f"{dot}{name}"), buffer))
                entry.places.append((owner, "_buffers", name))
    return [*rows.values(), *(entry for entry in found.values() if entry.slot.kind != "param")]


@contextlib.contextmanager
def as_written(module: nn.Module, method: str) -> Iterator[Callable[..., Any]]:
    """Let a module be as the user wrote it while the block is open; yield the method that is traced.

    Hooks of the root are left out, because they run around the compiled forward. So does a forward that replaces the
    compiled model's and calls it.

    Args:
        method: what is traced instead of `forward`.
    """
    is_model = is_compiled(module)
    with contextlib.ExitStack() as stack:
        for owner in module.modules():
            stack.callback(_restore, owner, dict(owner.__dict__))
            _restore(owner, without_entries(owner))
            for attribute in ("_parameters", "_buffers"):
                owner.__dict__[attribute] = copy.copy(owner.__dict__[attribute])
        for attribute in (*HOOKS, *MARKS_OF_HOOKS):
            module.__dict__[attribute] = type(getattr(module, attribute))()
        found = module.__dict__.get(method)
        if found is None or is_model:  # a compiled model's own forward runs programs
            found = types.MethodType(getattr(users_class(module), method), module)
        if is_model and method != "forward":  # which this one may call
            module.__dict__["forward"] = types.MethodType(users_class(module).forward, module)
        yield found


@contextlib.contextmanager
def holding(tensors: Mapping[str, torch.Tensor], held: list[ModuleTensor]) -> Iterator[None]:
    """Let the module hold other tensors while the block is open; within `as_written`, which puts the old ones back.

    Args:
        tensors: by the names of slots.
        held: of the module.
    """
    for entry in held:
        if entry.slot.name in tensors:
            for owner, kind, name in entry.places:
                owner.__dict__[kind][name] = tensors[entry.slot.name]
    yield


def check_registered(values: Iterable[Any], function: str) -> None:
    """Check that forward reads parameters from modules: what lists and closures still hold is no longer trained.

    Args:
        values: inputs of the graph that are no parameters or buffers.
        function: that was traced, for the message.

    Raises:
        CaptureError: one is a full parameter that was replaced by its shard.
    """
    for value in values:
        name = getattr(value, REPLACED, None) if isinstance(value, nn.Parameter) else None
        if name is not None:
            raise CaptureError(
                f"graphshard cannot capture {function}: it reads the parameter {name} from a list, dict or closure, "
                "which holds the full one that graphshard.compile has replaced by its shard. Read it from its module "
                "in forward."
            )


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    module.__dict__.clear()
    module.__dict__.update(attributes)


def fake_state(
    slot: Slot, originals: dict[str, torch.Tensor], params: ParamTable, device: torch.device, fake_mode: FakeTensorMode
) -> torch.Tensor:
    """A full parameter in the compute dtype, or a buffer."""
    with fake_mode:
        if slot.kind == "param":
            row = params[slot.name]
            stride = row.stride_of(row.shape)
            full = torch.empty_strided(row.shape, stride, dtype=row.compute_dtype, device=device)
            full.requires_grad_(row.trainable)
            if row.trainable and row.grad_dtype != row.compute_dtype:
                full.grad_dtype = row.grad_dtype
            return full
        tensor = originals[slot.name]
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
