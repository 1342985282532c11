"""Ranks meet in the rendezvous store, and find out whether they all came with the same text.

    rank 0          "first": 0 and the hash of its text        the text itself
    equal ranks     one more in the counter "in"               the last one ends the meeting with "same"
    rank 5          "odd": 5 and another hash                  compares the texts, ends it with "differ" and how
    who must leave                                             ends it with "failed" and why

Whatever ends a meeting is the value of one key that all wait for, so they know at once. What travels is a hash for each
rank and one text, which is read once if there is a difference: O(N) bytes for N ranks, and a few requests for each.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

# Looking for a key costs 25 us. All ranks together do not ask the store's one thread more often than this in a second.
_LOOKS_A_SECOND = 8000
_SHORTEST, _LONGEST = 0.001, 0.05

# Told for how many seconds a rank has waited; raises what ends the wait.
Look = Callable[[float], None]

# Says how a text differs from that of the first rank, which is given with its number.
Tell = Callable[[int, str, str], str]


@dataclass(frozen=True)
class End:
    """How a meeting ended.

    Attributes:
        how: all texts are the same, one differs, or a rank failed and does not come.
        rank: which.
        message: how it differs, or why it failed.
    """

    how: Literal["same", "differ", "failed"]
    rank: int = -1
    message: str = ""


@dataclass(frozen=True)
class Meeting:
    """One occasion.

    Attributes:
        store: with a prefix that names the occasion.
        rank: of the caller.
        size: how many ranks are expected.
    """

    store: dist.Store
    rank: int
    size: int

    def come(self, text: str, tell: Tell, look: Look) -> None:
        """Come with a text."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        mine = f"{self.rank} {digest}"
        first = self._first("first", mine)
        if first == mine:
            self.store.set("text", text)
        if not first.endswith(digest):
            if self._first("odd", mine) == mine:
                theirs = self.wait("text", look).decode()
                self._end(End("differ", self.rank, tell(int(first.partition(" ")[0]), theirs, text)))
        elif self.store.add("in", 1) == self.size:
            self._end(End("same"))

    def end(self, look: Look) -> End:
        """Wait for the end."""
        return End(*json.loads(self.wait("end", look)))

    def fail(self, message: str) -> None:
        """Tell those who wait that this rank does not come."""
        self._end(End("failed", self.rank, message))

    def give(self, text: str) -> None:
        """Leave a text for the others."""
        self.store.set("given", text)

    def take(self, look: Look) -> str | End:
        """Wait for the text that another rank gives, or for the end of the meeting."""
        found = self._wait_for_any(("given", "end"), look)
        value = self.store.get(found).decode()
        return value if found == "given" else End(*json.loads(value))

    def wait(self, key: str, look: Look) -> bytes:
        """Wait for a key in short slices, as long as `look` has nothing against it."""
        return self.store.get(self._wait_for_any((key,), look))

    def _wait_for_any(self, keys: tuple[str, ...], look: Look) -> str:
        start, pause = time.monotonic(), _SHORTEST
        while True:
            for key in keys:
                if self.store.check([key]):
                    return key
            look(time.monotonic() - start)
            time.sleep(pause)
            pause = min(2 * pause, max(_LONGEST, self.size / _LOOKS_A_SECOND))

    def _first(self, key: str, value: str) -> str:
        """What the first rank has put there."""
        return self.store.compare_set(key, "", value).decode()

    def _end(self, end: End) -> None:
        self._first("end", json.dumps([end.how, end.rank, end.message]))
