"""Trace the path that a forward takes in eager mode.

Libraries ask whether they are traced, and then compute the same thing in another way, which may round differently:

    if torch.compiler.is_exporting():     transformers, of attention     repeat keys and values, make a causal mask
    else:                                                                is_causal=True, enable_gqa=True, no mask

While a forward is traced, code outside of torch is therefore told that nothing is. The path of eager mode may read
values of tensors. Those that depend on no input are computed (`known_values`); where others are read, tracing fails.
The function that asked is then told the truth, and the forward is traced once more: the nearest to the failure first,
then its callers. At last everyone is told. If that fails, too, the path of eager mode is taken again, where values of
inputs and buffers become conditions of the program (`deciding.py`).
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from graphshard.capture.deciding import Deciding
from graphshard.capture.known_values import Assume, known_values
from graphshard.capture.lines import callers, package_of
from graphshard.ir.tracing_internals import answer_tracing_checks

log = logging.getLogger(__name__)

# Modules of torch that compute in another way where they are traced.
_LIKE_USERS = {"torch.nn.modules.activation", "torch.nn.modules.transformer"}


@dataclass
class EagerPath:
    """What code of a forward is told about being traced, over several attempts to trace it.

    Attributes:
        told: functions that are told the truth, as is what they call.
        asked: functions that were told, in the current attempt, that nothing is traced, and their callers.
        failed: functions that the exception of the current attempt passed through.
        everyone: all are told the truth.
    """

    told: set[CodeType] = field(default_factory=set)
    asked: set[CodeType] = field(default_factory=set)
    failed: list[CodeType] = field(default_factory=list)
    everyone: bool = False

    def around(self, forward: Callable[..., Any], assume: Assume, deciding: Deciding) -> Callable[..., Any]:
        """A forward that takes this path while it is traced; `assume` is told what must hold.

        Values of inputs and buffers come from `deciding`.
        """

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with answer_tracing_checks(self._is_told, everyone=self.everyone), known_values(assume, deciding):
                try:
                    return forward(*args, **kwargs)
                except Exception as error:
                    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
                    self.failed = [frame.f_code for frame in reversed(frames)]
                    raise

        return run

    def concede(self) -> bool:
        """After a failure, tell one more function the truth; False if everyone was told."""
        if self.everyone:
            return False
        nearest = next((code for code in self.failed if code in self.asked), None)
        if nearest is None:
            self.everyone = True
        else:
            self.told.add(nearest)
        log.info(
            "the path of eager mode cannot be traced; tracing again the one that %s takes where it is traced",
            f"{nearest.co_name} ({nearest.co_filename}:{nearest.co_firstlineno})" if nearest else "the module",
        )
        self.asked.clear()
        self.failed.clear()
        return True

    def _is_told(self, frame: FrameType) -> bool:
        """Whether the code of a frame is told the truth: torch's own is, and that of functions that gave up."""
        if self.everyone:
            return True
        # torch's older names for a check ask on behalf of their callers.
        asking = next(caller for caller in callers(frame) if caller.f_code.co_name != "is_compiling")
        if package_of(asking) == "torch" and _module(asking) not in _LIKE_USERS:
            return True
        codes = {caller.f_code for caller in callers(asking) if package_of(caller) not in ("torch", "graphshard")}
        if codes & self.told:
            return True
        self.asked |= codes
        return False


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
