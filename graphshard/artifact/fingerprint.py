"""What the programs of an artifact depend on, and what to do where it is not the same here.

A fingerprint is plain JSON, field by field. What the mesh's size changes (numbers of shards) is kept for each mesh. The
options are in `stored_options.py`. What forward computes is compared call by call: by the digest of its trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphshard.codec.values import encode, short_name
from graphshard.errors import ArtifactError
from graphshard.ir.param_table import ParamTable
from graphshard.utils.environment_fingerprint import instruction_set
from graphshard.utils.text import users_class
from graphshard.utils.version import own_version

# Fields of a parameter's row that the model decides, in the order in which they are compared, and what they are called.
MODEL_FIELDS = {
    "shape": "parameter shape",
    "dtype": "parameter dtype",
    "trainable": "requires_grad",
    "order": "memory layout",
    "split": "placement on the tensor axis",
}
_REMEDY = {
    "graphshard": "Install that version, or export again with this one.",
    "torch": "Install that version, or export again with this one.",
    "device": "Load it on a mesh of such devices, or export again for these.",
    "capability": "Compiled regions run on that kind of GPU only: export again on this one.",
    "cpu": "Compiled regions are code of that processor: export again on a machine like this one, or run "
    "`graphshard finish` on one after exporting with compile_regions=False.",
    "threads": "Compiled regions divide their work among so many threads: call torch.set_num_threads, set "
    "OMP_NUM_THREADS, or export with threads=.",
    "matmul_precision": "Call torch.set_float32_matmul_precision with the former, or export again.",
    "deterministic": "Call torch.use_deterministic_algorithms accordingly, or export again.",
    "model": "Load it into that class of model, or export this one.",
    "buffers": "Make the model with the same configuration, or export again.",
    "parameter names": "Make the model with the same parameters, tied alike, or export again.",
    "parameter shape": "Make the model with the same configuration, or export again.",
    "parameter dtype": "Convert the model before loading, or export again.",
    "requires_grad": "Freeze and unfreeze the same parameters before loading, or export again.",
    "placement on the tensor axis": "Call parallelize_module with the same plan before loading, or export again.",
    "memory layout": "Make the model in the same memory format, or export again.",
}
_OPTION_REMEDY = "Give the option that it was exported with, or export again with this one."


@dataclass(frozen=True)
class Difference:
    """One field that differs: its name, which part of it, both values as text, and what to do."""

    field: str
    where: str
    exported: str
    here: str

    def __str__(self) -> str:
        what = self.field if not self.where else f"{self.field} of {self.where}"
        return f"{what} was {self.exported} when it was exported and is {self.here} here. {self.remedy}"

    @property
    def remedy(self) -> str:
        return _REMEDY.get(self.field, _OPTION_REMEDY)


def environment(device: torch.device, *, native: bool) -> dict[str, Any]:
    """The fields of versions and machine. What matters to compiled regions only is None without them (`native`)."""
    on_cpu = native and device.type == "cpu"
    return {
        "graphshard": own_version(),
        # Compiled regions call the very build; a program needs the operators of the version.
        "torch": str(torch.__version__) if native else str(torch.__version__).partition("+")[0],
        "device": device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if native and device.type == "cuda" else None,
        "cpu": instruction_set() if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else None,
        "matmul_precision": torch.get_float32_matmul_precision() if native else None,
        "deterministic": torch.are_deterministic_algorithms_enabled() if native else None,
    }


def model_facts(model: nn.Module) -> dict[str, Any]:
    """The fields of a module besides its parameters."""
    return {
        # Without its module, which is __main__ for who runs it as a script.
        "model": users_class(model).__qualname__,
        "buffers": {name: f"{short_name(buffer.dtype)}{list(buffer.shape)}" for name, buffer in model.named_buffers()},
    }


def differences(exported: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    """The fields that differ, part by part where they are mappings."""
    for field, value in exported.items():
        other = here.get(field)
        if isinstance(value, dict) and isinstance(other, dict):
            parts = (*value, *(part for part in other if part not in value))
            for part in sorted(parts, key=lambda part: part.startswith("(")):  # what sums up others comes last
                if value.get(part) != other.get(part):
                    yield Difference(field, part, shown(value.get(part)), shown(other.get(part)))
        elif value != other:
            yield Difference(field, "", shown(value), shown(other))


def table_differences(exported: ParamTable, here: ParamTable, names: Mapping[str, str]) -> Iterator[Difference]:
    """What differs between parameters in some fields of their rows, the first parameter first."""
    known = {row.names: row for row in here}
    if list(known) != [row.names for row in exported]:
        yield _names_difference(exported, here)
        return
    for row in exported:
        for field, name in names.items():
            value, other = getattr(row, field), getattr(known[row.names], field)
            if value != other:
                yield Difference(name, row.name, shown(encode(value)), shown(encode(other)))


def _names_difference(exported: ParamTable, here: ParamTable) -> Difference:
    for row, other in zip(exported, here):
        if row.names != other.names:
            return Difference("parameter names", "", " = ".join(row.names), " = ".join(other.names))
    rest = [" = ".join(row.names) for row in (*exported.rows[len(here) :], *here.rows[len(exported) :])]
    pair = (rest[0], "missing") if len(exported) > len(here) else ("missing", rest[0])
    return Difference("parameter names", "", *pair)


def refuse(path: Any, found: Iterator[Difference]) -> None:
    """Raise ArtifactError for the first difference, if there is one."""
    first = next(found, None)
    if first is not None:
        raise ArtifactError(f"{path} does not fit: {first}", field=first.field)


def shown(value: Any) -> str:
    """A value in a message."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
