"""The ranks that run a model together: rendezvous in the store for what they agree on, and the steps that they make."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import socket
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import ArgumentError, DivergenceError, PeerError
from graphshard.runtime._end_collectives import completion_on
from graphshard.runtime.health_monitor import PATIENT, HealthMonitor, differ_text, error_text
from graphshard.runtime.process_groups import is_fake, on_gloo, ranks_of
from graphshard.torch_compat.autograd_state import without_dispatch_modes
from graphshard.torch_compat.dtensor import process_group, rendezvous_store
from graphshard.utils.progress import cancelled_by

log = logging.getLogger(__name__)

CHECK, PATIENCE = "GRAPHSHARD_CHECK", "GRAPHSHARD_PATIENCE"
# Seconds that ranks wait at a rendezvous before each step for one that lives.
_IMPATIENT = 4.0
# Seconds until the other ranks have found out why a connection was closed.
_UNTIL_FOUND = 3.0
# How often a rank that makes a program asks if another has failed to, and how often all ranks together.
_ASKS_EVERY, _ASK_A_SECOND = 0.5, 500
# Seconds that it goes on then, as it may be about to fail in the same way: its own error says more.
_FAILS_ALIKE = 2.5

_OF_A_COLLECTIVE = re.compile("aborted|gloo|nccl|connection|socket|pair closure|broken pipe", re.IGNORECASE)

# A look for a key takes 25 us. All ranks together ask the store's only thread at most this often in a second.
_LOOKS_A_SECOND = 8000
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05

# One for each set of ranks of a store: the order of calls matters between models, too.
_known: weakref.WeakKeyDictionary[dist.Store, dict[tuple[int, ...], Peers]] = weakref.WeakKeyDictionary()


# Called with the seconds that a rank has waited; raises to end the wait.
Look = Callable[[float], None]
# Describes how a text differs from the first rank's, given that rank, its text, and the other text.
Tell = Callable[[int, str, str], str]


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of ranks in a store: compare a text, share a text, find the largest number.

        rank 0                "first": 0 and the hash of its text      the text itself
        ranks that agree      one more in the counter "in"             the last one sets "end" to ""
        rank 5                "odd": 5 and another hash                compares texts, sets "end" to how they differ
        a rank that leaves    sets "failed" and why

        rank 0                "given": hash of a text for all          the text, compressed
        one of each machine   "reader MACHINE"                         reads it, sets "copy MACHINE" to a file with it
        others                read the file

    All ranks wait for the same key, so all know the result at once. A hash for each rank and one text travel, and the
    text is read once if there is a difference: O(N) bytes for N ranks, and a few requests for each. A text for all
    leaves the store once for each machine.

    An occasion, such as a new program, may have several: `number` counts them. A rank that fails fails all of them.
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

    def join(self, text: str, tell: Tell, look: Look) -> None:
        """Come with a text."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        mine = f"{self.rank} {digest}"
        first = self._set_once("first", mine)
        if first == mine:
            self.store.set(f"{self.name} text", text)
        if first.endswith(digest):
            if self.store.add(f"{self.name} in", 1) == self.size:
                self._set_once("end", json.dumps(""))
        elif self._set_once("odd", mine) == mine:
            theirs = self._wait_for("text", look)
            self._set_once("end", json.dumps(tell(int(first.partition(" ")[0]), theirs, text)))

    def end(self, look: Look) -> str:
        """Wait until all ranks have come; return how the text of one differs, "" if all are the same."""
        return str(json.loads(self._wait_for("end", look)))

    def fail(self, message: str) -> None:
        """Tell the ranks that wait that this one does not come."""
        self.store.set(f"{self.occasion} failed", json.dumps([self.rank, message]))

    def failure(self) -> PeerError | None:
        """Return why a rank does not come, if one has failed; does not wait."""
        if not self.store.check([f"{self.occasion} failed"]):
            return None
        rank, message = json.loads(self.store.get(f"{self.occasion} failed"))
        return PeerError(message, rank=rank)

    def give(self, text: str) -> None:
        """Leave a text for the other ranks."""
        packed = zlib.compress(text.encode())
        self.store.set(f"{self.name} text for all", packed)  # type: ignore[arg-type]
        self.store.set(f"{self.name} given", hashlib.sha256(packed).hexdigest())

    def take(self, look: Look) -> str:
        """Wait for the text that another rank gives; one rank of each machine reads it from the store."""
        digest, machine, mine = self._wait_for("given", look), _machine(), str(self.rank)
        reads = self._set_once(f"reader {machine}", mine) == mine
        if not reads:
            with contextlib.suppress(OSError):  # processes of a machine may have other directories
                packed = Path(self._wait_for(f"copy {machine}", look)).read_bytes()
                if hashlib.sha256(packed).hexdigest() == digest:
                    return zlib.decompress(packed).decode()
        packed = self.store.get(f"{self.name} text for all")
        if reads:
            self.store.set(f"{self.name} copy {machine}", _copy_of(packed))
        return zlib.decompress(packed).decode()

    def raise_to(self, number: int) -> None:
        """Leave a number for the other ranks, unless a larger one is there."""
        seen, mine = "", str(number)
        while (found := self.store.compare_set(f"{self.name} most", seen, mine).decode()) != mine:
            if int(found) > number:
                return
            seen = found

    def most(self) -> int:
        """Return the largest number that ranks have left."""
        return int(self.store.get(f"{self.name} most"))

    def _wait_for(self, key: str, look: Look) -> str:
        """Wait in short slices, as long as `look` does not raise, for a key; raise PeerError if a rank fails."""
        start, pause = time.monotonic(), _SHORTEST_PAUSE
        while not self.store.check([f"{self.name} {key}"]):
            if (error := self.failure()) is not None:
                raise error
            look(time.monotonic() - start)
            time.sleep(pause)
            pause = min(2 * pause, max(_LONGEST_PAUSE, self.size / _LOOKS_A_SECOND))
        return self.store.get(f"{self.name} {key}").decode()

    def _set_once(self, key: str, value: str) -> str:
        """Set a key unless it is set; return its value."""
        return self.store.compare_set(f"{self.name} {key}", "", value).decode()


@functools.cache
def _machine() -> str:
    """Return a name that the processes of this machine have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


@functools.cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """Return a directory for other ranks of this user to read from, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="graphshard-", ignore_cleanup_errors=True)


def _copy_of(content: bytes) -> str:
    """Leave a file for the ranks of this machine; "" if it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=_copies().name, delete=False) as file:
            file.write(content)
    except OSError:
        return ""
    return file.name


def _settings() -> tuple[bool, float]:
    """Return, from the environment, if ranks meet before each step, and how long they wait for one that lives."""
    check, patience = os.environ.get(CHECK, ""), os.environ.get(PATIENCE, "")
    if check not in ("", "steps"):
        raise ArgumentError(f"{CHECK} must be 'steps' or not set, got {check!r}.")
    if not re.fullmatch(r"(\d+(\.\d+)?)?", patience):
        raise ArgumentError(f"{PATIENCE} must be a number of seconds, got {patience!r}.")
    return bool(check), float(patience or (_IMPATIENT if check else PATIENT))


def peers_of(mesh: DeviceMesh, groups: Iterable[str]) -> Peers | None:
    """Return the ranks of a mesh that communicate in some process groups, None for a single or fake one.

    All ranks of the mesh call this in the same order.
    """
    settings = _settings()
    if mesh.size() == 1 or is_fake(mesh):
        return None
    ranks = tuple(ranks_of(mesh))
    known = _known.setdefault(rendezvous_store(), {})
    if ranks not in known:
        groups_of_axes = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        gloo = [str(group.group_name) for group in groups_of_axes if on_gloo(group, mesh.device_type)]
        launches = mesh.device_type if len(gloo) < len(groups_of_axes) else ""
        known[ranks] = Peers(ranks, rendezvous_store(), *settings, gloo, launches)
    known[ranks].monitor.groups.update(groups)
    return known[ranks]


class Peers:
    """The ranks of a mesh, in its order.

    Args:
        gloo: names of the process groups of the mesh's axes, if they are gloo's.
        launches_on: kind of device whose collectives run after the host has launched them; "" if they do not.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        store: dist.Store,
        checks_steps: bool,
        patience: float,
        gloo: Sequence[str] = (),
        launches_on: str = "",
    ) -> None:
        self.ranks, self.rank = ranks, dist.get_rank()
        self._checks_steps, self._gloo, self._launches_on = checks_steps, gloo, launches_on
        name = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        # A store may outlive a process group.
        prefix = f"graphshard/{name}-{store.add(f'graphshard/{name}/{self.rank}', 1)}"
        self._store = dist.PrefixStore(prefix, store)
        self._attempt = self._met = 0
        self._asked = 0.0
        self._failure_seen = ("", 0.0)
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=10))
        self.monitor = HealthMonitor(ranks, self.rank, dist.PrefixStore(prefix, own), patience).start(store)

    # --- rendezvous ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Mark a block in which all ranks do the same, such as make a program; if one fails, all of them do."""
        before, self.monitor.doing = self.monitor.doing, doing
        try:
            with cancelled_by(self._still_wanted):
                yield
        except BaseException as error:
            if not isinstance(error, (DivergenceError, PeerError)):
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._next().fail(f"rank {self.rank} {doing} and failed: {error_text(error)}")
            self._attempt, self._met = self._attempt + 1, 0
            raise
        finally:
            self.monitor.doing = before

    def _still_wanted(self) -> None:
        """Raise PeerError if another rank has failed to make the program that this rank makes, or has ended."""
        now = time.monotonic()
        if now < self._asked + max(_ASKS_EVERY, len(self.ranks) / _ASK_A_SECOND):
            return
        self._asked = now
        # Outside of the trace that asks. If the store is gone, the next rendezvous says so.
        with without_dispatch_modes(), contextlib.suppress(dist.DistError):
            meeting = self._next()
            if (error := meeting.failure()) is not None:
                if self._failure_seen[0] != meeting.name:
                    self._failure_seen = meeting.name, now
                if now < self._failure_seen[1] + _FAILS_ALIKE:
                    return
                raise error
            self.monitor.check_meeting(self.monitor.number + 1)

    def agree(self, text: str, tell: Tell) -> None:
        """Wait until all ranks have come with the same text; raise DivergenceError or PeerError if one does not."""
        if differ := self._meet(self._next(), text, tell):
            raise DivergenceError(differ)

    def unanimous(self, text: str) -> bool:
        """Wait until all ranks have come with a text, and return whether all have the same; raises PeerError."""
        return not self._meet(self._next(), text)

    def share(self, make: Callable[[], str]) -> str:
        """Return what the first rank makes, on all ranks; raises PeerError."""
        meeting = self._next()
        self._met += 1
        if self.rank == self.ranks[0]:
            made = make()
            meeting.give(made)
            return made
        return self._wait(meeting, meeting.take)

    def most(self, number: int) -> int:
        """Return the largest number that a rank has come with, on all ranks; raises PeerError."""
        meeting = self._next()
        meeting.raise_to(number)
        self._meet(meeting, "")
        return meeting.most()

    def follow(self, others: Peers) -> None:
        """Adopt the step count of the ranks that run the steps, where these ranks run none themselves."""
        now = others.monitor.number, others._attempt
        if now != (self.monitor.number, self._attempt):
            self.monitor.follow(now[0])
            self._attempt, self._met = now[1], 0

    def _next(self) -> Rendezvous:
        """Return the next rendezvous: ranks with the same number of steps have met the same number of times."""
        occasion = f"{self.monitor.number + 1}.{self._attempt}"
        return Rendezvous(self._store, occasion, self._met, self.rank, len(self.ranks))

    def _meet(self, meeting: Rendezvous, text: str, tell: Tell = lambda *_: "differs", step: int | None = None) -> str:
        """Wait until all ranks have come with a text; return how one differs, "" if all are the same."""

        def meet(look: Look) -> str:
            meeting.join(text, tell, look)
            return meeting.end(look)

        differ = self._wait(meeting, meet, step)
        self._met += step is None
        return differ

    def _wait(self, meeting: Rendezvous, act: Callable[[Look], str], step: int | None = None) -> str:
        """Run `act` with the function that ends its wait at a rendezvous before a step, by default the next one."""
        before = step or self.monitor.number + 1
        self.monitor.wait_at(meeting.name)
        try:
            return act(lambda _: self.monitor.check_meeting(before))
        except dist.DistError as error:
            raise PeerError(
                f"rank {self.rank} {self.monitor.doing} and cannot reach the rendezvous store any more: the process "
                "that serves it has ended, which is torchrun's, or that of rank 0.",
                rank=0,
            ) from error
        finally:
            self.monitor.meeting = ""

    # --- steps ---------------------------------------------------------------------------------------------------

    def _begin(self, label: str, text: str) -> None:
        self._attempt = self._met = 0
        self.monitor.begin(label, text)
        try:
            self.monitor.check_step()
            if self._checks_steps or not self._is_same():
                self._check(label, text)
        except BaseException:
            self.monitor.doing = ""
            raise

    def _is_same(self) -> bool:
        """Return whether all ranks have begun the same steps; all of them call this together.

        Only with gloo, which ends a process that receives another number of bytes than it expects: these have one size.
        """
        digest = self.monitor.digest
        largest = torch.tensor([digest, -digest])
        try:
            with without_dispatch_modes():
                for name in self._gloo:
                    dist.all_reduce(largest, dist.ReduceOp.MAX, process_group(name))
        except RuntimeError as error:
            self._finish(error)
            raise
        return largest.tolist() == [digest, -digest]

    def _check(self, label: str, text: str) -> None:
        """Wait until all ranks are at the same step."""
        number = self.monitor.number

        def tell(first: int, theirs: str, mine: str) -> str:
            label_of_first, *lines = theirs.split("\n")
            differ = differ_text(number, f"rank {first} runs {label_of_first}", f"rank {self.rank} runs {label}")
            for index, (a, b) in enumerate(itertools.zip_longest(lines, text.splitlines(), fillvalue="nothing")):
                if a != b:
                    first_of = f"They first differ at collective {index}"
                    return f"{differ} {first_of}: rank {first} starts {a}, rank {self.rank} {b}."
            return differ

        meeting = Rendezvous(self._store, f"step {number}", 0, self.rank, len(self.ranks))
        if differ := self._meet(meeting, f"{label}\n{text}", tell, number):
            raise DivergenceError(differ)
        if self.rank == self.ranks[0] and number > 1:
            before = replace(meeting, occasion=f"step {number - 1}")
            for key in ("first", "text", "in", "end"):  # all other ranks have left it
                self._store.delete_key(f"{before.name} {key}")

    def step(self, label: str, text: str) -> _RunningStep:
        """Return the context manager in which a step that communicates `text` runs."""
        return _RunningStep(self, label, text)

    def _finish(self, error: BaseException | None) -> None:
        """End a step, with the error of a collective replaced by the finding that explains it."""
        doing = self.monitor.doing
        self.monitor.end(completion_on(self._launches_on) if self._launches_on and error is None else None)
        if error is None and self.monitor.aborted and self._launches_on:  # the results are garbage
            error = RuntimeError("the collectives of this step were aborted")
        if not isinstance(error, RuntimeError) or not _OF_A_COLLECTIVE.search(str(error)):
            return
        deadline = time.monotonic() + _UNTIL_FOUND
        while self.monitor.finding is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.monitor.finding is not None:
            self.monitor.doing = doing
            raise self.monitor.error(self.monitor.finding) from error


@dataclass(frozen=True)
class _RunningStep:
    """A step that runs. A class, as a context manager made of a generator takes three times as long."""

    peers: Peers
    label: str
    text: str

    def __enter__(self) -> None:
        self.peers._begin(self.label, self.text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.peers._finish(error)
