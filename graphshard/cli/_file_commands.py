"""Subcommands for artifacts: `graphshard show FILE`, `verify`, and `finish`, which compiles.

`show` and `verify` do not execute anything of a file.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator

import torch

from graphshard.aot.export import MOST_THREADS
from graphshard.aot.exporter import compiler_for_file, operators_only, with_threads
from graphshard.codec.program_format import decode_lowered, decode_partitioned
from graphshard.debug.show import import_all
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.ir.collapse_repeats import fold
from graphshard.ir.gpus import CAPABILITIES, dotted
from graphshard.lower.region_store import Package
from graphshard.lower.regions import RegionCall
from graphshard.pipeline.pipeline import Pipeline
from graphshard.store.artifact_file import Artifact, ArtifactWriter, read_artifact
from graphshard.store.fingerprint import differences, environment, refuse
from graphshard.store.signing import signer_of, verifier_of
from graphshard.utils.argument_validation import check_count, path_of
from graphshard.utils.progress import progress
from graphshard.utils.text import say

WRITTEN = "a file that graphshard.export wrote"


def show(args: argparse.Namespace) -> int:
    """Run `graphshard show FILE --graph`: print the scheduled graphs of its programs."""
    import_all(args.imports)
    artifact = read_artifact(path_of("PATH", args.path, WRITTEN))
    for mesh in artifact.manifest.meshes:
        for program in mesh.programs:
            text = artifact.archive.text(f"{program.file}.txt")
            say(f"{program.file} ({program.entry or 'the model'}, {mesh.mesh})")
            say(text if args.full else fold(text))
    return 0


def verify(args: argparse.Namespace) -> int:
    """Run `graphshard verify FILE`; return 1 if something is wrong."""
    path = path_of("FILE", args.file, WRITTEN)
    try:
        artifact = read_artifact(path, verifier_of(args.trust))
        checked = list(_check(artifact))
    except ArtifactError as error:
        say(f"{args.file}: {error}")
        return 1
    compiled = artifact.native or artifact.manifest.capabilities
    code = "native code: trust it as you would a program" if compiled else "no native code"
    say(f"{args.file}: whole. {', '.join(checked)}; {code}")
    return 0


def _check(artifact: Artifact) -> Iterator[str]:
    """Read everything as loading would, and yield counts in words; raise ArtifactError for a contradiction."""
    manifest = artifact.manifest
    device = torch.device(manifest.environment.device)
    for key, entry in manifest.regions.items():
        region = artifact.region(key, device)
        if hashlib.sha256(region.text.encode()).hexdigest()[:16] != key.partition("-")[0]:
            raise ArtifactError(f"region {key} is another than its key says.")
        for capability in manifest.capabilities if entry.gpus else ():
            artifact.gpu_code(key, capability, device)
    compiled = {key: RegionCall(Package()) for key in manifest.regions}
    count = 0
    for mesh in manifest.meshes:
        for program in mesh.programs:
            names = (f"{program.file}.json", *map(program.backward_file, program.backwards))
            decoded = [decode_lowered(artifact.archive.json(name), compiled, None, device) for name in names]
            count += len(decoded)
            for name in program.partitioned_files:
                decode_partitioned(artifact.archive.json(name), decoded[0], Pipeline(), device)
    yield f"{len(artifact.archive.members)} members"
    yield f"{count} programs for {len(manifest.meshes)} meshes"
    yield f"{len(manifest.regions)} regions"


def finish(args: argparse.Namespace) -> int:
    """Run `graphshard finish FILE`: compile regions that have no code."""
    path = path_of("FILE", args.file, WRITTEN)
    if args.threads is not None:
        check_count("--threads", args.threads, most=MOST_THREADS)
    signer = None if args.sign is None else signer_of(args.sign)
    artifact = read_artifact(path, verifier_of(args.trust))
    if not artifact.later:
        say(f"{path}: nothing to do, no region is left to compile")
        return 0
    manifest = artifact.manifest
    device = torch.device(manifest.environment.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"{path} is for CUDA, and there is no GPU here: run this where it will be loaded")
    here = environment(device, native=False)
    refuse(path, differences(manifest.environment, here, ("graphshard", "torch", "device")))
    compiler, _ = compiler_for_file("inductor", device, None, [])
    if compiler is operators_only:
        major, minor = torch.cuda.get_device_capability()
        raise ArgumentError(
            f"{path}: files have code for GPUs of compute capability {', '.join(map(dotted, CAPABILITIES))}, and this "
            f"GPU is of {major}.{minor}. `load` compiles what is left, each time."
        )
    writer = ArtifactWriter(dict(artifact.archive.members), dict(manifest.regions), manifest.meshes)
    problems = []
    wanted = {key: artifact.region(key, device) for key in artifact.later}
    with progress(f"graphshard finish {path}", lines=True) as tell, with_threads(args.threads):
        for key, package in compiler(wanted, tell):
            assert isinstance(package, Package)
            writer.add_code(key, package)
            if writer.regions[key].code == "operators":
                problems.append(f"{key}: {package.problem}")
        native = any(region.code == "native" for region in writer.regions.values())
        now = environment(device, native=native)
    writer.write(path, now, manifest.model, sign=signer)
    say(f"{path}: compiled {len(wanted) - len(problems)} of {len(wanted)} regions")
    say(*problems, end="\n" if problems else "")
    return 0
