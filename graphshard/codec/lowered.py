"""A lowered program as plain JSON: the code that calls regions and collectives, and what binds it to a module.

What `codec/stage.py` describes, where nodes may be "call_module" of a region, and besides (without times, so that equal
programs make equal files)

 "regions": ["9f3c...", ...],             keys in the order of their names, region_0 and so on
 "region_calls": ["9f3c...", ...],        in order of execution
 "communication": ["forward: gather ..."], "peak_gathered": {...}, "saved": [...], "history": [...],
 "conditions": ["s0*s1 <= 4096"],         what compilation took for granted of dynamic sizes
 "values": {"_lifted": {"dtype": "float32", "shape": [2], "data": "base64"}}    constants made while tracing
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from graphshard.codec.graphs import decode_graph, decode_phase, encode_graph
from graphshard.codec.signature import decode_structure, encode_structure
from graphshard.codec.sizes import decode_sizes, encode_sizes, parse_size
from graphshard.codec.stage import decode_program, program_to_json
from graphshard.codec.values import Decoder, named, short_name, strings, typed
from graphshard.ir.errors import ArgumentError, ArtifactError
from graphshard.ir.program import Phase, Program, Region, Size, Stage, UnitMemory
from graphshard.ir.sizes import renamed, size_inputs
from graphshard.ir.torch_internals import condition
from graphshard.lower.regions import RegionCall, executor


def encode_lowered(program: Program, module: nn.Module) -> dict[str, Any]:
    """A lowered program as plain JSON.

    Args:
        module: the one it was captured from; tensors that are its own are not stored.

    Raises:
        ArtifactError: something of the program cannot be stored.
    """
    data = json.loads(program_to_json(program))
    own = _own_tensors(module)
    return {
        **data,
        "out_spec": encode_structure(program.out_spec, "outputs"),
        "regions": list(program.regions),
        "region_calls": program.region_calls,
        "communication": program.communication,
        "peak_gathered": {name: list(units) for name, units in program.peak_gathered.items()},
        "saved": [asdict(row) for row in program.saved],
        "history": [
            {field.name: getattr(stage, field.name) for field in fields(stage) if field.name not in ("text", "seconds")}
            for stage in program.history
        ],
        "conditions": _conditions(program.sizes),
        "values": {name: _encode_tensor(value, name) for name, value in program.constants.items() if name not in own},
    }


def decode_lowered(
    data: dict[str, Any], compiled: Mapping[str, RegionCall], module: nn.Module | None, device: torch.device
) -> Program:
    """Inverse of `encode_lowered`, for a device.

    Args:
        compiled: regions by key.
        module: the one it will run for; it gives the tensors that are its own. None is to look only.

    Raises:
        ArtifactError: this is no such program, or does not fit the module.
    """
    try:
        return _decode(data, compiled, module, device)
    except ArtifactError:
        raise
    except ArgumentError as error:
        raise ArtifactError(f"a program cannot be read: {error}") from error
    except Exception as error:  # whatever torch says of odd values
        raise ArtifactError(f"a program cannot be read: {type(error).__name__}: {error}") from error


def _decode(
    data: dict[str, Any], compiled: Mapping[str, RegionCall], module: nn.Module | None, device: torch.device
) -> Program:
    keys = strings(data["regions"])
    regions = {f"region_{index}": compiled[key] for index, key in enumerate(keys)}
    decoder = Decoder(regions=frozenset(regions), device=device)

    def phase_of(item: dict[str, Any], decoder: Decoder) -> Phase:
        return decode_phase(item, decoder, lambda graph: executor(graph, regions))

    program = decode_program({**data, "out_spec": ""}, decoder, phase_of)
    for text in strings(data["conditions"]):
        condition(parse_size(text, {size.name: size.value for size in program.sizes}))
    values = data["values"]
    if module is None:
        return program
    own = _own_tensors(module)
    missing = sorted(set(program.constants) - set(own) - set(values))
    if missing:
        raise ArtifactError(f"the model has no tensor {missing[0]}, which it had when it was exported.")
    return replace(
        program,
        out_spec=decode_structure(data["out_spec"], "outputs"),
        constants={
            name: _decode_tensor(values[name], device) if name in values else own[name] for name in program.constants
        },
        region_calls=strings(data["region_calls"]),
        communication=strings(data["communication"]),
        peak_gathered={name: tuple(strings(units)) for name, units in data["peak_gathered"].items()},
        saved=tuple(UnitMemory(**row) for row in data["saved"]),
        history=[Stage(text="", seconds=0.0, **stage) for stage in data["history"]],
        regions={key: Region(key, "", GraphModule(nn.Module(), Graph())) for key in keys},
    )


def encode_region(region: Region) -> dict[str, Any]:
    """A region's operators as plain JSON."""
    inputs = size_inputs(region.module.graph)
    placeholders = region.module.graph.find_nodes(op="placeholder")
    sizes = tuple(
        Size(f"n{index}", (placeholders.index(node), 0), node.meta["val"]) for index, node in enumerate(inputs.values())
    )
    names = {size.symbol: size.name for size in sizes}
    return {"text": region.text, "sizes": encode_sizes(sizes), "nodes": encode_graph(region.module.graph, names)}


def decode_region(key: str, data: dict[str, Any], device: torch.device) -> Region:
    """Inverse of `encode_region`, for a device.

    Raises:
        ArtifactError: this is no region.
    """
    try:
        decoder = Decoder(device=device)
        sizes = decode_sizes(data["sizes"], decoder.mode)
        decoder.sizes.update((size.name, size.value) for size in sizes)
        graph = decode_graph(data["nodes"], decoder)
        return Region(key, typed(data["text"], str), GraphModule(nn.Module(), graph))
    except Exception as error:  # whatever torch says of odd values
        raise ArtifactError(f"region {key} cannot be read: {type(error).__name__}: {error}") from error


def _conditions(sizes: tuple[Size, ...]) -> list[str]:
    """What holds of the sizes besides their ranges, by the sizes' names."""
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


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are plain attributes of a module or its submodules, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, owner in module.named_modules()
        for name, value in owner.__dict__.items()
        if isinstance(value, torch.Tensor)
    }


def _encode_tensor(tensor: torch.Tensor, name: str) -> dict[str, Any]:
    if tensor.is_meta:
        raise ArtifactError(f"the constant {name} that forward makes is on the meta device, so its values are unknown.")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": short_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "data": base64.b64encode(raw).decode(),
    }


def _decode_tensor(data: dict[str, Any], device: torch.device) -> torch.Tensor:
    raw = np.frombuffer(base64.b64decode(data["data"], validate=True), np.uint8).copy()
    dtype, shape = named("dtype", data["dtype"]), [typed(size, int) for size in data["shape"]]
    dense = torch.from_numpy(raw).view(dtype).reshape(shape)
    strided = torch.empty_strided(shape, [typed(size, int) for size in data["stride"]], dtype=dtype)
    return strided.copy_(dense).to(device)
