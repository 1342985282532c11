"""Everything except its trace that a stored program depends on: versions, machine, model and options.

An artifact states it field by field (`Environment`, `ModelFacts`, `StoredOptions`, the parameter table), so that a
difference has a name, two values and a remedy. The compile cache hashes all of it and more (`key_facts`). The code of
forward is in neither: each call is traced, and the digest of the trace selects the program.

Options are compared where they took effect, so that two spellings of one choice are equal: in the parameter table
(`ROWS`), and in the units that were found, the passes that ran, and so on (`FACTS`). Every field of `Options` is in one
of the two, or in `NOT_COMPARED` with the reason.
"""

from __future__ import annotations

import glob
import json
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.export import Dim

from graphshard.codec.converter import PASSES, class_name, encode_pass, write
from graphshard.codec.graph_format import short_name
from graphshard.errors import ArtifactError
from graphshard.frontend.signature import Signature
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Program
from graphshard.ir.units import modules_of
from graphshard.module.tracer import Tracer
from graphshard.passes import MakePlan, OffloadParameters, Pass
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from graphshard.store.artifact_manifest import Environment, MeshEntry, ModelFacts, StoredOptions
from graphshard.torch_compat.autograd_state import modes_of_functions
from graphshard.torch_compat.torch_ops import kernels_in_python
from graphshard.utils.environment_fingerprint import instruction_set, own_files, settings, variables
from graphshard.utils.text import brief, own_version, users_class

# Fields of a parameter spec that the model decides, in the order of comparison, and what messages call them.
MODEL_FIELDS = {
    "shape": "parameter shape",
    "dtype": "parameter dtype",
    "trainable": "requires_grad",
    "order": "memory layout",
    "split": "placement on the tensor axis",
}
# Fields of a parameter spec, in the order of comparison, and the options that decide them.
ROWS = {
    "dim": "shard_placement_fn",
    "ignored": "ignored_params",
    "unit": "units",
    "reshard": "reshard_after_forward",
    "compute_dtype": "mp_policy",
    "reduce_dtype": "mp_policy",
    "exchanged": "reduce",
}
# Fields of `StoredOptions`, and the options that decide them.
FACTS = {
    "units": ("units",),
    "mp_policy": ("mp_policy",),
    "mp_policies": ("mp_policy",),
    "reshard_after_forward": ("reshard_after_forward",),
    "offload_policy": ("offload_policy",),
    "backend": ("backend",),
    "passes": ("passes", "activation", "memory_limit", "hardware", "reduce"),
    "dynamic_shapes": ("dynamic_shapes",),
}
# Options that have had their effect when a program is stored: `load` compares them only if one is given.
_DONE = ("passes", "dynamic_shapes")
NOT_COMPARED = {
    "max_captures": "limits what is captured later, and is the same program",
    "fullgraph": "is about modules that cannot be captured, and this was",
    "verify": "checks the program, and is the same program",
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


def environment(device: torch.device, *, native: bool) -> Environment:
    """Describe this process and machine, for programs with native code or without."""
    on_cpu = native and device.type == "cpu"
    return Environment(
        graphshard=own_version(),
        # Native code calls that very build; a program needs the operators of the version.
        torch=str(torch.__version__) if native else str(torch.__version__).partition("+")[0],
        device="cuda" if device.type == "cuda" else "cpu",
        capability=list(torch.cuda.get_device_capability(device)) if native and device.type == "cuda" else None,
        cpu=instruction_set() if on_cpu else None,
        threads=torch.get_num_threads() if on_cpu else None,
        matmul_precision=torch.get_float32_matmul_precision() if native else None,
        deterministic=torch.are_deterministic_algorithms_enabled() if native else None,
    )


def model_facts(model: nn.Module) -> ModelFacts:
    """Describe a module; the class is without its Python module, which is __main__ in a script."""
    buffers = {name: f"{short_name(buffer.dtype)}{list(buffer.shape)}" for name, buffer in model.named_buffers()}
    return ModelFacts(users_class(model).__qualname__, buffers)


def describe_options(tracer: Tracer) -> StoredOptions:
    """Return the options that a tracer was made with."""
    spec, steps = tracer.spec, list(tracer.pipeline)
    offloads = any(step.name == OffloadParameters.name for step in steps)
    return StoredOptions(
        units=list(spec.units),
        mp_policy=spec.precision.default,
        mp_policies=dict(spec.precision.by_unit),
        reshard_after_forward=spec.mesh.regather.size if spec.mesh.regather is not None else None,
        offload_policy=CPUOffloadPolicy(pin_memory=tracer.storage.pinned) if offloads else None,
        backend=tracer.options.backend,
        passes={
            **{step.name: json.dumps(_pass_settings(step), sort_keys=True) for step in steps},
            "(classes)": ", ".join(class_name(type(step)) for step in steps),
            "(order)": ", ".join(step.name for step in steps),
        },
        dynamic_shapes=encode_shapes(tracer.options.dynamic_shapes),
    )


def _pass_settings(step: Pass) -> Any:
    """Return a pass's options; of a planner by cost the hash of its hardware profile.

    The mesh and the units are compared elsewhere, and `load` names the units, which `export` may have found.
    """
    planner = step.planner if isinstance(step, MakePlan) else None
    if not isinstance(planner, PlanByCost):
        return encode_pass(step)["options"]
    plain = replace(planner, constraints=replace(planner.constraints, units=False))
    options = {field.name: str(getattr(plain, field.name)) for field in fields(plain) if field.name != "costs"}
    return {**options, "profile": planner.costs.profile.hash}


# --- comparing ---------------------------------------------------------------------------------------------------

# A field, the part of it that differs, such as a parameter, and its two values.
Difference = tuple[str, str, Any, Any]


def refuse(path: Any, found: Iterator[Difference]) -> None:
    """Raise ArtifactError for the first difference between an export and this process, if there is one."""
    for field, where, *values in found:
        was, here = (text if len(text) <= 100 else f"{text[:97]}..." for text in map(str, values))
        what, remedy = f"{field} of {where}" if where else field, _REMEDY.get(field, _OPTION_REMEDY)
        raise ArtifactError(
            f"{path} does not fit: {what} was {was} when it was exported and is {here} here. {remedy}", field=field
        )


def differences(exported: Any, here: Any, names: Collection[str] | None = None) -> Iterator[Difference]:
    """Yield the differences in some fields, or all, of two dataclasses; part by part where a field is a mapping."""
    former, latter = asdict(exported), asdict(here)
    for name, value in former.items():
        other = latter[name]
        if value == other or (names is not None and name not in names):
            continue
        if not isinstance(value, dict) or not isinstance(other, dict):
            yield name, "", value, other
            continue
        for part in sorted({**value, **other}, key=lambda part: part.startswith("(")):  # summaries come last
            if value.get(part) != other.get(part):
                yield name, part, value.get(part), other.get(part)


def table_differences(exported: ParamTable, here: ParamTable, names: Mapping[str, str]) -> Iterator[Difference]:
    """Yield the differences between two parameter tables; `names` are the fields, and how messages call them."""
    known = {row.names: row for row in here}
    if list(known) != [row.names for row in exported]:
        former, latter = ([" = ".join(row.names) for row in table] for table in (exported, here))
        pairs = zip([*former, "missing"], [*latter, "missing"])
        yield "parameter names", "", *next(pair for pair in pairs if pair[0] != pair[1])
        return
    for row in exported:
        for field, name in names.items():
            value, other = getattr(row, field), getattr(known[row.names], field)
            if value != other:
                yield name, row.name, write(value), write(other)


def check_same_options(path: Path, stored: MeshEntry, tracer: Tracer, given: Collection[str] | None = None) -> None:
    """Raise ArtifactError for the first option of a tracer that differs from the export.

    `given` are names of the options that the caller gave; None compares all.
    """
    here = describe_options(tracer)
    by_rows = [name for name, options in FACTS.items() if set(options) <= set(ROWS.values())]
    refuse(path, differences(stored.options, here, by_rows))
    refuse(path, table_differences(stored.params, tracer.spec.params, ROWS))
    rest = [n for n, options in FACTS.items() if given is None or n not in _DONE or set(options) & set(given)]
    refuse(path, differences(stored.options, here, rest))


def restored_options(
    stored: StoredOptions, params: Mapping[tuple[str, ...], nn.Parameter], rows: ParamTable
) -> dict[str, Any]:
    """Return the options of the export as arguments of `Options`, except options that have had their effect."""
    named = {name: param for names, param in params.items() for name in names}
    dims = {id(named[row.name]): row.dim for row in rows}
    reshard = {row.reshard if row.reshard or row.shown else None for row in rows}
    units = [tuple(map(glob.escape, modules_of(unit))) for unit in stored.units]
    shapes = None if stored.dynamic_shapes is None else decode_shapes(stored.dynamic_shapes)
    return {
        "mp_policy": {glob.escape(unit): policy for unit, policy in stored.mp_policies.items()} or stored.mp_policy,
        "reshard_after_forward": stored.reshard_after_forward or (reshard.pop() if len(reshard) == 1 else None),
        "shard_placement_fn": lambda param: Shard(dims[id(param)]),
        "offload_policy": stored.offload_policy,
        "ignored_params": [named[row.name] for row in rows if row.ignored],
        "units": [unit if len(unit) > 1 else unit[0] for unit in units],
        "backend": stored.backend,
        "reduce": "exchange" if any(row.exchanged for row in rows) else None,
        **({} if shapes is None else {"dynamic_shapes": shapes}),
    }


# --- dynamic shapes ----------------------------------------------------------------------------------------------

_HINTS = ("AUTO", "DYNAMIC", "STATIC")


def encode_shapes(shapes: Any) -> str | None:
    """Return `dynamic_shapes` as JSON; None for none.

    {"x": {0: Dim("n", max=8)}, "y": None}   ->   {"dict": [["x", {"dict": [[0, {"dim": ["n", 0, 8]}]]}], ["y", null]]}
    """

    def data_of(shapes: Any) -> Any:
        if shapes is None or type(shapes) in (int, str):
            return shapes
        if isinstance(shapes, Mapping):
            return {"dict": [[key, data_of(value)] for key, value in shapes.items()]}
        if isinstance(shapes, (list, tuple)):
            return {type(shapes).__name__: list(map(data_of, shapes))}
        for name in _HINTS if isinstance(shapes, type(Dim.AUTO)) else ():
            if shapes == getattr(Dim, name):
                return {"hint": name}
        if type(shapes) is Dim:
            return {"dim": [shapes.__name__, shapes.min, shapes.max if type(shapes.max) is int else None]}
        return {"other": getattr(shapes, "__name__", str(shapes))}  # such as 2*n

    return None if shapes is None else json.dumps(data_of(shapes))


def decode_shapes(text: str) -> Any:
    """Inverse of `encode_shapes`; None where one dim is computed from another. Equal names are one `Dim`."""
    dims: dict[tuple[str, int, int | None], Any] = {}

    def shapes_of(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind == "dict":
            return {key: shapes_of(value) for key, value in content}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(map(shapes_of, content))
        if kind == "hint" and content in _HINTS:
            return getattr(Dim, content)
        name, least, most = content
        return dims.setdefault((name, least, most), Dim(name, min=least, max=most))

    if '{"other": ' in text:
        return None
    try:
        return shapes_of(json.loads(text))
    except Exception as error:
        raise ArtifactError(f"dynamic_shapes {brief(text)} cannot be read ({error!r}).") from error


# --- key of the compile cache ------------------------------------------------------------------------------------

# Packages that are imported whenever graphshard is; forward may import others while it runs.
_VERSIONED = ("cattrs", "networkx", "numpy", "sympy")


def why_not_cached(tracer: Tracer, program: Program | None = None) -> str:
    """Return why a program of a tracer, or none of them, is cached; "" if it may be."""
    spec = tracer.spec
    if spec.tensor is not None or spec.whole is not None:
        return "the model has a tensor axis: its programs are those of a rank's place on it"
    if spec.experts is not None:
        return "the model has parameters on another mesh: its programs are those of a rank's place on it"
    if tracer.current_spec().extended:
        return "a parameter decides itself what is gathered of it"
    known: tuple[type, ...] = tuple(PASSES.values())
    for step in tracer.pipeline:
        if type(step) not in known:
            return f"the pass {step.name} ({class_name(type(step))}) is not graphshard's: its code is not compared"
        planner = step.planner if isinstance(step, MakePlan) else None
        if planner is not None and type(planner) not in (PlanByUnit, PlanByCost):
            return f"the planner {type(planner).__qualname__} is not graphshard's: its code is not compared"
    if modes_of_functions():
        return "a mode of torch is active that sees every function"
    if program is not None and set(program.mesh.axes) - set(spec.mesh.axes):
        return "the model communicates in process groups of its own"
    return ""


def key_facts(model: nn.Module, tracer: Tracer, signature: Signature) -> dict[str, Any]:
    """Return all that a program depends on, except its graph, as plain data; raise if it cannot be written down."""
    spec, device = tracer.spec, tracer.spec.device
    gpu: list[Any] = [torch.cuda.is_available()]
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        gpu = [torch.cuda.device_count(), str(properties), str(torch.version.cuda)]
    packages = {name: str(getattr(sys.modules[name], "__version__", "")) for name in _VERSIONED if name in sys.modules}
    here = asdict(environment(device, native=True))
    return {
        "graphshard": own_files(),
        "versions": {**here, "git": torch.version.git_version, "python": sys.version, "packages": packages},
        "machine": {**instruction_set(), "node": platform.machine(), "gpu": gpu},
        "settings of torch": settings(),
        "environment variables": variables(),
        "kernels in Python": kernels_in_python(),
        "model": f"{users_class(model).__module__}.{users_class(model).__qualname__}",
        "entry": [tracer.name, spec.method, spec.forward_class.__qualname__],
        "call": write(signature),
        "options": write(describe_options(tracer)),
        "parameters": write(tracer.current_spec().params),
        "units": list(spec.units),
        "mesh": [write(spec.mesh), dist.get_world_size(), str(dist.get_backend()), device.type],
    }
