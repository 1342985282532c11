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


# What a meeting leaves behind when those who wait go on.
OVER = ("end", "given")


@dataclass(frozen=True)
class Meeting:
    """One of several meetings of an occasion, such as a new program. A rank that fails fails all of them.

    Attributes:
        store: of all meetings of these ranks.
        occasion: a name that is the same on every rank.
        number: of the meeting.
        rank: of the caller.
        size: how many ranks are expected.
    """

    store: dist.Store
    occasion: str
    number: int
    rank: int
    size: int

    @property
    def name(self) -> str:
        """What its keys begin with."""
        return f"{self.occasion}.{self.number}"

    @property
    def _failed(self) -> str:
        """The key that says why a rank does not come to any meeting of the occasion."""
        return f"{self.occasion} failed"

    def come(self, text: str, tell: Tell, look: Look) -> None:
        """Come with a text."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        mine = f"{self.rank} {digest}"
        first = self._first("first", mine)
        if first == mine:
            self._set("text", text)
        if not first.endswith(digest):
            if self._first("odd", mine) == mine:
                found = self._wait_for("text", look=look)
                if found.endswith("text"):
                    theirs = self.store.get(found).decode()
                    self._end(End("differ", self.rank, tell(int(first.partition(" ")[0]), theirs, text)))
        elif self.store.add(f"{self.name} in", 1) == self.size:
            self._end(End("same"))

    def first_to_come(self) -> int:
        """The rank that was here first; -1 before one is."""
        key = f"{self.name} first"
        return int(self.store.get(key).split()[0]) if self.store.check([key]) else -1

    def end(self, look: Look) -> End:
        """Wait for the end."""
        return self._read(self._wait_for("end", look=look))

    def fail(self, rank: int, message: str) -> None:
        """Tell those who wait that a rank, this one or another, does not come."""
        self.store.set(self._failed, json.dumps(["failed", rank, message]))

    def failure(self) -> End | None:
        """Why one of the ranks does not come, if that is so; does not wait."""
        return self._read(self._failed) if self.store.check([self._failed]) else None

    def give(self, text: str) -> None:
        """Leave a text for the others."""
        self._set("given", text)

    def take(self, look: Look) -> str | End:
        """Wait for the text that another rank gives, or for the failure of one."""
        self._first("first", f"{self.rank} waits")
        found = self._wait_for("given", look=look)
        return self.store.get(found).decode() if found.endswith("given") else self._read(found)

    def raise_to(self, number: int) -> None:
        """Leave a number for the others, unless a larger one is there."""
        seen, mine = "", str(number)
        while (found := self.store.compare_set(f"{self.name} most", seen, mine).decode()) != mine:
            if int(found) > number:
                return
            seen = found

    def most(self) -> int:
        """The largest number that ranks have left so far, 0 before one has; of all, where the meeting has ended."""
        key = f"{self.name} most"
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def forget(self) -> None:
        """Remove what a meeting has left in the store, which all others have left."""
        for key in ("first", "text", "in", "end"):
            self.store.delete_key(f"{self.name} {key}")

    def _wait_for(self, key: str, *, look: Look) -> str:
        """Wait in short slices for a key, or for a failure, as long as `look` has nothing against it; which it is."""
        keys = f"{self.name} {key}", self._failed
        start, pause = time.monotonic(), _SHORTEST
        while True:
            for found in keys:
                if self.store.check([found]):
                    return found
            look(time.monotonic() - start)
            time.sleep(pause)
            pause = min(2 * pause, max(_LONGEST, self.size / _LOOKS_A_SECOND))

    def _read(self, key: str) -> End:
        return End(*json.loads(self.store.get(key)))

    def _set(self, key: str, text: str) -> None:
        self.store.set(f"{self.name} {key}", text)

    def _first(self, key: str, value: str) -> str:
        """What the first rank has put there."""
        return self.store.compare_set(f"{self.name} {key}", "", value).decode()

    def _end(self, end: End) -> None:
        self._first("end", json.dumps([end.how, end.rank, end.message]))
