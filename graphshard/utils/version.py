"""Version of graphshard, found without importing torch."""

from __future__ import annotations


def own_version() -> str:
    """Return the installed version; "not installed" for a checkout that is only on the path."""
    from importlib.metadata import PackageNotFoundError, version  # reads files

    try:
        return version("graphshard")
    except PackageNotFoundError:
        return "not installed"
