"""Run the parts one after the other, each in a separate process, within a budget of seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.table import Row, rows_in

# Seconds from the request to end to the kill.
_GRACE = 3.0
# Lines of output in the note of a failure.
_TOLD = 2


@dataclass(frozen=True)
class Part:
    """Process that appends rows to a file, and ends itself in time if it can: `--rows FILE --seconds LIMIT`.

    Attributes:
        share: of the budget; later parts divide unused time by their shares.
        command: without these arguments.
    """

    name: str
    share: float
    command: tuple[str, ...]


def run_parts(
    parts: Sequence[Part],
    seconds: float,
    folder: Path,
    show: Callable[[str], None],
    root: Path | None = None,
    ended: Callable[[str, list[Row]], None] = lambda *_: None,
) -> list[Row]:
    """Run all parts, even if some fail.

    Args:
        seconds: for all together.
        folder: for the parts' rows and output, by their names.
        show: called with the progress, and with every line that a part prints.
        root: working directory of the parts.
        ended: called after each part, with its name and rows.

    Returns:
        The rows of all. A part that did not end well adds one that says so, and is `failed`.
    """
    end = time.monotonic() + seconds
    found = []
    for number, part in enumerate(parts):
        left = max(end - time.monotonic(), 0.0)
        limit = left * part.share / sum(other.share for other in parts[number:])
        show(f"{part.name}: at most {limit:.0f} s of the {left:.0f} s that are left")
        began = time.monotonic()
        rows, note = _run(part, limit, folder, show, root)
        if note:
            rows.append(Row(part.name, failed=True, note=note))
        how = f"{note}; " if note else ""
        show(f"{part.name}: {how}{len(rows)} rows in {time.monotonic() - began:.0f} s")
        found += rows
        ended(part.name, rows)
    return found


def _run(
    part: Part, limit: float, folder: Path, show: Callable[[str], None], root: Path | None
) -> tuple[list[Row], str]:
    """Return the part's rows, and a note on how it ended."""
    path, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    path.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*part.command, "--rows", str(path), "--seconds", f"{limit:.0f}"],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its child processes end with it
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_relay, args=(process.stdout, log, part.name, show), daemon=True)
    reader.start()
    try:
        status: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
    reader.join(_GRACE)
    rows = rows_in(path)
    if status is None:
        return rows, f"ended after {limit:.0f} s, its share; what it had found counts"
    if status == 0 or (status == 1 and any(row.failed for row in rows)):
        return rows, ""  # its rows contain the failure
    told = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()][-_TOLD:]
    return rows, f"exit status {status}: {' / '.join(told)}"


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and all its remaining child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _relay(stream: IO[str], log: Path, name: str, show: Callable[[str], None]) -> None:
    with stream, log.open("w", encoding="utf-8") as file:
        for line in stream:
            file.write(line)
            file.flush()
            show(f"[{name}] {line.rstrip()}")
