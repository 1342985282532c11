"""What `graphshard show` prints of an artifact, from its manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from graphshard.utils.text import format_bytes

_CODES = {
    "native": "compiled",
    "gpu": "compiled to kernels",
    "operators": "that run as ATen operators",
    "later": "to be compiled on the target, by `graphshard finish` or when they are loaded",
}


def summarize(facts: Mapping[str, Any]) -> str:
    """A few lines on the model, the machine, each mesh and its programs, and the regions."""
    environment, model, meshes = facts["environment"], facts["model"], facts["meshes"]
    regions = facts["regions"]
    backend = meshes[0]["options"]["backend"]
    orders = dict.fromkeys(mesh["options"]["passes"]["(order)"] for mesh in meshes)
    lines = [
        f"model      {model['model']}",
        f"made with  graphshard {environment['graphshard']}, torch {environment['torch']}, {backend}",
        f"device     {_device(environment, regions)}",
        *(f"passes     {order}" for order in orders),
    ]
    for mesh in meshes:
        lines += _mesh(mesh)
    codes = Counter(region["code"] for region in regions.values())
    counts = ", ".join(f"{codes[code]} {text}" for code, text in _CODES.items() if codes[code])
    size = format_bytes(sum(region["bytes"] for region in regions.values()))
    lines.append(f"regions    {len(regions)} distinct: {counts or 'none'}; {size} of code")
    # Most that run as operators are of one operator; the others are worth a line.
    tellers = ("AOTInductor", "Inductor")
    lines += [f"  {key}: {region['why']}" for key, region in regions.items() if region["why"].startswith(tellers)]
    for key, region in regions.items():
        lines += _kernels(key, region["gpus"])
    return "\n".join(lines) + "\n"


def _mesh(mesh: Mapping[str, Any]) -> Iterator[str]:
    shards = format_bytes(mesh["shard_bytes"])
    shape = ", ".join(f"{name} {size}" for name, size in mesh["shape"].items())
    at = "" if mesh["place"] is None else f", place {mesh['place']}"
    yield f"mesh       {shape}{at}: {mesh['num_parameters']} parameters, {shards} of shards per rank"
    for program in mesh["programs"]:
        inputs = [item for item in program["signature"]["inputs"] if "shape" in item]
        shapes = ", ".join(f"{item['dtype']}{item['shape']}" for item in inputs)
        calls = f"{program['region_calls']} region calls, {program['collectives']} collectives"
        further = [row for row in program["backwards"] if not row["microbatch"]]
        more = "".join(f", gradients of outputs {', '.join(row['outputs'])}" for row in further)
        what = f"{program['entry'] or 'the model'}({shapes}): {' and '.join(program['phases'])}, {calls}{more}"
        yield f"  {program['file']}: {what}"
        yield from _microbatches(program)
        yield from (f"    {line.strip()}" for line in program["prediction"].splitlines())


def _kernels(key: str, gpus: Mapping[str, Any]) -> Iterator[str]:
    """The kernels of a region, for each capability that it is compiled for."""
    for capability, kernels in gpus.items():
        count = f"{len(kernels) or 'no'} kernel{'' if len(kernels) == 1 else 's'}"
        yield f"  {key}, compute capability {capability}: {count}"
        for kernel in kernels:
            times = f" x{kernel['count']}" if kernel["count"] > 1 else ""
            spilled = f"{kernel['spills']} bytes spilled" if kernel["spills"] else "no spills"
            yield (
                f"    {kernel['name']}{times}: {kernel['registers']} registers, {spilled}, {kernel['shared']} bytes of "
                f"shared memory, {kernel['warps']} warps"
            )


def _microbatches(program: Mapping[str, Any]) -> Iterator[str]:
    """Which backwards there are for steps of several microbatches, a line for each set of outputs."""
    found: dict[str, list[str]] = {}
    for row in program["backwards"]:
        if row["microbatch"]:
            found.setdefault(", ".join(row["outputs"]), []).append(row["microbatch"])
    for outputs, names in found.items():
        yield f"    microbatches, gradients of outputs {outputs}: {', '.join(names)}"


def _device(environment: Mapping[str, Any], regions: Mapping[str, Any]) -> str:
    compiled = dict.fromkeys(capability for region in regions.values() for capability in region["gpus"])
    if compiled:
        return f"{environment['device']}, compute capability {' and '.join(compiled)}"
    if environment["capability"]:
        return f"{environment['device']}, compute capability {'.'.join(map(str, environment['capability']))}"
    if environment["cpu"]:
        return f"cpu, {environment['cpu']['machine']} {environment['cpu']['vectors']}, {environment['threads']} threads"
    return f"{environment['device']}, any"
