"""Rendezvous of ranks in the rendezvous store: compare a text, share a text, find the largest number.

    rank 0                "first": 0 and the hash of its text      the text itself
    ranks that agree      one more in the counter "in"             the last one sets "end" to "same"
    rank 5                "odd": 5 and another hash                compares the texts, sets "end" to "differ" and how
    a rank that leaves    sets "failed" and why

All ranks wait for the same key, so all know the result at once. A hash for each rank and one text travel, and the text
is read once if there is a difference: O(N) bytes for N ranks, and a few requests for each.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

# A look for a key takes 25 us. All ranks together ask the store's only thread at most this often in a second.
_LOOKS_A_SECOND = 8000
_SHORTEST, _LONGEST = 0.001, 0.05

# Called with the seconds that a rank has waited; raises to end the wait.
Look = Callable[[float], None]

# Describes how a text differs from the first rank's, given that rank, its text, and the other text.
Tell = Callable[[int, str, str], str]

# Keys of a rendezvous that exist once the ranks that wait may go on.
OVER = ("end", "given")


@dataclass(frozen=True)
class End:
    """Result of a rendezvous.

    Attributes:
        how: all texts are the same, one differs, or a rank failed and does not come.
        rank: the rank that differs or failed.
        message: how it differs, or why it failed.
    """

    how: Literal["same", "differ", "failed"]
    rank: int = -1
    message: str = ""


@dataclass(frozen=True)
class Rendezvous:
    """One of several rendezvous of an occasion, such as a new program. A rank that fails fails all of them.

    Attributes:
        store: shared by all rendezvous of these ranks.
        occasion: a name that is the same on every rank.
        number: of the rendezvous within the occasion.
        size: number of ranks that are expected.
    """

    store: dist.Store
    occasion: str
    number: int
    rank: int
    size: int

    @property
    def name(self) -> str:
        """Prefix of its keys."""
        return f"{self.occasion}.{self.number}"

    @property
    def _failed(self) -> str:
        return f"{self.occasion} failed"

    def join(self, text: str, tell: Tell, look: Look) -> None:
        """Come with a text."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        mine = f"{self.rank} {digest}"
        first = self._set_once("first", mine)
        if first == mine:
            self.store.set(f"{self.name} text", text)
        if first.endswith(digest):
            if self.store.add(f"{self.name} in", 1) == self.size:
                self._end(End("same"))
        elif self._set_once("odd", mine) == mine:
            found = self._wait_for("text", look)
            if found.endswith("text"):
                theirs = self.store.get(found).decode()
                self._end(End("differ", self.rank, tell(int(first.partition(" ")[0]), theirs, text)))

    def first_rank(self) -> int:
        """Return the rank that came first, -1 before one has."""
        key = f"{self.name} first"
        return int(self.store.get(key).split()[0]) if self.store.check([key]) else -1

    def end(self, look: Look) -> End:
        """Wait for the result."""
        return self._read(self._wait_for("end", look))

    def fail(self, rank: int, message: str) -> None:
        """Tell the ranks that wait that a rank, this one or another, does not come."""
        self.store.set(self._failed, json.dumps(["failed", rank, message]))

    def failure(self) -> End | None:
        """Return why a rank does not come, if one has failed; does not wait."""
        return self._read(self._failed) if self.store.check([self._failed]) else None

    def give(self, text: str) -> None:
        """Leave a text for the other ranks."""
        self.store.set(f"{self.name} given", text)

    def take(self, look: Look) -> str | End:
        """Wait for the text that another rank gives, or for a failure."""
        self._set_once("first", f"{self.rank} waits")
        found = self._wait_for("given", look)
        return self.store.get(found).decode() if found.endswith("given") else self._read(found)

    def raise_to(self, number: int) -> None:
        """Leave a number for the other ranks, unless a larger one is there."""
        seen, mine = "", str(number)
        while (found := self.store.compare_set(f"{self.name} most", seen, mine).decode()) != mine:
            if int(found) > number:
                return
            seen = found

    def most(self) -> int:
        """Return the largest number that ranks have left so far, 0 before one has."""
        key = f"{self.name} most"
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def forget(self) -> None:
        """Remove the keys of a rendezvous that all other ranks have left."""
        for key in ("first", "text", "in", "end"):
            self.store.delete_key(f"{self.name} {key}")

    def _wait_for(self, key: str, look: Look) -> str:
        """Wait in short slices for a key or a failure, as long as `look` does not raise; return the key found."""
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

    def _set_once(self, key: str, value: str) -> str:
        """Set a key unless it is set; return its value."""
        return self.store.compare_set(f"{self.name} {key}", "", value).decode()

    def _end(self, end: End) -> None:
        self._set_once("end", json.dumps([end.how, end.rank, end.message]))
