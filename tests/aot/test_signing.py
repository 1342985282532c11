"""Signed files, created with the manual's command, load only with the right key."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard.cli.main import main
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.utils.archive import read_archive
from tests.arguments.malformed import NO_PATHS, Hostile, Row
from tests.exported import rewritten
from tests.helpers import Blocks
from tests.ranks import FakeWorld

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
INPUTS = (torch.ones(3, 4),)


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Create files of a private and a public key."""
    private, public = folder / f"{name}.pem", folder / f"{name}.public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the keys of two users."""
    made = tmp_path_factory.mktemp("signed")
    for name in ("mine", "yours"):
        keys(made, name)
    return made


@pytest.fixture
def mesh(fake_world: FakeWorld) -> DeviceMesh:
    fake_world(2)
    return init_device_mesh("cpu", (2,))


def exported(path: Path, **options: Any) -> Path:
    return graphshard.export(Blocks(1), (2,), path, example_inputs=INPUTS, backend="eager", **options)


@pytest.fixture(scope="module")
def signed(folder: Path) -> Path:
    return exported(folder / "signed.gshard", sign=folder / "mine.pem")


@pytest.mark.parametrize("as_object", [False, True], ids=["file", "object"])
@pytest.mark.quick_cases("object")
def test_loads_with_the_right_key(folder: Path, mesh: DeviceMesh, tmp_path: Path, as_object: bool) -> None:
    """One of several keys is enough, and keys may be objects."""
    mine = ed25519.Ed25519PrivateKey.generate()
    sign, trust = (mine, mine.public_key()) if as_object else (folder / "mine.pem", str(folder / "mine.public.pem"))
    path = exported(tmp_path / "a.gshard", sign=sign)
    graphshard.load(path, Blocks(1), mesh, trust=trust)(*INPUTS).backward()
    graphshard.load(path, Blocks(1), mesh, trust=[folder / "yours.public.pem", trust])
    graphshard.load(path, Blocks(1), mesh)  # without `trust` any file loads


def load_error(path: Path, mesh: DeviceMesh, trust: Any) -> str:
    """Return the error; check that nothing of the file was interpreted."""
    model = Blocks(1)
    unread = mock.patch("graphshard.utils.archive.json.loads", side_effect=AssertionError("it is read"))
    with unread, pytest.raises(ArtifactError) as caught:
        graphshard.load(path, model, mesh, trust=trust)
    assert caught.value.field == "signature"
    assert type(model) is Blocks
    return str(caught.value)


def test_without_the_right_signature_nothing_is_read(folder: Path, signed: Path, mesh: DeviceMesh) -> None:
    mine, yours = folder / "mine.public.pem", folder / "yours.public.pem"
    assert "is not signed by a key that is trusted" in load_error(signed, mesh, yours)
    unsigned = exported(folder / "unsigned.gshard")
    assert "is not signed, and trust= was given. Export it with sign=" in load_error(unsigned, mesh, mine)
    forged = rewritten(signed, lambda facts, members: facts["model"].update(model="another"))
    assert "is not signed, and" in load_error(forged, mesh, mine)
    line, check, body = forged.read_bytes().split(b"\n", 2)
    signature = signed.read_bytes().split(b"\n", 2)[1][-len(" ed25519:") - 128 :]  # of another file
    forged.write_bytes(b"\n".join([line, check + signature, body]))
    assert "is not signed by a key that is trusted" in load_error(forged, mesh, mine)


def test_every_changed_byte_of_a_signed_file_is_found(folder: Path, signed: Path, mesh: DeviceMesh) -> None:
    content, copy = signed.read_bytes(), folder / "changed.gshard"
    check = content.index(b"\n") + 1
    for place in (0, 30, *range(check - 1, check + 220, 7), (check + len(content)) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        copy.write_bytes(changed)
        load_error(copy, mesh, folder / "mine.public.pem")
        with pytest.raises(ArtifactError):
            graphshard.load(copy, Blocks(1), mesh, trust=folder / "mine.public.pem")


def test_signing_only_adds_a_signature(folder: Path, signed: Path) -> None:
    """A signature is added to the digest, and changes nothing else."""
    unsigned = exported(folder / "same.gshard")
    assert len(signed.read_bytes()) - len(unsigned.read_bytes()) == len(" ed25519:") + 128
    assert read_archive(unsigned).members == read_archive(signed).members


def test_the_command_checks_and_signs(folder: Path, signed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = str(folder / "mine.public.pem")
    assert main(["verify", str(signed), "--trust", public]) == 0
    assert main(["verify", str(signed), "--trust", str(folder / "yours.public.pem")]) == 1
    assert "is not signed by a key that is trusted" in capsys.readouterr().out


def test_rejects_invalid_keys(folder: Path, signed: Path, mesh: DeviceMesh) -> None:
    texts = (folder / "mine.pem").read_text()
    (folder / "short.pem").write_text(texts[:60])
    rsa = folder / "rsa.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "RSA", "-out", rsa], check=True, capture_output=True)
    common = (*NO_PATHS, "nope.pem", folder, "/dev/zero", folder / "short.pem", rsa, Hostile())
    given = {"model": Blocks(1), "mesh": (2,), "path": folder / "x.gshard", "example_inputs": INPUTS}
    assert not Row(graphshard.export, "sign", (*common, folder / "mine.public.pem"), given).faults()
    loaded = {"path": signed, "model": Blocks(1), "mesh": mesh}
    assert not Row(graphshard.load, "trust", (*common, folder / "mine.pem", []), loaded).faults()


def test_a_missing_package_is_named(folder: Path) -> None:
    with (
        mock.patch.dict("sys.modules", {"cryptography.hazmat.primitives": None}),
        pytest.raises(ArgumentError, match=r"sign needs the package cryptography: pip install 'graphshard\[sign\]'"),
    ):
        exported(folder / "x.gshard", sign=folder / "mine.pem")
