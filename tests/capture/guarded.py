"""Functions that ask for the truth of a value: not in a file of tests, whose assertions pytest rewrites."""

from __future__ import annotations

from typing import Any


def raises(flag: Any) -> int:
    if flag:
        raise ValueError("wrong")
    return 1


def raises_later(flag: Any) -> int:
    for number in range(3):
        if flag:
            text = "odd" if number % 2 else "even"
            raise ValueError(text)
    return 1


def asserts_not(flag: Any) -> int:
    assert not flag, "wrong"
    return 1


def asserts_one_of_two(flag: Any, other: Any = None) -> int:
    assert other is None and not flag  # noqa: PT018 - one statement that asks twice
    return 1


def returns_or_raises(flag: Any) -> int:
    if not flag:
        return 1
    raise ValueError("wrong")


def chooses(flag: Any) -> int:
    if flag:
        return 2
    return 1


def catches(flag: Any) -> int:
    try:
        if flag:
            raise ValueError("wrong")
    except ValueError:
        pass
    return 1


def only_asks(flag: Any) -> bool:
    return bool(flag)


GUARDS = (raises, raises_later, asserts_not, asserts_one_of_two, returns_or_raises)
OTHERS = (chooses, catches, only_asks)


def refuse(tokens: Any, weights: Any) -> None:
    """What a model may ask of its inputs."""
    if tokens.max() >= 4:
        raise ValueError("too large")
    assert weights.isfinite().all(), "not finite"
