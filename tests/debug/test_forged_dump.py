"""Forged dumps: commands report the error, and never print control characters to a terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from graphshard.cli.main import main
from graphshard.pipeline.pipeline import Pipeline
from tests.aot.forging import forgeries
from tests.debug.test_repro import write_dump

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dump(tmp_path_factory.mktemp("dumps") / "Blocks-0", Pipeline())


def fault_of(capsys: Capture, *argv: str) -> str:
    """Return the fault in a command's outcome, or ""."""
    try:
        status = main(argv)
    except BaseException as error:
        return f"raw {type(error).__name__}: {str(error)[:200]}"
    said = "".join(capsys.readouterr())
    if any(ord(char) < 32 and char not in "\n\t" for char in said):
        return "control characters"
    return "" if status in (0, 1) or said.startswith(f"graphshard {argv[0]}: ") else f"status {status}: {said[:200]}"


def faults_of(capsys: Capture, path: Path, data: Any, stride: int, *commands: tuple[str, ...]) -> list[str]:
    """Return the faults of the commands for every forgery."""
    faults = []
    for name, value in forgeries(data, stride=stride):
        path.write_text(json.dumps(value))
        faults += [f"{name}: {command}: {fault}" for command in commands if (fault := fault_of(capsys, *command))]
    return faults


def test_forged_stages(dump: Path, tmp_path: Path, capsys: Capture) -> None:
    """Show and repro; every sixtieth position of the last stage, which has a plan."""
    path = tmp_path / "10-reorder.json"
    data = json.loads((dump / path.name).read_text())
    commands = ("show", str(path)), ("repro", str(path), "--pass", "reorder")
    assert not faults_of(capsys, path, data, 12, *commands)


def test_forged_summaries(dump: Path, tmp_path: Path, capsys: Capture) -> None:
    """Of a dump, and in a list of dumps."""
    path = tmp_path / "dump" / "summary.json"
    path.parent.mkdir()
    data = json.loads((dump / "summary.json").read_text())
    assert not faults_of(capsys, path, data, 1, ("show", str(path.parent)), ("show", str(tmp_path)))


def test_escapes_are_printed_visibly(dump: Path, tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    """Of texts, summaries, file names and errors; also on a terminal, where diffs have colors."""
    escape = "\x1b]0;title\x07\x1b[31mred\x9b\u202e"
    evil = tmp_path / f"evil{escape}"
    evil.mkdir()
    (evil / "00-capture.txt").write_text(f"forward:\n{escape}\n")
    (evil / "01-plan.txt").write_text(f"forward:\n{escape}{escape}\n")
    summary = json.loads((dump / "summary.json").read_text())
    summary |= {"title": escape, "reason": escape, "error": escape, "torch": escape, "axes": {escape: 2}}
    summary["stages"][0]["name"] = escape
    (evil / "summary.json").write_text(json.dumps(summary))
    for terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal, raising=False)
        for argv in (
            ("show", f"{evil}/00"),
            ("diff", f"{evil}/00", f"{evil}/01"),
            ("show", str(evil)),
            ("show", str(tmp_path)),
            ("show", f"{evil}/nothing"),
            ("repro", f"{evil}/00"),
        ):
            main(argv)
            said = "".join(capsys.readouterr())
            assert "\x1b]" not in said
            assert "\x07" not in said
            assert "\x1b[31mred" not in said
            assert "\\x1b]0;title" in said


@pytest.mark.parametrize("name", ["summary.json", "00-capture.json", "00-capture.txt"])
def test_rejects_special_and_huge_files(tmp_path: Path, capsys: Capture, name: str) -> None:
    """A FIFO without a writer, an endless device, and a file of 200 GB are not read."""
    path = tmp_path / "dump" / name
    path.parent.mkdir()
    command = ("show", str(path.parent if name == "summary.json" else path))
    os.mkfifo(path)
    assert "it is a FIFO" in said_by(capsys, *command)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "it is a device" in said_by(capsys, *command)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(200 << 30)
    assert "has 214748364800 bytes, more than" in said_by(capsys, *command)


def said_by(capsys: Capture, *argv: str) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err
