"""A lowered program as plain JSON: the code that calls regions and collectives, and what binds it to a module.

What `codec/stage.py` describes, where nodes may be "call_module" of a region, and besides

 "conditions": ["s0*s1 <= 4096"],         what compilation took for granted of dynamic sizes
 "values": {"_lifted": {"dtype": "float32", "shape": [2], "data": "base64"}}    constants made while tracing

Of "regions" there are the keys, in the order of their names, region_0 and so on. Times are left out, so that equal
programs make equal files.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from graphshard.codec.converter import read, write
from graphshard.codec.sizes import decode_symbols, encode_symbols, encode_unknown, parse_size
from graphshard.codec.stage import decode_program, encode_program
from graphshard.codec.structures import decode_structure, encode_structure
from graphshard.codec.values import Decoder, named, short_name, strings
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.ir.plain import typed
from graphshard.ir.program import Program, Region, Size
from graphshard.ir.sizes import renamed, size_inputs
from graphshard.lower.regions import RegionCall, executor
from graphshard.torch_compat.symbolic_sizes import condition


def encode_lowered(program: Program, module: nn.Module) -> dict[str, Any]:
    """A lowered program as plain JSON.

    Args:
        module: the one it was captured from; tensors that are its own are not stored.

    Raises:
        ArtifactError: something of the program cannot be stored.
    """
    own = _own_tensors(module)
    return {
        **encode_program(program),
        "out_spec": encode_structure(program.out_spec, "outputs"),
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
    regions = {f"region_{index}": compiled[key] for index, key in enumerate(strings(data["regions"]))}
    decoder = Decoder(regions=frozenset(regions), device=device, module_of=lambda graph: executor(graph, regions))
    program = decode_program({**data, "out_spec": ""}, decoder, beside={"conditions", "values", "accumulate"})
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
    )


def encode_region(region: Region) -> dict[str, Any]:
    """A region's operators as plain JSON."""
    values = [node.meta["val"] for node in size_inputs(region.module.graph).values()]
    # A sum of other inputs stays one: it is known to be.
    known = {value.node.expr for value in values if value.node.expr.is_Symbol}
    own = (value for value in values if value.node.expr in known or not value.node.expr.free_symbols <= known)
    sizes = {f"n{index}": value for index, value in enumerate(own)}
    names = {value.node.expr: name for name, value in sizes.items()}
    symbols = {**encode_symbols(sizes.items()), **encode_unknown([region.module.graph])}
    return {"symbols": symbols, **write(region, names)}


def decode_region(key: str, data: dict[str, Any], device: torch.device) -> Region:
    """Inverse of `encode_region`, for a device.

    Raises:
        ArtifactError: this is no region.
    """
    try:
        decoder = Decoder(device=device)
        decoder.sizes.update(decode_symbols(data["symbols"], decoder.mode))
        region = read({name: value for name, value in data.items() if name != "symbols"}, Region, decoder)
        return replace(region, key=key)  # the name of its file, where one region is compiled under several conditions
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
    return {
        "dtype": short_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "data": base64.b64encode(bytes_of(tensor)).decode(),
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor; of one whose elements share memory, such as an expanded one, the memory's."""
    flat, span = tensor.detach().cpu(), _span(tensor.shape, tensor.stride())
    shares_memory = span < flat.numel()
    flat = flat.as_strided((span,), (1,)) if shares_memory else flat.reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements there are from the first to the last in memory."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _decode_tensor(data: dict[str, Any], device: torch.device) -> torch.Tensor:
    raw = np.frombuffer(base64.b64decode(data["data"], validate=True), np.uint8)
    dtype = named("dtype", data["dtype"])
    shape, stride = ([typed(each, int) for each in data[key]] for key in ("shape", "stride"))
    span = _span(shape, stride)
    count = min(span, math.prod(shape))
    if raw.size != count * dtype.itemsize:
        raise ValueError(f"{raw.size} bytes are not those of a tensor of shape {shape} and strides {stride}")
    flat = torch.empty(count, dtype=dtype)
    flat.view(torch.uint8).copy_(torch.from_numpy(raw.copy()))
    if span < math.prod(shape):
        return flat.to(device).as_strided(shape, stride)
    return torch.empty_strided(shape, stride, dtype=dtype).copy_(flat.reshape(shape)).to(device)
