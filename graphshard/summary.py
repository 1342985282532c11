"""What `graphshard show` prints of an artifact, written when it is exported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from graphshard.artifact import Captured, MeshPrograms, Stored
from graphshard.report import format_bytes


def summarize(fingerprint: Mapping[str, Any], meshes: Sequence[MeshPrograms], regions: Mapping[str, Stored]) -> str:
    """A few lines on the model, the machine, each mesh and its programs, and the regions."""
    environment, options = fingerprint["environment"], fingerprint["options"]
    lines = [
        f"model      {fingerprint['model']['model']}, code {fingerprint['model']['code'][:12]}",
        f"made with  graphshard {environment['graphshard']}, torch {environment['torch']}, {options['backend']}",
        f"device     {_device(environment)}",
        f"passes     {options['passes']['(order)']}",
    ]
    for mesh in meshes:
        axes = ", ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)
        stored = sum(row.gathered_bytes // row.num_shards for row in mesh.params)
        lines.append(f"mesh       {axes}: {len(mesh.params)} parameters, {format_bytes(stored)} of shards per rank")
        for program in mesh.programs:
            lines.append(f"  program  {_program(program)}")
            lines += [f"           {line}" for line in program.prediction.splitlines()]
    codes = Counter(stored.code for stored in regions.values())
    counts = ", ".join(f"{codes[code]} {text}" for code, text in _CODES.items() if codes[code])
    size = sum(len(stored.package.content) for stored in regions.values())
    lines.append(f"regions    {len(regions)} distinct: {counts}; {format_bytes(size)} of code")
    lines += [
        f"           {key}: {stored.package.problem}"
        for key, stored in regions.items()
        if stored.package.problem.startswith("AOTInductor")
    ]
    return "\n".join(lines) + "\n"


_CODES = {"native": "compiled", "operators": "that run as ATen operators", "later": "to be compiled on the target"}


def _device(environment: Mapping[str, Any]) -> str:
    if environment["capability"]:
        return f"{environment['device']}, compute capability {'.'.join(map(str, environment['capability']))}"
    if environment["cpu"]:
        return f"cpu, {environment['cpu']['machine']} {environment['cpu']['vectors']}, {environment['threads']} threads"
    return f"{environment['device']}, any"


def _program(program: Captured) -> str:
    what = "forward and backward" if "backward" in program.data["phases"] else "forward"
    calls = f"{len(program.data['region_calls'])} region calls, {len(program.data['communication'])} collectives"
    shapes = ", ".join(str(list(key[0])) for key in program.signature.inputs if len(key) == 4)
    more = "".join(f", gradients of outputs {', '.join(sorted(outputs))}" for outputs in program.backwards)
    return f"{program.entry or 'the model'}, inputs {shapes or 'none'}: {what}, {calls}{more}"
