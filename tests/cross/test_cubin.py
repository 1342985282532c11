"""Cubin headers, parsed in Python."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from graphshard.cross.gpu_kernels import Resources, read_cubin
from graphshard.errors import ArtifactError
from graphshard.lower.inductor_cache import damage_of


def cubin(
    *,
    machine: int = 190,
    version: int = 8,
    flags: int = 90 << 8,
    kernel: str = "add",
    registers: int = 22,
    spills: int = 8,
) -> bytes:
    """Build a minimal cubin: names, symbols, attributes and a kernel without code."""
    names = [b"", b".shstrtab", b".symtab", b".nv.info", f".text.{kernel}".encode(), kernel.encode()]
    table, offsets = b"", []
    for name in names:
        offsets.append(len(table))
        table += name + b"\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", offsets[5], 0x12, 0, 4, 0, 0)
    info = b"".join(struct.pack("<BBHII", 4, what, 8, 1, value) for what, value in ((0x2F, registers), (0x11, spills)))
    parts = [(0, b""), (3, table), (2, symbols), (0x70000000, info), (1, b"")]
    body, rows = b"", []
    for (kind, content), offset in zip(parts, offsets):
        rows.append(struct.pack("<IIQQQQIIQQ", offset, kind, 0, 0, 64 + len(body), len(content), 1, 0, 1, 0))
        body += content
    ident = b"\x7fELF\x02\x01\x01\x41" + bytes([version]) + bytes(7)
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, machine, 1, 0, 0, 64 + len(body), flags, 64, 0, 0, 64, 5, 1)
    return header + body + b"".join(rows)


def test_parses_a_cubin() -> None:
    found = read_cubin("k", cubin())
    assert found.capability == (9, 0)
    assert found.kernels == {"add": Resources(registers=22, spills=8)}


def test_headers_of_older_compilers() -> None:
    assert read_cubin("k", cubin(version=7, flags=0x500 | 80)).capability == (8, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "k is no cubin: unpack_from requires"),
        (b"\x7fELF", "k is no cubin"),
        (cubin(machine=62), "k is no cubin: it has not the header of an ELF file for CUDA"),
        (cubin()[:-70], "k is no cubin"),
        (b"MZ" + cubin()[2:], "not the header of an ELF file"),
        (cubin(kernel="x").replace(b".text.x", b".data.x"), "it has no kernel"),
    ],
)
def test_rejects_files_other_than_cubins(content: bytes, message: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        read_cubin("k", content)
    assert message in str(caught.value)
    assert "It is not loaded" in str(caught.value)


@pytest.mark.parametrize("length", range(0, len(cubin()), 7))
def test_truncated_cubins(length: int) -> None:
    with pytest.raises(ArtifactError):
        read_cubin("k", cubin()[:length])


@pytest.mark.skipif(sys.platform != "linux", reason="libraries of other systems are no ELF files")
def test_truncated_libraries(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    command = ["g++", "-shared", "-fPIC", "-g", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=b'extern "C" int one() { return 1; }', check=True)
    content = library.read_bytes()
    size = len(content)
    assert damage_of(content) == ""
    for cut in (0, 10, 64, size // 2, size - 1):
        assert damage_of(content[:cut]) != "", cut
    assert damage_of(content[: size // 2]) == "it is cut off"
    assert damage_of(content[: size // 2] + bytes(size - size // 2)) == "its table of sections was not written"
    assert damage_of(bytes(size)) == "it has not the header of an ELF file"
