"""Programs as JSON: a stage before lowering, a lowered program, a region, the start of another backward.

{
 "format": 8,
 "next": {"name": "bucket", "class": "graphshard.passes.bucket:Bucketing", "options": {}} or null,
 "symbols": {"s0": {"hint": 128, "range": [2, null]}},            dynamic sizes
 "phases": {"joint": {
  "nodes": [
   {"name": "mm", "op": "call_function", "target": "aten.mm.default", "args": [VALUE], "kwargs": {},
    "val": VALUE, "modules": {"layers.0@0": "layers.0"},
    "meta": {"number": 7, "recompute": "MUST_SAVE"}}
  ],
  "inputs": [{"kind": "param", "name": "embed.weight", "of": null}],
  "outputs": [{"kind": "output", "name": "0", "of": null}]}},
 "params": {"rows": [{"names": ["embed.weight"], "shape": [256, 64], "dtype": "float32", ...}]},
 ...                                                all other fields of `Program`, see `codec/converter.py`
}

VALUE is defined in `codec/graph_format.py`. The "modules" of a node are those whose forward made it, from the outside,
with a number for each call, and "fwd_modules" those whose backward did; or the name of the first node with the same.
The rest of `node.meta` that is kept are numbers, strings and torch's mark "recompute".

A lowered program has no "format" and no "next". Its nodes may call regions, of which "regions" has the keys in the
order of their names, and it has also

 "conditions": ["s0*s1 <= 4096"],         assumptions of the compilation about dynamic sizes
 "values": {"_lifted": {"dtype": "float32", "shape": [2], "data": "base64"}}    constants made while tracing

Times are left out, so that equal programs make equal files.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from graphshard.codec.converter import (
    NextPass,
    decode_pass,
    decode_structure,
    encode_pass,
    encode_structure,
    read,
    write,
)
from graphshard.codec.graph_format import (
    Decoder,
    decode_symbols,
    encode_symbols,
    named,
    parse_size,
    short_name,
    strings,
    to_json,
)
from graphshard.codec.stage_format import FORMAT, load_stage
from graphshard.cross.gpu_kernels import GpuCode
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.ir.program import Program, Region, Size
from graphshard.ir.sizes import renamed, size_inputs
from graphshard.lower.regions import RegionCall, executor
from graphshard.passes import Pass
from graphshard.pipeline.pipeline import Partitioned, Pipeline
from graphshard.torch_compat.fake_tensors import new_fake_mode
from graphshard.torch_compat.symbolic_sizes import condition
from graphshard.utils.json_dataclasses import typed

_PHASES = ("joint", "forward", "backward")
# Levels of a key's content that have a line for each item; 1 for others.
_LEVELS = {"phases": 3, "plan": 2, "params": 2}
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


def graph_digest(program: Program) -> str:
    """Return a hash of what a traced program computes: its graph, parameters, constants and results.

    Dynamic sizes are hashed with their ranges, without the values of the call that was traced.
    """
    data = _encode(replace(program, reason="", capture=0, history=[], taken=()))
    data["symbols"] = {name: {**known, "hint": None} for name, known in data["symbols"].items()}
    digest = hashlib.sha256(to_json(data).encode())
    digest.update(repr((program.out_spec, program.trace and program.trace.repeats)).encode())
    for name, tensor in sorted(program.constants.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _encode(program: Program) -> dict[str, Any]:
    """Return the fields of a program, and what is known of its dynamic sizes."""
    sizes = [(size.name, size.value) for size in program.sizes]
    return {
        "symbols": encode_symbols(sizes, (phase.module.graph for phase in program.phases.values())),
        **write(program, {size.symbol: size.name for size in program.sizes}),
    }


def _decode(data: dict[str, Any], decoder: Decoder, others: Set[str]) -> Program:
    """Inverse of `_encode`; `others` are keys that are not fields of the program."""
    decoder.sizes.update(decode_symbols(data.get("symbols", {}), decoder.mode))
    program = read({key: value for key, value in data.items() if key not in {"symbols", *others}}, Program, decoder)
    if not program.phases or not set(program.phases) <= set(_PHASES):
        raise ArgumentError(f"phases are {list(program.phases)}, they must be of {', '.join(_PHASES)}")
    return program


@contextlib.contextmanager
def reading(what: str, kind: type[Exception] = ArtifactError) -> Iterator[None]:
    """Turn whatever torch raises for odd data into one kind of error that names what was read."""
    try:
        yield
    except Exception as error:
        if kind is ArtifactError and isinstance(error, ArtifactError):
            raise
        text = str(error) if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"
        raise kind(f"{what} be read: {text}") from error


# --- stages ------------------------------------------------------------------------------------------------------


def program_to_json(program: Program, *, next_pass: Pass | None = None) -> str:
    """Return a program before lowering as text, one node per line, with the pass that runs on it next.

    It never fails on a program that can be printed: values that cannot be stored are marked, and reading them fails.
    """
    following = encode_pass(next_pass) if next_pass else None
    data = {"format": FORMAT, "next": following, **_encode(program)}
    items = (f'"{key}": {_lines(value, _LEVELS.get(key, 1))}' for key, value in data.items())
    return "{\n" + ",\n".join(items) + "\n}\n"


def program_from_json(text: str) -> Program:
    """Inverse of `program_to_json`; constants and values of nodes become fake tensors.

    Raise ArgumentError if it is not a whole stage in this format, or needs an operator that is not registered.
    """
    data = load_stage(text)
    with reading("not a stage that can", ArgumentError):
        return _decode(data, Decoder(), {"format", "next"})


def next_pass_of(text: str) -> NextPass | None:
    """Return the pass that ran on a stage next; None if none did, or the stage does not say."""
    data = load_stage(text).get("next")
    return None if data is None else decode_pass(data)


def _lines(value: Any, levels: int) -> str:
    """Return JSON with a line for each item of the outer levels."""
    if levels == 0 or not value or not isinstance(value, (dict, list)):
        return to_json(value)
    if isinstance(value, dict):
        items = (f"{to_json(key)}: {_lines(item, levels - 1)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + "\n}"
    return "[\n" + ",\n".join(_lines(item, levels - 1) for item in value) + "\n]"


# --- lowered programs --------------------------------------------------------------------------------------------


def own_names(program: Program, compiled: Mapping[str, RegionCall], mark: object) -> dict[str, str]:
    """Return the names of a program's regions in a file, by key.

    A region that was compiled under conditions on dynamic sizes belongs to the program alone, whose mark is added.
    """
    return {key: key if compiled[key].within is None else f"{key}-{mark}" for key in program.regions}


def encode_lowered(program: Program, module: nn.Module, names: Mapping[str, str] = _NO_NAMES) -> dict[str, Any]:
    """Return a lowered program as JSON, without tensors of the captured module; raise ArtifactError if it cannot be.

    `names` are of its regions in the file, by key.
    """
    values, own = {}, _own_tensors(module)
    for name, tensor in program.constants.items():
        if name not in own:
            if tensor.is_meta:
                raise ArtifactError(
                    f"the constant {name} that forward makes is on the meta device, so its values are unknown."
                )
            values[name] = {
                "dtype": short_name(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "data": base64.b64encode(_bytes_of(tensor)).decode(),
            }
    structure, conditions = encode_structure(program.out_spec, "outputs"), _conditions(program.sizes)
    data = {**_encode(program), "out_spec": structure, "conditions": conditions, "values": values}
    return {**data, **{field: [names.get(key, key) for key in data[field]] for field in ("regions", "region_calls")}}


def decode_lowered(
    data: dict[str, Any], compiled: Mapping[str, RegionCall], module: nn.Module | None, device: torch.device
) -> Program:
    """Inverse of `encode_lowered`, for a device, with regions by key; raise ArtifactError for a misfit of the module.

    Without a module the program is only checked.
    """
    with reading("a program cannot"):
        regions = {f"region_{index}": compiled[key] for index, key in enumerate(strings(data["regions"]))}
        decoder = Decoder(callees=frozenset(regions), device=device, module_of=lambda graph: executor(graph, regions))
        program = _decode({**data, "out_spec": ""}, decoder, {"conditions", "values"})
        for text in strings(data["conditions"]):
            condition(parse_size(text, {size.name: size.value for size in program.sizes}))
        if module is None:
            return program
        values, own = data["values"], _own_tensors(module)
        missing = sorted(set(program.constants) - set(own) - set(values))
        if missing:
            raise ArtifactError(f"the model has no tensor {missing[0]}, which it had when it was exported.")
        constants = {n: _decode_tensor(values[n], device) if n in values else own[n] for n in program.constants}
        return replace(program, out_spec=decode_structure(data["out_spec"], "outputs"), constants=constants)


def _conditions(sizes: tuple[Size, ...]) -> list[str]:
    """Return the conditions on dynamic sizes, except their ranges, by their names."""
    if not sizes:
        return []
    env = sizes[0].value.node.shape_env
    names = {size.symbol: size.name for size in sizes}
    found = (env.replace(guard.expr) for guard in env.guards)
    texts = [str(renamed(expr, names)) for expr in found if expr.free_symbols and expr.free_symbols <= set(names)]
    for text in texts:
        try:
            parse_size(text, {size.name: size.value for size in sizes})
        except ArgumentError as error:
            raise ArtifactError(
                f"the program holds where {text}, which a file cannot hold: {error}. Export it for fixed sizes, "
                "without dynamic_shapes."
            ) from error
    return texts


def encode_region(region: Region) -> dict[str, Any]:
    """Return a region's operators as JSON."""
    values = [node.meta["val"] for node in size_inputs(region.module.graph).values()]
    # A sum of other inputs stays one: it is known to be.
    known = {value.node.expr for value in values if value.node.expr.is_Symbol}
    own = (value for value in values if value.node.expr in known or not value.node.expr.free_symbols <= known)
    sizes = {f"n{index}": value for index, value in enumerate(own)}
    names = {value.node.expr: name for name, value in sizes.items()}
    return {"symbols": encode_symbols(sizes.items(), [region.module.graph]), **write(region, names)}


def decode_region(key: str, data: dict[str, Any], device: torch.device) -> Region:
    """Inverse of `encode_region`, for a device; raise ArtifactError if it is none. The key may have a suffix."""
    with reading(f"region {key} cannot"):
        decoder = Decoder(device=device)
        decoder.sizes.update(decode_symbols(data["symbols"], decoder.mode))
        region = read({name: value for name, value in data.items() if name != "symbols"}, Region, decoder)
        return replace(region, key=key)


def decode_gpu_code(name: str, data: dict[str, Any], cubins: Mapping[str, bytes], device: torch.device) -> GpuCode:
    """Return a region's code for GPUs; raise ArtifactError with `name` if it is none. `cubins` are by their names."""
    with reading(f"{name} cannot"):
        decoder = Decoder(device=device, callees=frozenset(data["kernels"]), cubins=cubins)
        return read(data, GpuCode, decoder)


def encode_partitioned(partitioned: Partitioned, program: Program) -> dict[str, Any]:
    """Return the start of another backward as JSON: the partitioner's graph, and the number of passes that follow."""
    names = {size.symbol: size.name for size in program.sizes}
    return {**write(replace(partitioned, rest=()), names), "rest": len(partitioned.rest)}


def decode_partitioned(data: dict[str, Any], program: Program, pipeline: Pipeline, device: torch.device) -> Partitioned:
    """Inverse of `encode_partitioned`, for the stored program and the pipeline that made it."""
    with reading("a backward cannot"):
        env = program.sizes[0].value.node.shape_env if program.sizes else None
        sizes = {size.name: size.value for size in program.sizes}
        decoder = Decoder(mode=new_fake_mode(env), sizes=sizes, device=device)
        rest = pipeline.passes[len(pipeline.passes) - typed(data["rest"], int) :]
        return replace(read({**data, "rest": []}, Partitioned, decoder), rest=rest)


# --- constants ---------------------------------------------------------------------------------------------------


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return tensors that are plain attributes of a module or its submodules, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, owner in module.named_modules()
        for name, value in owner.__dict__.items()
        if isinstance(value, torch.Tensor)
    }


def _decode_tensor(data: dict[str, Any], device: torch.device) -> torch.Tensor:
    raw = np.frombuffer(base64.b64decode(data["data"], validate=True), np.uint8)
    shape, stride = ([typed(each, int) for each in data[key]] for key in ("shape", "stride"))
    dtype, span, count = named("dtype", data["dtype"]), _span(shape, stride), math.prod(shape)
    if raw.size != min(span, count) * dtype.itemsize:
        raise ValueError(f"{raw.size} bytes are not those of a tensor of shape {shape} and strides {stride}")
    flat = torch.empty(min(span, count), dtype=dtype)
    flat.view(torch.uint8).copy_(torch.from_numpy(raw.copy()))
    if span < count:
        return flat.to(device).as_strided(shape, stride)
    return torch.empty_strided(shape, stride, dtype=dtype).copy_(flat.reshape(shape)).to(device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor; of one whose elements share memory, such as an expanded one, the memory."""
    flat, span = tensor.detach().cpu(), _span(tensor.shape, tensor.stride())
    flat = flat.as_strided((span,), (1,)) if span < flat.numel() else flat.reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements in memory from the first to the last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
