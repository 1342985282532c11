"""What the user chose to run belongs to one model: a copy of the model chooses for itself."""

from __future__ import annotations

from graphshard.runtime.custom import Custom, Used


def test_a_copy_is_changed_apart() -> None:
    first = Custom(gathers={"a": Used(print)}, separate={"a"}, group="7")
    second = first.copy()
    assert second == first
    second.update(Custom(gathers={"b": Used(print)}, hooks={"b": Used(print)}, separate={"b"}))
    assert (list(first.gathers), first.hooks, first.separate) == (["a"], {}, {"a"})
