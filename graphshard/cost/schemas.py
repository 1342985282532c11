"""Files of profiles as they were written before: what an older schema says, in the words of the present one.

Schema 1 had one speed of attention for both directions and all kernels, and knew nothing of what a tile takes besides
its products, of a limited power, of the host, or of stragglers: all of that is left out of the model for its files.
"""

from __future__ import annotations

from typing import Any

from graphshard.ir.plan import SMALL

SCHEMA = 2

_NOT_SAID = "not modelled: the file is of schema 1"


def from_schema_1(data: dict[str, Any]) -> dict[str, Any]:
    """A file of schema 1 as one of schema 2; what is wrong in it stays so, and is found when it is read."""
    added = {"split_seconds": 0.0, "tile_seconds": 0.0, "sustained": 1.0, "head_power": 0.0, "straggler": 0.0}
    data = {**data, **{name: _unknown(value) for name, value in added.items()}}
    data["host_seconds"] = {name: _unknown(0.0) for name in ("eager", "compiled")}
    data.setdefault("pack_below", _unknown(SMALL))
    if "split" in data:  # the longest part then, and the shortest now
        data["split"] = _unknown(0)
    rates = data.get("rates")
    if isinstance(rates, dict):
        data["rates"] = {name: _rate(rate) for name, rate in rates.items()}
    return data


def _rate(rate: Any) -> Any:
    if not isinstance(rate, dict) or "attention" not in rate:
        return rate
    return {**rate, "attention": {"flash": {"forward": rate["attention"], "backward": rate["attention"]}}}


def _unknown(value: float) -> dict[str, Any]:
    return {"value": value, "source": _NOT_SAID}
