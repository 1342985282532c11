"""Custom collectives belong to one model; a copy has separate ones."""

from __future__ import annotations

from graphshard.runtime.collective_launches import UserCollectives, UserObject


def test_a_copy_is_independent() -> None:
    first = UserCollectives({("gather", "a"): UserObject(print)}, separate={"a"}, group="7")
    second = UserCollectives()
    second.update(first)
    assert second == first
    chosen = {("gather", "b"): UserObject(print), ("hook", "b"): UserObject(print)}
    second.update(UserCollectives(chosen, separate={"b"}))  # type: ignore[arg-type]
    assert (list(first.chosen), first.separate) == ([("gather", "a")], {"a"})
