"""Layers of the package: which package may import which, and the imports found in the source.

`python -m tests.layers [ROOT]` counts layers, import edges between packages and files, and cycles.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]

# Bottom first: a package may import packages on lower floors only.
FLOORS = (
    ("errors",),
    ("torch_compat",),
    ("utils",),
    ("ir",),
    ("cost", "lower", "checkpoint", "exported", "subclasses", "guards", "repeats", "optim"),
    ("frontend", "passes", "cross"),
    ("schedule", "runtime"),
    ("pipeline",),
    ("options", "codec"),
    ("module",),
    ("debug",),
    ("predict",),
    ("store",),
    ("aot",),
    ("api", "profiling"),
    ("cli",),
    ("__init__", "__main__", "integrations"),
)


@dataclass(frozen=True)
class Import:
    """One module's import of another, by dotted names."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


@functools.cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the package's files by dotted name; `graphshard/passes` is a link to `passes`."""
    inside = [path for path in (root / "graphshard").rglob("*.py") if (root / "graphshard/passes") not in path.parents]
    files = {path.relative_to(root): path for path in inside}
    files |= {Path("graphshard") / path.relative_to(root): path for path in (root / "passes").rglob("*.py")}
    return {".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for name, path in files.items()}


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file, parsed once for all tests of the process."""
    return ast.parse(path.read_text())


def package(module: str) -> str:
    """Return the package that a module is in."""
    return [*module.split("."), "__init__"][1]


@functools.cache
def imports(root: Path = ROOT, *, in_functions: bool = True) -> tuple[Import, ...]:
    """Return the imports of the package's modules by each other."""
    known = modules(root)
    found = []
    for source, path in known.items():
        for target, line in imported(path, in_functions=in_functions):
            if target.startswith("graphshard"):
                while target not in known:  # a name of a module, not a module
                    target = target.rpartition(".")[0]
                if target != source:
                    found.append(Import(source, target, line))
    return tuple(found)


def imported(path: Path, *, in_functions: bool = True) -> Iterator[tuple[str, int]]:
    """Yield the names that a file imports, and the lines; `from a import b` yields a.b."""
    for node in ast.walk(tree(path)) if in_functions else tree(path).body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def floors(graph: nx.DiGraph) -> int:
    """Return the number of layers of an import graph, with each cycle as one node."""
    return int(nx.dag_longest_path_length(nx.condensation(graph))) + 1


def circles(graph: nx.DiGraph) -> list[list[str]]:
    """Return the import cycles."""
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def main() -> None:
    """Print the counts."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    found = list(imports(root))
    of_files = nx.DiGraph([(each.source, each.target) for each in found])
    rooms = {(package(each.source), package(each.target)) for each in found}
    of_packages = nx.DiGraph([(a, b) for a, b in rooms if a != b])
    print(f"{len(modules(root))} files")
    for what, graph in (("packages", of_packages), ("files", of_files)):
        print(
            f"{what}: {graph.number_of_nodes()} with imports, {floors(graph)} floors, {graph.number_of_edges()} arrows"
        )
        for circle in circles(graph):
            print(f"  circle: {', '.join(circle)}")


if __name__ == "__main__":
    main()
