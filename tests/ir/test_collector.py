"""The search for cycles is paused in a block, and is afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from graphshard.utils.progress import collector_paused


def test_it_is_paused_and_goes_on() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="in the block"), collector_paused():
        raise ValueError("in the block")
    assert gc.isenabled()


def test_it_stays_off_where_the_user_has_turned_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
