"""Gathers at the head of an executor, taken out of its lines."""

from __future__ import annotations

from graphshard.lower.ahead import gathers_at_the_head
from graphshard.lower.lines import Begin, Line, Return, Take
from tests.lower.test_arrivals import _call, _start, _v, _view, _wait


def _names(lines: list[Line]) -> list[str]:
    return [f"begin {line.where}" if isinstance(line, Begin) else "".join(line.results[:1]) for line in lines]


def test_before_and_after() -> None:
    """With what is made of shards on the way; what comes behind the first wait stays."""
    lines = [
        Take(results=_v("w", "v", "u", "x")),
        _call("c", "w"),
        _start("g", "c", "gather embed"),
        _view("a", "v"),
        _start("h", "a", "gather 0"),
        _call("m", "x"),
        _wait("f", "g", "gather embed"),
        _start("k", "u", "gather 1"),
        Return(values=_v("f", "h", "m", "k")),
    ]
    found, gathers = gathers_at_the_head(lines, [0, 1, 2])
    assert _names(found) == ["w", "begin gather embed", "begin gather 0", "m", "f", "k", ""]
    assert [(one.bucket, one.sources, one.num_results) for one in gathers] == [
        ("gather embed", (0,), 1),
        ("gather 0", (1,), 1),
    ]
    assert [_names(list(one.start)) for one in gathers] == [["w", "c", "g", ""], ["v", "a", "h", ""]]
    assert [_names(list(one.sent)) for one in gathers] == [["w", "c", ""], ["v", "a", ""]]
    assert gathers[0].start[-1].reads == _v("g", "c")


def test_what_is_read_elsewhere_stays() -> None:
    """A cast that is read besides, and a collective of what is no shard."""
    lines = [
        Take(results=_v("w", "x")),
        _call("c", "w"),
        _start("g", "c", "gather embed"),
        _start("h", "x", "exchange"),
        _wait("f", "g", "gather embed"),
        Return(values=_v("f", "c", "h")),
    ]
    assert gathers_at_the_head(lines, [0]) == (lines, [])
