"""Bytes and seconds as people read them."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Three digits and a binary unit: `1.50 MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        num_bytes /= 1024
        if num_bytes < 999.5:
            break
    return f"{_three_digits(num_bytes)} {unit}"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: `12.3 ms`."""
    if seconds == 0:
        return "0"
    factor, unit = (1e6, "us") if seconds < 0.9995e-3 else (1e3, "ms") if seconds < 0.9995 else (1, "s")
    return f"{_three_digits(seconds * factor)} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
