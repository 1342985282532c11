"""Files of profiles as they were written before: what an older schema says, in the words of the present one.

Schema 1 had one speed of attention for both directions and all kernels, and knew nothing of what a tile takes besides
its products, of a limited power, of the host, or of stragglers: all of that is left out of the model for its files.
Schema 2 had a number for each network, which is the bandwidth of a rank, and rings alone.
"""

from __future__ import annotations

from typing import Any

from graphshard.ir.plan import SMALL

SCHEMA = 3

_NOT_SAID = "not modelled: the file is of an older schema"


def present(data: dict[str, Any], schema: int) -> dict[str, Any]:
    """A file of an older schema as one of this; what is wrong in it stays so, and is found when it is read."""
    if schema == 1:
        data = _from_schema_1(data)
    return _from_schema_2(data) if schema < SCHEMA else data


def _from_schema_2(data: dict[str, Any]) -> dict[str, Any]:
    """Rings that no host posts, no switches, and networks of one card for each rank that is reached in full."""
    data = dict(data)
    if isinstance(data.get("protocols"), list):
        data["protocols"] = [
            {**each, "algorithm": "ring", "posted": _unknown(0.0)} if isinstance(each, dict) else each
            for each in data["protocols"]
        ]
    if isinstance(data.get("inside"), dict):
        data["inside"] = {
            kind: {**link, "switched": _unknown(0.0)} if isinstance(link, dict) else link
            for kind, link in data["inside"].items()
        }
    if isinstance(data.get("outside"), dict):
        whole = {name: _unknown(1) for name in ("nics", "reached", "rails", "crossing")}
        data["outside"] = {name: {"bandwidth": number, **whole} for name, number in data["outside"].items()}
    return data


def _from_schema_1(data: dict[str, Any]) -> dict[str, Any]:
    """A file of schema 1 as one of schema 2."""
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
