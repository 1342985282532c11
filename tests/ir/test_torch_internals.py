"""Patches of torch attributes that are None or inherited."""

from __future__ import annotations

from types import SimpleNamespace

from graphshard.torch_compat.torch_ops import replaced


def test_an_attribute_that_was_none_is_restored() -> None:
    """Dynamo's code state is None until something is compiled: `torch.cond` failed after a capture."""
    owner = SimpleNamespace(state=None)
    with replaced(owner, "state", 1):
        assert owner.state == 1
    assert owner.state is None


def test_an_inherited_attribute_is_restored() -> None:
    class Base:
        state = 0

    class Derived(Base):
        pass

    with replaced(Derived, "state", 1):
        assert Derived.state == 1
    assert "state" not in vars(Derived)
