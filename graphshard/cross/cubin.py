"""Headers of cubins: the kernels, and their registers and spills.

A cubin is an ELF file of 64 bits, little-endian, for the machine 190 (EM_CUDA). Each kernel has a section
`.text.NAME`; `.nv.info` has a kernel's registers and the bytes of a thread's local memory, where registers are spilled
to. Only the standard library reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.errors import ArtifactError
from graphshard.lower.inductor_cache import ELF_HEADER, elf_sections

_MACHINE = 190
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS = 2
# Format of attributes of .nv.info whose value is a symbol and a number.
_SIZED = 4
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F


@dataclass(frozen=True)
class Resources:
    """Registers of a thread, and bytes of its local memory, to which registers are spilled."""

    registers: int
    spills: int


@dataclass(frozen=True)
class Cubin:
    """Compute capability and kernels, by name, of a cubin."""

    capability: tuple[int, int]
    kernels: dict[str, Resources]


def read_cubin(name: str, content: bytes) -> Cubin:
    """Read a cubin's headers; raises ArtifactError with `name` if it is not complete."""
    try:
        return _read(content)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{name} is no cubin: {error}. It is not loaded.") from None


def _read(content: bytes) -> Cubin:
    ident, _, machine, _, _, _, _, flags, *_, names = ELF_HEADER.unpack_from(content)
    if machine != _MACHINE:
        raise ValueError("it has not the header of an ELF file for CUDA")
    sections = elf_sections(content)
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
    """Read the header's flags: 10 times the major number plus the minor one, in another byte since CUDA 13."""
    number = (flags >> 8 if version >= 8 else flags) & 0xFF
    return number // 10, number % 10


def _text(content: bytes, table: tuple[int, ...], offset: int) -> str:
    start = table[4] + offset
    return content[start : content.index(b"\0", start)].decode()


def _symbols(content: bytes, row: tuple[int, ...], sections: list[tuple[int, ...]]) -> list[str]:
    rows = (_SYMBOL.unpack_from(content, row[4] + index * _SYMBOL.size) for index in range(row[5] // _SYMBOL.size))
    return [_text(content, sections[row[6]], symbol[0]) for symbol in rows]


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield attributes of kernels: which, the kernel's symbol, and the value."""
    offset = 0
    while offset + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _SIZED:
            if attribute in (_FRAME_SIZE, _REGISTERS):
                symbol, value = struct.unpack_from("<II", info, offset)
                yield attribute, symbol, value
            offset += size
