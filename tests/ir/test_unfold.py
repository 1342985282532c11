"""Lists of a few equal blocks expand to all blocks, and back; unequal blocks are rejected."""

from __future__ import annotations

import pytest

from graphshard.ir.plan import Event
from graphshard.ir.repeat_windows import RepeatExpansion
from graphshard.ir.repeats import BlocksDifferError, Repeats

# Groups of two blocks: 1 2 | 3 4 | ... | 15 16
REPEATS = Repeats("model.layers", first=1, period=2, groups=8)


def texts(groups: list[int]) -> list[str]:
    """Return texts in which each group names its second block, and the first one of the next group."""
    found = ["embed"]
    for group, following in zip(groups, [*groups[1:], None]):
        found.append(f"gather model.layers.{2 + 2 * group}.up")
        if following is not None:
            found.append(f"with model.layers.{2 + 2 * group} start model.layers.{1 + 2 * following}")
    return [*found, "head of other.model.layers.3"]


@pytest.mark.parametrize("descending", [False, True])
def test_texts(descending: bool) -> None:
    unfolding = RepeatExpansion(REPEATS, descending)
    few, every = (list(groups)[:: -1 if descending else 1] for groups in (REPEATS.captured, range(8)))
    assert unfolding.unfold(texts(few)) == texts(every)
    assert unfolding.fold(texts(every)) == texts(few)


def test_events_move_with_their_windows() -> None:
    """A gather starts five positions before its window, and the last event is at the end."""

    def events(begins: dict[int, int], end: int) -> list[Event]:
        starts = [Event("start", f"model.layers.{1 + 2 * g}", max(at - 5, 0)) for g, at in begins.items()]
        waits = [Event("wait", f"model.layers.{1 + 2 * g}", at) for g, at in begins.items()]
        return sorted([*starts, *waits, Event("wait", "(root)", end)], key=lambda event: event.at)

    unfolding = RepeatExpansion(REPEATS, False, {0: 3, 1: 13, 5: 23, 6: 33, 7: 43})
    few, every = events(unfolding.begins, 60), events({group: 3 + 10 * group for group in range(8)}, 90)
    assert unfolding.unfold(few) == every
    assert unfolding.fold(every) == few


def test_a_block_that_differs() -> None:
    few = texts([*REPEATS.captured])
    few[few.index("gather model.layers.12.up")] = "gather model.layers.12.down"
    with pytest.raises(BlocksDifferError, match=r"blocks differ: .*up.* and .*down"):
        RepeatExpansion(REPEATS, False).unfold(few)


def test_far_blocks() -> None:
    few = [f"model.layers.{1 + 2 * group} reads model.layers.1" for group in REPEATS.captured]
    with pytest.raises(BlocksDifferError, match="far away"):
        RepeatExpansion(REPEATS, False).unfold(few)


def test_blocks_in_no_order() -> None:
    with pytest.raises(BlocksDifferError, match="do not follow each other"):
        RepeatExpansion(REPEATS, True).unfold(texts([*REPEATS.captured]))
