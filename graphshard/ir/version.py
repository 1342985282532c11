"""Which version of the package this is."""

from __future__ import annotations


def own_version() -> str:
    """As it is installed; "not installed" where it runs from a checkout that is only on the path."""
    from importlib.metadata import PackageNotFoundError, version  # it reads files

    try:
        return version("graphshard")
    except PackageNotFoundError:
        return "not installed"
