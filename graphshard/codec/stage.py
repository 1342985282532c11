"""A program as JSON, at every stage before lowering: what one pass needs to run on it alone, in another process.

{
 "format": 1,
 "model": "Llama", "capture": 0, "reason": "...",   "device": "cuda",  "next_number": 310,
 "mesh": {"axes": [{"name": "shard", "size": 8, "role": "shard"}]},
 "tangents": ["0"],  "established": ["reduced_once"],  "differentiated": ["embed.weight"],
 "out_spec": "[1, {...}]",                           pytree.treespec_dumps
 "params": [{"names": ["embed.weight"], "shape": [256, 64], "dtype": "float32", ...}],    fields of ParamRow
 "constants": {"mask": VALUE},                       shape, stride, dtype and device; values are not stored
 "plan": {...} or null,                              Plan.to_json
 "next": {"name": "bucket", "class": "graphshard.passes.bucket:Bucketing", "options": {}} or null,
 "sizes": {"s0": {"source": [0, 1], "hint": 128, "range": [2, null]}},  "shapes": [[[4, SIZE], [SIZE, 1]]],
 "phases": {"joint": {
  "inputs": [["param", "embed.weight"], ["input", "0"]],      kind and name of each slot, and what a gradient is of
  "outputs": [["output", "0"], ["grad", "embed.weight", "param"]],
  "nodes": [
   {"name": "mm", "op": "call_function", "target": "aten.mm.default", "args": [VALUE], "kwargs": {},
    "val": VALUE, "module": "layers.0", "meta": {"number": 7, "recompute": "MUST_SAVE"}}
  ]}}
}

`codec/values.py` says what a VALUE looks like; "sizes" and the inputs' "shapes" are there if some are dynamic. A node's
"module" is the module whose forward made it, "fwd_module" the one whose backward did. Of the rest of `node.meta`
numbers, strings and torch's mark "recompute" are kept; the partitioner and the passes need no more. The history is not
stored. An "out_spec" with other classes than lists, tuples and dicts stays text: nothing that runs before the model
does reads it.

A file cannot run code: names must be identifiers, operators must be known to torch's dispatcher, and nothing is
imported or evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphshard.codec.graphs import decode_phase, encode_phase
from graphshard.codec.passes import NextPass, decode_pass, encode_pass
from graphshard.codec.sizes import decode_sizes, encode_sizes
from graphshard.codec.values import Decoder, encode, named, short_name, strings, typed
from graphshard.ir.errors import ArgumentError
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.params import ParamRow, ParamTable
from graphshard.ir.plan import Plan
from graphshard.ir.program import Phase, Program
from graphshard.passes import Pass

FORMAT = 3
_PHASES = ("joint", "forward", "backward")
_SAFE_SPECS = frozenset({None, "builtins.list", "builtins.tuple", "builtins.dict", "collections.OrderedDict"})
# How many levels of a key's content have a line for each item; 1 for others.
_LEVELS = {"phases": 3, "plan": 2}


class UnknownOutput:
    """Stands in a treespec for classes that could not be stored; its context is the text."""


def program_to_json(program: Program, *, next_pass: Pass | None = None) -> str:
    """A program before lowering as text, one node per line, with the pass that runs on it next.

    It never fails on a program that can be printed: what cannot be stored is marked, and reading it says so.
    """
    names = {size.symbol: size.name for size in program.sizes}
    shapes = [[list(shape), list(stride)] for shape, stride in program.shapes]
    data = {
        "format": FORMAT,
        "model": program.model,
        "capture": program.capture,
        "reason": program.reason,
        "mesh": encode_mesh(program.mesh),
        "device": str(program.device),
        "next_number": program.next_number,
        "tangents": list(program.tangents),
        "established": sorted(program.established),
        "differentiated": sorted(program.differentiated),
        "out_spec": _encode_spec(program.out_spec),
        "params": encode_table(program.params),
        "constants": {name: encode(value) for name, value in program.constants.items()},
        "plan": json.loads(program.plan.to_json()) if program.plan else None,
        "next": encode_pass(next_pass) if next_pass else None,
        **({"sizes": encode_sizes(program.sizes), "shapes": encode(shapes, names)} if program.sizes else {}),
        "phases": {name: encode_phase(phase, names) for name, phase in program.phases.items()},
    }
    items = (f'"{key}": {_lines(value, _LEVELS.get(key, 1))}' for key, value in data.items())
    return "{\n" + ",\n".join(items) + "\n}\n"


def program_from_json(text: str) -> Program:
    """Inverse of `program_to_json`; constants and values of nodes become fake tensors.

    Raises:
        ArgumentError: the text is not a whole stage in this format, or needs an operator that is not registered.
    """
    data = load_stage(text)
    try:
        return decode_program(data, Decoder())
    except ArgumentError as error:
        raise ArgumentError(f"not a stage that can be read: {error}") from error
    except KeyError as error:
        raise ArgumentError(f"not a stage that can be read: {error} is missing") from error
    except Exception as error:  # whatever torch says of odd values
        raise ArgumentError(f"not a stage that can be read: {type(error).__name__}: {error}") from error


def load_stage(text: str) -> dict[str, Any]:
    """The data of a stage in this format; raises `ArgumentError` as `program_from_json` does."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not JSON, cut off perhaps: {error}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise ArgumentError('not a stage: it has no "format"')
    if data["format"] != FORMAT:
        raise ArgumentError(f"format {data['format']!r} is not {FORMAT}, which this version of graphshard reads")
    return data


def next_pass_of(text: str) -> NextPass | None:
    """The pass that ran on a stage next; None if none did, or if the stage does not say."""
    data = load_stage(text).get("next")
    return None if data is None else decode_pass(data)


def plan_of(text: str) -> Plan | None:
    """The plan of a stage, without the program."""
    data = load_stage(text).get("plan")
    return None if data is None else _decode_plan(data)


def decode_program(
    data: dict[str, Any], decoder: Decoder, phase_of: Callable[[dict[str, Any], Decoder], Phase] = decode_phase
) -> Program:
    """A program of the data of its file; `phase_of` reads one of its phases."""
    sizes = decode_sizes(data.get("sizes", {}), decoder.mode)
    decoder.sizes.update((size.name, size.value) for size in sizes)
    unknown = set(data["phases"]) - set(_PHASES)
    if unknown or not data["phases"]:
        raise ArgumentError(f"phases are {list(data['phases'])}, they must be of {', '.join(_PHASES)}")
    return Program(
        {name: phase_of(phase, decoder) for name, phase in data["phases"].items()},
        decode_table(data["params"]),
        decode_mesh(data["mesh"]),
        torch.device(data["device"]),
        {name: decoder.value(value) for name, value in data["constants"].items()},
        _decode_spec(data["out_spec"]),
        tuple(strings(data["tangents"])),
        plan=None if data["plan"] is None else _decode_plan(data["plan"]),
        established=set(strings(data["established"])),
        differentiated=frozenset(strings(data["differentiated"])),
        model=typed(data["model"], str),
        capture=typed(data["capture"], int),
        reason=typed(data["reason"], str),
        next_number=typed(data["next_number"], int),
        sizes=sizes,
        shapes=tuple((tuple(shape), tuple(stride)) for shape, stride in decoder.value(data.get("shapes", []))),
    )


def encode_mesh(mesh: Mesh) -> dict[str, Any]:
    return {"axes": [asdict(axis) for axis in mesh.axes]}


def decode_mesh(data: dict[str, Any]) -> Mesh:
    return Mesh(tuple(Axis(typed(axis["name"], str), typed(axis["size"], int), axis["role"]) for axis in data["axes"]))


def _decode_plan(data: dict[str, Any]) -> Plan:
    try:
        return Plan.from_json(json.dumps(data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"not a plan: {error}") from error


def encode_table(table: ParamTable) -> list[dict[str, Any]]:
    return [_encode_row(row) for row in table]


def decode_table(data: list[dict[str, Any]]) -> ParamTable:
    return ParamTable(tuple(map(_decode_row, data)))


def _encode_row(row: ParamRow) -> dict[str, Any]:
    values = ((field.name, getattr(row, field.name)) for field in fields(row))
    return {name: short_name(value) if isinstance(value, torch.dtype) else value for name, value in values}


def _decode_row(data: dict[str, Any]) -> ParamRow:
    dtypes = {key: named("dtype", value) for key, value in data.items() if key.endswith("dtype")}
    tuples = {key: tuple(typed(size, int) for size in data[key]) for key in ("shape", "order")}
    row = ParamRow(**{**data, **dtypes, **tuples, "names": tuple(strings(data["names"]))})
    typed(row.unit, str)
    typed(row.num_shards, int)
    typed(row.dim, int)
    return row


def _encode_spec(spec: pytree.TreeSpec) -> str:
    if spec.type is UnknownOutput:
        return str(spec.context)
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError):
        return f"not stored: {spec}"


def _decode_spec(text: str) -> pytree.TreeSpec:
    """The structure if it is of Python's own classes: pytree imports what the others name."""
    try:
        _, schema = json.loads(text)
        if "__enum__" not in text and _spec_types(schema) <= _SAFE_SPECS:
            return pytree.treespec_loads(text)
    except ValueError:
        pass
    return pytree.TreeSpec(UnknownOutput, typed(text, str), [])


def _spec_types(schema: dict[str, Any]) -> set[str | None]:
    return {schema["type"]}.union(*map(_spec_types, schema["children_spec"]))


def _lines(value: Any, levels: int) -> str:
    """JSON with a line for each item of the outer levels."""
    if levels == 0 or not value or not isinstance(value, (dict, list)):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}: {_lines(item, levels - 1)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + "\n}"
    return "[\n" + ",\n".join(_lines(item, levels - 1) for item in value) + "\n]"
