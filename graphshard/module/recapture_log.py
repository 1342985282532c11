"""Log of a model's captures: each with its reason, as information first and as a warning from the fourth recapture on.

`TORCH_LOGS=recompiles` prints the reasons of recaptures next to those of `torch.compile`, and `TORCH_TRACE=dir` keeps
them for the tlparse tool.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from graphshard.ir.torch_internals import recompiles_log
from graphshard.module.recapture_reason import Reason
from graphshard.pipeline.trace import trace_recapture

log = logging.getLogger(__name__)

# Training and evaluation, with gradients and without, take three.
_EXPECTED_RECAPTURES = 3
_MORE = "Raise max_captures in graphshard.compile to keep more."


@dataclass
class RecaptureLog:
    """Log of the captures of one model, or of one entry into it.

    Attributes:
        recaptures: the number of captures after the first.
        last: the reason of the last capture.
    """

    recaptures: int = 0
    last: Reason = field(default_factory=lambda: Reason(""))
    _remedies: set[str] = field(default_factory=set)
    _warned_of_limit: bool = False

    def capture(self, label: str, number: int, reason: Reason) -> None:
        """Log one capture; a warning says a remedy once."""
        self.last = reason
        self.recaptures += not reason.first
        if self.recaptures <= _EXPECTED_RECAPTURES:
            log.info("capture %d of %s: %s", number, label, reason.text)
        else:
            log.warning("capture %d of %s: %s%s", number, label, reason.text, self._remedy(reason))
        if not reason.first:
            recompiles_log.debug("Recompiling %s in graphshard (capture %d)\n    - %s", label, number, reason.text)
            trace_recapture(label, number, reason.text)

    def _remedy(self, reason: Reason) -> str:
        if not reason.remedy or reason.remedy in self._remedies:
            return ""
        self._remedies.add(reason.remedy)
        return f". {reason.remedy}"

    def eviction(self, label: str, titles: list[str], most: int) -> None:
        """Log which programs were evicted for the last capture, the first time as a warning."""
        for title in titles:
            log.info("evicted %s, the least recently used program", title)
        if not self._warned_of_limit:
            self._warned_of_limit = True
            log.warning(
                "%s has more than max_captures=%d programs: from now on the least recently used one is evicted, and "
                "captured again when a call needs it. The last capture: %s. %s",
                *(label, most, self.last.text, " ".join(filter(None, [self.last.remedy, _MORE]))),
            )
