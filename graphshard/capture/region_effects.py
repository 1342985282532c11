"""What a checkpointed region leaves on modules, which eager mode does again in backward.

def region(x):
    self.aux = x.square().mean()        the same again: nothing to do
    self.step += 1                      counted twice in a step: an error, since the program counts once
    self.losses.append(self.aux)        twice in the list: an error
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphshard.capture.changes import Node
from graphshard.capture.contents import contents_of
from graphshard.capture.growing import Growing
from graphshard.capture.untraceable import Located
from graphshard.ir.state import MISSING, Place


class _Held(NamedTuple):
    """Something with contents, and where it was read."""

    owner: Any
    place: Place
    contents: Any
    line: str
    kind: Literal["attributes", "buffers", "items"]


class RegionEffects:
    """What happens in a region to what forward can reach.

    Args:
        label: what the module is called.
        nodes: what forward can reach, by identity.
        lines: where attributes of modules were set, by the identity of the module and the name.

    Attributes:
        was_set: attributes of modules that were set, by the same.
    """

    def __init__(self, label: str, nodes: Mapping[int, Node], lines: Mapping[tuple[int, str], str]) -> None:
        self.was_set: set[tuple[int, str]] = set()
        self._label, self._nodes, self._lines = label, nodes, lines
        self._read_before: set[tuple[int, str]] = set()
        self._begin = {id(held.owner): held for held in _all_held(nodes.values())}

    def reads(self, owner: Any, name: str) -> None:
        """An attribute is looked up."""
        if (id(owner), name) not in self.was_set:
            self._read_before.add((id(owner), name))

    def refusal(self, *, reentrant: bool) -> Located | None:
        """At the end of the region: the error to raise if backward runs it again; None if that changes nothing."""
        for now, name, place, line in self._changes():
            if reentrant and now.kind == "attributes" and _has_gradient(now.contents.get(name)):
                return self._without_gradient(place, line)
            is_read = (id(now.owner), name) in self._read_before
            if now.kind != "attributes" or not isinstance(now.owner, nn.Module) or is_read:
                return self._refusal(place, line)
        return None

    def refusal_of_branch(self) -> Located | None:
        """At the end of a branch of torch.cond: the error to raise; None if it has changed nothing."""
        for _, _, place, line in self._changes():
            return self._located(
                line,
                f"a branch of torch.cond changes {place}. Both branches are computed, and the results of one chosen: "
                "return a tensor from the branches, and keep it outside of them.",
            )
        return None

    def _changes(self) -> Iterator[tuple[_Held, Any, Place, str]]:
        """What has changed: what holds it, its name, its place, and the line that changed it."""
        for now in _all_held(self._nodes.values()):
            before = self._begin.get(id(now.owner))
            for name in () if before is None else _differences(before.contents, now.contents):
                place = now.place if now.kind == "items" else now.place.then("attribute", name)
                yield now, name, place, self._lines.get((id(now.owner), name), now.line)

    def _without_gradient(self, place: Place, line: str) -> Located:
        return self._error(
            line,
            f"with use_reentrant=True leaves {place} without a gradient in eager mode, so that a loss made of it "
            "trains nothing. Use use_reentrant=False, or return it from the region.",
        )

    def _refusal(self, place: Place, line: str) -> Located:
        return self._error(
            line,
            f"changes {place}, which eager mode does once more in backward, when it runs the region again. Change it "
            "outside of the region, or keep a tensor in a buffer and write to that in place.",
        )

    def _error(self, line: str, what: str) -> Located:
        return self._located(line, f"a region of torch.utils.checkpoint {what}")

    def _located(self, line: str, what: str) -> Located:
        where = f" at {line}" if line else ""
        return Located(f"graphshard cannot capture {self._label}.forward{where}: {what}")


def _has_gradient(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value))


def _all_held(nodes: Iterable[Node]) -> Iterator[_Held]:
    """What was there before forward ran, and lists, dicts and sets that forward has put there."""
    for node in nodes:
        contents = node.now()
        yield _Held(
            node.owner, node.place, contents_of(contents), node.line, "items" if node.has_items else "attributes"
        )
        for name, value in contents.items() if isinstance(contents, dict) else ():
            items = value.items if type(value) is Growing else value
            if node.is_module and name == "_buffers":
                yield _Held(items, node.place, contents_of(items), node.line, "buffers")
            elif isinstance(items, (list, dict, set)):
                yield _Held(items, node.step(name), contents_of(items), node.line, "items")


def _differences(before: Any, now: Any) -> Iterator[Any]:
    """What contents differ in: names, or None once for a list or set."""
    if isinstance(before, dict):
        for name in dict.fromkeys((*before, *now)):
            if before.get(name, MISSING) is not now.get(name, MISSING):
                yield name
    elif len(before) != len(now) or any(x is not y for x, y in zip(before, now)):
        yield None
