"""`.gshard` files in one process: their contents, rejected files, and the fingerprint's fields."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.export import Dim

import graphshard
from graphshard.errors import ArtifactError
from graphshard.lower.region_store import KeptRegion
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.store.artifact_file import read_artifact
from graphshard.utils.archive import read_archive, write_archive
from tests.exported import Net, export_net, rewritten
from tests.helpers import Blocks
from tests.ranks import FakeWorld


@pytest.fixture(scope="module")
def net_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_net(tmp_path_factory.mktemp("net") / "net.gshard", (2,))


@pytest.fixture
def mesh(fake_world: FakeWorld) -> DeviceMesh:
    fake_world(2)
    return init_device_mesh("cpu", (2,))


def load_error(path: Path, mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> ArtifactError:
    """Return the error of loading a file; check that the model is unchanged and nothing of the file was executed."""
    model = Net() if model is None else model
    before = dict(model.named_parameters())
    executed = mock.patch.object(KeptRegion, "load", side_effect=AssertionError("native code is loaded"))
    with executed, pytest.raises(ArtifactError) as caught:
        graphshard.load(path, model, mesh, **options)
    assert not isinstance(model, graphshard.module.compiled_module.CompiledModule)
    assert all(param is before[name] for name, param in model.named_parameters())
    return caught.value


# --- contents ---------------------------------------------------------------------------------------------------


def test_export_needs_no_process_group_or_weights_and_has_no_side_effects(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Blocks(1)
    model.layers[0].eval()
    graphshard.export(model, (2,), tmp_path / "b.gshard", example_inputs=(torch.zeros(2, 4),), backend="eager")
    assert not torch.distributed.is_initialized()
    assert type(model) is Blocks
    assert all(param.is_meta for param in model.parameters())
    assert model.training
    assert not model.layers[0].training
    assert [path.name for path in tmp_path.iterdir()] == ["b.gshard"]


@pytest.mark.parametrize(
    "where",
    ["graphshard.aot.exporter.lower", "graphshard.utils.archive.zlib.compress", "os.replace"],
)
def test_interrupted_export_leaves_no_files(tmp_path: Path, where: str) -> None:
    with mock.patch(where, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        graphshard.export(Blocks(1), (2,), tmp_path / "b.gshard", example_inputs=(torch.zeros(2, 4),), backend="eager")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_equal_exports_are_equal_files(net_file: Path, tmp_path: Path) -> None:
    assert export_net(tmp_path / "again.gshard", (2,)).read_bytes() == net_file.read_bytes()


def test_progress_names_meshes_and_passes(tmp_path: Path) -> None:
    told: list[str] = []
    with mock.patch("graphshard.aot.export.progress", return_value=contextlib.nullcontext(told.append)) as progress:
        graphshard.export(Blocks(1), (2,), tmp_path / "b.gshard", example_inputs=(torch.zeros(2, 4),), backend="eager")
    progress.assert_called_once_with("graphshard: export Blocks")
    passes = [step.name for step in graphshard.Pipeline()]
    assert told == [f"2 ranks: {phase}" for phase in ("capture", *passes, "lower")]


def test_no_member_could_be_unpickled(net_file: Path) -> None:
    for name, data in read_archive(net_file).members.items():
        assert Path(name).suffix in (".json", ".txt"), name
        if name.endswith(".json"):
            json.loads(data)
        assert not data.startswith(b"\x80")


def test_meshes_share_regions_without_packing(tmp_path: Path) -> None:
    """Without packed buckets and padding, no region depends on the number of ranks."""
    passes = graphshard.Pipeline().replace("plan", graphshard.passes.MakePlan(PlanByUnit(0, 0)))
    given = {"example_inputs": (torch.zeros(2, 8),), "backend": "eager", "passes": passes}
    one, several = (
        read_artifact(graphshard.export(Blocks(2, 8), meshes, tmp_path / name, **given)).manifest.regions
        for meshes, name in (((2,), "one.gshard"), ([(2,), (4,), (8,)], "several.gshard"))
    )
    assert set(one) == set(several)


class Pairs(nn.Module):
    """Behaves differently with an even number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum() if x.shape[0] % 2 == 0 else self.w.sum()


def test_dynamic_sizes_and_their_constraints(tmp_path: Path, mesh: DeviceMesh) -> None:
    dims = ({0: Dim.AUTO},)
    given = {"example_inputs": (torch.zeros(4, 4),), "dynamic_shapes": dims, "backend": "eager"}
    path = graphshard.export(Pairs(), (2,), tmp_path / "p.gshard", **given)
    (condition,) = json.loads(read_archive(path).members["programs/0.json"])["conditions"]
    assert condition == "Eq(Mod(s0, 2), 0)"
    model = graphshard.load(path, Pairs(), mesh)
    for rows in (2, 6, 10):
        model.zero_grad()
        model(torch.ones(rows, 4)).backward()
        assert model.w.grad is not None
    assert len(graphshard.programs(model)) == 1
    for rows in (5, 1):
        with pytest.raises(
            ArtifactError, match=rf"is float32\[{rows}, 4\] \(programs of .* where 'Eq\(Mod\(s0, 2\), 0\)'"
        ):
            model(torch.ones(rows, 4))
    graphshard.load(path, Pairs(), mesh, dynamic_shapes=dims)(torch.ones(8, 4)).backward()


# --- several microbatches ---------------------------------------------------------------------------------------


def export_blocks(path: Path, mesh: Any, **options: Any) -> Path:
    return graphshard.export(Blocks(2, 8), mesh, path, example_inputs=(torch.zeros(2, 8),), backend="eager", **options)


def test_backwards_of_microbatches(tmp_path: Path) -> None:
    """First, middle and last; on one rank nothing stays for the next one, and the last is not special."""
    path = export_blocks(tmp_path / "b.gshard", [(1,), (2,), (2, 2)], accumulate=True)
    artifact = read_artifact(path)
    no_sync = [f"no-sync-{microbatch}" for microbatch in ("first", "middle", "last")]
    no_all_reduce = [f"no-all-reduce-{microbatch}" for microbatch in ("first", "middle", "last")]
    found = [[row.microbatch for row in mesh.programs[0].backwards] for mesh in artifact.manifest.meshes]
    assert found == [no_sync[:1], no_sync, no_sync + no_all_reduce]
    assert f"    microbatches, gradients of outputs 0: {', '.join(no_sync)}\n" in artifact.archive.text("summary.txt")
    sent = {}
    for name in (*no_sync, *no_all_reduce):
        lines = artifact.archive.json(f"programs/2.backward-0-{name}.json")["communication"]
        sent[name] = {kind for kind in ("reduce", "all_reduce") for line in lines if f"backward: {kind} " in line}
    assert sent["no-sync-first"] == sent["no-sync-middle"] == set()
    assert sent["no-all-reduce-first"] == sent["no-all-reduce-middle"] == {"reduce"}
    assert sent["no-sync-last"] == sent["no-all-reduce-last"] == {"reduce", "all_reduce"}


def test_gradients_accumulate_over_any_number_of_microbatches(tmp_path: Path, mesh: DeviceMesh) -> None:
    path = export_blocks(tmp_path / "b.gshard", (2,), accumulate=True)
    model = graphshard.load(path, Blocks(2, 8), mesh)
    for count in (1, 2, 5):
        model.zero_grad()
        for microbatch in range(count):
            model.set_requires_gradient_sync(microbatch == count - 1)
            assert all(param.grad is None for param in model.parameters())
            model(torch.ones(2, 8)).backward()
        assert all(param.grad is not None for param in model.parameters())
    model.set_requires_gradient_sync(False, units=["layers.0"])
    with pytest.raises(ArtifactError, match=r"accumulate the gradients of all parameters of the model alike.*whole"):
        model(torch.ones(2, 8)).backward()


def test_microbatches_that_were_not_exported(tmp_path: Path, mesh: DeviceMesh) -> None:
    """The error names the option; nothing was accumulated, so training can continue."""
    model = graphshard.load(export_blocks(tmp_path / "b.gshard", (2,)), Blocks(2, 8), mesh)
    model.set_requires_gradient_sync(False)
    with pytest.raises(
        ArtifactError, match=r"set_requires_gradient_sync\(False\) asks for. Export it with accumulate=T"
    ):
        model(torch.ones(2, 8)).backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 8)).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_rejects_an_invalid_accumulation(tmp_path: Path, mesh: DeviceMesh) -> None:
    path = export_blocks(tmp_path / "b.gshard", (2,), accumulate=True)

    def change(facts: dict[str, Any], _: Any) -> None:
        facts["meshes"][0]["programs"][0]["backwards"][0]["accumulate"] = {"unsynced": 1}

    error = load_error(rewritten(path, change), mesh, Blocks(2, 8))
    assert "its manifest is not one of graphshard.export" in str(error)


# --- two mesh axes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_several_shapes_of_one_and_two_axes(tmp_path: Path, fake_world: FakeWorld) -> None:
    """Each shape has separate options; all plans are cost-based."""
    path = export_blocks(tmp_path / "b.gshard", [(4,), (2, 2), {"outer": 4, "inner": 1}])
    assert all("profile" in mesh.options.passes["plan"] for mesh in read_artifact(path).manifest.meshes)
    fake_world(4)
    for shape, names in (((4,), ("shard",)), ((2, 2), ("replicate", "shard")), ((4, 1), ("outer", "inner"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = graphshard.load(path, Blocks(2, 8), mesh, passes=graphshard.Pipeline())
        model(torch.ones(2, 8)).backward()
        (param, *_) = model.parameters()
        assert param.grad is not None
        assert param.grad.placements == param.placements
        assert len(param.placements) == len(shape)
        assert param.to_local().shape[0] == 8 // shape[-1]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((4,), ("shard",)),
        ((2, 2), ("shard", "replicate")),
        ((2, 2), ("dp_replicate", "dp_shard")),
        ((4, 1), ("replicate", "shard")),
    ],
    ids=str,
)
@pytest.mark.quick_cases("(4,)-('shard',)", "(2, 2)-('dp_replicate', 'dp_shard')", "(4, 1)-('replicate', 'shard')")
def test_rejects_other_axes(
    tmp_path: Path, fake_world: FakeWorld, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    """Different number, order, names or sizes; the division of gradients follows from sizes."""
    path = export_blocks(tmp_path / "b.gshard", [(2, 2), (2,)])
    fake_world(4)
    error = load_error(path, init_device_mesh("cpu", shape, mesh_dim_names=names), Blocks(2, 8))
    assert error.field == "mesh"
    here = dict(zip(names, shape))
    assert "mesh was {'replicate': 2, 'shard': 2} or {'shard': 2} when it was exported and is" in str(error)
    assert f"is {here} here. Export again with this mesh in the list: export(model, [..., {here}], ...)" in str(error)


def test_regathers_among_the_same_number_of_ranks(tmp_path: Path, fake_world: FakeWorld) -> None:
    path = export_blocks(tmp_path / "b.gshard", (4,), reshard_after_forward=2)
    fake_world(4)
    mesh = init_device_mesh("cpu", (4,))
    graphshard.load(path, Blocks(2, 8), mesh)(torch.ones(2, 8)).backward()
    error = load_error(path, mesh, Blocks(2, 8), reshard_after_forward=True)
    assert "reshard_after_forward was 2 when it was exported and is None here. Give the option" in str(error)


# --- rejected files ---------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found(net_file: Path, tmp_path: Path) -> None:
    content = net_file.read_bytes()
    copy = tmp_path / "copy.gshard"
    drawn = random.Random(0)
    # The structure, and a sample of the rest.
    places = {*range(60), *range(len(content) - 120, len(content)), *drawn.sample(range(len(content)), 200)}
    for place in sorted(places):
        changed = bytearray(content)
        changed[place] ^= 1 << drawn.randrange(8)
        copy.write_bytes(changed)
        with pytest.raises(ArtifactError, match=r"copy\.gshard"):
            read_artifact(copy)


def test_every_truncation_and_addition_is_found(net_file: Path, tmp_path: Path) -> None:
    content = net_file.read_bytes()
    copy = tmp_path / "copy.gshard"
    drawn = random.Random(0)
    for length in (0, 1, 21, 22, len(content) - 1, *drawn.sample(range(len(content)), 40)):
        copy.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match=r"copy\.gshard"):
            read_artifact(copy)
    for more in (content + b"\0", b"\0" + content, content + content):
        copy.write_bytes(more)
        with pytest.raises(ArtifactError, match=r"copy\.gshard"):
            read_artifact(copy)


def _line(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Return a function that changes the first line, with a correct digest."""

    def apply(content: bytes) -> bytes:
        line, _, body = content.split(b"\n", 2)
        facts = json.loads(line)
        change(facts)
        return _with_digest(json.dumps(facts).encode(), body)

    return apply


def _with_digest(line: bytes, body: bytes) -> bytes:
    digest = hashlib.sha256(line + b"\n" + body).hexdigest()
    return b"\n".join([line, f"sha256:{digest}".encode(), body])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_line(lambda facts: facts.update(format=1)), r"has format 1, this version of graphshard reads 12"),
        (_line(lambda facts: facts.update(format=True)), r"has format True"),
        (_line(lambda facts: facts.pop("format")), r"was not written by graphshard \(KeyError"),
        (_line(lambda facts: facts.pop("members")), r"was not written by graphshard \(KeyError"),
        (_line(lambda facts: facts["members"].update({"summary.txt": 1 << 40})), r"and it holds others"),
        (_line(lambda facts: facts["members"].update({"data.pkl": 0})), r"has an unexpected data\.pkl"),
        (_line(lambda facts: facts.pop("regions")), r"its manifest is not one of graphshard\.export"),
        (lambda content: _with_digest(b"{", b""), r"was not written by graphshard"),
        (lambda content: _with_digest(b"[" * 100000, b""), r"was not written by graphshard"),
        (lambda content: content.replace(b"sha256:", b"sha256;", 1), r"is not whole, or was changed"),
    ],
)
def test_rejects_changed_archives(
    net_file: Path, tmp_path: Path, mesh: DeviceMesh, change: Callable[[bytes], bytes], message: str
) -> None:
    copy = tmp_path / "copy.gshard"
    copy.write_bytes(change(net_file.read_bytes()))
    error = load_error(copy, mesh)
    assert re.search(message, str(error)), error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, members: members.pop("programs/0.json"), r"has no programs/0\.json"),
        (lambda _, members: members.update({"programs/9.json": b"{}"}), r"has an unexpected programs/9\.json"),
        (lambda _, members: members.update({"../evil": b""}), r"has an unexpected \.\./evil"),
        (
            lambda facts, _: next(iter(facts["regions"].values())).update(libraries=["../evil"]),
            r"has a library '\.\./evil', as no region has",
        ),
    ],
)
def test_rejects_other_members(
    net_file: Path, mesh: DeviceMesh, change: Callable[[Any, dict[str, bytes]], None], message: str
) -> None:
    assert re.search(message, str(load_error(rewritten(net_file, change), mesh)))


def test_no_more_is_unpacked_than_the_members_have(net_file: Path, tmp_path: Path) -> None:
    line, _, body = net_file.read_bytes().split(b"\n", 2)
    copy = tmp_path / "copy.gshard"
    for other in (zlib.compress(b"\0" * (1 << 24)), body + b"more", body[:-20]):
        copy.write_bytes(_with_digest(line, other))
        with pytest.raises(ArtifactError, match="and it holds others"):
            read_artifact(copy)


@pytest.mark.parametrize("sizes", [{"bomb.txt": 1 << 24}, {"bomb.txt": 1 << 24, "a": -(1 << 24) - 1}])
def test_rejects_bombs_before_unpacking(net_file: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    """For any sizes in the file: a bomb's, or a negative one, which would disable the limit."""
    facts = json.loads(net_file.read_bytes().partition(b"\n")[0])
    line = json.dumps({**facts, "members": sizes}).encode()
    copy = tmp_path / "copy.gshard"
    copy.write_bytes(_with_digest(line, zlib.compress(b"\0" * (1 << 24))))
    unpacker = mock.Mock(decompress=mock.Mock(side_effect=AssertionError("unpacked")), eof=False)
    unpacked = mock.patch("zlib.decompressobj", return_value=unpacker)
    with unpacked, pytest.raises(ArtifactError, match="and it holds others"):
        read_artifact(copy)


def test_highly_compressible_files_are_readable(tmp_path: Path) -> None:
    members = {"zeros": b"\0" * (1 << 24)}
    write_archive(tmp_path / "zeros", {}, members)
    assert read_archive(tmp_path / "zeros").members == members


def test_rejects_forged_contents_with_correct_checksums(net_file: Path, mesh: DeviceMesh) -> None:
    """Forging checksums allows running code anyway, but malformed contents only raise an ArtifactError."""

    def change(facts: dict[str, Any], members: dict[str, bytes]) -> None:
        data = json.loads(members["programs/0.json"])
        nodes = data["phases"]["forward"]["nodes"]
        next(node for node in nodes if node["op"] == "call_function")["target"] = "os.system"
        members["programs/0.json"] = json.dumps(data).encode()

    path = rewritten(net_file, change)
    assert re.search("a program cannot be read: .*unknown operator", str(load_error(path, mesh)))
    for member, forged in (("programs/0.json", b"[]"), ("programs/0.json", b"7"), ("programs/0.json", b"\x80\x04.")):
        path = rewritten(net_file, lambda _, members, m=member, f=forged: members.update({m: f}))
        load_error(path, mesh)
    path = rewritten(net_file, lambda facts, _: facts.pop("regions"))
    assert "its manifest is not one of graphshard.export" in str(load_error(path, mesh))
