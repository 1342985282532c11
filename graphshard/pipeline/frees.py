"""Check the frees in an executor's code: nothing is read after it was freed, nothing outlives its last use.

The executor frees a value by `name = None` (FX writes it behind the last use). A gathered parameter that is not freed
there costs memory without an error, so the code that runs is read, not the graph it was made from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

# The list that a region is called with, which it empties, and FX's own way through the arguments.
_SCRATCH = ("inputs", "args_iter")


def faults(code: str) -> Iterator[tuple[str, int]]:
    """What is wrong with the frees of a function's code, each with a line number of the code."""
    (function,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef))
    values = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    reads: dict[str, int] = {}
    freed: dict[str, int] = {}
    for statement in _statements(function.body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                if node.id in freed:
                    yield f"{node.id} is read after it was freed in line {freed[node.id]}", node.lineno
                reads[node.id] = node.lineno
        for name in _freed_by(statement):
            freed[name] = statement.lineno
        for name in _stored_by(statement):
            freed.pop(name, None)
            if not _takes_argument(statement):  # an argument that nobody reads belongs to the caller
                reads.setdefault(name, statement.lineno)
    exempt = {*_SCRATCH, *(n.id for n in ast.walk(function.body[-1]) if isinstance(n, ast.Name))}
    for name, line in reads.items():
        if name in exempt or name not in values:
            continue
        if name not in freed:
            yield f"{name} is never freed", line
        elif freed[name] != line:
            yield f"{name} is last used in line {line} and freed in line {freed[name]}", line


def _takes_argument(statement: ast.stmt) -> bool:
    return ast.unparse(statement).endswith("next(args_iter)")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in order, those inside of profiler ranges included."""
    for statement in body:
        yield from _statements(statement.body) if isinstance(statement, ast.With) else [statement]


def _freed_by(statement: ast.stmt) -> list[str]:
    is_free = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    if not is_free or statement.value.value is not None:  # type: ignore[attr-defined]
        return []
    return [t.id for t in statement.targets if isinstance(t, ast.Name)]  # type: ignore[attr-defined]


def _stored_by(statement: ast.stmt) -> list[str]:
    if _freed_by(statement):
        return []
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
