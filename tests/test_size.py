"""Size of the package: lines, files, depth of imports, each at most a number that only falls, and unique names.

A commit that raises a number explains it. `python -m tests.test_size` prints the current sizes.
"""

from __future__ import annotations

import ast
from collections import Counter

import networkx as nx

from tests.layers import imports, modules, tree

# The goal is 42,000 lines in 230 files.
LINES = 61_535
FILES = 274
DEPTH = 26
# Lines of the largest file.
LARGEST = 500


def lines() -> dict[str, int]:
    """Return the number of lines of each module."""
    return {name: len(path.read_text().splitlines()) for name, path in modules().items()}


def depth() -> int:
    """Return the number of modules on the longest chain of imports at module level."""
    graph = nx.DiGraph()
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    graph.add_edges_from(
        (each.source, each.target) for each in imports(in_functions=False) if each.target not in packages
    )
    return nx.dag_longest_path_length(graph) + 1


def file_names_twice() -> list[str]:
    names = Counter(path.stem for path in modules().values() if not path.stem.startswith("__"))
    return sorted(name for name, count in names.items() if count > 1)


def class_names_twice() -> list[str]:
    names = Counter(
        node.name for path in modules().values() for node in tree(path).body if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def test_lines_and_files() -> None:
    assert sum(lines().values()) <= LINES
    assert len(lines()) <= FILES
    assert max(lines().values()) <= LARGEST


def test_depth_of_imports() -> None:
    assert depth() <= DEPTH


def test_names_are_unique() -> None:
    assert file_names_twice() == []
    assert class_names_twice() == []


if __name__ == "__main__":
    print(f"{sum(lines().values()):,} lines in {len(lines())} files, the largest {max(lines().values())}")
    print(f"import depth {depth()}")
    print(f"file names twice {len(file_names_twice())}: {' '.join(file_names_twice())}")
    print(f"class names twice {len(class_names_twice())}: {' '.join(class_names_twice())}")
