"""Collapse the repeated blocks in a program's text, so that a deep model stays readable.

    ...lines up to layers.1...
    ...46 lines, from layers.1 to layers.2...
      ... layers.2 to layers.30: 29 times 46 lines like layers.1
    ...the lines of layers.31...

This works on text alone (from `ir/printer.py`), so it also works on dumps. A block starts where its name first appears:
at its prefetched gather, inside of the previous block's lines.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

# The first numbered element of a dotted name: layers.3 of layers.3.attention.weight.
_BLOCK = re.compile(r"\b((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)\.(\d+)\b")
_VALUE = re.compile(r"%(\d+)")
_DEFINED = re.compile(r"^. %(\d+):")
# Inputs and outputs of each kind form a list; a joint graph has two directions.
_LIST = re.compile(r"^  (?:return .* as |%\d+: [^=]* = )(param|buffer|grad|mutation|saved)\b")
_BACKWARD = re.compile(r"  # .*\(backward\)")
MIN_REPEATS = 3
MAX_PERIOD = 4


@dataclass(frozen=True)
class _Section:
    """Lines from the first appearance of a block to the next block. Equal blocks have equal keys."""

    block: str
    lines: tuple[str, ...]
    key: str


def fold(text: str) -> str:
    """Return the text with blocks (or groups of up to `MAX_PERIOD`) that repeat `MIN_REPEATS` times shown once."""
    phases = re.split(r"(?m)^(?=\S+:\n)", text)
    return "".join(_fold_phase(_sections(phase.splitlines(keepends=True))) for phase in phases)


def _fold_phase(sections: list[_Section]) -> str:
    text, start = "", 0
    while start < len(sections):
        period, times = _repeats([s.key for s in sections[start:]])
        shown = sections[start : start + period]
        text += "".join(line for section in shown for line in section.lines)
        if times > 1:
            first, last = sections[start + period].block, sections[start + period * times - 1].block
            like = shown[0].block + (f" to {shown[-1].block}" if period > 1 else "")
            size = sum(len(section.lines) for section in shown)
            text += f"  ... {first} to {last}: {times - 1} times {size} lines like {like}\n"
        start += period * times
    return text


def _repeats(keys: list[str]) -> tuple[int, int]:
    """Return length and count of the repeated group that the keys start with; (1, 1) if none."""
    for period in range(1, MAX_PERIOD + 1):
        times = 1
        while keys[times * period : (times + 1) * period] == keys[:period]:
            times += 1
        if times >= MIN_REPEATS:
            return period, times
    return 1, 1


def _sections(lines: list[str]) -> list[_Section]:
    """Split a phase's lines where a block first appears, in lists where it changes; keys are relative to the block."""
    groups: list[tuple[tuple[str, str, int], list[str]]] = []
    seen: set[tuple[str, str, int]] = set()
    for line in lines:
        in_list = _LIST.match(line)
        part = in_list[1] if in_list else "(backward)" if _BACKWARD.search(line) else ""
        block = (part, *_block_of(line))
        is_new = block[1] != "" and (block != groups[-1][0] if in_list and groups else block not in seen)
        if not groups or is_new or part != groups[-1][0][0]:
            groups.append((block, []))
        seen.add(block)
        groups[-1][1].append(line)

    where: dict[str, tuple[str, str, int, int]] = {}
    defined: Counter[tuple[str, str, int]] = Counter()
    sections: list[_Section] = []
    for block, members in groups:
        _, stem, index = block
        for line in members:
            if match := _DEFINED.match(line):
                where[match[1]] = (*block, defined[block])
                defined[block] += 1
        key = "".join(_relative(line, stem, index, where) for line in members) if stem else f"{len(sections)}"
        sections.append(_Section(f"{stem}.{index}", tuple(members), key))
    return sections


def _block_of(line: str) -> tuple[str, int]:
    """Return the block that a line names in its comment or slot; ("", 0) for none."""
    code, _, comment = line.partition("  # ")
    label = _LIST.match(line)
    match = _BLOCK.search(comment) or (_BLOCK.search(code, label.start(1)) if label else None)
    return (match[1], int(match[2])) if match else ("", 0)


def _relative(line: str, stem: str, index: int, where: dict[str, tuple[str, str, int, int]]) -> str:
    """Return a line with values and block numbers relative to the block `stem.index`."""

    def value(match: re.Match[str]) -> str:
        part, owner, at, ordinal = where.get(match[1], ("", "", 0, 0))
        return f"%<{part} {at - index} {ordinal}>" if owner == stem else match[0]

    def number(match: re.Match[str]) -> str:
        return f"{stem}.<{int(match[2]) - index}>" if match[1] == stem else match[0]

    return _BLOCK.sub(number, _VALUE.sub(value, line))
