"""Tables predicted by several processes: the numbers and errors of one process, and no process left over."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import graphshard
from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.predict import search
from graphshard.predict.study import Study
from graphshard.utils.progress import other_threads, progress
from tests.predict.test_explain import TOKENS, meta_net

MESHES = [(8,), (1024,)]
SETTINGS = {"f32": {}, "keep": {"reshard_after_forward": False}}


def grid(count=None, **options):
    about = {"example_inputs": (TOKENS,), "settings": SETTINGS, **options}
    return graphshard.explain_grid(meta_net(width=16, depth=2), MESHES, workers=count, **about)


@pytest.mark.slow
def test_numbers_of_one_process():
    """Order of rows, formulas, omissions, progress and reports do not depend on the number of processes."""
    options = {"global_batch": 64 * len(TOKENS), "hardware": ["h100", "a100"]}
    told: list[list[str]] = [[], []]
    alone, parallel = (grid(count, show=said.append, **options) for count, said in zip((1, 2), told))
    assert len(parallel.rows) == 4
    assert parallel == alone
    assert parallel.left_out == alone.left_out
    assert len(parallel.left_out) == 1
    assert sorted(told[0]) == sorted(told[1])


@pytest.mark.slow
def test_formulas_come_with_the_numbers():
    symbols = {"batch": 0}
    alone, parallel = (grid(count, settings={"": {}, "symbols": {"symbols": symbols}}) for count in (1, 2))
    assert [str(row) for row in parallel.rows] == [str(row) for row in alone.rows]
    assert parallel.rows[-1].formulas.smooth("compute_s") == alone.rows[-1].formulas.smooth("compute_s")


def _without_times(report: str) -> str:
    """Return a report without numbers, and without the bars of passes: their seconds differ between processes."""
    report = re.sub(
        r'<div class="flame" role="img" aria-label="Time of each pass.*?(?=<div class="scroll")',
        "",
        report,
        flags=re.DOTALL,
    )
    return re.sub(r"[\d.]+(e-\d+)? ?(us|ms|s)?\b", "", report)


def test_the_report_of_a_row(tmp_path):
    """The program is rebuilt, because another process had it."""
    for count in (1, 2):
        row = grid(count).rows[-1]
        row.save_html(tmp_path / f"{count}.html")
        row.save_trace(tmp_path / f"{count}.json")
    one, other = (_without_times((tmp_path / f"{n}.html").read_text()) for n in (1, 2))
    assert other == one
    assert json.loads((tmp_path / "2.json").read_text()) == json.loads((tmp_path / "1.json").read_text())


@pytest.mark.slow
def test_predictions_run_in_workers(monkeypatch):
    """Work after the capture runs in the workers."""
    explain = Study.explain

    def telling(self, *where, **options):
        self.show(f"pid {os.getpid()}")
        return explain(self, *where, **options)

    monkeypatch.setattr(Study, "explain", telling)
    told = []
    grid(2, show=told.append)
    pids = [int(found) for text in told for found in re.findall(r"pid (\d+)", text)]
    assert len(pids) == 4
    assert os.getpid() not in pids
    assert 1 <= len(set(pids)) <= 2
    assert len([text for text in told if text.endswith("capture")]) == 1


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (lambda: os._exit(3), graphshard.GraphshardError, "one of 2 processes that predict ended, .* Pass workers=1"),
        (lambda: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
    ids=["ends", "raises"],
)
def test_a_worker_that_fails(monkeypatch, fault, error, message):
    """The error is raised at once, and no process remains."""
    here, explain = os.getpid(), Study.explain

    def failing(self, mesh, *where, **options):
        if os.getpid() != here and mesh == (1024,):
            fault()
        return explain(self, mesh, *where, **options)

    monkeypatch.setattr(Study, "explain", failing)
    before = set(multiprocessing.active_children())
    with pytest.raises(error, match=message):
        grid(2)
    assert set(multiprocessing.active_children()) <= before


def test_interrupted():
    """Ctrl-C ends the workers, even if they do not get the signal."""
    before, last = set(multiprocessing.active_children()), []

    def interrupt(text):
        last.append(text)
        if multiprocessing.active_children():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grid(2, show=interrupt)
    assert set(multiprocessing.active_children()) <= before


def test_a_memory_error_from_another_process():
    """The error is rebuilt from both of its arguments."""
    with pytest.raises(InfeasibleError, match="memory_limit of 1,000 bytes") as alone:
        grid(1, memory_limit=1000)
    with pytest.raises(InfeasibleError, match="memory_limit of 1,000 bytes") as parallel:
        grid(2, memory_limit=1000)
    assert (str(parallel.value), parallel.value.smallest) == (str(alone.value), alone.value.smallest)
    limits = {"all": {}, "little": {"memory_limit": 1000}}
    assert grid(2, settings=limits).left_out == grid(1, settings=limits).left_out != ()


def test_without_safe_forks(monkeypatch):
    """An explicit number of workers raises an error with the reason; otherwise this process predicts alone."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ArgumentError, match="workers=2 processes cannot be forked, as CUDA is in use"):
        grid(2)
    monkeypatch.undo()
    monkeypatch.setattr(search, "dist", SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True))
    with pytest.raises(ArgumentError, match=r"this process is a rank of a process group\. Pass workers=1"):
        grid(2)
    monkeypatch.setattr(search, "_LONG", 0.0)
    monkeypatch.setattr(search, "_in_workers", None)
    assert len(grid().rows) == 4


@pytest.mark.slow
def test_a_worker_does_not_inherit_the_console_lock(monkeypatch, capfd):
    """Another thread may hold stderr's lock at the fork; a worker that warns must not wait for it."""
    explain, writing = Study.explain, threading.Lock()

    class Locked(io.TextIOWrapper):
        def write(self, text):
            with writing:
                return super().write(text)

    def warning(self, *where, **options):
        if writing.locked():
            logging.getLogger("graphshard").warning("from a worker")
        return explain(self, *where, **options)

    monkeypatch.setattr(Study, "explain", warning)
    stream = Locked(os.fdopen(os.dup(2), "wb", 0), write_through=True)
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler()
    logging.getLogger("graphshard").addHandler(handler)
    try:
        with writing:  # held by another thread at the fork
            grid(2)
    finally:
        logging.getLogger("graphshard").removeHandler(handler)
        monkeypatch.undo()
        stream.close()
    assert capfd.readouterr().err.count("from a worker") == 4


def test_progress_uses_no_thread():
    before = other_threads()  # earlier tests may have left threads, such as tqdm's monitor
    with progress("test", lines=True):
        assert other_threads() == before
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert other_threads() == [*before, thread]
    done.set()
    thread.join()


@pytest.mark.slow
def test_default_number_of_workers(monkeypatch):
    """Only if the rest takes long, with one worker per core."""
    asked = []

    def in_workers(groups, count, telling):
        asked.append(count)
        return [[task.outcome() for task in group] for group in groups]

    monkeypatch.setattr(search, "_in_workers", in_workers)
    monkeypatch.setattr(search, "cores_here", lambda: 3)
    monkeypatch.setattr(search, "other_threads", list)
    grid()
    assert asked == []
    began = iter(range(0, 1000, 2))
    monkeypatch.setattr(search.time, "perf_counter", lambda: float(next(began)))  # two seconds for the first
    grid()
    assert asked == [3]
    monkeypatch.setattr(search, "other_threads", lambda: [threading.current_thread()])
    grid()
    assert asked == [3]
