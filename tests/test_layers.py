"""Import rules: packages import lower layers only, and passes import only some packages."""

import networkx as nx
import pytest

from tests.layers import FLOORS, ROOT, circles, floors, imports, modules, package

FLOOR = {name: index for index, names in enumerate(FLOORS) for name in names}


def test_every_package_has_a_floor() -> None:
    assert {package(name) for name in modules()} == set(FLOOR)


def test_packages_import_lower_floors_only() -> None:
    upwards = [
        str(each)
        for each in imports()
        if package(each.source) != package(each.target) and FLOOR[package(each.source)] <= FLOOR[package(each.target)]
    ]
    assert not upwards


@pytest.mark.slow
def test_no_two_files_import_each_other() -> None:
    arrows = nx.DiGraph([(each.source, each.target) for each in imports()])
    assert not circles(arrows)


def test_passes_see_neither_capture_nor_lowering_nor_runtime() -> None:
    """They use programs, parameters, plans, graph queries and costs."""
    seen = {package(each.target) for each in imports() if package(each.source) == "passes"}
    assert seen <= {"passes", "ir", "cost", "errors", "torch_compat"}


def test_modules_of_one_package_have_private_names() -> None:
    """Public are modules that other packages import, that the reference shows, and that users import."""
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    importers: dict[str, set[str]] = {}
    for each in imports():
        importers.setdefault(each.target, set()).add(package(each.source))
    for name, path in modules().items():
        outside = importers.get(name, set()) - {package(name)}
        if path.stem.startswith("_") and path.stem.strip("_") == path.stem[1:]:
            assert not outside, f"{name} has a private name, and {outside} import it"
        elif name.count(".") > 1 and package(name) not in ("passes", "integrations"):
            assert outside or name in reference or path.stem.startswith("__"), f"only its package imports {name}"


@pytest.mark.parametrize(
    ("arrows", "depth", "groups"),
    [
        ([("a", "b"), ("b", "c"), ("a", "c")], 3, []),
        ([("a", "b"), ("b", "a"), ("a", "c")], 2, [["a", "b"]]),
    ],
)
def test_counting(arrows: list[tuple[str, str]], depth: int, groups: list[list[str]]) -> None:
    graph = nx.DiGraph(arrows)
    assert (floors(graph), circles(graph)) == (depth, groups)


def test_the_tracer_is_small() -> None:
    """At most 16 files and 3,000 lines: torch does the tracing."""
    files = [*(ROOT / "graphshard" / "frontend").glob("*.py")]
    assert len(files) <= 16
    assert sum(len(file.read_text().splitlines()) for file in files) <= 3000
