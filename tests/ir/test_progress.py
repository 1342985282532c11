"""Progress of long operations: a spinner on a terminal, lines of commands elsewhere."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.lower import inductor
from graphshard.lower.region_store import Kernels, Store
from graphshard.lower.regions import Compiler
from graphshard.module import program_compiler
from graphshard.utils import progress as module
from graphshard.utils.progress import progress
from tests.ranks import FakeWorld

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def terminal() -> Iterator[io.StringIO]:
    """Capture the output of a terminal."""
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=200, _environ={"TERM": "xterm"})
    with mock.patch.object(module, "Console", return_value=console):
        yield sent


def without_seconds(text: str) -> list[str]:
    return re.sub(r" +\d+\.\d s ", " N s ", text).splitlines()


def test_a_spinner_shows_the_phase_with_its_and_the_total_seconds(terminal: io.StringIO) -> None:
    with mock.patch.object(time, "monotonic", return_value=1003.0) as now:
        phases = module._Phases("graphshard: Llama", Console(), begun=1000.0)
        assert phases.__rich__().plain == "graphshard: Llama"
        phases.begin("compile region_3, 4 of 14")
        now.return_value = 1010.0
        assert phases.__rich__().plain == "graphshard: Llama: compile region_3, 4 of 14, 7 s (10 s in all)"
    with progress("graphshard: Llama") as show:
        show("capture")
    assert "graphshard: Llama: capture, 0 s (0 s in all)" in terminal.getvalue()


@pytest.mark.parametrize("lines", [False, True])
def test_names_are_escaped(terminal: io.StringIO, lines: bool) -> None:
    with progress("graphshard: \x1b[31m", lines=lines) as show:
        show("[bold]capture[/bold]")
    assert "graphshard: \\x1b[31m: [bold]capture[/bold], 0 s" in terminal.getvalue()


def test_lines_are_written_as_phases_end(capsys: Capture) -> None:
    with progress("graphshard explain", lines=True) as show:
        show("capture")
        assert capsys.readouterr().err == ""
        show("8 ranks: [partition]\x1b")
        first = capsys.readouterr().err
        assert re.fullmatch(r"graphshard explain: +\d+\.\d s  capture\n", first)
    out, rest = capsys.readouterr()
    assert without_seconds(rest) == [
        "graphshard explain: N s  8 ranks: [partition]\\x1b",
        "graphshard explain: N s  in all",
    ]
    assert out == ""


def test_a_long_phase_is_reported(capsys: Capture) -> None:
    with mock.patch.object(module, "_BEAT", 0.01), progress("graphshard explain", lines=True) as show:
        show("plan")
        deadline = time.monotonic() + 30
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert without_seconds(said)[0] == "graphshard explain: N s  plan, under way"


def test_an_error_ends_a_phase_without_a_line(capsys: Capture) -> None:
    """The error is the last line of a command."""

    def fail() -> None:
        with progress("graphshard explain", lines=True) as show:
            show("capture")
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert capsys.readouterr().err == ""


def test_functions_report_long_phases_and_their_sum(capsys: Capture) -> None:
    """Short phases are silent; regions that are compiled one after the other are one phase."""
    said = ""
    with mock.patch.object(module, "_SILENT", 0.2), progress("graphshard: Llama") as show:
        show("capture")
        for region in ("region_0, 1 of 2", "region_1, 2 of 2"):
            show(f"compile {region}")
            time.sleep(0.15)
        deadline = time.monotonic() + 30
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
        show("keep")
    assert without_seconds(said) == ["graphshard: Llama: N s  compile region_1, 2 of 2, under way"]
    assert without_seconds(capsys.readouterr().err) == [
        "graphshard: Llama: N s  compile region_1, 2 of 2",
        "graphshard: Llama: N s  in all",
    ]


def test_silence_of_many_programs_ends(capsys: Capture) -> None:
    """Units of a module with a graph break have a program each, which takes a second."""
    said = ""
    with mock.patch.object(module, "_SILENT", 0.3):
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            with progress("graphshard: Block") as show:
                show("capture")
                time.sleep(0.1)
            said = capsys.readouterr().err
    assert without_seconds(said)[0] == "graphshard: Block: N s  capture"


def test_notebooks_have_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ipywidgets, rich has no spinner there."""
    shown = mock.MagicMock()
    console = Console(force_jupyter=True, force_terminal=True)
    monkeypatch.setitem(sys.modules, "IPython", shown)
    monkeypatch.setitem(sys.modules, "IPython.display", shown.display)
    monkeypatch.setattr(module, "_SILENT", 0.01)
    with mock.patch.object(module, "Console", return_value=console), progress("graphshard: Llama") as show:
        show("capture")
        time.sleep(0.02)
    assert shown.display.display.called


@pytest.mark.parametrize(("rank", "lines"), [("0", False), ("1", True)])
def test_functions_and_other_ranks_are_silent(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, rank: str, lines: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    with progress("graphshard: Llama", lines=lines) as show:
        show("capture")
    assert capsys.readouterr() == ("", "")


def test_ignores_errors_of_the_stream() -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError("No space left on device")

    console = Console(file=Full())
    with mock.patch.object(module, "Console", return_value=console), progress("graphshard", lines=True) as show:
        show("capture")


# Sources of progress.


def test_compile_names_passes_and_another_backward(fake_world: FakeWorld) -> None:
    fake_world(2)
    told: list[str] = []
    with mock.patch.object(program_compiler, "progress", return_value=contextlib.nullcontext(told.append)) as begun:
        model = graphshard.compile(Two(), init_device_mesh("cpu", (2,)), backend="eager")
        loss, other = model(torch.zeros(2, 4))
        passes = [step.name for step in graphshard.Pipeline()]
        assert told == ["capture", *passes, "compare with the other ranks", "lower"]
        told.clear()
        (loss.sum() + other.sum()).backward()
    assert [call.args[0] for call in begun.call_args_list] == ["graphshard: Two", "graphshard: Two, another backward"]
    assert told == [*passes[passes.index("partition") + 1 :], "lower"]


@pytest.mark.parametrize("compile_regions", [inductor.compile_all, inductor.package_all])
def test_inductor_reports_regions_and_their_number(compile_regions: Compiler) -> None:
    told: list[str] = []
    regions: Any = {name: mock.MagicMock(key=name) for name in ("region_0", "region_1")}
    with (
        mock.patch.object(inductor, "generate"),
        mock.patch.object(inductor, "kernels_of", return_value=Kernels("")),
        mock.patch.object(inductor, "store_here", return_value=Store(None)),
    ):
        assert [name for name, _ in compile_regions(regions, told.append)] == ["region_0", "region_1"]
    assert told == ["compile region_0, 1 of 2", "compile region_1, 2 of 2"]


class Two(nn.Module):
    """Two outputs; only the scalar one gets a gradient by default."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y.sum(), y
