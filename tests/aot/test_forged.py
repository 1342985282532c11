"""Forged contents with correct checksums are rejected at loading, or when a trace selects the program."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard.errors import ArtifactError
from graphshard.utils.archive import read_archive
from tests.aot.forging import forgeries
from tests.exported import rewritten
from tests.helpers import Blocks
from tests.ranks import reset_distributed

INPUTS = (torch.ones(3, 4),)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Build a mesh of one rank, which runs loaded models."""
    reset_distributed()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    reset_distributed()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export with few fields, but at least one of each kind."""
    path = tmp_path_factory.mktemp("forged") / "blocks.gshard"
    return graphshard.export(blocks(), (1,), path, example_inputs=INPUTS, backend="eager")


def blocks() -> nn.Module:
    """Build a model with only parameters."""
    return Blocks(1, bias=True)


def outcome(path: Path, mesh: DeviceMesh, make: Callable[[], nn.Module]) -> str:
    """Return "refused", "runs", or a description of a wrong error."""
    model = make()
    kind = type(model)
    before = dict(model.named_parameters())
    try:
        graphshard.load(path, model, mesh)
    except ArtifactError as error:
        changed = any(param is not before[name] for name, param in model.named_parameters())
        escapes = "\x1b" in str(error) or len(str(error)) > 3000
        return (
            "changed" if changed or type(model) is not kind else f"said {str(error)[:200]!r}" if escapes else "refused"
        )
    except Exception as error:
        return f"load raised {type(error).__name__}: {str(error)[:200]}"
    try:
        model(*INPUTS).backward()
    except ArtifactError as error:  # the file serves other calls
        unchanged = all(param.grad is None for param in model.parameters())
        return "runs" if unchanged else f"the first call raised {error}"
    except Exception as error:
        return f"the first call raised {type(error).__name__}: {str(error)[:200]}"
    return "runs"


def members(file: Path) -> list[str]:
    return [name for name in read_archive(file).members if name.endswith(".json") and "plan" not in name]


def check(
    file: Path,
    mesh: DeviceMesh,
    member: str,
    stride: int,
    make: Callable[[], nn.Module] = blocks,
    at: tuple[Any, ...] = (),
) -> dict[str, int]:
    """Count the outcomes of forgeries of a member, of the manifest, or of a position in it."""
    archive = read_archive(file)
    data = dict(archive.facts) if member == "manifest" else archive.json(member)
    faults, counts = [], {"refused": 0, "runs": 0}
    for name, value in forgeries(data, stride=stride, at=at):

        def change(facts: dict[str, Any], members: dict[str, bytes], value: Any = value) -> None:
            if member == "manifest":
                facts.clear()
                facts.update(value if isinstance(value, dict) else {"meshes": value})
            else:
                members[member] = json.dumps(value).encode()

        found = outcome(rewritten(file, change), mesh, make)
        if found in counts:
            counts[found] += 1
        else:
            faults.append(f"{name}: {found}")
    assert not faults, "\n".join(faults)
    return counts


def test_forged_manifests(file: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshard.store.artifact_file.summarize", lambda _: "")
    counts = check(file, mesh, "manifest", 2)
    assert counts["refused"] > 2 * counts["runs"]


# Every nth position of a member is forged.
STRIDES = {"programs/0.json": 4, "regions": 4, "programs/0.partitioned.json": 40}


@pytest.mark.parametrize("member", STRIDES)
@pytest.mark.quick_cases("regions")
def test_forged_members(file: Path, mesh: DeviceMesh, member: str) -> None:
    names = [name for name in members(file) if name.startswith(member)]
    counts = check(file, mesh, names[0], STRIDES[member])
    assert counts["refused"] or "partitioned" in member


def test_a_program_of_another_call(file: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    """A program under another trace's digest is an error of the first call, before anything runs."""
    other = graphshard.export(
        blocks(), (1,), tmp_path / "other.gshard", example_inputs=(torch.ones(5, 4),), backend="eager"
    )
    digests = read_archive(file).facts["meshes"][0]["programs"][0]["digests"]

    def change(facts: dict[str, Any], _: Any) -> None:
        facts["meshes"][0]["programs"][0]["digests"] = digests

    model = graphshard.load(rewritten(other, change), blocks(), mesh)
    with pytest.raises(ArtifactError, match="a program is for another call: input:0 is"):
        model(*INPUTS)
