"""What the programs of an artifact depend on, and what to do where it is not the same here.

A fingerprint is plain JSON, field by field. Everything that could change a result is a field; what the mesh's size
changes (numbers of shards) is kept for each mesh. The inputs are compared call by call, as in-process programs are.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.artifact.model_code import attributes, code_hash
from graphshard.codec.passes import encode_pass
from graphshard.codec.values import encode, short_name
from graphshard.ir.errors import ArtifactError
from graphshard.ir.params import ParamTable
from graphshard.module.tracer import Tracer
from graphshard.passes import MakePlan, Pass
from graphshard.schedule.by_cost import PlanByCost

# Fields of a parameter's row that the model decides, in the order in which they are compared, and what they are called.
MODEL_FIELDS = {
    "shape": "parameter shape",
    "dtype": "parameter dtype",
    "trainable": "requires_grad",
    "order": "memory layout",
}
# Those that options decide.
OPTION_FIELDS = {
    "dim": "shard_placement_fn",
    "ignored": "ignored_params",
    "unit": "units",
    "reshard": "reshard_after_forward",
    "compute_dtype": "mp_policy",
    "reduce_dtype": "mp_policy",
}
# Of x86 and ARM: what compilers told to generate code for this very processor make use of.
_EXTENSIONS = ("avx", "amx", "sse", "fma", "f16c", "bmi", "vaes", "gfni", "sve", "asimd", "bf16", "i8mm")
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
    "code": "The source of the model's modules, or of what they call, was changed: export again.",
    "attributes": "Make the model with the same configuration, or export again.",
    "buffers": "Make the model with the same configuration, or export again.",
    "parameter names": "Make the model with the same parameters, tied alike, or export again.",
    "parameter shape": "Make the model with the same configuration, or export again.",
    "parameter dtype": "Convert the model before loading, or export again.",
    "requires_grad": "Freeze and unfreeze the same parameters before loading, or export again.",
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
        "graphshard": version("graphshard"),
        # Compiled regions call the very build; a program needs the operators of the version.
        "torch": str(torch.__version__) if native else str(torch.__version__).partition("+")[0],
        "device": device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if native and device.type == "cuda" else None,
        "cpu": instruction_set() if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else None,
        "matmul_precision": torch.get_float32_matmul_precision() if native else None,
        "deterministic": torch.are_deterministic_algorithms_enabled() if native else None,
    }


def instruction_set() -> dict[str, str]:
    """The processor's architecture, what ATen uses of it, and the vector extensions that compilers may use."""
    found = {"machine": platform.machine(), "vectors": torch.backends.cpu.get_cpu_capability()}
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return found | {flag: "yes" for flag in sorted(flags.split()) if flag.startswith(_EXTENSIONS)}


def model_facts(model: nn.Module) -> dict[str, Any]:
    """The fields of a module besides its parameters."""
    return {
        # Without its module, which is __main__ for who runs it as a script.
        "model": type(model).__qualname__,
        "code": code_hash(model),
        "attributes": attributes(model),
        "buffers": {name: f"{short_name(buffer.dtype)}{list(buffer.shape)}" for name, buffer in model.named_buffers()},
    }


def options_of(tracer: Tracer) -> dict[str, Any]:
    """The fields of `compile`'s options, as far as parameters do not show them."""
    spec = tracer.spec
    steps = list(tracer.pipeline)
    offload = any(step.name == "offload" for step in steps)
    return {
        "units": list(spec.units),
        "mp_policy": _policy(spec.precision.default),
        "mp_policies": {unit: _policy(policy) for unit, policy in spec.precision.by_unit.items()},
        # Among how many ranks, if that is not all of the axis; the rest of it is in the rows of the parameters.
        "reshard_after_forward": spec.mesh.regather.size if spec.mesh.regather is not None else None,
        "offload_policy": {"pin_memory": tracer.storage.pinned} if offload else None,
        "backend": tracer.backend,
        "passes": {
            **{step.name: _settings(step) for step in steps},
            "(classes)": ", ".join(encode_pass(step)["class"] for step in steps),
            "(order)": ", ".join(step.name for step in steps),
        },
        "dynamic_shapes": shapes_text(spec.dynamic_shapes),
    }


def _settings(step: Pass) -> str:
    """A pass's options as text; of a planner by cost the machine's hash.

    The mesh and the units are fields of their own, and `load` names the units, which `export` may have found.
    """
    planner = step.planner if isinstance(step, MakePlan) else None
    if isinstance(planner, PlanByCost):
        plain = replace(planner, constraints=replace(planner.constraints, units=False))
        options = {field.name: str(getattr(plain, field.name)) for field in fields(plain) if field.name != "costs"}
        return json.dumps({**options, "profile": planner.costs.profile.hash}, sort_keys=True)
    return json.dumps(encode_pass(step)["options"], sort_keys=True)


def _policy(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    return {field.name: encode(getattr(policy, field.name)) for field in fields(policy)}


def shapes_text(shapes: Any) -> str | None:
    """`dynamic_shapes` as text: dims by name and range."""
    if shapes is None:
        return None
    if isinstance(shapes, Mapping):
        return f"{{{', '.join(f'{key}: {shapes_text(value)}' for key, value in shapes.items())}}}"
    if isinstance(shapes, (list, tuple)):
        return f"[{', '.join(str(shapes_text(value)) for value in shapes)}]"
    name = getattr(shapes, "__name__", None)
    return f"{name}({getattr(shapes, 'min', None)}, {getattr(shapes, 'max', None)})" if name else str(shapes)


def differences(exported: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    """The fields that differ, part by part where they are mappings."""
    for field, value in exported.items():
        other = here.get(field)
        if isinstance(value, dict) and isinstance(other, dict):
            parts = (*value, *(part for part in other if part not in value))
            for part in sorted(parts, key=lambda part: part.startswith("(")):  # what sums up others comes last
                if value.get(part) != other.get(part):
                    yield Difference(field, part, _shown(value.get(part)), _shown(other.get(part)))
        elif value != other:
            yield Difference(field, "", _shown(value), _shown(other))


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
                yield Difference(name, row.name, _shown(encode(value)), _shown(encode(other)))


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


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
