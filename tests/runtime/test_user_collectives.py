"""Custom collectives belong to one model; a copy has separate ones."""

from __future__ import annotations

from graphshard.runtime.collective_launches import UserCollectives, UserObject


def test_a_copy_is_independent() -> None:
    first = UserCollectives(gathers={"a": UserObject(print)}, separate={"a"}, group="7")
    second = UserCollectives()
    second.update(first)
    assert second == first
    second.update(UserCollectives(gathers={"b": UserObject(print)}, hooks={"b": UserObject(print)}, separate={"b"}))
    assert (list(first.gathers), first.hooks, first.separate) == (["a"], {}, {"a"})
