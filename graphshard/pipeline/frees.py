"""Check the frees of an executor: nothing is read after it was freed, nothing outlives its last use.

A gathered parameter that is not freed at its last use costs memory without an error. So the lines that run are checked,
whatever read them off the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphshard.lower.executor_lines import Line, Variable


def faults(lines: Sequence[Line]) -> Iterator[tuple[str, int]]:
    """What is wrong with the frees of an executor, each with the index of the line at which it shows."""
    freed: dict[Variable, int] = {}
    last: dict[Variable, int] = {}
    for index, line in enumerate(lines):
        for name in line.reads:
            if name in freed:
                yield f"{name} is read after it was freed", index
            last[name] = index
        last.update(dict.fromkeys(line.results, index))
        freed.update(dict.fromkeys(line.frees, index))
    for name, index in last.items():
        if index == len(lines) - 1:  # it is returned
            continue
        if name not in freed:
            yield f"{name} is never freed", index
        elif freed[name] > index:
            yield f"{name} outlives its last use", index
