"""A program as JSON, at every stage before lowering: what one pass needs to run on it alone, in another process.

{
 "format": 7,
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

`codec/values.py` says what a VALUE looks like. A node's "modules" are those whose forward made it, from the outside,
with a number for each call, "fwd_modules" those whose backward did; or the name of the first node that has the same.
Of the rest of `node.meta` numbers, strings and torch's mark "recompute" are kept; the partitioner and the passes need
no more. An "out_spec" with other classes than lists, tuples and dicts stays text: nothing that runs before the model
does reads it.

A file cannot run code: names must be identifiers, operators must be known to torch's dispatcher, and nothing is
imported or evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

from graphshard.codec.converter import read, write
from graphshard.codec.passes import NextPass, decode_pass, encode_pass
from graphshard.codec.sizes import decode_symbols, encode_symbols, encode_unknown
from graphshard.codec.values import Decoder, to_json
from graphshard.errors import ArgumentError
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.passes import Pass

FORMAT = 8
_PHASES = ("joint", "forward", "backward")
# How many levels of a key's content have a line for each item; 1 for others.
_LEVELS = {"phases": 3, "plan": 2, "params": 2}


def program_to_json(program: Program, *, next_pass: Pass | None = None) -> str:
    """A program before lowering as text, one node per line, with the pass that runs on it next.

    It never fails on a program that can be printed: what cannot be stored is marked, and reading it says so.
    """
    following = encode_pass(next_pass) if next_pass else None
    data = {"format": FORMAT, "next": following, **encode_program(program)}
    items = (f'"{key}": {_lines(value, _LEVELS.get(key, 1))}' for key, value in data.items())
    return "{\n" + ",\n".join(items) + "\n}\n"


def program_from_json(text: str) -> Program:
    """Inverse of `program_to_json`; constants and values of nodes become fake tensors.

    Raises:
        ArgumentError: the text is not a whole stage in this format, or needs an operator that is not registered.
    """
    data = load_stage(text)
    try:
        return decode_program(data, Decoder(), beside={"format", "next"})
    except ArgumentError as error:
        raise ArgumentError(f"not a stage that can be read: {error}") from error
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
    return None if data is None else read(data, Plan)


def encode_program(program: Program) -> dict[str, Any]:
    """The fields of a program, and what is known of its dynamic sizes."""
    sizes = [(size.name, size.value) for size in program.sizes]
    unknown = encode_unknown(phase.module.graph for phase in program.phases.values())
    return {
        "symbols": {**encode_symbols(sizes), **unknown},
        **write(program, {size.symbol: size.name for size in program.sizes}),
    }


def decode_program(data: dict[str, Any], decoder: Decoder, *, beside: Set[str] = frozenset()) -> Program:
    """Inverse of `encode_program`.

    Args:
        beside: what stands in the file beside the program.

    Raises:
        ArgumentError: nothing is written so.
    """
    decoder.sizes.update(decode_symbols(data.get("symbols", {}), decoder.mode))
    program = read({key: value for key, value in data.items() if key not in {"symbols", *beside}}, Program, decoder)
    if not program.phases or not set(program.phases) <= set(_PHASES):
        raise ArgumentError(f"phases are {list(program.phases)}, they must be of {', '.join(_PHASES)}")
    return program


def _lines(value: Any, levels: int) -> str:
    """JSON with a line for each item of the outer levels."""
    if levels == 0 or not value or not isinstance(value, (dict, list)):
        return to_json(value)
    if isinstance(value, dict):
        items = (f"{to_json(key)}: {_lines(item, levels - 1)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + "\n}"
    return "[\n" + ",\n".join(_lines(item, levels - 1) for item in value) + "\n]"
