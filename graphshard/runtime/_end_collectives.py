"""Collectives that cannot complete, because another rank does not take part: how a rank ends its wait for them.

gloo     the host waits in the collective      connections are closed, so the collective raises
NCCL     the host has launched it, and waits   the group is aborted, so the device goes on with garbage, and an
         later, in code of the user            error is raised in the main thread as soon as it runs Python again
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

# Nothing is ever sent under this tag.
_TAG = 0x6753


def completion_on(device_type: str) -> Callable[[], bool]:
    """Record an event after all that has been launched; return the function that asks whether it has happened.

    Where there are no events, on a CPU and in a graph that is captured, what has been launched counts as complete.
    """
    if device_type == "cpu" or (device_type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return lambda: True
    event = torch.Event(device_type)
    event.record()
    return event.query


def raise_in_main_thread(error: Exception) -> None:
    """Raise an error in the main thread, where it is; a call of C or C++ that it waits in has to return first."""

    class Raised(type(error)):  # type: ignore[misc]
        """A thread is given the class of an error, not the error."""

        def __init__(self) -> None:
            Exception.__init__(self, *error.args)
            self.__dict__.update(error.__dict__)

    Raised.__name__ = Raised.__qualname__ = type(error).__name__
    Raised.__module__ = type(error).__module__
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Raised))


# Gloo has no call to ask for or close connections, but receiving does both: gloo refuses to receive from a rank that
# has closed its connection, and when a receive times out, gloo closes all connections of the group. A rank that waits
# for a collective on them, here or elsewhere, gets an error at once, and so does the destructor of the group, which
# waits for what is under way.


def has_closed_connection(rank: int) -> bool:
    """Return whether a rank of the default group has closed its connection to this one, as a process that ends does."""
    group = dist.group.WORLD
    assert group is not None
    try:
        group.recv([torch.zeros(1)], rank, _TAG)
    except RuntimeError as error:
        return any(word in str(error) for word in ("onnection closed", "onnection reset", "roken pipe"))
    return False


def end_collectives(group: dist.ProcessGroup) -> None:
    """End what is under way in a process group; it cannot be used any more."""
    backend = str(dist.get_backend(group))
    if "gloo" in backend:
        _close_connections(group)
    if backend != "gloo":
        try:
            group.abort()
        except Exception as error:
            log.error("process group %s (%s) cannot be aborted: %s. End the job.", group.group_name, backend, error)


def _close_connections(group: dist.ProcessGroup) -> None:
    for rank in range(group.size()):
        if rank != group.rank():
            try:
                work = group.recv([torch.zeros(1)], rank, _TAG)
            except RuntimeError:  # closed by that rank; gloo asks only this one, and the others may be open
                continue
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
            return
