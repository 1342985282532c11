"""What the headers of ELF files say: which kernels a cubin has, and what each takes; if a shared library is whole.

A cubin is an ELF file of 64 bits, little-endian, for the machine 190 (EM_CUDA). Each kernel has a section
`.text.NAME`; `.nv.info` says how many registers a kernel takes and how many bytes of a thread's own memory, where
registers are spilled to. Nothing but the standard library reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.errors import ArtifactError

_MACHINE = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _STRINGS, _EMPTY = 2, 3, 8
# Attributes of .nv.info with a value of this format; what they are about is a symbol and a number.
_SIZED = 4
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread, and bytes of its own memory, which spilled registers are in."""

    registers: int
    spills: int


@dataclass(frozen=True)
class Cubin:
    """What a cubin is.

    Attributes:
        capability: compute capability that it is for.
        kernels: by name.
    """

    capability: tuple[int, int]
    kernels: dict[str, Resources]


def read_cubin(name: str, content: bytes) -> Cubin:
    """Read a cubin's headers; `name` is what messages call it.

    Raises:
        ArtifactError: it is no whole cubin.
    """
    try:
        return _read(content)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{name} is no cubin: {error}. It is not loaded.") from None


def damage_of(content: bytes) -> str:
    """Why a shared library of 64 bits, little-endian, is not whole; "" if its headers say nothing of the kind.

    Linkers put the table of sections at the end, so a library without its end has none.
    """
    try:
        _sections(content)
    except (struct.error, IndexError, ValueError) as error:
        return str(error)
    return ""


def _sections(content: bytes) -> list[tuple[int, ...]]:
    """The table of sections; raises ValueError, or what `struct` and indices do, if the file is not whole."""
    ident, *_, first, _, _, _, _, size, count, names = _HEADER.unpack_from(content)
    if ident[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it has not the header of an ELF file")
    if size != _SECTION.size:
        raise ValueError("its table of sections is of another format")
    if first + size * count > len(content):
        raise ValueError("it is cut off")
    sections = [_SECTION.unpack_from(content, first + index * size) for index in range(count)]
    for _, kind, _, _, offset, length, *_ in sections:
        if kind != _EMPTY and offset + length > len(content):
            raise ValueError("it is cut off")
    if sections[names][1] != _STRINGS:
        raise ValueError("its table of sections was not written")
    return sections


def _read(content: bytes) -> Cubin:
    ident, _, machine, _, _, _, _, flags, *_, names = _HEADER.unpack_from(content)
    if machine != _MACHINE:
        raise ValueError("it has not the header of an ELF file for CUDA")
    sections = _sections(content)
    parts = [(_text(content, sections[names], row[0]), row) for row in sections]
    kernels = [name.removeprefix(".text.") for name, _ in parts if name.startswith(".text.")]
    if not kernels:
        raise ValueError("it has no kernel")
    symbols = [_symbols(content, row, sections) for _, row in parts if row[1] == _SYMBOLS]
    named = symbols[0] if symbols else []
    found: dict[tuple[int, str], int] = {}
    for name, row in parts:
        if name == ".nv.info":
            for attribute, symbol, value in _attributes(content[row[4] : row[4] + row[5]]):
                found[attribute, named[symbol]] = value
    taken = {name: Resources(found.get((_REGISTERS, name), 0), found.get((_FRAME_SIZE, name), 0)) for name in kernels}
    return Cubin(_capability(ident[8], flags), taken)


def _capability(version: int, flags: int) -> tuple[int, int]:
    """The GPU in the header's flags: 10 times the major number and the minor one, in another byte since CUDA 13."""
    number = (flags >> 8 if version >= 8 else flags) & 0xFF
    return number // 10, number % 10


def _text(content: bytes, table: tuple[int, ...], offset: int) -> str:
    start = table[4] + offset
    return content[start : content.index(b"\0", start)].decode()


def _symbols(content: bytes, row: tuple[int, ...], sections: list[tuple[int, ...]]) -> list[str]:
    rows = (_SYMBOL.unpack_from(content, row[4] + index * _SYMBOL.size) for index in range(row[5] // _SYMBOL.size))
    return [_text(content, sections[row[6]], symbol[0]) for symbol in rows]


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """Attributes of kernels: which, the kernel's symbol, and the value."""
    offset = 0
    while offset + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _SIZED:
            if attribute in (_FRAME_SIZE, _REGISTERS):
                symbol, value = struct.unpack_from("<II", info, offset)
                yield attribute, symbol, value
            offset += size
