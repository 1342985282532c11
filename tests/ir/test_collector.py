"""The cyclic garbage collector is paused in a block and restored afterwards."""

from __future__ import annotations

import gc

import pytest

from graphshard.utils.progress import collector_paused


def test_paused_and_resumed() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_resumed_after_an_error() -> None:
    with pytest.raises(ValueError, match="in the block"), collector_paused():
        raise ValueError("in the block")
    assert gc.isenabled()


def test_stays_off_if_the_user_disabled_it() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
