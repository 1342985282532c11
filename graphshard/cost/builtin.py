"""The profiles that come with graphshard, as files: `--help` names them, and reads none."""

from __future__ import annotations

from importlib import resources


def builtin_profiles() -> list[str]:
    """Names that `hardware=` takes besides paths of profile files."""
    folder = resources.files("graphshard.cost") / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def builtin_text(name: str) -> str:
    """The profile of a name, as JSON."""
    return (resources.files("graphshard.cost") / "profiles" / f"{name}.json").read_text("utf-8")
