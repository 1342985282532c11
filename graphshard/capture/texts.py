"""Texts of numbers that a trace does not know: they may be printed, and not be returned or kept.

print(f"loss {loss.item():.3f}")             printed once, while the forward is traced
return loss, f"{loss.item():.3f}"            an error: a program computes no text
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils import _pytree as pytree

from graphshard.capture.untraceable import Untraceable
from graphshard.ir.state import ModuleState
from graphshard.ir.unbacked_internals import UNKNOWN_TEXT

_BEGIN = UNKNOWN_TEXT[0]


def check_texts(leaves: Iterable[Any], structure: pytree.TreeSpec, state: ModuleState) -> None:
    """Raise Untraceable if the text of an unknown number is a result, a key of one, or left on a module."""
    texts = [leaf for leaf in leaves if isinstance(leaf, str)]
    found = next((text for text in (*texts, str(structure), repr(state.writes)) if _BEGIN in text), None)
    if found is not None:
        raise Untraceable("text", found if found in texts else "of a key or an attribute")
