"""Reduce what backwards have added up, when no other backward is to come."""

from __future__ import annotations

import itertools

from graphshard.ir.errors import UnsupportedError
from graphshard.module.runner import Runner
from graphshard.runtime.left import reduce_left


def finish(runner: Runner) -> None:
    """Reduce the gradients of a model that were added up, and that nobody has asked to leave where they are.

    Raises:
        UnsupportedError: no program has all of them; nothing was reduced.
    """
    state = runner.accumulation
    left = {
        each.name
        for each in state.sums
        if each.name not in (state.unsynced if each.kind == "accumulated" else state.unsynced | state.unreplicated)
    }
    chosen = []
    for one in (runner, *runner.entries.values()):
        programs = itertools.chain.from_iterable(reversed(one.executables.known.values()))
        trained = [(installed.executable, left & installed.executable.trained.keys()) for installed in programs]
        executable, names = max(trained, key=lambda pair: len(pair[1]), default=(None, set()))
        if executable is not None and names:
            chosen.append(executable)
            left -= names
    if left:
        raise UnsupportedError(
            f"finalize_backward: the gradient of {min(left)} was added up and is to be reduced, and the model has no "
            "program that computes it: it was copied, or planned anew, within a step. Call backward once more, or do "
            "that after a step."
        )
    for executable in chosen:
        reduce_left(executable)
    runner.unsharded.end()
